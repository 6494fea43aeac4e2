"""Answers after logits that are no numbers are no answers: the evaluations that generate say so."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvcache_plugins.cli import main
from kvcache_plugins.errors import NotFiniteError
from kvcache_plugins.evaluation.finite import FiniteLogits
from kvcache_plugins.quantizers import affine
from kvcache_plugins.runs.results import read_results
from tests.evaluation.longbench.rows import write_data

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama-books"
INT8 = {"backend": "int8", "kernel": "torch"}
FACTS = ["--facts", "2", "--lengths", "200", "--trials", "1"]


def _command(task: str, model: Path, folder: Path) -> list[str]:
    command = ["eval", "longbench" if task == "longbench" else "passkey", "--model", str(model), "--no_plots"]
    command += ["--cache_config", json.dumps(INT8), "--dtype", "fp32", "--output", str(folder / "out")]
    if task == "longbench":
        data = write_data(folder / "data")
        return [
            *command,
            "--data_dir",
            str(data),
            "--prompts",
            str(data / "prompts.json"),
            "--max_length",
            "300",
        ]
    return [*command, *(FACTS if task == "facts" else ["--lengths", "128", "--depths", "1", "--trials", "1"])]


TASKS = ["passkey", "facts", "longbench"]


@pytest.mark.parametrize("task", TASKS)
def test_a_cache_with_which_the_model_predicts_no_numbers(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(codes: Any, scale: Any, granularity: Any) -> Any:
        return affine.quantizers_own(codes, scale, granularity) * math.nan  # type: ignore[attr-defined]

    monkeypatch.setattr(affine, "quantizers_own", affine.dequantize_symmetric, raising=False)
    monkeypatch.setattr(affine, "dequantize_symmetric", spoilt)
    assert main(_command(task, MODEL, tmp_path)) == 1
    document = read_results(tmp_path / "out")
    assert [row["cache_config"] for row in document["results"]] == [{"backend": "dense"}]
    (entry,) = document["skipped"]
    assert entry["cache_config"] == INT8 and entry["is_failure"]
    assert "predictions are not numbers (NaN or infinite logits)" in entry["reason"]
    assert "error: int8" in capsys.readouterr().err


@pytest.mark.parametrize("task", TASKS)
def test_a_model_that_predicts_no_numbers_is_refused(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(MODEL, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][3] = math.nan
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert main(_command(task, model, tmp_path)) == 2
    said = capsys.readouterr().err
    assert "The model itself, in float32 and with its ordinary cache, makes no sense of the text" in said
    assert not (tmp_path / "out" / "results.json").exists()


def test_what_is_looked_for() -> None:
    logits = FiniteLogits()
    model: Any = torch.nn.Linear(1, 1)
    model.dtype = torch.float32
    ids, scores = torch.zeros(2, 3, dtype=torch.long), torch.randn(2, 5)
    scores[0, 1] = -math.inf  # of a token that must not come
    assert logits(ids, scores) is scores
    logits.check(INT8, model)
    for number in (math.nan, math.inf):
        logits(ids, scores.index_fill(1, torch.tensor([2]), number)[:1])
    logits(ids, torch.full_like(scores, -math.inf)[:1])
    with pytest.raises(NotFiniteError, match="3 of 5 predictions"):
        logits.check(INT8, model)
