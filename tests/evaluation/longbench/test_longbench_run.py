"""LongBench from the command line: files, resumption, scores of files, several processes."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from kvcache_plugins.cli import main
from kvcache_plugins.evaluation.longbench import run as run_module
from kvcache_plugins.evaluation.longbench.options import LongBenchOptions
from kvcache_plugins.evaluation.longbench.prediction_files import (
    find_predictions,
    folder_name,
    name_folder,
)
from kvcache_plugins.evaluation.longbench.prompting import Prompt
from kvcache_plugins.evaluation.longbench.summary import summarize
from kvcache_plugins.evaluation.longbench.tasks import TASKS
from kvcache_plugins.runs.labels import DENSE
from kvcache_plugins.runs.output_lock import writing_alone
from kvcache_plugins.runs.results import check_document, read_results
from tests.evaluation.longbench.rows import row, write_data, write_rows
from tests.launching import run_script

ROOT = Path(__file__).resolve().parents[3]
INT8 = {"backend": "int8"}


def _command(model: Path, data: Path, output: Path, *arguments: str) -> list[str]:
    common = ["--model", str(model), "--data_dir", str(data), "--prompts", str(data / "prompts.json")]
    caches = ["--cache_config", json.dumps(INT8)]
    return [*common, *caches, "--max_length", "300", "--no_plots", "--output", str(output), *arguments]


def _run(model: Path, data: Path, output: Path, *arguments: str) -> dict[str, Any]:
    assert main(["eval", "longbench", *_command(model, data, output, *arguments)]) == 0
    return read_results(output)


def _files(output: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        str(path.relative_to(output)): [json.loads(line) for line in path.open(encoding="utf-8")]
        for path in sorted(output.glob("*/*.jsonl"))
        if path.parent.name != "progress"
    }


def _metrics(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Everything but the time."""
    return [{key: value for key, value in row.items() if key != "seconds"} for row in document["results"]]


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("finished")
    _run(model, write_data(folder / "data"), folder / "out")
    return folder / "out"


def test_a_run_leaves_predictions_and_scores(finished: Path) -> None:
    document = read_results(finished)
    files = _files(finished)
    assert document["task"] == "longbench"
    assert document["settings"]["dtype"] == "float32", "which --dtype auto has found"
    assert [result["cache_config"] for result in document["results"]] == [DENSE, INT8]
    assert list(files) == [
        f"{cache}/{task}.jsonl" for cache in ("dense", "int8") for task in ("hotpotqa", "passage_count")
    ]
    for lines in files.values():
        assert [line["_id"].rpartition("-")[2] for line in lines] == ["0", "1", "2"]
        assert set(lines[0]) == {"pred", "answers", "all_classes", "length", "_id"}
    for result in document["results"]:
        assert result["rows"] == {"hotpotqa": 3, "passage_count": 3}
        assert result["truncated"] == {"hotpotqa": 0, "passage_count": 0}
        assert result["average"] == pytest.approx(sum(result["scores"].values()) / 2, abs=0.006)
        assert result["query_agnostic"] is False
    dense, int8 = document["results"]
    assert (dense["memory_fraction"], dense["bits_per_value"]) == (1.0, 32.0)
    assert int8["kv_bytes"] < dense["kv_bytes"]
    assert int8["memory_fraction"] < 0.5  # 8 bits of 32, and the scales
    assert int8["bits_per_value"] == pytest.approx(32 * int8["memory_fraction"])
    assert document["settings"]["max_lengths"] == {"hotpotqa": 300, "passage_count": 300}
    assert not (finished / "progress").exists()


def test_predictions_of_another_run_are_kept_and_those_of_the_same_are_written_again(
    model: Path, data: Path, tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    shutil.copytree(finished, output)
    settings = read_results(finished)["settings"]
    few = ["--limit", "1", "--tasks", "hotpotqa"]
    assert _run(model, Path(settings["data_dir"]), output, *few)["results"][0]["rows"] == {"hotpotqa": 1}
    assert _files(output / "results-longbench") == _files(finished)
    assert read_results(output / "results-longbench.json") == read_results(finished)
    said = f"kept: {output / 'results-longbench'}, the predictions of an earlier run\n"
    assert said in capsys.readouterr().out
    _run(model, Path(settings["data_dir"]), output, *few)
    there = {path.name for path in output.iterdir()}
    assert there == {"dense", "int8", "results.json", "results-longbench", "results-longbench.json"}
    assert f"replaced: {output / 'results.json'}, of" in capsys.readouterr().out


class _Interrupted(Exception):
    """Stands for whatever ends a run."""


def test_predictions_stay_until_a_run_that_repeats_theirs_has_others(
    model: Path, tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    shutil.copytree(finished, output)
    data, before, answer = (
        Path(read_results(finished)["settings"]["data_dir"]),
        _files(finished),
        run_module.answer,
    )
    calls: list[Any] = []

    def other(*args: Any) -> Any:
        if len(calls) == 4:
            raise _Interrupted
        calls.append(args)
        return answer(*args) | {"pred": "another"}

    with monkeypatch.context() as changed:
        changed.setattr(run_module, "answer", other)
        with pytest.raises(_Interrupted):
            _run(model, data, output)
    after = _files(output)
    assert {line["pred"] for line in after.pop("dense/hotpotqa.jsonl")} == {"another"}
    assert after == {name: lines for name, lines in before.items() if name in after}
    assert read_results(output) == read_results(finished)
    _run(model, data, output)
    preds = [line["pred"] for line in _files(output)["dense/passage_count.jsonl"]]
    assert preds == ["another", *(line["pred"] for line in before["dense/passage_count.jsonl"][1:])]


@pytest.mark.parametrize("answered", [0, 2, 7])
def test_an_interrupted_run_goes_on_where_it_ended(
    model: Path, data: Path, tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch, answered: int
) -> None:
    calls, answer = [], run_module.answer

    def interrupted(*args: Any) -> Any:
        if len(calls) == answered:
            raise _Interrupted
        calls.append(args)
        return answer(*args)

    monkeypatch.setattr(run_module, "answer", interrupted)
    output = tmp_path / "out"
    with pytest.raises(_Interrupted):
        _run(model, data, output)
    kept = [line for lines in _files(output).values() for line in lines]
    assert len(kept) == answered  # on the disk, in the form that can be scored
    # as if the power had failed while the next row was written
    for path in (output / "progress" / "records-0.jsonl", output / "dense" / "hotpotqa.jsonl"):
        with path.open("a") as file:
            file.write('{"key": "half a li')

    def counted(*args: Any) -> Any:
        calls.append(args)
        return answer(*args)

    monkeypatch.setattr(run_module, "answer", counted)
    document = _run(model, data, output)
    assert len(calls) == 12  # each of them once
    assert _files(output) == _files(finished)
    assert _metrics(document) == _metrics(read_results(finished))
    assert not (output / "results-longbench").exists(), "there are no predictions of another run"


def test_a_full_disk_is_told_and_finished_rows_are_kept(
    model: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    synced, sync = [], os.fsync

    def full(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) > 6:  # the header, then two a row
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    output = tmp_path / "out"
    assert main(["eval", "longbench", *_command(model, data, output)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert [len(lines) for lines in _files(output).values()] == [2]
    monkeypatch.undo()
    _run(model, data, output)
    assert [len(lines) for lines in _files(output).values()] == [3] * 4


def test_an_output_that_cannot_be_is_refused(
    model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "longbench", *_command(model, data, data / "prompts.json")]) == 2
    assert "--output must be a directory" in capsys.readouterr().err
    assert main(["eval", "longbench", *_command(model, data, data / "prompts.json" / "out")]) == 2
    assert "prompts.json" in capsys.readouterr().err


def test_a_model_without_positions_enough_needs_a_limit(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = _command(model, data, tmp_path / "out")
    index = arguments.index("--max_length")
    del arguments[index : index + 2]
    document_of = ["eval", "longbench", *arguments, "--limit", "1", "--tasks", "hotpotqa"]
    assert main(document_of) == 0
    assert read_results(tmp_path / "out")["settings"]["max_lengths"] == {"hotpotqa": 2048 - 32 - 500}
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 512}
    small = tmp_path / "small"
    small.mkdir()
    for path in model.iterdir():
        (small / path.name).symlink_to(path)
    (small / "config.json").unlink()
    (small / "config.json").write_text(json.dumps(config))
    arguments[arguments.index(str(model))] = str(small)
    assert main(["eval", "longbench", *arguments]) == 2
    assert "--max_length has no default for hotpotqa" in capsys.readouterr().err


def test_a_prompt_and_its_answer_must_fit_the_positions(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = _command(model, data, tmp_path / "out", "--max_length", "2017")
    assert main(["eval", "longbench", *arguments]) == 2
    said = "at most 2016: the model has 2048 positions and an answer of passage_count takes 32; got 2017."
    assert capsys.readouterr().err == f"error: --max_length must be {said}\n"
    assert not (tmp_path / "out").exists()


def test_a_prompt_and_its_answer_may_fill_the_positions(model: Path, data: Path) -> None:
    options = LongBenchOptions(model=str(model), data_dir=str(data), max_length=2048 - 128)
    tasks, config = [TASKS["samsum"], TASKS["hotpotqa"]], AutoConfig.from_pretrained(model)
    assert run_module._max_lengths(options, config, tasks) == dict.fromkeys(tasks, 1920)


def test_longbench_e_is_scored_by_length(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = _run(model, data, tmp_path / "out", "--longbench_e", "--tasks", "hotpotqa")
    for result in document["results"]:  # lengths are 0, 3000 and 6000
        groups = result["scores_by_length"]["hotpotqa"]
        assert groups["8k+"] is None
        assert (2 * groups["0-4k"] + groups["4-8k"]) / 3 == pytest.approx(
            result["scores"]["hotpotqa"], abs=0.02
        )
    assert "4-8k" in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["quanto", "int8"])
def test_a_failure_of_transformers_own_cache_does_not_end_the_run(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    answer, failing = run_module.answer, {"backend": backend}

    def fails(subject: Any, cache_config: dict[str, Any], *rest: Any) -> Any:
        if cache_config == failing:
            raise RuntimeError("out of something")
        return answer(subject, cache_config, *rest)

    monkeypatch.setattr(run_module, "answer", fails)
    monkeypatch.setattr(
        "kvcache_plugins.evaluation.caches.why_unavailable", lambda config, cache_config: None
    )
    arguments = ["--cache_config", json.dumps(failing), "--limit", "2"]
    if backend == "int8":  # one of ours: a bug must not be passed over
        with pytest.raises(RuntimeError, match="out of something"):
            _run(model, data, tmp_path / "out", *arguments)
        return
    with monkeypatch.context() as stopped:
        stopped.setattr(run_module, "write_results", _interrupt)
        command = _command(model, data, tmp_path / "out", *arguments)
        assert main(["eval", "longbench", *command]) == 130
    shutil.copytree(tmp_path / "out", tmp_path / "again")
    document = _run(model, data, tmp_path / "out", *arguments)
    assert [result["cache_config"] for result in document["results"]] == [DENSE, INT8]
    [skipped] = document["skipped"]
    assert skipped == {
        "cache_config": failing,
        "reason": "failed at row 1 of hotpotqa: out of something",
        "is_failure": True,
    }
    assert not (tmp_path / "out" / folder_name(failing)).exists(), "a part is not scored as the whole"
    # the failure was of that hour; what has failed is tried again
    monkeypatch.setattr(run_module, "answer", lambda subject, cache, *rest: answer(subject, INT8, *rest))
    document = _run(model, data, tmp_path / "again", *arguments)
    assert document["skipped"] == [] and len(document["results"]) == 3
    assert document["results"][2]["rows"] == {"hotpotqa": 2, "passage_count": 2}


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


class _Answers:
    """Stands in for a model: tells what it was given, and can be stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stops_at: int | None = None) -> None:
        self.prompts: list[Prompt] = []
        self.stops_at = stops_at
        monkeypatch.setattr(run_module, "answer", self)

    def __call__(self, subject: Any, cache_config: Any, task: Any, prompt: Prompt) -> dict[str, Any]:
        if len(self.prompts) == self.stops_at:
            raise KeyboardInterrupt
        self.prompts.append(prompt)
        measured = {"kv_bytes": 100, "cached_tokens": 10, "prompt_tokens": len(prompt.ids), "seconds": 1.0}
        return measured | {"pred": "7", "new_tokens": 1}


def test_prompts_are_as_asked_for(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = shutil.copytree(model, tmp_path / "chat")
    (chat / "chat_template.jinja").write_text("User: {{ messages[0]['content'] }}")
    answers, few = _Answers(monkeypatch), ["--limit", "1", "--tasks", "hotpotqa"]
    documents = [
        _run(chat, data, tmp_path / f"out{number}", *few, *options)
        for number, options in enumerate(([], ["--no_chat_template"], ["--query_agnostic"]))
    ]
    usual, plain, agnostic = answers.prompts[::2]
    assert len(usual.ids) > len(plain.ids) and not usual.context_ids and not plain.context_ids
    assert agnostic.context_ids and len(agnostic.question_ids) < 20
    found = [
        (document["settings"]["uses_chat_template"], document["results"][0]["query_agnostic"])
        for document in documents
    ]
    assert found == [(True, False), (False, False), (True, True)]


def test_a_run_goes_on_with_answers_to_the_same_prompts_alone(
    model: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers, output = _Answers(monkeypatch, stops_at=3), tmp_path / "out"
    assert main(["eval", "longbench", *_command(model, data, output)]) == 130
    for name in ("query_agnostic", "no_chat_template", "longbench_e"):
        assert main(["eval", "longbench", *_command(model, data, output, f"--{name}")]) == 2
        assert f"unfinished run with other settings ({name} was False, is True)" in capsys.readouterr().err
    answers.stops_at = None
    kept = shutil.copytree(output, tmp_path / "kept")
    _run(model, data, kept, "--max_length", "299")
    assert len(answers.prompts) == 3 + 12, "a prompt that may be cut elsewhere is another one"
    rows = [row(number) | {"input": "Who?"} for number in range(3)]
    write_rows(data / "hotpotqa.jsonl", rows)
    _run(model, data, output)
    assert len(answers.prompts) == 3 + 12 + 12, "so is one with another question"


def test_rows_are_put_together() -> None:
    first, second = TASKS["qasper"], TASKS["hotpotqa"]
    rows = [{"pred": pred, "answers": ["cat"], "all_classes": None} for pred in ("cat", "dog")]
    sizes = {("qasper", 0): (100, 10), ("qasper", 1): (60, 20), ("hotpotqa", 0): (900, 90)}
    dense_sizes = {("qasper", 0): (400, 20), ("qasper", 1): (240, 20), ("hotpotqa", 0): (1800, 90)}
    records, dense = (
        {
            key: {"kv_bytes": kv_bytes, "cached_tokens": tokens, "prompt_tokens": tokens - 3, "seconds": 2.0}
            | {"is_truncated": key[0] == "hotpotqa"}
            for key, (kv_bytes, tokens) in of_rows.items()
        }
        for of_rows in (sizes, dense_sizes)
    )
    asked = {first: rows, second: rows[:1]}
    result = summarize(INT8, asked, records, dense, dense_bits=16, longbench_e=False, query_agnostic=True)
    assert (result["scores"], result["average"]) == ({"qasper": 50.0, "hotpotqa": 100.0}, 75.0)
    assert (result["rows"], result["truncated"]) == (
        {"qasper": 2, "hotpotqa": 1},
        {"qasper": 0, "hotpotqa": 1},
    )
    # bytes a token, of dense: 10 of 20, 3 of 12, 10 of 20
    assert result["memory_fraction"] == pytest.approx(1.25 / 3)
    assert result["bits_per_value"] == pytest.approx(16 * 1.25 / 3)
    assert (result["kv_bytes"], result["prompt_tokens"], result["seconds"]) == (900, 87, 6.0)
    assert result["query_agnostic"] is True


# ---- scores of files ----


def test_scores_of_files_are_those_of_the_run(finished: Path, tmp_path: Path) -> None:
    arguments = ["--score_only", str(finished), "--output", str(tmp_path), "--no_plots"]
    assert main(["eval", "longbench", *arguments]) == 0
    document, run = read_results(tmp_path), read_results(finished)
    for name in ("cache_config", "scores", "average", "rows"):
        assert [result[name] for result in document["results"]] == [result[name] for result in run["results"]]


def test_scores_have_their_directory_to_themselves(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with writing_alone(tmp_path):
        assert main(["eval", "longbench", "--score_only", str(finished), "--output", str(tmp_path)]) == 2
    assert "--output: another run is writing to" in capsys.readouterr().err
    assert not (tmp_path / "results.json").exists()


def test_files_of_different_numbers_of_rows_are_told_of(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predictions = shutil.copytree(finished, tmp_path / "predictions")
    path = predictions / "int8" / "hotpotqa.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    assert (
        main(["eval", "longbench", "--score_only", str(predictions), "--output", str(tmp_path), "--no_plots"])
        == 0
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "hotpotqa 2 to 3 " in said and "passage_count 3 " in said
    assert "caches have different numbers of rows: their scores are not of the same questions" in said
    path.write_text("[" * 100_000)
    assert main(["eval", "longbench", "--score_only", str(predictions), "--output", str(tmp_path)]) == 2
    assert "hotpotqa.jsonl, line 1 is not json: " in capsys.readouterr().err


def test_a_shorter_run_leaves_a_longer_one_its_answers(
    model: Path, data: Path, tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, answer = [], run_module.answer

    def counted(*args: Any) -> Any:
        if len(calls) == 7:
            raise KeyboardInterrupt
        calls.append(args)
        return answer(*args)

    monkeypatch.setattr(run_module, "answer", counted)
    output = tmp_path / "out"
    assert main(["eval", "longbench", *_command(model, data, output)]) == 130
    few = _run(model, data, output, "--limit", "1", "--tasks", "hotpotqa")
    assert few["results"][0]["rows"] == {"hotpotqa": 1} and len(calls) == 7
    calls[:] = [None] * 8
    document = _run(model, data, output)
    assert len(calls) == 8 + 12 - 7 and _metrics(document) == _metrics(read_results(finished))
    assert not (output / "progress").exists()


def test_files_of_other_programs_are_scored_without_a_model(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="part of the extra 'plots'")
    rows = [{"pred": pred, "answers": ["cat"], "all_classes": None, "length": 4000} for pred in ("cat", "a")]
    write_rows(tmp_path / "pred" / "qasper.jsonl", rows)
    write_rows(tmp_path / "pred" / "lcc.jsonl", rows)
    arguments = ["--score_only", str(tmp_path / "pred"), "--output", str(tmp_path), "--longbench_e"]
    assert main(["eval", "longbench", *arguments]) == 0
    [result] = read_results(tmp_path)["results"]
    assert result["cache_config"] == {"backend": "unknown"}
    assert result["scores"] == {"qasper": 50.0, "lcc": 75.0}  # of "a" and "cat", 2 letters of 4 match
    assert result["average"] == 62.5
    assert result["scores_by_length"]["qasper"] == {"0-4k": None, "4-8k": 50.0, "8k+": None}
    assert (tmp_path / "longbench.png").read_bytes().startswith(b"\x89PNG")


def test_files_of_longbench_e_are_not_those_of_longbench(tmp_path: Path) -> None:
    write_rows(tmp_path / "qasper_e.jsonl", [{"pred": "cat", "answers": [], "all_classes": None}])
    [(_, _, files)] = find_predictions(tmp_path, longbench_e=True)
    assert files == {"qasper": tmp_path / "qasper_e.jsonl"}
    with pytest.raises(ValueError, match="Unknown LongBench task 'qasper_e'"):
        find_predictions(tmp_path)


def test_the_dense_cache_comes_first_whatever_its_folder_is_called(tmp_path: Path) -> None:
    for name, cache_config in (("a", INT8), ("b", DENSE)):
        name_folder(tmp_path / name, cache_config)
        write_rows(tmp_path / name / "qasper.jsonl", [{"pred": "cat", "answers": [], "all_classes": None}])
    assert [label for label, _, _ in find_predictions(tmp_path)] == ["dense", "int8"]


def test_folders_of_other_programs_are_told_apart_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, pred in (("llama-kivi", "cat"), ("llama-full", "dog")):
        row = {"pred": pred, "answers": ["cat"], "all_classes": None, "length": 4000}
        write_rows(tmp_path / "pred" / name / "qasper.jsonl", [row])
    monkeypatch.chdir(tmp_path / "pred")  # of which "." is no name
    assert main(["eval", "longbench", "--score_only", ".", "--output", "../out", "--no_plots"]) == 0
    scores = {result["label"]: result["average"] for result in read_results(tmp_path / "out")["results"]}
    assert scores == {"llama-full": 0.0, "llama-kivi": 100.0}
    shown = capsys.readouterr().out
    assert "llama-full   llama-kivi" in shown and "predictions in pred;" in shown


def test_only_scores_of_files_may_lack_the_dense_cache(finished: Path) -> None:
    document = read_results(finished)
    del document["results"][0]
    with pytest.raises(ValueError, match="first result must be the dense cache"):
        check_document(document)
    document["settings"]["score_only"] = True
    check_document(document)


def test_what_cannot_be_scored_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*arguments: str) -> str:
        output = ["--output", str(tmp_path / "out"), "--no_plots"]
        assert main(["eval", "longbench", "--score_only", str(tmp_path / "pred"), *output, *arguments]) == 2
        return capsys.readouterr().err

    assert "must be a directory" in error()
    (tmp_path / "pred").mkdir()
    assert "found no <task>.jsonl" in error()
    write_rows(tmp_path / "pred" / "qasper.jsonl", [{"pred": "cat", "answers": ["cat"]}])
    assert "qasper.jsonl, line 1 lacks all_classes" in error()
    write_rows(tmp_path / "pred" / "qasper.jsonl", [{"pred": None, "answers": [], "all_classes": None}])
    assert "line 1: pred must be str, got None" in error()
    write_rows(tmp_path / "pred" / "qasper.jsonl", [{"pred": "", "answers": ["a"], "all_classes": None}])
    assert "line 1 lacks length" in error("--longbench_e")
    assert "has no predictions of lcc" in error("--tasks", "lcc", "qasper")
    assert "leave out --model" in error("--model", "some/model")
    answers = ("Paragraph 2", "the second one")
    rows = [{"pred": "2", "answers": [answer], "all_classes": None} for answer in answers]
    write_rows(tmp_path / "pred" / "passage_retrieval_en.jsonl", rows)
    said = "Row 2 of passage_retrieval_en cannot be scored: The reference must name a paragraph"
    assert said in error("--tasks", "passage_retrieval_en")
    write_rows(tmp_path / "pred" / "qaspar.jsonl", [{}])
    assert "Did you mean 'qasper'" in error()
    assert not (tmp_path / "out").exists()


def test_folders_have_names_that_every_file_system_takes() -> None:
    configs: list[dict[str, Any]] = [
        {"backend": "dense"},
        {"backend": "kivi", "nbits": 2, "q_group_size": 64},
        {"backend": "streaming", "budget": 0.5, "storage": {"backend": "int8"}},
        {"backend": "streaming", "budget": 0.5, "storage": {"backend": "int4"}},
        {"backend": "kvquant", "calibration": "../some where/" + 300 * "x"},
        # of which labels show the same
        {"backend": "kvquant", "calibration": "first/run"},
        {"backend": "kvquant", "calibration": "second/run"},
        {"backend": "h2o", "budget": 9, "storage": {"backend": "int8", "calibration": "first/run"}},
        {"backend": "h2o", "budget": 9, "storage": {"backend": "int8", "calibration": "second/run"}},
    ]
    names = [folder_name(config) for config in configs]
    assert names[:2] == ["dense", "kivi_2-bit_q_group_size=64"]
    assert len(set(names)) == len(names)
    for name in names:
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._=-")
        assert len(name) < 80


# ---- several processes ----


@pytest.mark.slow
def test_two_processes_give_what_one_gives(model: Path, data: Path, tmp_path: Path, finished: Path) -> None:
    done = run_script("eval_longbench.py", *_command(model, data, tmp_path / "out"), processes=2)
    assert done.returncode == 0, done.stderr[-2000:]
    assert _files(tmp_path / "out") == _files(finished)
    assert _metrics(read_results(tmp_path / "out")) == _metrics(read_results(finished))
