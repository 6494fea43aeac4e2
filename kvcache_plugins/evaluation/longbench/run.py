"""A LongBench run: every question to every cache, the answers kept as they come, then the scores."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...models.decoder import decoder_only_config, most_positions
from ...models.positions import check_positions
from ...runs.cache_names import CacheNames
from ...runs.code_versions import code_settings
from ...runs.earlier import is_repeated
from ...runs.failures import Failures
from ...runs.file_digests import digest_words, model_settings
from ...runs.journal import Journal
from ...runs.labels import cache_label
from ...runs.loading import Subject, load_config, load_subject
from ...runs.output_lock import writing_alone
from ...runs.progress import Progress, ProgressBar, no_bar
from ...runs.results import RESULTS_FILE, build_document, write_results
from ..caches import split_available
from . import prediction_files as files
from .answering import answer
from .metrics import check_metric
from .options import MARGIN, LongBenchOptions
from .prompting import build_prompt
from .questions import Question
from .summary import summarize
from .tasks import Task

__all__ = ["measure_longbench"]

_TASK = "longbench"
_Questions = Mapping[Task, Sequence[Question]]

# Changing one of these asks other questions or writes elsewhere, but leaves an answer what it is.
_ANSWERS_DO_NOT_DEPEND_ON = ("tasks", "limit", "data_dir", "prompts", "threads", "max_length")


def measure_longbench(
    options: LongBenchOptions, questions: _Questions, output: Path, progress_bar: ProgressBar = no_bar
) -> dict[str, Any] | None:
    """Answer the questions through every cache, write the predictions and `results.json`.

    Every answer is on the disk when the next one is begun: a run that was interrupted goes on where it ended.
    One process adds it to the file of predictions at once; several keep it in a journal of their own, and the
    file of a task is written when all of them are through with it. So is the file of a run that repeats a
    finished one, whose predictions stay until then.

    A failure of a cache of transformers' or of a third party's is noted under `skipped`; one of ours stops
    the run.

    Args:
        options (`LongBenchOptions`): What to measure.
        questions (`Mapping[Task, Sequence[Question]]`): Of `load_questions(options)`.
        output (`Path`): Directory of the results, made if need be: `<folder of a cache>/<task>.jsonl`.
        progress_bar (`ProgressBar`): What the first process shows of its answers.

    Returns:
        `dict | None`: The document of `results.json`; None in every process but the first.

    Raises:
        ValueError: If an option does not fit the model, an answer cannot be scored, or the output directory
            holds another run or is being written to.
        OSError: If the model cannot be read, or the output cannot be written.
    """
    for task in questions:
        check_metric(task.metric)
    config = load_config(options)
    max_lengths = _max_lengths(options, config, list(questions))
    cache_configs, skipped = split_available(config, options.cache_configs)
    with writing_alone(output):
        relevant = _what_answers_depend_on(options) | model_settings(options.model, config) | code_settings()
        names = CacheNames(cache_configs)
        subject = load_subject(options)
        shard = subject.shard
        uses_template = not options.no_chat_template and subject.tokenizer.chat_template is not None
        settings = options.settings() | {
            "dtype": subject.dtype,
            "max_lengths": {task.name: length for task, length in max_lengths.items()},
            "uses_chat_template": uses_template,
            "score_only": False,
        }
        inputs = {
            "model": relevant["model_digest"],
            "questions": _digest(questions),
            "artifacts": names.artifacts,
        }
        journal = Journal(output, relevant, shard.process)
        if shard.is_main:
            names.tell_outdated(journal)
            if not len(journal) and not _is_repeated(output, settings, inputs, options.cache_configs):
                files.set_aside(output, cache_configs)
            for cache_config in cache_configs:
                files.name_folder(output / files.folder_name(cache_config), cache_config)
        shard.wait()  # until every process has seen what there is to do
        run = _Run(subject, options, output, journal, names, max_lengths)
        own = sum(len(shard.take(asked)) for asked in questions.values())
        with (progress_bar if shard.is_main else no_bar)(own * len(cache_configs)) as progress:
            for cache_config in cache_configs:
                for task, asked in questions.items():
                    run.answer_all(cache_config, task, asked, progress)
        shard.wait()
        if not shard.is_main:
            return None
        journal.reload()
        results, failed = _results(run, cache_configs, questions)
        for entry in failed:  # predictions of a part would be scored as if they were all
            folder = output / files.folder_name(entry["cache_config"])
            files.remove_predictions(folder, questions)
        document = build_document(
            _TASK,
            results,
            settings=settings,
            inputs=inputs,
            skipped=[*skipped, *failed],
            device=subject.device,
        )
        write_results(output, document)
        journal.remove(names.is_outdated)
        return document


class _Run:
    """What all answers of a run have in common."""

    def __init__(
        self,
        subject: Subject,
        options: LongBenchOptions,
        output: Path,
        journal: Journal,
        names: CacheNames,
        max_lengths: Mapping[Task, int],
    ) -> None:
        self.subject = subject
        self.options = options
        self.output = output
        self.journal = journal
        self.names = names
        self.max_lengths = max_lengths
        self._failures = Failures()

    def answer_all(
        self, cache_config: dict[str, Any], task: Task, asked: Sequence[Question], progress: Progress
    ) -> None:
        """Answer this process's questions of a task, and write the file of all when it can be written."""
        shard = self.subject.shard
        name = f"{task.name}: {cache_label(cache_config)}"
        progress(name)
        mine = shard.take(asked)
        missing = [q for q in mine if not self.journal.is_done(self.key(cache_config, task, q))]
        progress(name, advance=len(mine) - len(missing))
        path = files.prediction_path(self.output / files.folder_name(cache_config), task)
        rows = self.rows(cache_config, task, asked)
        # the file of a finished run that is repeated stays until there is one that could take its place
        writes_rows = shard.is_main and shard.count == 1 and files.count_predictions(path) <= len(rows)
        if writes_rows:
            files.rewrite_predictions(path, rows)
        for question in missing:
            record = self._answer(cache_config, task, question)
            if shard.keeps_records and record is not None:
                self.journal.add(self.key(cache_config, task, question), record)
                if writes_rows and "failed" not in record:
                    files.append_prediction(path, _prediction(record, question))
            progress(name, advance=1)
        if shard.count > 1:
            shard.wait()
            if shard.is_main:
                self.journal.reload()
        if shard.is_main and not writes_rows:
            files.rewrite_predictions(path, self.rows(cache_config, task, asked))

    def _answer(self, cache_config: dict[str, Any], task: Task, question: Question) -> dict[str, Any] | None:
        """Return the record of one answer; None if the cache has failed before."""
        if self._failures.said_of(cache_config) is not None:
            return None
        prompt = build_prompt(
            self.subject.tokenizer,
            task,
            question,
            self.max_lengths[task],
            chat_template=not self.options.no_chat_template,
            query_agnostic=self.options.query_agnostic,
        )
        check_positions(
            self.subject.model,
            len(prompt.ids) + task.max_new_tokens - 1,
            f"Row {question.number + 1} of {task.name}, cut to --max_length {self.max_lengths[task]}, in its "
            "chat template and with its answer",
        )
        try:
            record = answer(self.subject, cache_config, task, prompt)
        except Exception as error:
            said = self._failures.note(cache_config, error)
            return {"failed": f"failed at row {question.number + 1} of {task.name}: {said}"}
        return record | {"is_truncated": prompt.is_truncated}

    def records(
        self, cache_config: dict[str, Any], task: Task, asked: Sequence[Question]
    ) -> list[tuple[Question, dict[str, Any]]]:
        """Return the questions of a task that have a record, in the published order."""
        keys = [(question, self.key(cache_config, task, question)) for question in asked]
        return [(question, self.journal[key]) for question, key in keys if key in self.journal]

    def rows(
        self, cache_config: dict[str, Any], task: Task, asked: Sequence[Question]
    ) -> list[dict[str, Any]]:
        """Return the predictions of a task, in the published order."""
        records = self.records(cache_config, task, asked)
        return [_prediction(record, question) for question, record in records if "failed" not in record]

    def key(self, cache_config: Mapping[str, Any], task: Task, question: Question) -> str:
        """Return the name of a record; it changes with the prompt and its limit."""
        digest = hashlib.sha256(question.prompt.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return f"{self.names[cache_config]} {task.name} {question.number} {digest} {self.max_lengths[task]}"


def _prediction(record: Mapping[str, Any], question: Question) -> dict[str, Any]:
    return {"pred": record["pred"], **question.row}


def _max_lengths(options: LongBenchOptions, config: Any, tasks: Sequence[Task]) -> dict[Task, int]:
    """Return the limit of the prompts of each task.

    Raises:
        ValueError: If the model has fewer positions than a prompt and its answer may take.
    """
    if options.max_length is not None:
        most = most_positions(config)
        new_tokens, name = max((task.max_new_tokens, task.name) for task in tasks)
        if most is not None and options.max_length + new_tokens > most:
            raise ValueError(
                f"--max_length must be at most {most - new_tokens}: the model has {most} positions and an "
                f"answer of {name} takes {new_tokens}; got {options.max_length}."
            )
        return dict.fromkeys(tasks, options.max_length)
    positions = getattr(decoder_only_config(config), "max_position_embeddings", None)
    lengths = {}
    for task in tasks:
        length = None if positions is None else positions - task.max_new_tokens - MARGIN
        if length is None or length < 2:
            raise ValueError(
                f"--max_length has no default for {task.name} with this model: {positions} positions, less "
                f"{task.max_new_tokens} new tokens and a margin of {MARGIN}. Say how long a prompt may be."
            )
        lengths[task] = length
    return lengths


def _what_answers_depend_on(options: LongBenchOptions) -> dict[str, Any]:
    settings = options.settings()
    return {name: value for name, value in settings.items() if name not in _ANSWERS_DO_NOT_DEPEND_ON}


def _digest(questions: _Questions) -> str:
    """Return a digest of all that is asked and of what it is scored with."""
    return digest_words(
        word
        for task, asked in questions.items()
        for question in asked
        for word in (task.name, question.prompt, json.dumps(question.row, sort_keys=True))
    )


def _is_repeated(
    output: Path,
    settings: Mapping[str, Any],
    inputs: Mapping[str, Any],
    cache_configs: list[dict[str, Any]],
) -> bool:
    """Whether the results that are there are of the same run, whose predictions will be what they are."""
    caches = [{"cache_config": cache_config} for cache_config in cache_configs]
    planned = {"task": _TASK, "settings": settings, "inputs": inputs, "results": caches}
    return is_repeated(output / RESULTS_FILE, planned)


def _results(
    run: _Run, cache_configs: Sequence[dict[str, Any]], questions: _Questions
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return one result for each cache, and what failed."""
    results: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    dense: dict[tuple[str, int], dict[str, Any]] = {}
    for cache_config in cache_configs:
        records = {
            (task.name, question.number): record
            for task, asked in questions.items()
            for question, record in run.records(cache_config, task, asked)
        }
        reason = next((record["failed"] for record in records.values() if "failed" in record), None)
        if reason is not None:
            failed.append({"cache_config": cache_config, "reason": reason, "is_failure": True})
            continue
        dense = dense or records  # the dense cache comes first
        results.append(
            summarize(
                cache_config,
                {task: run.rows(cache_config, task, asked) for task, asked in questions.items()},
                records,
                dense,
                dense_bits=8 * int(run.subject.model.dtype.itemsize),
                longbench_e=run.options.longbench_e,
                query_agnostic=run.options.query_agnostic,
            )
        )
    return results, failed
