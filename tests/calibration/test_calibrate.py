"""The command from end to end, interrupted or not, and everything it refuses before it works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import DynamicCache

from kvcache_plugins import build_cache
from kvcache_plugins.artifacts.card import model_card
from kvcache_plugins.artifacts.codebooks import load_codebooks
from kvcache_plugins.artifacts.scales import load_scales
from kvcache_plugins.calibration import calibrate as job
from kvcache_plugins.calibration.calibrate import calibrate_subject
from kvcache_plugins.calibration.fitting import fit_layers
from kvcache_plugins.calibration.options import CalibrationOptions
from kvcache_plugins.calibration.passes import run_passes
from kvcache_plugins.calibration.recording import calibrated_layers
from kvcache_plugins.calibration.samples import Samples, read_samples, token_digest
from kvcache_plugins.calibration.statistics import Statistics
from kvcache_plugins.cli import main
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.rotary import find_rotary
from kvcache_plugins.runs.language_reference import UNSEEN_TOPICS
from kvcache_plugins.runs.loading import Subject, load_subject
from kvcache_plugins.runs.model_options import ModelOptions
from kvcache_plugins.testing import tiny_model

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "models" / "tiny-llama-books"
ARTIFACT = ROOT / "examples" / "models" / "tiny-llama-books-kvquant3"
FILES = ["README.md", "kvquant.json", "kvquant.safetensors", "scales.json", "scales.safetensors"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "reference.txt"
    path.write_text("\n\n".join(topics[name] for name in sorted(topics)[:40]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject(ModelOptions(model=str(MODEL), dtype="fp32"))


def options(text: Path, **given: Any) -> CalibrationOptions:
    defaults = {
        "model": str(MODEL),
        "dtype": "fp32",
        "text_files": [str(text)],
        "num_samples": 3,
        "sequence_length": 96,
        "nbits": (2, 3),
    }
    return CalibrationOptions(**(defaults | given))


@pytest.fixture(scope="module")
def made(subject: Subject, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "artifact"
    calibrate_subject(subject, options(text), folder)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- what is written


def test_the_artifact_is_complete(made: Path, subject: Subject) -> None:
    assert names(made) == FILES
    found = load_codebooks(str(made))
    found.check_model(subject.model.config)
    assert (found.nbits, found.outlier_fraction, found.sink_length) == ([2, 3], 0.01, 1)
    assert {"weight": "fisher_scale", "num_samples": 3, "sequence_length": 96}.items() <= found.facts.items()
    rotary = find_rotary(subject.model, subject.model.config, "full_attention", 64)
    for index in range(6):
        layer = found.for_layer(index, 2, 64, key_bits=2, value_bits=3, rotary=rotary)
        assert layer.key_codebook.shape == (4,) and layer.value_codebook.shape == (8,)
        assert (layer.key_upper > layer.key_lower).all() and (layer.key_codebook.diff() > 0).all()
        assert layer.key_codebook[0] < 0 < layer.key_codebook[-1]
    assert load_scales(str(made)).key_absmax.keys() == set(range(6))


def test_nothing_tells_where_it_was_made(made: Path, text: Path) -> None:
    for path in (*made.iterdir(), *ARTIFACT.iterdir()):
        content = path.read_bytes()
        for place in (str(made), str(text.parent), str(Path.home()), str(ROOT)):
            assert place.encode() not in content, path.name


@pytest.mark.parametrize(("backend", "option"), [("float8", "scale"), ("int8", "granularity")])
def test_static_scales_serve(backend: str, option: str, made: Path, subject: Subject) -> None:
    cache = build_cache(subject.model, {"backend": backend, option: "head", "calibration": str(made)})
    with torch.no_grad():
        subject.model(torch.arange(5, 45)[None], **as_argument(cache))
    assert cache.get_seq_length() == 40


def test_a_repetition_gives_the_same_files(made: Path, subject: Subject, text: Path, tmp_path: Path) -> None:
    calibrate_subject(subject, options(text), tmp_path / "again")
    for name in FILES:
        assert (made / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_more_samples_and_other_seeds_differ(
    made: Path, subject: Subject, text: Path, tmp_path: Path
) -> None:
    calibrate_subject(subject, options(text, seed=1), tmp_path / "other")
    first, other = (load_codebooks(str(folder)) for folder in (made, tmp_path / "other"))
    assert first.facts["text_sha256"] != other.facts["text_sha256"]
    assert not torch.equal(first.tensors["layers.0.key_upper"], other.tensors["layers.0.key_upper"])


def test_the_artifact_is_what_its_options_say(subject: Subject, text: Path, tmp_path: Path) -> None:
    given = options(
        text,
        num_samples=2,
        sequence_length=48,
        nbits=(2,),
        outlier_fraction=0.08,
        sink_length=5,
        weight="fisher",
    )
    calibrate_subject(subject, given, tmp_path / "out")
    layers = calibrated_layers(subject.model)
    statistics = Statistics(tmp_path, {}, layers, tokens=43, num_samples=2, tail=0.04)
    samples = read_samples(subject, given).token_ids
    run_passes(
        subject.model, samples, layers, statistics, outlier_fraction=0.08, sink_length=5, weight="fisher"
    )
    found, scales = load_codebooks(str(tmp_path / "out")), load_scales(str(tmp_path / "out"))
    assert (found.outlier_fraction, found.sink_length) == (0.08, 5)
    expected = fit_layers(statistics, [2], q_norm=False)
    torch.testing.assert_close(dict(found.tensors), expected, rtol=0, atol=0)
    for index, layer in statistics.layers.items():
        assert torch.equal(scales.key_absmax[index], layer.absmax["key"])
        assert torch.equal(scales.value_absmax[index], layer.absmax["value"])


def test_q_norm_adds_levels(subject: Subject, text: Path, tmp_path: Path) -> None:
    calibrate_subject(subject, options(text, nbits=(2,), num_samples=1, q_norm=True), tmp_path / "norm")
    layer = load_codebooks(str(tmp_path / "norm"))
    assert layer.tensors["layers.3.key_levels_2"].shape == (4,)
    assert not torch.equal(layer.tensors["layers.3.key_levels_2"], layer.tensors["layers.3.key_codebook_2"])


# -- an interruption


class Interrupt(Exception):
    """Stands for whatever ends a process."""


@pytest.mark.parametrize("after", [1, 3, 4, 6])
def test_an_interrupted_calibration_is_continued(
    after: int, made: Path, subject: Subject, text: Path, tmp_path: Path
) -> None:
    output = tmp_path / "artifact"
    done = 0

    def interrupt(description: str, advance: int = 0) -> None:
        nonlocal done
        done += advance
        if done == after:
            raise Interrupt

    with pytest.raises(Interrupt):
        calibrate_subject(subject, options(text), output, interrupt)
    assert names(output) == ["progress"], "nothing looks like an artifact"
    forwards = 0

    def count(*args: Any) -> None:
        nonlocal forwards
        forwards += 1

    handle = subject.model.base_model.register_forward_hook(count)
    calibrate_subject(subject, options(text), output)
    handle.remove()
    assert forwards == 6 - after, "finished samples are not read again"
    assert names(output) == FILES
    for name in FILES:
        assert (made / name).read_bytes() == (output / name).read_bytes(), name


def test_a_precision_chosen_for_other_levels_goes_and_what_is_not_ours_stays(
    subject: Subject, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "progress").mkdir()
    for name in ("progress/notes.md", "precision.json", "cache_config.json"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    calibrate_subject(subject, options(text), tmp_path)
    assert names(tmp_path) == sorted([*FILES, "progress"])
    assert names(tmp_path / "progress") == ["notes.md"]


def test_other_settings_are_not_continued(
    subject: Subject, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(description: str, advance: int = 0) -> None:
        if advance:
            raise Interrupt

    with pytest.raises(Interrupt):
        calibrate_subject(subject, options(text), tmp_path, interrupt)
    with pytest.raises(ValueError, match=r"outlier_fraction was 0\.01, is 0\.02.*--output"):
        calibrate_subject(subject, options(text, outlier_fraction=0.02), tmp_path)
    with pytest.raises(ValueError, match="text was"):
        calibrate_subject(subject, options(text, seed=1), tmp_path)
    with monkeypatch.context() as changed:
        changed.setattr("kvcache_plugins.runs.code_versions.version_of", lambda name: "0")
        with pytest.raises(ValueError, match=r"transformers was '\d.*', is '0'"):
            calibrate_subject(subject, options(text), tmp_path)
    # the bits are fitted at the end, so they may change
    calibrate_subject(subject, options(text, nbits=(4,)), tmp_path)
    assert load_codebooks(str(tmp_path)).nbits == [4]


def test_few_long_samples_do_not_continue_many_short_ones_of_the_same_tokens(
    subject: Subject, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.randint(5, 2000, (96,), generator=torch.Generator().manual_seed(0))

    def cut(subject: Subject, given: CalibrationOptions) -> Samples:
        return Samples(tokens.view(given.num_samples, given.sequence_length), "text", token_digest(tokens))

    def interrupt(description: str, advance: int = 0) -> None:
        if advance:
            raise Interrupt

    monkeypatch.setattr(job, "read_samples", cut)
    with pytest.raises(Interrupt):
        calibrate_subject(subject, options(text, num_samples=4, sequence_length=24), tmp_path, interrupt)
    with pytest.raises(ValueError, match=r"shape was \[4, 24\], is \[2, 48\]"):
        calibrate_subject(subject, options(text, num_samples=2, sequence_length=48), tmp_path)


def test_all_that_the_statistics_depend_on_stays_as_it_was(
    subject: Subject, text: Path, tmp_path: Path
) -> None:
    def interrupt(description: str, advance: int = 0) -> None:
        if advance:
            raise Interrupt

    model = shutil.copytree(MODEL, tmp_path / "model")
    given: dict[str, Any] = {"model": str(model), "num_samples": 1, "sequence_length": 24}
    with pytest.raises(Interrupt):
        calibrate_subject(subject, options(text, **given), tmp_path / "out", interrupt)
    for name, value in (
        ("weight", "none"), ("sink_length", 2), ("dtype", "bf16"), ("attn_implementation", "eager")
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name} was .*, is {value!r}"):
            calibrate_subject(subject, options(text, **given | {name: value}), tmp_path / "out")
    (model / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes() + b" ")
    with pytest.raises(ValueError, match="model_digest was"):
        calibrate_subject(subject, options(text, **given), tmp_path / "out")


def test_a_damaged_state_is_refused(subject: Subject, text: Path, tmp_path: Path) -> None:
    (tmp_path / "progress").mkdir()
    (tmp_path / "progress" / "statistics.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match=r"statistics\.safetensors cannot be continued"):
        calibrate_subject(subject, options(text), tmp_path)


# -- errors before work


def test_a_short_text(subject: Subject, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Call me Ishmael.")
    with pytest.raises(ValueError, match=r"\(short\.txt\) has \d+ tokens, a sample .* needs 96"):
        calibrate_subject(subject, options(tmp_path / "short.txt"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_without_weights() -> None:
    model = tiny_model("llama").to("meta")
    with pytest.raises(ValueError, match=r"weights on the device 'meta' \(such as .*embed_tokens"):
        calibrated_layers(model)


def test_an_encoder_decoder_model(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import T5Config

    T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2).save_pretrained(tmp_path / "t5")
    arguments = ["--model", str(tmp_path / "t5"), "--text_files", str(text), "--output", str(tmp_path / "o")]
    assert main(["calibrate", *arguments]) == 2
    assert "encoder-decoder" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_model_that_cannot_be_packed() -> None:
    sliding = tiny_model("gemma3_text", layer_types=["sliding_attention"] * 2)
    with pytest.raises(ValueError, match=r"No layer of this model can be packed.*sliding"):
        calibrated_layers(sliding)


def test_samples_longer_than_the_context(subject: Subject, text: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at most the model's context of 4096 tokens, got 4097"):
        calibrate_subject(subject, options(text, sequence_length=4097), tmp_path)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--text_files", "nowhere.txt"], "--text_files must be a file, 'nowhere.txt' cannot be read"),
        (["--dataset", "pydoc", "--sequence_length", "4097"], "at most the model's context of 4096 tokens"),
    ],
)
def test_what_is_told_before_the_weights_are_loaded(
    more: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(job, "load_subject", lambda options: pytest.fail("loaded"))
    assert main(["calibrate", "--model", str(MODEL), "--output", str(tmp_path / "out"), *more]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "x"], "--model is needed"),
        (["--model", "m"], "--output is needed"),
        (["--model", "m", "--output", "x", "--nbits", "8"], "different numbers of 2, 3, 4, got [8]"),
        (["--model", "m", "--output", "x", "--outlier_fraction", "0.5"], "[0, 0.1]"),
        (
            ["--model", "m", "--output", "x", "--dataset", "pydoc", "--text_files", "f"],
            "--dataset is not for --text_files, which take its place, got 'pydoc'.",
        ),
        (
            ["--model", "m", "--output", "x", "--backend", "kivi"],
            "--backend is for --target_bits, which is not given, got 'kivi'.",
        ),
        (
            ["--model", "m", "--output", "x", "--precision_samples", "2"],
            "--precision_samples is for --target",
        ),
        (
            ["--model", "m", "--output", "x", "--target_bits", "3", "--backend", "kivi", "--nbits", "2", "4"],
            "--nbits is for the levels of kvquant, --backend is 'kivi', got [2, 4].",
        ),
        (
            ["--model", str(MODEL), "--output", "x", "--revision", "main"],
            "--revision is for models on the hub",
        ),
        (
            [
                "--model",
                "m",
                "--output",
                "x",
                "--target_bits",
                "3",
                "--backend",
                "kivi",
                "--push_to_hub",
                "r",
            ],
            "no artifact to upload",
        ),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# -- the command


def test_the_command(
    made: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pushed: list[Any] = []
    monkeypatch.setattr(job, "push_to_hub", lambda *args: pushed.append(args))
    monkeypatch.setattr(job, "check_push", lambda *args: pushed.append(args))
    arguments = [
        "calibrate", "--model", str(MODEL), "--dtype", "fp32", "--text_files", str(text),
        "--num_samples", "3", "--sequence_length", "96", "--nbits", "2", "3",
        "--output", str(tmp_path / "out"), "--push_to_hub", "me/tiny",
    ]  # fmt: skip
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "kvquant.safetensors" in said and "replaced" not in said
    assert pushed == [("me/tiny", "push_to_hub"), (tmp_path / "out", "me/tiny")]
    for name in FILES:
        assert (made / name).read_bytes() == (tmp_path / "out" / name).read_bytes(), name


def test_options_from_a_file_and_precision(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "model": str(MODEL), "dtype": "fp32", "text_files": [str(text)], "num_samples": 1,
        "sequence_length": 192, "target_bits": 3.0, "backend": "kivi",
        "cache_config": [{"backend": "kivi", "residual_length": 32, "skip_layers": [0, 1, 2, 3]}],
    }  # fmt: skip
    (tmp_path / "options.yaml").write_text(json.dumps(settings))  # json is yaml
    output = tmp_path / "it's $HOME"
    assert main(["calibrate", "--config", str(tmp_path / "options.yaml"), "--output", str(output)]) == 0
    (use,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("use: ")]
    if os.name == "posix":
        pasted = f"printf '%s' {use.removeprefix('use: --cache_config ')}"
        done = subprocess.run(["sh", "-c", pasted], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == json.loads((output / "cache_config.json").read_text())
    assert names(output) == ["cache_config.json", "precision.json"]
    config = json.loads((output / "cache_config.json").read_text())
    assert config["residual_length"] == 32 and config["layer_overrides"].keys() == {"4", "5"}
    build_cache(tiny_model("llama", num_hidden_layers=6), config)
    assert main(["calibrate", "--config", str(tmp_path / "options.yaml"), "--output", str(output)]) == 0
    replaced = "replaced, of an earlier calibration: cache_config.json, precision.json"
    assert replaced in " ".join(capsys.readouterr().out.split())


def test_precision_of_kvquant(
    subject: Subject, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {
        "nbits": None,
        "num_samples": 2,
        "sequence_length": 160,
        "target_bits": 2.5,
        "precision_samples": 1,
    }
    base = {"backend": "kvquant", "residual_length": 0, "skip_layers": [1, 2, 3, 4]}
    calibrate_subject(subject, options(text, **given, cache_config=[base]), Path("out"))
    assert names(tmp_path / "out") == sorted([*FILES, "cache_config.json", "precision.json"])
    config = json.loads((tmp_path / "out" / "cache_config.json").read_text())
    assert config["calibration"] == str(tmp_path / "out")
    overrides = config["layer_overrides"]
    assert overrides.keys() == {"0", "5"}
    assert sum(sum(override.values()) for override in overrides.values()) <= 2.5 * 4
    cache = build_cache(subject.model, config)
    assert [layer.config.key_bits for layer in cache.packed_layers] == [
        override["key_bits"] for override in overrides.values()
    ]


KIVI = {
    "sequence_length": 72,
    "target_bits": 3.0,
    "backend": "kivi",
    "cache_config": [{"backend": "kivi", "residual_length": 32, "skip_layers": [0, 1, 2, 3, 4]}],
    "nbits": None,
}


def test_progress_is_told_of_as_many_steps_as_were_announced(
    subject: Subject, text: Path, tmp_path: Path
) -> None:
    done = 0

    def count(description: str, advance: int = 0) -> None:
        nonlocal done
        done += advance

    few = {"num_samples": 2, "sequence_length": 48, "nbits": (2,)}
    for name, given in {"levels": few, "precision": KIVI | {"num_samples": 2}}.items():
        done, asked = 0, options(text, **given)
        calibrate_subject(subject, asked, tmp_path / name, count)
        assert done == job.steps_of(asked), name


@pytest.mark.parametrize("backend", ["kvquant", "kivi"])
def test_a_precision_is_judged_all_over_the_text_with_the_cache_that_is_described(
    backend: str, subject: Subject, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(job, "choose_precision", lambda *args: seen.append(args))
    monkeypatch.setattr(job, "check_candidates", lambda *args: None)
    given = {"target_bits": 2.0, "backend": backend, "nbits": None, "num_samples": 7, "precision_samples": 4}
    given |= {"sequence_length": 24, "sink_length": 3}
    given |= {"outlier_fraction": 0.05, "nbits": (2,)} if backend == "kvquant" else {}
    asked = options(text, **given)
    calibrate_subject(subject, asked, tmp_path, progress := lambda description, advance=0: None)
    ((_, samples, config, bits, target, output, settings, told),) = seen
    assert torch.equal(samples, read_samples(subject, asked).token_ids[[0, 2, 4, 6]])
    expected = {"backend": backend}
    if backend == "kvquant":
        expected |= {"calibration": str(tmp_path), "outlier_fraction": 0.05, "sink_length": 3}
    assert config == expected and (bits, target, output) == (asked.candidate_bits, 2.0, tmp_path)
    assert told is progress and settings["dtype"] == "fp32"


def test_a_precision_of_other_levels_is_not_gone_on_with(
    subject: Subject, text: Path, tmp_path: Path
) -> None:
    """The levels are fitted anew, also where the statistics are the same."""

    def interrupt(description: str, advance: int = 0) -> None:
        if description.startswith("loss") and advance:
            raise Interrupt

    base = {"backend": "kvquant", "residual_length": 0, "skip_layers": [0, 1, 2, 3, 4]}
    given = {"nbits": (2,), "num_samples": 2, "sequence_length": 130, "target_bits": 2.0}
    given |= {"cache_config": [base]}
    with pytest.raises(Interrupt):
        calibrate_subject(subject, options(text, **given), tmp_path, interrupt)
    with pytest.raises(ValueError, match="q_norm was False, is True"):
        calibrate_subject(subject, options(text, **given, q_norm=True), tmp_path)


# -- the bundled artifact


def test_the_bundled_artifact(subject: Subject) -> None:
    assert names(ARTIFACT) == FILES
    found = load_codebooks(str(ARTIFACT))
    found.check_model(subject.model.config)
    assert found.nbits == [3] and found.facts["num_samples"] == 16
    rotary = find_rotary(subject.model, subject.model.config, "full_attention", 64)
    for index in range(6):
        found.for_layer(index, 2, 64, key_bits=3, value_bits=3, rotary=rotary)
    assert "pride_and_prejudice.txt" in found.facts["text_source"]
    assert (ARTIFACT / "README.md").read_text() == model_card(found.facts)


def test_an_artifact_without_its_tensors(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "copy")
    assert (
        load_file(tmp_path / "copy" / "kvquant.safetensors").keys()
        == load_codebooks(str(made)).tensors.keys()
    )
    (tmp_path / "copy" / "kvquant.safetensors").unlink()
    with pytest.raises(ValueError, match=r"kvquant\.safetensors cannot be read"):
        load_codebooks(str(tmp_path / "copy"))


# -- what it is good for


@pytest.mark.slow
@torch.no_grad()
def test_chosen_precision_beats_a_uniform_one_on_unseen_text(
    subject: Subject, text: Path, tmp_path: Path
) -> None:
    """At the same average of 3 bits, judged on topics that the model has not seen either."""
    model = subject.model
    given = {"nbits": None, "sequence_length": 384, "num_samples": 1, "target_bits": 3.0, "backend": "kivi"}
    base = [{"backend": "kivi", "rope_mode": "block"}]  # the choice of which is tested elsewhere
    calibrate_subject(subject, options(text, **given, cache_config=base), tmp_path)
    chosen = json.loads((tmp_path / "cache_config.json").read_text())
    token_ids = torch.tensor(subject.encode("\n\n".join(topics[name] for name in UNSEEN_TOPICS)))
    window = token_ids[None, :768]
    reads = {}
    for name in ("dense", "chosen", "post", "block"):
        uniform = {"backend": "kivi", "nbits": 3, "rope_mode": name}
        cache = (
            DynamicCache(config=model.config)
            if name == "dense"
            else build_cache(model, chosen if name == "chosen" else uniform)
        )
        model.base_model(input_ids=window[:, :512], **as_argument(cache))
        blocks = window[:, 512:].split(64, dim=1)
        logits = [model(input_ids=block, **as_argument(cache)).logits[0] for block in blocks]
        reads[name] = torch.cat(logits).log_softmax(-1)
    dense = reads.pop("dense")
    divergence = {
        name: torch.nn.functional.kl_div(read, dense, log_target=True, reduction="batchmean").item()
        for name, read in reads.items()
    }
    assert 0 < divergence["chosen"] < 0.8 * min(divergence["post"], divergence["block"]), divergence
