"""What a run repeats is known by the files it reads, not by their names: results of others are kept."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvcache_plugins.cli import main
from kvcache_plugins.runs.results import read_results
from tests.evaluation.longbench.rows import row, write_data, write_rows

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"
MODEL = MODELS / "tiny-llama-books"
INT8 = {"backend": "int8"}


@pytest.fixture(autouse=True)
def _path_only_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command puts this Python's tools on the path."""
    monkeypatch.setenv("PATH", os.environ["PATH"])


def _retouch(folder: Path) -> None:
    """Change weights, as a further step of training does."""
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        facts = file.metadata()
    save_file({name: weight * 1.1 for name, weight in load_file(path).items()}, path, facts)


def _run(output: Path, *arguments: str, model: Path = MODEL, cache: dict[str, Any] = INT8) -> None:
    given = ["--model", str(model), "--dtype", "fp32", "--no_plots", "--output", str(output)]
    assert main(["eval", *arguments, *given, "--cache_config", json.dumps(cache)]) == 0


def _is_kept(output: Path, task: str, first: dict[str, Any], said: str) -> bool:
    """Whether the first results lie beside those of the second run, which is said."""
    kept = output / f"results-{task}.json"
    assert (f"kept: {kept}" in said) == kept.exists() != (f"replaced: {output / 'results.json'}" in said)
    return kept.exists() and read_results(kept) == first


def _book(folder: Path, topic: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "book.txt").write_text(topics[topic][:1500], encoding="utf-8")
    return folder / "book.txt"


def test_another_text_of_the_same_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    books = [_book(tmp_path / topic, topic) for topic in ("specialnames", "subscriptions")]
    copy = tmp_path / "copy" / "book.txt"
    shutil.copytree(books[0].parent, copy.parent)
    output = tmp_path / "out"
    windows = ["--context_length", "48", "--max_windows", "1"]
    for book, is_kept in ((books[0], False), (copy, False), (books[1], True)):
        first = read_results(output) if output.exists() else {}
        _run(output, "perplexity", "--dataset", "text", "--text_files", str(book), *windows)
        said = capsys.readouterr().out
        assert not first or _is_kept(output, "perplexity", first, said) == is_kept
    assert set(read_results(output)["inputs"]) == {"model", "texts"}


@pytest.mark.parametrize("changed", ["heads", "model"])
def test_heads_or_a_model_that_were_trained_further(
    changed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(MODEL, tmp_path / "model")
    heads = shutil.copytree(MODELS / "tiny-llama-books-locret", tmp_path / "heads")
    cache = {"backend": "locret", "heads": str(heads), "budget": 96}
    output = tmp_path / "out"
    few = ["passkey", "--lengths", "128", "--depths", "1", "--trials", "1"]
    _run(output, *few, model=model, cache=cache)
    _run(output, *few, model=model, cache=cache)
    first, said = read_results(output), capsys.readouterr().out
    assert not _is_kept(output, "passkey", first, said)
    _retouch(tmp_path / changed)
    _run(output, *few, model=model, cache=cache)
    assert _is_kept(output, "passkey", first, capsys.readouterr().out)
    assert list(read_results(output)["inputs"]["artifacts"]) == [str(heads)]


def test_questions_that_were_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, output = write_data(tmp_path / "data"), tmp_path / "out"
    asked = ["longbench", "--data_dir", str(data), "--prompts", str(data / "prompts.json")]
    asked += ["--tasks", "passage_count", "--limit", "1", "--max_length", "300"]
    _run(output, *asked)
    _run(output, *asked)
    first, said = read_results(output), capsys.readouterr().out
    assert not _is_kept(output, "longbench", first, said)
    prediction = (output / "int8" / "passage_count.jsonl").read_text()
    write_rows(data / "passage_count.jsonl", [row(0, "passage_count") | {"answers": ["8"]}])
    _run(output, *asked)
    assert _is_kept(output, "longbench", first, capsys.readouterr().out)
    assert (output / "results-longbench" / "int8" / "passage_count.jsonl").read_text() == prediction
    assert json.loads((output / "int8" / "passage_count.jsonl").read_text())["answers"] == ["8"]


def test_predictions_of_another_folder_of_the_same_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    for place, pred in (("a", "7"), ("b", "8")):
        rows = [{"pred": pred, "answers": ["7"], "all_classes": None}]
        write_rows(tmp_path / place / "pred" / "passage_count.jsonl", rows)
        score = ["eval", "longbench", "--score_only", str(tmp_path / place / "pred"), "--no_plots"]
        for _ in range(2):
            assert main([*score, "--output", str(output)]) == 0
        said = capsys.readouterr().out
        assert f"replaced: {output / 'results.json'}" in said
        assert (f"kept: {output / 'results-longbench.json'}" in said) == (place == "b")
    assert read_results(output / "results-longbench.json")["results"][0]["average"] == 100


def test_results_of_before_digests_were_kept_are_not_taken_for_a_repetition(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["passkey", "--lengths", "128", "--depths", "1", "--trials", "1"]
    _run(tmp_path, *few)
    old = read_results(tmp_path)
    del old["inputs"]
    (tmp_path / "results.json").write_text(json.dumps(old))
    capsys.readouterr()
    _run(tmp_path, *few)
    assert _is_kept(tmp_path, "passkey", old, capsys.readouterr().out)
