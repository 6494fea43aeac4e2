"""Retrieval through every cache: pass keys hidden in a text and asked for.

The prompts are the same for every cache, the answers are generated greedily by plain `generate()`, and a
trial is right if the first integer of the answer is the key. With one fact the prompt ends with the question,
as in InfiniteBench's passkey task (arXiv 2402.13718), with filler of one's own over a grid of lengths and
depths. With several facts the prompt is read once, without any question, and each fact is asked for on a copy
of the cache: what a cache keeps, it keeps without knowing what for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...models.decoder import most_positions
from ...runs.cache_names import CacheNames
from ...runs.code_versions import code_settings
from ...runs.failures import Failures
from ...runs.file_digests import model_settings
from ...runs.journal import Journal
from ...runs.labels import cache_label
from ...runs.loading import Subject, load_config, load_subject, load_tokenizer
from ...runs.output_lock import writing_alone
from ...runs.progress import Progress, ProgressBar, no_bar
from ...runs.results import build_document, write_results
from ..caches import split_available
from .answers import ask_afterwards, ask_with_prompt
from .filler import read_filler
from .options import PasskeyOptions
from .prompts import Trial, build_trials
from .rows import build_rows, record_key

__all__ = ["measure_passkey"]

_Batch = tuple[dict[str, Any], list[Trial]]


def measure_passkey(
    options: PasskeyOptions, output: Path, progress_bar: ProgressBar = no_bar
) -> dict[str, Any] | None:
    """Ask for the pass keys through every cache, and write `results.json`.

    Answers are kept in `output` as they come: a run that was interrupted goes on where it ended. A failure
    of a cache of transformers' or of a third party's is noted under `skipped`; one of ours stops the run.

    Args:
        options (`PasskeyOptions`): What to measure.
        output (`Path`): Directory of the results; made if need be.
        progress_bar (`ProgressBar`): What the first process shows of its trials.

    Returns:
        `dict | None`: The document of `results.json`; None in every process but the first.

    Raises:
        ValueError: If an option is wrong, or does not fit the model or the filler, or the output directory
            holds another run or is being written to.
        OSError: If a file or the model cannot be read, or the results cannot be written.
    """
    text = read_filler(options)
    config = load_config(options)
    _check_positions(options, config, 0)  # before a length is found too much for the filler
    cache_configs, skipped = split_available(config, options.cache_configs)
    tokenizer = load_tokenizer(options)
    trials = build_trials(options, text, tokenizer)
    _check_positions(options, config, max(len(trial.question) for trial in trials))
    settings = options.settings() | {"filler_sha256": hashlib.sha256(text.encode()).hexdigest()}
    with writing_alone(output):
        names = CacheNames(cache_configs)
        model = model_settings(options.model, config)
        subject = load_subject(options, tokenizer)
        shard = subject.shard
        journal = Journal(output, settings | model | code_settings(), shard.process)
        if shard.is_main:
            names.tell_outdated(journal)
        own = shard.take(_batches(cache_configs, trials, options))
        todo = _missing(journal, names, own)
        total, left = (sum(len(batch) for _, batch in batches) for batches in (own, todo))
        shard.wait()  # until every process has seen what there is to do
        keeper = journal if shard.keeps_records else None
        with (progress_bar if shard.is_main else no_bar)(total) as progress:
            if left < total:
                progress("finished before", advance=total - left)
            _ask_all(subject, options, todo, names, keeper, progress)
        shard.wait()
        if not shard.is_main:
            return None
        journal.reload()
        dense_bits = 8 * subject.model.dtype.itemsize
        rows, failed = build_rows(journal, names, trials, dense_bits, options.facts)
        document = build_document(
            "passkey",
            rows,
            settings=settings | {"dtype": subject.dtype},
            inputs={"model": model["model_digest"], "artifacts": names.artifacts},
            skipped=[*skipped, *failed],
            device=subject.device,
        )
        write_results(output, document)
        journal.remove(names.is_outdated)
        return document


def _check_positions(options: PasskeyOptions, config: Any, question_length: int) -> None:
    """Check that the model has a position for every token; a question in the prompt is part of its length."""
    limit = most_positions(config)
    longest, answer = max(options.lengths), options.max_new_tokens
    if limit is not None and answer >= limit:
        raise ValueError(f"--max_new_tokens must be below the model's {limit} positions, got {answer}.")
    if limit is not None and longest + question_length + answer > limit:
        question = f"the question takes {question_length} and " if question_length else ""
        raise ValueError(
            f"--lengths must be at most {limit - question_length - answer}: the model has {limit} positions "
            f"and {question}the answer takes {answer}; got {longest}."
        )


def _batches(
    cache_configs: list[dict[str, Any]], trials: list[Trial], options: PasskeyOptions
) -> list[_Batch]:
    """Cut the trials of each length into batches: the same ones for any number of processes.

    A batch is what is generated together or, with several facts, what is asked about one prompt.
    """
    batch_size = options.batch_size if options.facts == 1 else options.facts
    groups = []
    for length in dict.fromkeys(trial.length for trial in trials):
        same = [trial for trial in trials if trial.length == length]
        groups += [same[start : start + batch_size] for start in range(0, len(same), batch_size)]
    return [(cache_config, group) for cache_config in cache_configs for group in groups]


def _missing(journal: Journal, names: CacheNames, batches: Sequence[_Batch]) -> list[_Batch]:
    """Return the batches with a trial that has no record yet; what failed before is tried again."""
    todo = []
    for cache_config, batch in batches:
        keys = [record_key(names[cache_config], trial) for trial in batch]
        if not all(map(journal.is_done, keys)):
            todo.append((cache_config, batch))
    return todo


def _ask_all(
    subject: Subject,
    options: PasskeyOptions,
    todo: Sequence[_Batch],
    names: CacheNames,
    keeper: Journal | None,
    progress: Progress,
) -> None:
    """Ask every batch, and keep the records."""
    ask = ask_with_prompt if options.facts == 1 else ask_afterwards
    failures = Failures()
    for cache_config, batch in todo:
        progress(f"{batch[0].length} tokens: {cache_label(cache_config)}")
        if failures.said_of(cache_config) is None:
            try:
                records = ask(subject, cache_config, batch, options.max_new_tokens)
            except Exception as error:
                said = failures.note(cache_config, error)
                records = [{"failed": f"failed at {batch[0].length} tokens: {said}"}]
            for trial, record in zip(batch, records, strict=False):
                if keeper is not None:
                    keeper.add(record_key(names[cache_config], trial), record)
        progress(f"{batch[0].length} tokens: {cache_label(cache_config)}", advance=len(batch))
