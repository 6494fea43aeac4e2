"""What a checkpoint says of its training: the data set it was made with, whatever form that has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from kvcache_plugins.training.arguments import LocretTrainingArguments
from kvcache_plugins.training.checkpoints import check_none_lost, find_checkpoint, training_facts
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


def _facts(tmp_path: Path, given: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    args = LocretTrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True, **arguments)
    return training_facts(LocretOptions(model=str(MODEL), **given), args, LlamaConfig())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "bf16"),
        ("attn_implementation", "eager"),
        ("sequence_length", 128),
        ("max_length", 128),
        ("num_examples", 3),
        ("eval_examples", 3),
        ("max_train_length", 50),
    ],
)
def test_the_steps_of_a_training_depend_on_its_data(name: str, value: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "b"}')
    given = {"dataset": str(rows)} if name in ("max_length", "num_examples") else {}
    before, after = _facts(tmp_path, given), _facts(tmp_path, given | {name: value})
    assert after == before | {name: value} != before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data_seed", 1),
        ("warmup_steps", 7),
        ("lr_scheduler_type", "cosine"),
        ("weight_decay", 0.5),
        ("adam_beta1", 0.5),
        ("adam_beta2", 0.5),
        ("max_grad_norm", 1.0),
        ("clip_value", 0.1),
        ("metric_for_best_model", "recall"),
    ],
)
def test_the_steps_of_a_training_depend_on_its_optimizer(name: str, value: Any, tmp_path: Path) -> None:
    before, after = _facts(tmp_path, {}), _facts(tmp_path, {}, **{name: value})
    changed = {key for key in before if before[key] != after[key]}
    assert name in changed <= {name, "greater_is_better"}  # which follows from the metric
    assert _facts(tmp_path, {}, max_steps=7, save_steps=3, logging_steps=1) == before


def _leave(output: Path, step: int, begun: float | None = None) -> None:
    folder = output / f"checkpoint-{step}"
    folder.mkdir()
    state = {"global_step": step, "train_batch_size": 1, "log_history": []}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    if begun is not None:
        (folder / "training.json").write_text(json.dumps({"seconds": 1.0, "begun": begun}))


def _finish(output: Path, **training: Any) -> None:
    document = {"task": "train locret", "training": training}
    (output / "results.json").write_text(json.dumps(document))


def _found(output: Path) -> str:
    args = LocretTrainingArguments(
        output_dir=str(output), use_cpu=True, max_steps=2, resume_from_checkpoint="true"
    )
    found = find_checkpoint(args, output)
    assert found is not None
    return Path(found).relative_to(output).name


def test_the_checkpoint_with_the_most_steps_is_gone_on_from(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        _leave(tmp_path, step)
    assert _found(tmp_path) == "checkpoint-10"


def test_that_of_the_interrupted_training_is_gone_on_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever a finished one beside it, of more steps, has left."""
    for step, begun in ((27, 5.0), (30, 5.0), (3, 9.0), (6, 9.0)):
        _leave(tmp_path, step, begun)
    _finish(tmp_path, begun=5.0, steps=30)
    assert _found(tmp_path) == "checkpoint-6" and not capsys.readouterr().out
    args = LocretTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match=r"with checkpoint-6\. Go on with it"):
        check_none_lost(find_checkpoint(args, tmp_path), tmp_path)
    (tmp_path / "results.json").rename(tmp_path / "results-train-locret.json")
    _finish(tmp_path, begun=9.0, steps=6)
    check_none_lost(find_checkpoint(args, tmp_path), tmp_path)
    assert _found(tmp_path) == "checkpoint-6", "that of the one that was begun last"
    assert "checkpoint-6, of a finished one" in capsys.readouterr().out


def test_a_finished_training_that_goes_on_may_be_interrupted(tmp_path: Path) -> None:
    for step in (27, 30, 33, 36):
        _leave(tmp_path, step, 5.0)
    _finish(tmp_path, begun=5.0, steps=30)
    assert _found(tmp_path) == "checkpoint-36"
    args = LocretTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match=r"with checkpoint-36\."):
        check_none_lost(None, tmp_path)
    shutil.rmtree(tmp_path / "checkpoint-36")
    shutil.rmtree(tmp_path / "checkpoint-33")
    check_none_lost(find_checkpoint(args, tmp_path), tmp_path)
    assert _found(tmp_path) == "checkpoint-30"
