"""The data of LongBench: where it comes from, how prompts are built of it, and what is refused."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kvcache_plugins.cli import main
from kvcache_plugins.evaluation.longbench import questions as questions_module
from kvcache_plugins.evaluation.longbench.options import LongBenchOptions
from kvcache_plugins.evaluation.longbench.questions import Question, load_questions
from tests.evaluation.longbench.rows import TEMPLATES, row, write_rows


def _options(**options: Any) -> LongBenchOptions:
    return LongBenchOptions(model="not read here", cache_config=[], **options)


def _load(**options: Any) -> dict[str, list[Question]]:
    return {task.name: asked for task, asked in load_questions(_options(**options)).items()}


def test_prompts_come_in_two_parts_at_the_end_of_the_context(data: Path) -> None:
    asked = _load(data_dir=str(data), prompts=str(data / "prompts.json"), limit=2)
    assert {task: len(of_task) for task, of_task in asked.items()} == {"hotpotqa": 2, "passage_count": 2}
    second, source = asked["hotpotqa"][1], row(1)
    assert second.prompt == TEMPLATES["hotpotqa"].format(**source)
    assert second.context_part.endswith(source["context"])
    assert second.question_part == "\n\nQuestion: What of number 1?\nAnswer:"
    assert second.row == {name: source[name] for name in ("answers", "all_classes", "length", "_id")}


def test_longbench_e_has_files_of_its_own(data: Path) -> None:
    write_rows(data / "hotpotqa_e.jsonl", [row(7)])
    asked = _load(data_dir=str(data), prompts=str(data / "prompts.json"), longbench_e=True)
    assert [question.row["_id"] for question in asked["hotpotqa"]] == ["hotpotqa-7"]


def test_rows_may_carry_their_prompts(tmp_path: Path) -> None:
    own = {"context": "Read: cat.\n", "question": "Who?\n", "answer_prefix": "Answer:", "max_new_tokens": 52}
    own |= {"answers": ["cat"], "all_classes": [], "length": 3}
    write_rows(tmp_path / "qasper.jsonl", [own])
    [question] = _load(data_dir=str(tmp_path))["qasper"]
    assert (question.context_part, question.question_part) == ("Read: cat.\n", "Who?\nAnswer:")
    (tmp_path / "prompts.json").write_text(json.dumps({"qasper": "{context}"}))
    with pytest.raises(ValueError, match="leave out --prompts"):
        _load(data_dir=str(tmp_path), prompts=str(tmp_path / "prompts.json"))


def test_rows_as_published_need_a_template_whatever_else_they_have(data: Path) -> None:
    write_rows(data / "hotpotqa.jsonl", [row(0) | {"question": "Who?", "answer_prefix": "A:"}])
    [question] = _load(data_dir=str(data), tasks=["hotpotqa"], prompts=str(data / "prompts.json"))["hotpotqa"]
    assert question.prompt == TEMPLATES["hotpotqa"].format(**row(0))


def test_an_archive_of_published_files_is_read(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    with zipfile.ZipFile(folder / "data.zip", "w") as files:
        files.write(data / "hotpotqa.jsonl", "data/hotpotqa.jsonl")
        files.writestr("data/passage_count.jsonl", "{broken")
    prompts = str(data / "prompts.json")
    from_archive = _load(dataset=str(folder), tasks=["hotpotqa"], prompts=prompts)
    assert from_archive == _load(data_dir=str(data), tasks=["hotpotqa"], prompts=prompts)
    with pytest.raises(ValueError, match=r"data/passage_count.jsonl, line 1 is not json"):
        _load(dataset=str(folder), tasks=["passage_count"], prompts=prompts)
    with pytest.raises(ValueError, match=r"must hold one musique.jsonl"):
        _load(dataset=str(folder), tasks=["musique"], prompts=prompts)


def test_what_a_mac_adds_to_an_archive_is_passed_over(data: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as files:
        files.write(data / "hotpotqa.jsonl", "data/hotpotqa.jsonl")
        files.writestr("__MACOSX/data/._hotpotqa.jsonl", "no row")
    [asked] = _load(dataset=str(tmp_path), tasks=["hotpotqa"], prompts=str(data / "prompts.json")).values()
    assert len(asked) == 3


def test_a_hub_dataset_has_a_configuration_for_each_task(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="part of the extra 'eval'")
    asked_for = []

    def load_dataset(*names: str, split: str) -> list[dict[str, Any]]:
        asked_for.append((*names, split))
        source = row(0)
        del source["input"]
        return [source | {"question": "Who?", "answer_prefix": ""}]

    monkeypatch.setattr(questions_module, "_archive", lambda dataset: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    asked = _load(dataset="someone/LongBench", tasks=["lcc", "qasper"], longbench_e=True)
    assert asked_for == [("someone/LongBench", "qasper_e", "test"), ("someone/LongBench", "lcc_e", "test")]
    assert asked["lcc"][0].question_part == "Who?"


# ---- what is refused ----


def _error(capsys: pytest.CaptureFixture[str], data: Path, *arguments: str) -> str:
    prompts = ["--prompts", str(data / "prompts.json")]
    # a model that is not there: none of these errors gets as far as to look for it
    common = ["eval", "longbench", "--no_plots", "--model", "no/such-model", "--output", str(data / "out")]
    status = main(
        [*common, "--data_dir", str(data), *([] if "--dataset" in arguments else prompts), *arguments]
    )
    assert status == 2
    assert not (data / "out").exists()
    return capsys.readouterr().err


def test_bad_rows_name_file_and_line(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = data / "hotpotqa.jsonl"
    good = json.dumps(row(0))
    for line, said in (
        ("{broken", "hotpotqa.jsonl, line 2 is not json"),
        ("[1]", "line 2 must be a json object"),
        (json.dumps({"input": "", "context": "", "length": 1}), "line 2 lacks answers, all_classes; it has"),
        (json.dumps(row(0) | {"answers": "rum"}), "line 2: answers must be list, got 'rum'"),
        (json.dumps(row(0) | {"answers": [7]}), "line 2: answers must hold strings"),
        (json.dumps(row(0) | {"length": None}), "line 2: length must be int"),
        (json.dumps(row(0) | {"input": "a \ud83d b"}), r"row 2: the prompt must be text, got '\ud83d' after"),
        (json.dumps(row(0) | {"context": "\ud83d"}), r"row 2: the prompt must be text, got '\ud83d' after"),
    ):
        path.write_text(f"{good}\n{line}\n")
        assert said in _error(capsys, data)
    path.write_text("\n\n")
    assert "hotpotqa.jsonl is empty" in _error(capsys, data)


def test_bad_options_are_told_before_the_model_is_looked_for(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "Did you mean 'hotpotqa'" in _error(capsys, data, "--tasks", "hotpot")
    assert "musique.jsonl" in _error(capsys, data, "--tasks", "musique")
    assert "--max_length must be an integer >= 2" in _error(capsys, data, "--max_length", "1")
    assert "--limit must be an integer >= 1" in _error(capsys, data, "--limit", "0")
    assert "got" in _error(capsys, data, "--dataset", "someone/LongBench")  # two sources
    assert "--prompts must be a file, 'no.json'" in _error(capsys, data, "--prompts", "no.json")
    assert "--data_dir must be a directory, got 'no'" in _error(capsys, data, "--data_dir", "no")
    (data / "prompts.json").write_text(json.dumps({"hotpotqa": "{context} {nothing}"}))
    assert "does not fit the template of hotpotqa: KeyError('nothing')" in _error(capsys, data)
    for template, said in (("{input.x}{context}", "AttributeError("), ("{context}{input[a]}", "TypeError(")):
        (data / "prompts.json").write_text(json.dumps({"hotpotqa": template}))
        assert f"does not fit the template of hotpotqa: {said}" in _error(capsys, data)
    (data / "prompts.json").write_text(json.dumps({"hotpotqa": "{input}"}))
    assert "must hold {context}" in _error(capsys, data)
    (data / "prompts.json").write_text(json.dumps({"hotpotqa": "{context}"}))
    assert "nothing to ask afterwards" in _error(capsys, data, "--tasks", "hotpotqa", "--query_agnostic")
    (data / "prompts.json").write_text("{}")
    assert "no template of hotpotqa" in _error(capsys, data)
    (data / "prompts.json").write_text("[]")
    assert "must hold templates by task" in _error(capsys, data)


def test_without_templates_the_error_says_where_they_are(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "longbench", "--no_plots", "--model", "none", "--data_dir", str(data)]) == 2
    error = capsys.readouterr().err
    assert "dataset2prompt.json" in error
    assert "Xnhyacinth/LongBench" in error


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no narrativeqa.jsonl"):
        _load(data_dir=str(tmp_path))


def test_tasks_without_a_file_are_named_before_any_is_run(data: Path) -> None:
    write_rows(data / "trec.jsonl", [row(0, "trec")])
    said = r"--tasks must be among those .* has files of, .*trec.*; it holds no qasper.jsonl, lsht.jsonl\.$"
    with pytest.raises(ValueError, match=said):
        _load(data_dir=str(data), tasks=["trec", "lsht", "qasper"])
    with pytest.raises(ValueError, match=r"^--tasks: Unknown LongBench task 'nope'"):
        _load(data_dir=str(data), tasks=["nope"])


def test_classes_are_needed_where_classes_are_asked_for(data: Path) -> None:
    write_rows(data / "trec.jsonl", [row(0, "trec")])
    with pytest.raises(ValueError, match=r"trec.jsonl, row 1: all_classes must be list, got None"):
        _load(data_dir=str(data), tasks=["trec"], prompts=str(data / "prompts.json"))


@pytest.mark.parametrize(
    ("task", "good", "said"),
    [
        ("passage_retrieval_en", "Paragraph 7", "'Paragraph 7', got 'x'"),
        ("passage_retrieval_zh", "段落7", "'段落7', got 'x'"),
    ],
)
def test_references_that_nothing_can_be_scored_with_are_told_before_anything_is_loaded(
    task: str, good: str, said: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / "prompts.json").write_text(json.dumps({task: "{context}{input}"}))
    for references in ([good], [good, "x"]):
        write_rows(data / f"{task}.jsonl", [row(0) | {"answers": [good]}, row(1) | {"answers": references}])
        if references == [good]:
            _load(data_dir=str(data), tasks=[task], prompts=str(data / "prompts.json"))
    error = _error(capsys, data, "--tasks", task)
    assert f"{task}.jsonl, row 2 cannot be scored: The reference must name a paragraph, as in {said}" in error
