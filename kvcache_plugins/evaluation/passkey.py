"""Retrieval through every cache: a pass key hidden in a text, asked for at its end.

The prompts are the same for every cache, the answers are generated greedily by plain `generate()`, and a
trial is right if the first integer of the answer is the key. The protocol is that of InfiniteBench's passkey
task (arXiv 2402.13718) with filler of one's own, over a grid of lengths and depths.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..models.facts import decoder_config
from ..registry import TRANSFORMERS_BACKENDS
from .caches import cache_bytes, why_unavailable
from .journal import Journal
from .labels import DENSE, cache_label
from .loading import Subject, load_config, load_subject, load_tokenizer
from .passkey_filler import read_filler
from .passkey_options import PasskeyOptions
from .passkey_prompts import Trial, build_trials, first_integer
from .passkey_rows import build_rows, record_key
from .progress import Progress, silent
from .results import build_document, write_results

__all__ = ["measure_passkey"]

_Batch = tuple[dict[str, Any], list[Trial]]


def measure_passkey(
    options: PasskeyOptions, output: Path, progress: Progress = silent
) -> dict[str, Any] | None:
    """Ask for the pass keys through every cache, and write `results.json`.

    Answers are kept in `output` as they come: a run that was interrupted goes on where it ended. A failure
    of a cache of transformers' is noted under `skipped`; one of ours stops the run.

    Args:
        options (`PasskeyOptions`): What to measure.
        output (`Path`): Directory of the results; made if need be.
        progress (`Progress`): Told of every finished trial of this process.

    Returns:
        `dict | None`: The document of `results.json`; None in every process but the first.

    Raises:
        ValueError: If an option is wrong, or does not fit the model or the filler.
        OSError: If a file or the model cannot be read, or the results cannot be written.
    """
    text = read_filler(options)
    output.mkdir(parents=True, exist_ok=True)  # whatever is wrong with it shows before the work
    config = load_config(options)
    _check_positions(options, config)
    skipped = [
        {"cache_config": cache_config, "reason": reason}
        for cache_config in options.cache_configs
        if (reason := why_unavailable(config, cache_config))
    ]
    left_out = [entry["cache_config"] for entry in skipped]
    cache_configs = [c for c in options.cache_configs if c not in left_out]
    tokenizer = load_tokenizer(options)
    trials = build_trials(options, text, tokenizer)
    settings = options.settings() | {"filler_sha256": hashlib.sha256(text.encode()).hexdigest()}

    subject = load_subject(options, tokenizer)
    shard = subject.shard
    journal = Journal(output, settings, shard.process)
    mine = shard.take(_batches(cache_configs, trials, options.batch_size))
    todo = _missing(journal, mine)
    done = sum(len(batch) for _, batch in mine) - sum(len(batch) for _, batch in todo)
    progress(f"{done} trials of an earlier run" if done else "", advance=done)
    shard.wait()  # until every process has seen what there is to do
    keeper = journal if shard.keeps_records else None
    _ask_all(subject, options, todo, keeper, progress)
    shard.wait()
    if not shard.is_main:
        return None
    journal.reload()
    rows, failed = build_rows(journal, cache_configs, trials, 8 * subject.model.dtype.itemsize)
    document = build_document(
        "passkey", rows, settings=settings, skipped=[*skipped, *failed], device=subject.device
    )
    write_results(output, document)
    journal.remove()
    return document


def _check_positions(options: PasskeyOptions, config: Any) -> None:
    """Check that the model has a position for every token."""
    limit = getattr(decoder_config(config), "max_position_embeddings", None)
    longest = max(options.lengths)
    if limit is not None and longest + options.max_new_tokens > limit:
        raise ValueError(
            f"--lengths must be at most {limit - options.max_new_tokens}: the model has {limit} positions "
            f"and the answer takes {options.max_new_tokens}; got {longest}."
        )


def _batches(cache_configs: list[dict[str, Any]], trials: list[Trial], batch_size: int) -> list[_Batch]:
    """Cut the trials of each length into batches: the same ones for any number of processes."""
    groups = []
    for length in dict.fromkeys(trial.length for trial in trials):
        same = [trial for trial in trials if trial.length == length]
        groups += [same[start : start + batch_size] for start in range(0, len(same), batch_size)]
    return [(cache_config, group) for cache_config in cache_configs for group in groups]


def _missing(journal: Journal, batches: Sequence[_Batch]) -> list[_Batch]:
    """Return the batches with a trial that has no record yet."""
    return [
        (cache_config, batch)
        for cache_config, batch in batches
        if not all(record_key(cache_config, trial) in journal for trial in batch)
    ]


def _ask_all(
    subject: Subject,
    options: PasskeyOptions,
    todo: Sequence[_Batch],
    keeper: Journal | None,
    progress: Progress,
) -> None:
    """Ask every batch, and keep the records."""
    failed: list[dict[str, Any]] = []
    for cache_config, batch in todo:
        progress(f"{batch[0].length} tokens: {cache_label(cache_config)}")
        if cache_config not in failed:
            try:
                records = _ask(subject, cache_config, batch, options.max_new_tokens)
            except Exception as error:
                # What transformers' own class cannot serve must not end a comparison; a bug of ours must.
                if cache_config["backend"] not in TRANSFORMERS_BACKENDS:
                    raise
                failed.append(cache_config)
                said = " ".join(str(error).split()) or type(error).__name__
                records = [{"failed": f"failed at {batch[0].length} tokens: {said}"}]
            for trial, record in zip(batch, records, strict=False):
                if keeper is not None:
                    keeper.add(record_key(cache_config, trial), record)
        progress(f"{batch[0].length} tokens: {cache_label(cache_config)}", advance=len(batch))


@torch.inference_mode()
def _ask(
    subject: Subject, cache_config: Mapping[str, Any], batch: Sequence[Trial], max_new_tokens: int
) -> list[dict[str, Any]]:
    """Generate the answers of one batch.

    Returns:
        `list[dict]`: For each trial, `answer`, `is_right`, and its share of the cache's bytes and of the
        time; `cached_tokens` are those the cache has seen.
    """
    started = time.perf_counter()
    prompts = torch.tensor([trial.ids for trial in batch], device=subject.device)
    quantized = {"cache_implementation": "quantized", "cache_config": dict(cache_config)}
    output = subject.model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,  # a checkpoint may bring another, which punishes the digits of the key
        max_new_tokens=max_new_tokens,
        pad_token_id=_pad_token_id(subject),
        return_dict_in_generate=True,
        **({} if cache_config == DENSE else quantized),
    )
    answers = subject.tokenizer.batch_decode(
        output.sequences[:, prompts.shape[1] :], skip_special_tokens=True
    )
    kv_bytes = subject.shard.total(cache_bytes(output.past_key_values))
    seconds = time.perf_counter() - started
    return [
        {
            "answer": answer,
            "is_right": first_integer(answer) == trial.key,
            "kv_bytes": kv_bytes / len(batch),
            "cached_tokens": output.sequences.shape[1] - 1,  # the last one was not read any more
            "seconds": seconds / len(batch),
        }
        for trial, answer in zip(batch, answers, strict=True)
    ]


def _pad_token_id(subject: Subject) -> int | None:
    """Return what `generate()` puts behind an answer that ended before the others of its batch."""
    if subject.tokenizer.pad_token_id is not None:
        return int(subject.tokenizer.pad_token_id)
    return subject.tokenizer.eos_token_id  # type: ignore[no-any-return]  # transformers declares Any
