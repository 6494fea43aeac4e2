"""Files of options: everything wrong with one is told in one line, before any work."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvcache_plugins.calibration.options import CalibrationOptions
from kvcache_plugins.cli import main
from kvcache_plugins.cli.options import merge_options
from kvcache_plugins.evaluation.passkey.options import PasskeyOptions
from kvcache_plugins.training.parsing import parse_arguments

MODEL = "model: org/model\n"


@pytest.mark.parametrize("command", ["eval passkey", "train-locret"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "--config must be a file, 'options.yaml' cannot be read: No such file"),
        ("", "--config must hold text, 'options.yaml' is empty."),
        ("false", "--config must hold options by name, got False in 'options.yaml'."),
        ("a: [", "--config must be a YAML file, got 'options.yaml'"),
        (f"{MODEL}seed: !!map [1]", "expected a mapping node, but found sequence"),
        ("!!map abc", "expected a mapping node, but found scalar"),
        (f"{MODEL}seed: !!int abc", "got 'options.yaml' ('abc' is no !!int in"),
        (f"{MODEL}seed: !!timestamp abc", "'abc' is no !!timestamp in"),
        (f"{MODEL}seed: 2026-13-01", "'2026-13-01' is no !!timestamp in"),
        (f"{MODEL}seed: !!python/name:os.system", "could not determine a constructor for the tag"),
        (f"{MODEL}cache_config: &a {{backend: int8, storage: *a}}", "found unconstructable recursive node"),
        ("[" * 2000, "got 'options.yaml' (maximum recursion depth exceeded"),
        (f"{MODEL}seed: 1\nseed: 2", "'seed' stands there twice, again in line 3)."),
        ("model: [a, b]", "--model must be a string, got ['a', 'b']."),
        (f"{MODEL}seed: [1]", "--seed must be an integer, got [1]."),
        (f"{MODEL}stride: 5", "Unknown option 'stride'"),
    ],
)
def test_a_wrong_file(
    command: str,
    text: str | None,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("options.yaml").write_text(text)
    assert main([*command.split(), "--config", "options.yaml", "--output", "out"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("error: ") and error.count("\n") == 1
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trust_remote_code: 'no'", "--trust_remote_code must be true or false, got 'no'."),
        ("lengths: 512.5", "--lengths must be a list, each an integer, got 512.5."),
        ("lengths: true", "--lengths must be a list, each an integer, got True."),
        ("lengths: 256 512", "--lengths must be a list, each an integer, got '256 512'."),
        ("lengths: [512, true]", "--lengths must be a list, each an integer, got [512, True]."),
        ("filler_files: 3", "--filler_files must be a list, each a string, got 3."),
        ("filler_files: ''", "--filler_files must not be empty, got ['']."),
        ("output: there", "'output' in 'options.yaml': it is given on the command line alone."),
        ("cache_config: {backend: int8, kernel: 2020-01-01}", "kernel must be one of"),
        ("cache_config: {backend: int8, 2020-01-01: {}}", "--cache_config must hold options by name, got"),
        ("cache_config: [{backend: int8, nbits: 2, nbits: 4}]", "'nbits' stands there twice"),
    ],
)
def test_a_wrong_value_in_a_file(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama-books"
    Path("options.yaml").write_text(f"model: {model}\n{text}")
    assert main(["eval", "passkey", "--config", "options.yaml"]) == 2
    assert said in capsys.readouterr().err


def test_numbers_with_an_exponent_are_numbers(tmp_path: Path) -> None:
    """As on a command line: for YAML 1.1 those without a dot are text, and so is the name of a commit."""
    (tmp_path / "options.yaml").write_text(
        f"{MODEL}revision: 1234e56\noutlier_fraction: 1e-2\ntarget_bits: 3.0e0\n"
        "cache_config: [{backend: kvquant, outlier_fraction: 1e-2, layer_overrides: {0: {nbits: 4}}}]\n"
    )
    options = merge_options({}, str(tmp_path / "options.yaml"))
    found = CalibrationOptions.from_dict(options)
    assert (found.outlier_fraction, found.target_bits, found.revision) == (0.01, 3.0, "1234e56")
    assert found.cache_config[0]["outlier_fraction"] == 0.01
    for name, value in (("outlier_fraction", "1e"), ("seed", "1e3"), ("num_samples", "4")):
        with pytest.raises(ValueError, match=f"--{name} must be .*, got {value!r}"):
            CalibrationOptions.from_dict(options | {name: value})


def test_what_a_file_may_hold() -> None:
    options = {"model": "m/m", "depths": None, "lengths": [128], "threads": None, "cache_config": []}
    assert PasskeyOptions.from_dict(options).depths == 5


def test_a_list_of_one_needs_no_brackets() -> None:
    """As on a command line."""
    options = {"model": "m/m", "lengths": 256, "filler_files": "book.txt", "cache_config": []}
    found = PasskeyOptions.from_dict(options)
    assert (found.lengths, found.filler_files, found.depths) == ([256], ["book.txt"], 5)


def test_a_list_of_one_needs_no_brackets_in_a_file_of_a_training(tmp_path: Path) -> None:
    (book := tmp_path / "book.txt").write_text("a text")
    (tmp_path / "options.yaml").write_text(f"{MODEL}text_files: {book}\n")
    words = ["--config", str(tmp_path / "options.yaml"), "--output_dir", str(tmp_path / "out")]
    assert parse_arguments(words)[0].text_files == [str(book)]


def test_numbers_of_numpy_are_written_down_as_pythons() -> None:
    cache = {"backend": "kivi", "nbits": np.int64(2)}
    given = {"model": "m/m", "lengths": [np.int64(128)], "depths": np.int32(3), "cache_config": [cache]}
    options = PasskeyOptions.from_dict(given)
    assert json.loads(json.dumps(options.settings()))["depths"] == 3
    assert json.dumps([options.lengths, options.cache_config]) == '[[128], [{"backend": "kivi", "nbits": 2}]]'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("text_files: 3", "--text_files must be a list, each a string, got 3."),
        ("max_steps: null", "--max_steps must be an integer, got None."),
        ("optim: null", "--optim must be OptimizerNames or a string, got None."),
        ("max_steps: 2.5", "--max_steps/--max-steps: invalid int value: '2.5'"),
        ("fp16: perhaps", "--fp16: Truthy value expected: got perhaps"),
        ("ddp_backend: carrier", "--ddp_backend must be one of ['cncl', 'gloo', "),
        ("eval_strategy: yes", "--eval_strategy must be one of ['epoch', 'no', 'steps'], got 'True'."),
    ],
)
def test_a_wrong_value_in_a_file_of_a_training(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "options.yaml").write_text(f"{MODEL}{text}")
    assert main(["train-locret", "--config", str(tmp_path / "options.yaml")]) == 2
    assert said in capsys.readouterr().err
