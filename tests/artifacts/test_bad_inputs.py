"""What does not fit is told by the commands in one line that names it, and leaves nothing behind."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcache_plugins import ArtifactError, build_cache
from kvcache_plugins.calibration.calibrate import calibrate_subject
from kvcache_plugins.calibration.options import CalibrationOptions
from kvcache_plugins.cli import main
from kvcache_plugins.runs.loading import Subject, load_subject
from kvcache_plugins.runs.model_options import ModelOptions
from kvcache_plugins.testing import tiny_model

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama-books"
ARTIFACT = MODEL.with_name(f"{MODEL.name}-kvquant3")
TENSORS = "kvquant.safetensors"


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Another model, a damaged artifact, a short and a long text, each in a folder of its own."""
    folder = tmp_path_factory.mktemp("inputs")
    found = {name: folder / name for name in ("other", "cut", "long.txt", "short.txt")}
    tiny_model("llama", vocab_size=8192).save_pretrained(found["other"])
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(found["other"])
    shutil.copytree(ARTIFACT, found["cut"])
    os.truncate(found["cut"] / TENSORS, (ARTIFACT / TENSORS).stat().st_size // 2)
    found["short.txt"].write_text("Call me Ishmael.")
    found["long.txt"].write_text("Call me Ishmael. " * 100)
    return found


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line a command says before it ends with status 2."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and captured.err.endswith(f"{lines[0]}\n")
    assert "written to" not in captured.out
    return lines[0]


def kvquant(artifact: Path, **options: Any) -> dict[str, Any]:
    return {"backend": "kvquant", "calibration": str(artifact), **options}


UNFIT: dict[str, tuple[str | None, str | None, dict[str, Any], tuple[str, ...]]] = {
    # model and artifact by their places (or the bundled ones), options, what the message must name
    "another-model": ("other", None, {}, (str(ARTIFACT), "'num_layers': 6", "'num_layers': 2")),
    "cut-short": (None, "cut", {}, (TENSORS, "cannot be read")),
    "bits-it-lacks": (None, None, {"nbits": 4}, (str(ARTIFACT), "[3]", "not for 4")),
    "key-bits-it-lacks": (None, None, {"key_bits": 2}, (str(ARTIFACT), "[3]", "not for 2")),
    "value-bits-it-lacks": (None, None, {"value_bits": 2}, (str(ARTIFACT), "[3]", "not for 2")),
    "other-share-of-outliers": (None, None, {"outlier_fraction": 0.02}, (str(ARTIFACT), "0.02", "0.01")),
}


@pytest.mark.parametrize("name", UNFIT)
def test_an_artifact_that_does_not_fit(
    name: str, places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_at, artifact_at, options, named = UNFIT[name]
    model = places[model_at] if model_at else MODEL
    config = kvquant(places[artifact_at] if artifact_at else ARTIFACT, **options)
    message = error_of(
        capsys, "eval", "perplexity", "--model", str(model), "--dtype", "fp32", "--dataset", "text",
        "--text_files", str(places["long.txt"]), "--cache_config", json.dumps(config),
        "--output", str(tmp_path / "out"),
    )  # fmt: skip
    assert all(thing in message for thing in named), message
    assert list(tmp_path.iterdir()) == []

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for known in (loaded, loaded.config):  # before a token is read, and also where there are no weights
        with pytest.raises(ValueError, match=re.escape(named[0])) as failure:
            build_cache(known, config)
        assert all(thing in str(failure.value) for thing in named)
        assert isinstance(failure.value, ArtifactError) == (name != "other-share-of-outliers")


@pytest.mark.parametrize("exists", [False, True])
def test_a_text_shorter_than_a_sample(
    exists: bool, places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "artifact"
    if exists:
        shutil.copytree(ARTIFACT, output)
    message = error_of(
        capsys, "calibrate", "--model", str(MODEL), "--dtype", "fp32", "--sequence_length", "64",
        "--text_files", str(places["short.txt"]), "--output", str(output),
    )  # fmt: skip
    count = len(AutoTokenizer.from_pretrained(MODEL)("Call me Ishmael.").input_ids)
    assert f"(short.txt) has {count} tokens" in message and "--sequence_length" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == (["artifact"] if exists else [])
    if exists:
        assert {p.name: p.read_bytes() for p in output.iterdir()} == {
            p.name: p.read_bytes() for p in ARTIFACT.iterdir()
        }


@pytest.mark.parametrize(("backend", "target_bits"), [("kvquant", None), ("kvquant", 3.0), ("kivi", 3.0)])
def test_a_model_on_the_meta_device(
    backend: str, target_bits: float | None, places: dict[str, Path], tmp_path: Path
) -> None:
    subject = load_subject(ModelOptions(model=str(MODEL), dtype="fp32"))
    model = copy.deepcopy(subject.model).to("meta")
    options = CalibrationOptions(
        model=str(MODEL),
        text_files=[str(places["long.txt"])],
        num_samples=1,
        sequence_length=64,
        backend=backend,
        target_bits=target_bits,
    )
    with pytest.raises(ValueError, match=r"weights on the device 'meta' \(such as .*embed_tokens") as failure:
        calibrate_subject(Subject(model, subject.tokenizer, subject.shard), options, tmp_path / "out")
    assert "\n" not in str(failure.value)
    assert list(tmp_path.iterdir()) == []


def test_the_command_on_the_meta_device(
    places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = error_of(
        capsys, "calibrate", "--model", str(MODEL), "--dtype", "fp32", "--device_map", "meta",
        "--sequence_length", "64", "--num_samples", "1", "--text_files", str(places["long.txt"]),
        "--output", str(tmp_path / "out"),
    )  # fmt: skip
    assert "'meta'" in message
    assert list(tmp_path.iterdir()) == []
