"""The command line: what it prints, what it refuses, and what importing it costs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import WhisperConfig

import kvcache_plugins as kvp
from kvcache_plugins.calibration.options import CalibrationOptions
from kvcache_plugins.cli import (
    backend_table,
    bench,
    calibrate,
    eval_longbench,
    eval_passkey,
    eval_perplexity,
    main,
)
from kvcache_plugins.cli.backend_table import SECTIONS, backend_rows, docstring_sections, markdown_table
from kvcache_plugins.cli.preparing import output_directory
from kvcache_plugins.errors import KernelUnavailableError
from kvcache_plugins.evaluation.longbench.options import LongBenchOptions
from kvcache_plugins.evaluation.passkey.options import PasskeyOptions
from kvcache_plugins.evaluation.perplexity.options import PerplexityOptions
from kvcache_plugins.kernels import cuda_loader, cuda_trial, loader
from kvcache_plugins.kernels.builds import KernelStatus
from kvcache_plugins.models.presets import PRESETS
from kvcache_plugins.registry import TRANSFORMERS_BACKENDS
from kvcache_plugins.runs.cache_words import parse_cache_configs
from kvcache_plugins.runs.labels import cache_label
from kvcache_plugins.runs.model_options import COMPARISON

ROOT = Path(__file__).resolve().parents[2]
BUNDLED_MODEL = ROOT / "examples" / "models" / "tiny-llama-books"


# ---- importing ----


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    code = "import sys, kvcache_plugins.cli; print(*{'torch', 'transformers', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_help_imports_nothing_heavy_and_names_every_command() -> None:
    code = (
        "import sys, contextlib, kvcache_plugins.cli as cli\n"
        "with contextlib.suppress(SystemExit): cli.main(['--help'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"list", "estimate", "kernels"} <= set(done.stdout.split())


@pytest.mark.parametrize(
    ("command", "options", "besides"),
    [
        (eval_perplexity, PerplexityOptions, {"no_plots"}),
        (eval_passkey, PasskeyOptions, {"no_plots"}),
        (eval_longbench, LongBenchOptions, {"no_plots", "score_only"}),
        (calibrate, CalibrationOptions, {"push_to_hub"}),
    ],
    ids=["perplexity", "passkey", "longbench", "calibrate"],
)
def test_a_command_shows_what_it_takes(command: Any, options: Any, besides: set[str]) -> None:
    subparsers = argparse.ArgumentParser().add_subparsers()
    command.add_parser(subparsers)
    (parser,) = subparsers.choices.values()
    shown = {action.dest for action in parser._actions} - {"help"}
    taken = {field.name for field in dataclasses.fields(options)} | {"config", "output"} | besides
    if options is CalibrationOptions:
        taken.remove("tp_plan")  # which it refuses
    else:
        for cache_config in COMPARISON:
            name = cache_config["backend"]
            assert name in TRANSFORMERS_BACKENDS or name in parser.format_help()
    assert shown == taken


@pytest.mark.parametrize("command", ["eval passkey", "bench attention", "bench generate", "calibrate"])
def test_an_output_that_is_a_file_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main([*command.split(), "--model", "org/model", "--output", str(tmp_path / "file")]) == 2
    assert "--output must be a directory, got the file" in capsys.readouterr().err
    assert main([*command.split(), "--model", "org/model", "--output", ""]) == 2
    assert "--output must be a directory, got ''." in capsys.readouterr().err
    assert main([*command.split(), "--model", "org/model", "--output", str(tmp_path / "file" / "out")]) == 2
    assert f"nothing can be written to '{tmp_path / 'file'}'." in capsys.readouterr().err


def test_an_output_that_cannot_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)  # also where root runs this
    for name in ("", "new", "deep/er"):
        assert main(["bench", "attention", "--output", str(tmp_path / name)]) == 2
        said = f"written to, got '{tmp_path / name}': nothing can be written to '{tmp_path}'.\n"
        assert capsys.readouterr().err == f"error: --output must be a directory that can be {said}"
    assert list(tmp_path.iterdir()) == []


# ---- list ----


def test_list_prints_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    first_words = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert set(kvp.list_backends()) <= first_words


def test_list_verbose_prints_the_sections_of_every_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--verbose"]) == 0
    text = capsys.readouterr().out
    for name in kvp.list_backends():
        assert f"\n{name}: " in f"\n{text}"
    for section in SECTIONS:
        assert text.count(f"    {section}: ") >= len(_builtin_rows())


def _builtin_rows() -> list[backend_table.BackendRow]:
    files = {path.stem for path in (ROOT / "kvcache_plugins" / "backends").glob("[a-z]*.py")}
    return [row for row in backend_rows() if row.name in files]


@pytest.mark.parametrize("row", _builtin_rows(), ids=lambda row: row.name)
def test_docstring_of_a_backend_says_what_the_table_needs(row: backend_table.BackendRow) -> None:
    assert row.summary.endswith(".")
    assert set(row.sections) == set(SECTIONS)
    assert all(row.sections.values())
    assert "residual_length" in row.options
    assert "null" not in row.options.get("budget", "")


def _own(name: str) -> dict[str, str]:
    return next(row.options for row in _builtin_rows() if row.name == name)


@pytest.mark.parametrize("row", _builtin_rows(), ids=lambda row: row.name)
def test_what_is_shown_as_required_is(row: backend_table.BackendRow) -> None:
    from transformers import AutoConfig

    models = ROOT / "examples" / "models"
    needed = {"budget": 512, "heads": str(models / "tiny-llama-books-locret"), "calibration": "normal_float"}
    required = {name for name, shown in row.options.items() if shown == "(required)"}
    config = AutoConfig.from_pretrained(BUNDLED_MODEL)
    given = {"backend": row.name} | {name: needed[name] for name in required}
    kvp.build_cache(config, given)
    for name in required:
        for without in (given | {name: None}, {key: given[key] for key in given if key != name}):
            with pytest.raises(ValueError, match=rf"{name} must be"):
                kvp.build_cache(config, without)


def test_defaults_that_depend_say_on_what() -> None:
    assert _own("kvquant")["outlier_fraction"] == "(of its artifact, or 0.01)"
    assert (_own("locret")["budget"], _own("knorm")["budget"]) == ("(of its heads)", "(required)")
    assert (_own("int8")["calibration"], _own("knorm")["storage"]) == ("null", "null")


def test_an_option_without_a_default_is_required() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class ShelfConfig(kvp.BackendConfig):
        width: int
        names: tuple[str, ...] = dataclasses.field(default_factory=tuple)

    assert backend_table._own_options(ShelfConfig) == {
        "residual_length": "0", "width": "(required)", "names": "[]"
    }  # fmt: skip


def test_a_backend_that_cannot_be_imported_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_backend(name: str) -> type:
        if name == "broken":
            raise ImportError("no module\nnamed nothing")
        return kvp.registry.get_backend(name)

    monkeypatch.setattr(backend_table, "list_backends", lambda: ["broken", "int8"])
    monkeypatch.setattr(backend_table, "get_backend", get_backend)
    broken, int8 = backend_rows()
    assert broken.summary == "cannot be loaded: no module named nothing"
    assert int8.sections["Paper"]


def test_markdown_table_escapes_its_separator() -> None:
    row = backend_table.BackendRow("name", "a | b", options={"scale": "head"})
    assert markdown_table([row]).splitlines()[2] == "| `name` | a \\| b |  | `scale=head` | no |"


def test_docstring_sections_may_start_on_the_line_of_their_name() -> None:
    summary, sections = docstring_sections(
        "First\nline.\n\nMore text: not a section.\n\nPaper: one\n    two\nCost:\n    `8 + 16`\n\n    bits\n"
    )
    assert summary == "First line."
    assert sections["Paper"] == "one two"
    assert sections["Cost"] == "`8 + 16` bits"


# ---- estimate ----


def test_estimate_json_is_the_python_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    cache_config = {"backend": "kivi", "nbits": 2}
    arguments = [
        "--tokens",
        "300",
        "1000",
        "--batch_size",
        "3",
        "--json",
        "--cache_config",
        json.dumps(cache_config),
    ]
    assert main(["estimate", "--model", str(BUNDLED_MODEL), *arguments]) == 0
    rows = json.loads(capsys.readouterr().out)

    assert [(row["tokens"], row["cache_config"]["backend"]) for row in rows] == [
        (300, "dense"),
        (300, "kivi"),
        (1000, "dense"),
        (1000, "kivi"),
    ]
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(BUNDLED_MODEL)
    for row in rows:
        assert row["kv_bytes"] == kvp.estimate(config, row["cache_config"], row["tokens"], batch_size=3)
        assert row["batch_size"] == 3
    dense, packed = rows[2:]
    assert (dense["memory_fraction"], dense["bits_per_value"]) == (1.0, 16.0)
    assert packed["memory_fraction"] == packed["kv_bytes"] / dense["kv_bytes"]
    assert packed["bits_per_value"] == pytest.approx(16 * packed["memory_fraction"])


def test_estimate_after_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    config = {"backend": "knorm", "budget": 128, "storage": {"backend": "int4"}}
    arguments = ["estimate", "--model", str(BUNDLED_MODEL), "--tokens", "300", "--new_tokens", "65"]
    arguments += ["--cache_config", json.dumps(config)]
    assert main([*arguments, "--json"]) == 0
    dense, packed = json.loads(capsys.readouterr().out)
    assert (dense["new_tokens"], dense["tokens"]) == (65, 300)
    assert dense["kv_bytes"] == 6 * 2 * 2 * 64 * 2 * (300 + 64)  # the last one is never read
    from transformers import AutoConfig

    model_config = AutoConfig.from_pretrained(BUNDLED_MODEL)
    assert packed["kv_bytes"] == kvp.estimate(model_config, config, 300, new_tokens=65)
    assert packed["kv_bytes"] > kvp.estimate(model_config, config, 300)
    assert main(arguments) == 0
    assert "65 generated" in " ".join(capsys.readouterr().out.split())  # wherever the line is broken
    assert main([*arguments, "--new_tokens", "0"]) == 2
    assert "new_tokens must be" in capsys.readouterr().err


def test_estimate_of_an_encoder_decoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = WhisperConfig(d_model=64, decoder_layers=2, decoder_attention_heads=4, dtype="bfloat16")
    config.save_pretrained(tmp_path)
    arguments = ["estimate", "--model", str(tmp_path), "--tokens", "64"]
    assert main([*arguments, "--encoder_tokens", "1500", "--json"]) == 0
    dense, *packed = json.loads(capsys.readouterr().out)
    assert dense["kv_bytes"] == (64 + 1500) * 2 * 2 * 64 * 2
    for row in packed:
        assert row["kv_bytes"] == kvp.estimate(config, row["cache_config"], 64, encoder_tokens=1500)
        assert row["memory_fraction"] < 0.6
    assert main([*arguments, "--encoder_tokens", "1500"]) == 0
    assert "1500 tokens of the encoder" in capsys.readouterr().out
    assert main(arguments) == 2
    assert "--encoder_tokens is needed for a model of type 'whisper'" in capsys.readouterr().err
    assert main(["estimate", "--preset", "tiny", "--encoder_tokens", "9"]) == 2
    assert "--encoder_tokens is not for a model of type 'llama'" in capsys.readouterr().err


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_estimate_presets(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    # of gpt-oss every other layer keeps a window of 128 tokens as it is
    arguments = [
        "--tokens",
        "4096" if "oss" in preset else "512",
        "--json",
        "--cache_config",
        '{"backend": "int8"}',
    ]
    if "t5" in preset:
        arguments += ["--encoder_tokens", "512"]
    assert main(["estimate", "--preset", preset, *arguments]) == 0
    dense, packed = json.loads(capsys.readouterr().out)
    assert dense["cache_config"] == {"backend": "dense"}
    assert 0.5 < packed["memory_fraction"] < 0.6


def test_estimate_compares_the_backends_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--preset", "tiny", "--tokens", "1024", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["cache_config"] == {"backend": "dense"}
    assert {row["cache_config"]["backend"] for row in rows} == {"dense", "int8", "float8", "int4", "kivi"}
    assert all(row["memory_fraction"] < 0.6 for row in rows[1:])


def test_estimate_of_llama3_is_the_known_size(capsys: pytest.CaptureFixture[str]) -> None:
    """32 layers, 8 key-value heads of 128 channels, keys and values in 2 bytes: 128 KiB a token."""
    only_dense = ["--cache_config", '{"backend": "dense"}']
    assert main(["estimate", "--preset", "llama3-8b", "--tokens", "1024", *only_dense]) == 0
    dense = next(line for line in capsys.readouterr().out.splitlines() if "dense" in line and "MiB" in line)
    assert "128.00 MiB" in dense
    assert "16.00" in dense


@pytest.mark.parametrize("dtype", ["float32", "fp32"])
def test_estimate_dtype_widens_the_dense_cache(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--preset", "tiny", "--tokens", "512", "--dtype", dtype, "--json"]) == 0
    dense = json.loads(capsys.readouterr().out)[0]
    assert dense["bits_per_value"] == 32
    assert (
        dense["kv_bytes"] == 2 * 2 * 2 * 64 * 512 * 4
    )  # keys and values, layers, heads, channels, tokens, bytes


# ---- kernels ----


def test_kernels_status_builds_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(loader, "_library", None)
    monkeypatch.setenv("KVCACHE_KERNEL_CACHE", str(tmp_path / "cache"))
    assert main(["kernels", "status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] in ("state:           missing", "state:           unavailable")
    assert f"cache directory: {tmp_path / 'cache'}" in lines
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the devices on which the kernels are tried; on the second one they fail."""
    tried: list[str] = []

    def check(device: torch.device) -> None:
        tried.append(str(device))
        if device.index == 1:
            raise KernelUnavailableError("the kernels failed their check on cuda:1: 2 bit")

    monkeypatch.delenv("KVCACHE_CUDA_KERNELS", raising=False)
    monkeypatch.setattr(loader, "build", lambda *, force: None)
    monkeypatch.setattr(cuda_loader, "build", lambda *, force: None)
    monkeypatch.setattr(cuda_loader, "check", check)
    found = KernelStatus("loaded", Path("cuda.so"), Path("."), "nvcc")
    monkeypatch.setattr(cuda_loader, "status", lambda: found)
    monkeypatch.setattr(cuda_trial, "passed", lambda library, device: device.index == 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return tried


def test_kernels_build_tries_every_gpu(two_gpus: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "build"]) == 1
    assert two_gpus == ["cuda:0", "cuda:1"]
    out, err = capsys.readouterr()
    assert "cuda:0 passed, cuda:1 not yet" in out
    assert err == "error: the kernels failed their check on cuda:1: 2 bit\n"


def test_kernels_build_for_gpus_elsewhere(two_gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Built and not tried; asked for by naming architectures."""
    built: list[bool] = []
    monkeypatch.setattr(cuda_loader, "build", lambda *, force: built.append(force))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert main(["kernels", "build"]) == 0
    assert built == []
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0")
    assert main(["kernels", "build"]) == 0
    assert (built, two_gpus) == ([False], [])


def test_kernels_build_leaves_gpus_alone_that_are_switched_off(
    two_gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCACHE_CUDA_KERNELS", "0")
    assert main(["kernels", "build"]) == 0
    assert two_gpus == []


def test_kernels_build_says_why_it_cannot(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(loader, "_library", None)
    monkeypatch.setattr(loader, "_failure", None)
    monkeypatch.setenv("KVCACHE_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setenv("KVCACHE_NO_BUILD", "1")
    assert main(["kernels", "build"]) == 2
    assert "KVCACHE_NO_BUILD forbids building kernels" in capsys.readouterr().err


# ---- errors ----


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cache_config", "{nbits: 2}"], ["JSON", "{nbits: 2}"]),
        (["--cache_config", "[1]"], ["JSON object", "[1]"]),
        (["--cache_config", '{"nbits": 2}'], ["backend"]),
        (["--cache_config", '{"backend": "kiwi"}'], ["kiwi", "kivi"]),
        (["--cache_config", '{"backend": "kivi", "nbits": 2, "nbits": 4}'], ["'nbits' stands there twice"]),
        (["--cache_config", '{"backend": "kivi", "nbit": 2}'], ["nbit", "nbits"]),
        (["--cache_config", '{"backend": "kivi", "nbits": 5}'], ["nbits", "5"]),
        (["--cache_config", '{"backend": "quanto", "nbits": 3}'], ["nbits", "quanto", "3"]),
        (["--cache_config", '{"backend": "int8", "kernel": "fast"}'], ["kernel", "fast", "native"]),
        (["--tokens", "0"], ["--tokens", "0"]),
        (["--batch_size", "-1"], ["--batch_size", "-1"]),
        (["--tokens", "9" * 30], ["--tokens", "at most 2147483647", "9" * 30]),
        (["--batch_size", "9" * 30], ["--batch_size", "at most 2147483647"]),
        (["--cache_config", '{"backend": "dense", "nbits": 2}'], ["'dense' takes no options", "nbits"]),
        (["--dtype", "int7"], ["--dtype", "int7"]),
        (["--model", "no/such/directory/anywhere"], ["no/such/directory/anywhere"]),
        (["--model", "./nowhere"], ["--model must be a directory or a hub id", "'./nowhere'"]),
    ],
    ids=lambda value: " ".join(value)[:60],
)
def test_errors_of_the_user_are_one_line(
    arguments: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    for word in said:
        assert word in captured.err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("bench attention --model", "--model must be a directory or a hub id"),
        ("calibrate --config", "--config must be a file"),
        ("calibrate --model m --output x --dataset", "--dataset must not be empty"),
        ("estimate --model", "--model must be a directory or a hub id"),
        ("eval longbench --model m --data_dir", "--data_dir must not be empty"),
        ("eval longbench --model m --dataset", "--dataset must not be empty"),
        ("eval longbench --score_only", "--score_only must not be empty"),
        ("eval passkey --model m --device_map", "--device_map must not be empty"),
        (
            "eval passkey --model m --filler_files a.txt",
            "--filler_files must not be empty, got ['a.txt', ''].",
        ),
        ("eval perplexity --model m --dataset_path", "--dataset_path must not be empty"),
        ("import-locret --model m --output x", "SOURCE must be a file, a directory or a hub id"),
        ("import-locret a/b --model m --output x --revision", "--revision must not be empty"),
        ("report", "DIR must be a directory"),
        ("report . --output", "--output must be a file"),
        (
            "train-locret --model m --output x --attn_implementation",
            "--attn_implementation must not be empty",
        ),
        ("train-locret --model m --output x --text_files", "--text_files must not be empty, got ['']."),
    ],
)
def test_an_empty_string_is_no_default(
    command: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is what a shell makes of a variable that is not set."""
    monkeypatch.chdir(tmp_path)
    assert main([*command.split(), ""]) == 2
    ending = "" if "[" in said else ", got ''."
    assert capsys.readouterr().err == f"error: {said}{ending}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_may_begin_with_nothing() -> None:
    assert PasskeyOptions.from_dict({"model": "m", "introduction": ""}).introduction == ""


def test_a_package_that_an_option_needs_is_asked_for_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As transformers does of flash attention; a broken import keeps its traceback."""
    errors = [ImportError("FlashAttention2 has\nto be installed"), ImportError("no 'x' in y", name="y")]

    def run(args: Any) -> int:
        raise errors.pop(0)

    monkeypatch.setattr("kvcache_plugins.cli.estimate.run", run)
    assert main(["estimate"]) == 2
    assert capsys.readouterr().err == "error: FlashAttention2 has to be installed\n"
    with pytest.raises(ImportError, match="no 'x' in y"):
        main(["estimate"])


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("estimate", "nothing is kept."),
        ("bench attention", "the same command goes on behind the last length and batch size."),
        ("bench generate", "the same command goes on behind the last round over all caches."),
        ("eval passkey", "the same command goes on where this one ended."),
        ("train-locret", "--resume_from_checkpoint true goes on from the newest checkpoint"),
    ],
)
def test_an_interruption_says_what_is_kept(
    command: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: Any) -> int:
        raise KeyboardInterrupt

    module = "_".join(command.split()[: 2 if "eval" in command else 1]).replace("-", "_")
    monkeypatch.setattr(f"kvcache_plugins.cli.{module}.run", run)
    assert main(command.split()) == 130
    error = capsys.readouterr().err
    assert error.startswith(f"\ninterrupted: {said}") and error.count("\n") == 2


def test_a_reader_that_has_read_enough_is_no_error() -> None:
    """As `| head -1` is, which prints nothing of ours but its line."""
    command = [sys.executable, "-m", "kvcache_plugins", "list", "--verbose"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 1


def test_a_command_without_an_output_works() -> None:
    code = "import sys; sys.stdout = None; from kvcache_plugins.cli import main; sys.exit(main(['list']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_signs_that_a_terminal_lacks_are_spelled_out() -> None:
    code = "from kvcache_plugins.cli.display import show; show([], ['two \u00b1 one'])"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=True
    )
    assert done.stdout.decode().strip() == r"two \xb1 one"


def test_a_benchmark_that_nobody_reads_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*args: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(bench, "show_results", closed)
    monkeypatch.setenv("PATH", os.environ["PATH"])  # which the command completes
    args = argparse.Namespace(benchmark="attention", output=str(tmp_path), no_plots=True)
    vars(args).update(
        preset="tiny", device="cpu", lengths=[64], cache_config=[['{"backend": "int8"}']], repeats=1
    )
    with pytest.raises(BrokenPipeError):
        bench.run(args)
    assert len(json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["results"]) == 2


@pytest.mark.parametrize(
    ("name", "said"), [("link", "a directory, got the link to nowhere '"), ("x" * 300, "a directory")]
)
def test_an_output_that_cannot_be_is_named(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    command = ["eval", "perplexity", "--model", str(BUNDLED_MODEL), "--output", str(tmp_path / name)]
    assert main(command) == 2
    assert capsys.readouterr().err.startswith(f"error: --output must be {said}")


def test_an_output_may_be_below_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert output_directory(argparse.Namespace(output="~/out")) == tmp_path / "out"


def test_numbers_are_shown_before_a_picture_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    monkeypatch.setenv("PATH", os.environ["PATH"])  # which the command completes
    reads = ["--dataset", "pydoc", "--context_length", "32", "--max_windows", "1", "--dtype", "fp32"]
    cache = ["--cache_config", '{"backend": "int8"}', "--output", str(tmp_path)]
    assert main(["eval", "perplexity", "--model", str(BUNDLED_MODEL), *reads, *cache]) == 2
    said = capsys.readouterr()
    assert "int8" in said.out and f"numbers: {tmp_path / 'results.json'}" in said.out
    picture = tmp_path / "perplexity.png"
    assert said.err.endswith(
        f"error: The picture {picture} cannot be written: [Errno 28] No space left on device\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize("arguments", [[], ["lits"], ["estimate", "--preset", "gpt-9"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "command", "hint"),
    [
        (["eval", "perplexity", "--modle", "x"], "eval perplexity", " Did you mean '--model'?"),
        (["bench", "attention", "--lenths=4"], "bench attention", " Did you mean '--lengths'?"),
        (["list", "--bogus", "3"], "list", ""),
        (["estimate", "extra"], "estimate", ""),
    ],
)
def test_what_a_command_does_not_know(
    arguments: list[str], command: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    said = capsys.readouterr().err
    unknown = " ".join(arguments[len(command.split()) :])
    assert stopped.value.code == 2 and said.startswith(f"usage: kvcache-plugins {command} ")
    assert said.endswith(
        f"unrecognized arguments: {unknown}.{hint} `kvcache-plugins {command} --help` shows all.\n"
    )


# ---- options ----


def test_cache_configs_are_collected_and_backends_lower_cased() -> None:
    given = [['{"backend": "KIVI"}', '{"backend": "HQQ", "nbits": 4}'], ['{"backend": "dense"}']]
    assert parse_cache_configs(given) == [
        {"backend": "kivi"},
        {"backend": "hqq", "nbits": 4},
        {"backend": "dense"},
    ]


@pytest.mark.parametrize(
    ("cache_config", "label"),
    [
        ({"backend": "dense"}, "dense"),
        ({"backend": "kivi", "nbits": 2}, "kivi 2-bit"),
        ({"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1}, "hqq 4-bit axis 1"),
        ({"backend": "quanto", "axis_key": 0, "axis_value": -1}, "quanto axis_key=0 axis_value=-1"),
        ({"backend": "int8", "granularity": "group"}, "int8 granularity=group"),
        ({"backend": "kvquant", "calibration": "name/of/artifact/"}, "kvquant calibration=artifact"),
        ({"backend": "kivi", "skip_layers": [0, 1]}, "kivi skip_layers=[0, 1]"),
        ({"backend": "knorm", "pool": {"weights": "some/file"}}, "knorm pool={'weights': 'some/file'}"),
        (
            {"backend": "int4", "layer_overrides": {str(layer): {"nbits": 8} for layer in range(32)}},
            "int4 layer_overrides[32]#f9c4",
        ),
    ],
)
def test_cache_label(cache_config: dict[str, object], label: str) -> None:
    before = dict(cache_config)
    assert cache_label(cache_config) == label
    assert cache_config == before
