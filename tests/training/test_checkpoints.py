"""What a checkpoint says of its training: the data set it was made with, whatever form that has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from kvcache_plugins.training.arguments import LocretTrainingArguments
from kvcache_plugins.training.checkpoints import training_facts
from kvcache_plugins.training.options import LocretOptions

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama-books"


def _digest(dataset: str, tmp_path: Path, **given: Any) -> str | None:
    args = LocretTrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True)
    options = LocretOptions(model=str(MODEL), dataset=dataset, **given)
    found: str | None = training_facts(options, args, LlamaConfig())["data_digest"]
    return found


@pytest.mark.parametrize("name", ["", ":default"])
def test_a_data_set_that_is_a_directory_may_change(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "org" / "data"
    (folder / "train" / ".cache").mkdir(parents=True)
    shard = folder / "train" / "0.jsonl"
    shard.write_text('{"prompt": "a", "answer": "b"}')
    before = _digest(f"{folder}{name}", tmp_path)
    assert before is not None
    (folder / "train" / ".cache" / "lock").write_text("of a program that reads it")
    assert _digest(f"{folder}{name}", tmp_path) == before
    shard.write_text('{"prompt": "a", "answer": "c"}')
    assert _digest(f"{folder}{name}", tmp_path) != before


def test_synthetic_tasks_are_of_their_texts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("a text")
    assert _digest("synthetic", tmp_path) is None
    before = _digest("synthetic", tmp_path, text_files=[str(text)])
    (tmp_path / "synthetic").mkdir()
    (tmp_path / "synthetic" / "other.txt").write_text("another")
    assert _digest("synthetic", tmp_path, text_files=[str(text)]) == before
    text.write_text("another text")
    assert _digest("synthetic", tmp_path, text_files=[str(text)]) != before
