"""The perplexity of a text read through caches.

A text is cut into windows of `context_length` tokens, each read with a fresh cache: the prefill at once,
the rest in blocks through the cache, and every token after the prefill is predicted exactly once
(`scoring`). Every cache reads the same windows, and is compared with the dense one token by
token.

A record, of one window and one cache, is kept as soon as it is made: an interrupted run goes on where it was.
Windows are dealt out to the processes of a run, and their records summed up in the order of the windows.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ...models.decoder import decoder_only_config, most_positions
from ...models.positions import check_positions
from ...runs.cache_names import CacheNames
from ...runs.code_versions import code_settings
from ...runs.failures import Failures
from ...runs.file_digests import digest_words, model_settings
from ...runs.journal import Journal
from ...runs.labels import DENSE, cache_label
from ...runs.loading import Subject, encode, load_config, load_subject, load_tokenizer, prefix_ids
from ...runs.output_lock import writing_alone
from ...runs.progress import Progress, ProgressBar, no_bar
from ...runs.results import build_document, write_results
from ..caches import split_available
from .options import PerplexityOptions
from .scoring import Reference, Schedule, score_window
from .summary import summarize
from .texts import Window, cut_windows, read_texts

__all__ = ["measure_perplexity"]

# What a record does not depend on: where the model runs, and which of the windows are read.
_NOT_OF_A_RECORD = (
    "dataset", "dataset_path", "text_files", "stride", "max_windows", "max_windows_per_text",
    "max_reference_gb", "threads", "device_map", "tp_plan",
)  # fmt: skip


def measure_perplexity(
    options: PerplexityOptions, output: Path, progress_bar: ProgressBar = no_bar
) -> dict[str, Any] | None:
    """Measure every cache on every window and write `results.json`.

    What can be wrong with the options, the texts and the place of the results is found before the model is
    loaded.

    Args:
        options (`PerplexityOptions`): What to measure.
        output (`Path`): Directory of the results, made if need be; an unfinished run in it is continued.
        progress_bar (`ProgressBar`): What the first process shows of its measurements.

    Returns:
        `dict`: The document that was written, or None in a process that is not the first of its run.

    Raises:
        ValueError: If an option, a text or a cache is wrong, or the output directory holds another run or is
            being written to.
        OSError: If something cannot be found, or not be written.
    """
    config = load_config(options)
    caches, skipped = split_available(config, options.cache_configs)
    texts = read_texts(options)
    tokenizer = load_tokenizer(options)
    windows = cut_windows(texts, lambda text: encode(tokenizer, text), options, prefix_ids(tokenizer))
    _check_reference(options, config)
    _warn_of_length(options, config)
    with writing_alone(output):
        settings = {name: value for name, value in options.settings().items() if name not in _NOT_OF_A_RECORD}
        settings |= model_settings(options.model, config) | code_settings()
        names = CacheNames(caches)
        subject = load_subject(options, tokenizer)
        check_positions(subject.model, options.context_length, "--context_length")
        shard = subject.shard
        journal = Journal(output, settings, shard.process)
        if shard.is_main:
            names.tell_outdated(journal)
        own, failures = shard.take(windows), Failures()
        with (progress_bar if shard.is_main else no_bar)(len(own) * len(caches)) as progress:
            for window, missing in [(w, _missing(journal, names, w)) for w in own]:
                if len(missing) < len(caches):
                    progress("finished before", advance=len(caches) - len(missing))
                for cache_config, record in _measure(subject, options, window, missing, failures, progress):
                    if shard.keeps_records:
                        journal.add(_key(names[cache_config], window), record)
        shard.wait()
        if not shard.is_main:
            return None
        journal.reload()
        inputs = {"model": settings["model_digest"], "texts": digest_words(w.digest for w in windows)}
        document = _document(options, subject, windows, names, skipped, journal, inputs)
        write_results(output, document)
        journal.remove(names.is_outdated)
        return document


def _check_reference(options: PerplexityOptions, config: Any) -> None:
    """Refuse a reference that may not fit into memory."""
    if options.no_kl:
        return
    config = decoder_only_config(config)
    dtype = options.torch_dtype if options.dtype != "auto" else config.dtype or torch.float32
    itemsize = (getattr(torch, dtype) if isinstance(dtype, str) else dtype).itemsize
    gigabytes = options.predicted_tokens * config.vocab_size * itemsize / 1e9
    if gigabytes > options.max_reference_gb:
        raise ValueError(
            f"The dense logits of one window, {options.predicted_tokens} tokens times {config.vocab_size} "
            f"words, take {gigabytes:.3g} GB, more than --max_reference_gb {options.max_reference_gb:g}. "
            "Raise it, take shorter windows, or leave the comparison out with --no_kl."
        )


def _warn_of_length(options: PerplexityOptions, config: Any) -> None:
    limit = most_positions(config)
    if limit is not None and options.context_length > limit:
        warnings.warn(
            f"--context_length {options.context_length} goes beyond the {limit} positions of the model.",
            stacklevel=3,
        )


def _key(cache: str, window: Window) -> str:
    return f"{cache}|{window.digest}"


def _missing(journal: Journal, names: CacheNames, window: Window) -> list[dict[str, Any]]:
    """Return the caches without a record of a window; what failed before is tried again."""
    keys = {_key(name, window): cache_config for cache_config, name in names}
    return [cache_config for key, cache_config in keys.items() if not journal.is_done(key)]


def _measure(
    subject: Subject,
    options: PerplexityOptions,
    window: Window,
    caches: Sequence[dict[str, Any]],
    failures: Failures,
    progress: Progress,
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the record of every cache for one window; the dense run comes first, always."""
    if not caches:
        return
    schedule = Schedule(options.prefill_tokens, options.block_length, options.approximate_blocks)
    token_ids = torch.tensor([window.token_ids], device=subject.device)
    keep_logits = not options.no_kl and caches != [DENSE]
    progress(cache_label(DENSE))
    record, reference = score_window(subject.model, token_ids, DENSE, schedule, keep_logits=keep_logits)
    for cache_config in caches:
        if cache_config != DENSE:
            progress(cache_label(cache_config))
            record = _record(subject, token_ids, cache_config, schedule, reference, failures)
        if "kv_bytes" in record:
            record["kv_bytes"] = subject.shard.total(record["kv_bytes"])
        yield cache_config, record
        progress(cache_label(cache_config), advance=1)


def _record(
    subject: Subject,
    token_ids: torch.Tensor,
    cache_config: dict[str, Any],
    schedule: Schedule,
    reference: Reference,
    failures: Failures,
) -> dict[str, Any]:
    said = failures.said_of(cache_config)
    if said is None:
        try:
            return score_window(subject.model, token_ids, cache_config, schedule, reference)[0]
        except Exception as error:
            said = failures.note(cache_config, error)
    return {"failed": said[:200]}


def _document(
    options: PerplexityOptions,
    subject: Subject,
    windows: Sequence[Window],
    names: CacheNames,
    skipped: Sequence[dict[str, Any]],
    journal: Journal,
    inputs: dict[str, Any],
) -> dict[str, Any]:
    """Sum up the records of all processes in the order of the windows."""
    results, failed = [], []
    dense = [journal[_key(names[DENSE], window)] for window in windows]
    for cache_config, name in names:
        records = [journal[_key(name, window)] for window in windows]
        reason = next((record["failed"] for record in records if "failed" in record), None)
        if reason is not None:
            failed.append({"cache_config": cache_config, "reason": f"failed: {reason}", "is_failure": True})
            continue
        results.append(
            summarize(
                cache_config,
                records,
                dense,
                prefill=options.prefill_tokens,
                dense_bits=8 * subject.model.dtype.itemsize,
            )
        )
    settings = options.settings() | {
        "dtype": subject.dtype,
        "text_files": [Path(name).name for name in options.text_files],
        "texts": list(dict.fromkeys(window.text for window in windows)),
        "windows": len(windows),
        "processes": subject.shard.processes,
    }
    return build_document(
        "perplexity",
        results,
        settings=settings,
        inputs=inputs | {"artifacts": names.artifacts},
        skipped=[*skipped, *failed],
        device=subject.device,
    )
