"""The questions of the benchmark: from published files or the hub, each as the two parts of its prompt."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...runs.hub_datasets import import_datasets
from ...runs.json_lines import check_row, parse_rows, read_rows
from ...runs.text_files import check_characters, read_text_file
from .metrics import check_reference
from .options import LongBenchOptions
from .tasks import Task, find_tasks

__all__ = ["Question", "load_questions", "read_templates"]

_COLUMNS = {"context": (str,), "answers": (list,), "all_classes": (list, type(None)), "length": (int,)}
_OWN_PROMPT = ("question", "answer_prefix")
_ARCHIVE = "data.zip"
_WHERE = (
    "The templates are not part of this package: give --prompts with the benchmark's own config/"
    "dataset2prompt.json (https://github.com/THUDM/LongBench), or a --dataset whose rows carry their prompts "
    "in the columns question and answer_prefix, such as Xnhyacinth/LongBench."
)


@dataclass(frozen=True)
class Question:
    """One row of a task.

    Args:
        number (`int`): Its place in the published order, from 0.
        context_part (`str`): The prompt up to the end of the context.
        question_part (`str`): The rest of the prompt. With rows that carry their prompts, the instruction
            between context and question is in the first part.
        row (`Mapping`): `answers`, `all_classes`, `length` and, where the data has it, `_id`.
    """

    number: int
    context_part: str
    question_part: str
    row: Mapping[str, Any]

    @property
    def prompt(self) -> str:
        """The whole prompt."""
        return self.context_part + self.question_part


def load_questions(options: LongBenchOptions) -> dict[Task, list[Question]]:
    """Read and check everything that will be asked.

    Raises:
        ValueError: On data that is missing or not as published; the message names file and line.
        OSError: If it cannot be read or fetched.
    """
    templates = None if options.prompts is None else read_templates(Path(options.prompts))
    questions = {}
    for task in _tasks_of(options):
        source, rows = _rows(options, task)
        if options.limit is not None:
            rows = rows[: options.limit]
        questions[task] = [
            _question(task, number, row, f"{source}, row {number + 1}", templates)
            for number, row in enumerate(rows)
        ]
        first = questions[task][0]
        if options.query_agnostic and not first.question_part:
            raise ValueError(
                f"The prompt of {task.name} ends with its context: there is nothing to ask afterwards, which "
                "--query_agnostic needs."
            )
    return questions


def read_templates(path: Path) -> dict[str, str]:
    """Read templates by task, in which `{column}` stands for a column.

    Raises:
        ValueError: If the file cannot be read, or does not hold an object of strings.
    """
    try:
        templates = json.loads(read_text_file(path, "--prompts"))
    except json.JSONDecodeError as error:
        raise ValueError(f"--prompts must be a json file, got {str(path)!r} ({error}).") from error
    if not isinstance(templates, dict) or not all(isinstance(text, str) for text in templates.values()):
        raise ValueError(f"--prompts must hold templates by task, got {templates!r:.80} in {str(path)!r}.")
    return templates


def _tasks_of(options: LongBenchOptions) -> list[Task]:
    tasks = find_tasks(options.tasks, longbench_e=options.longbench_e)
    if options.data_dir is None:
        return tasks
    known = find_tasks(None, longbench_e=options.longbench_e)
    present = [task for task in known if _path(options, task).exists()]
    if not present:
        raise ValueError(
            f"--data_dir holds no {_path(options, tasks[0]).name} nor the file of another task, got "
            f"{options.data_dir!r}."
        )
    if options.tasks is None:
        return present
    missing = [_path(options, task).name for task in tasks if task not in present]
    if missing:
        raise ValueError(
            f"--tasks must be among those that --data_dir {options.data_dir!r} has files of, "
            f"{', '.join(task.name for task in present)}; it holds no {', '.join(missing)}."
        )
    return tasks


def _path(options: LongBenchOptions, task: Task) -> Path:
    assert options.data_dir is not None
    return Path(options.data_dir) / f"{_configuration(options, task)}.jsonl"


def _configuration(options: LongBenchOptions, task: Task) -> str:
    """Name of the file or hub configuration of a task."""
    return f"{task.name}_e" if options.longbench_e else task.name


def _rows(options: LongBenchOptions, task: Task) -> tuple[str, list[dict[str, Any]]]:
    """Return what errors call the data of a task, and its rows."""
    if options.data_dir is not None:
        path = _path(options, task)
        return str(path), read_rows(path, _COLUMNS)
    assert options.dataset is not None
    configuration = _configuration(options, task)
    archive = _archive(options.dataset)
    if archive is not None:
        return _from_archive(archive, configuration)
    source = f"{options.dataset}, {configuration}"
    datasets = import_datasets("eval", "use --data_dir")
    rows = [dict(row) for row in datasets.load_dataset(options.dataset, configuration, split="test")]
    if not rows:
        raise ValueError(f"{source} is empty.")
    for number, row in enumerate(rows, start=1):
        check_row(row, f"{source}, row {number}", _COLUMNS)
    return source, rows


def _archive(dataset: str) -> Path | None:
    """Return the archive of jsonl files a dataset consists of, if it does.

    THUDM/LongBench is a script that unpacks one; datasets 4 and later run no scripts.
    """
    if Path(dataset).is_dir():
        path = Path(dataset) / _ARCHIVE
        return path if path.exists() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(dataset, _ARCHIVE, repo_type="dataset"))
    except EntryNotFoundError:  # there is none, or without a network none was fetched before
        return None


def _from_archive(archive: Path, configuration: str) -> tuple[str, list[dict[str, Any]]]:
    with zipfile.ZipFile(archive) as files:
        names = [name for name in files.namelist() if Path(name).name == f"{configuration}.jsonl"]
        if len(names) != 1:
            raise ValueError(f"{archive} must hold one {configuration}.jsonl, found {names}.")
        with files.open(names[0]) as file:
            source = f"{archive}, {names[0]}"
            return source, parse_rows(io.TextIOWrapper(file, encoding="utf-8"), source, _COLUMNS)


def _question(
    task: Task, number: int, row: Mapping[str, Any], place: str, templates: Mapping[str, str] | None
) -> Question:
    if task.metric == "classification":
        check_row(row, place, {"all_classes": (list,)})
    for reference in row["answers"]:
        try:
            check_reference(task.metric, reference)
        except ValueError as error:  # which would else be told when all has been answered
            raise ValueError(f"{place} cannot be scored: {error}") from error
    context_part, question_part = _parts(task, row, place, templates)
    check_characters(context_part + question_part, f"{place}: the prompt")
    kept = {name: row[name] for name in ("answers", "all_classes", "length", "_id") if name in row}
    return Question(number, context_part, question_part, kept)


def _parts(
    task: Task, row: Mapping[str, Any], place: str, templates: Mapping[str, str] | None
) -> tuple[str, str]:
    """Return the prompt of a row up to the end of the context, and the rest of it."""
    if all(name in row for name in _OWN_PROMPT) and "input" not in row:
        if templates is not None:
            raise ValueError(f"{place} carries its own prompt: leave out --prompts.")
        check_row(row, place, {"question": (str,), "answer_prefix": (str,)})
        return row["context"], row["question"] + row["answer_prefix"]
    if templates is None:
        raise ValueError(f"{place} needs a template for its prompt. {_WHERE}")
    if task.name not in templates:
        raise ValueError(f"--prompts has no template of {task.name}. {_WHERE}")
    before, mark, after = templates[task.name].partition("{context}")
    if not mark:
        raise ValueError(
            f"The template of {task.name} must hold {{context}}, got {templates[task.name]!r:.200}."
        )
    try:
        return before.format(**row) + row["context"], after.format(**row)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:  # of {a.b} or {a[b]}, too
        raise ValueError(
            f"{place} does not fit the template of {task.name}: {error!r}; the row has "
            f"{', '.join(sorted(row))}."
        ) from error
