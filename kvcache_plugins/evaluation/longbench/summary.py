"""Scores of whole runs: of one that was just made, or of files of predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...runs.file_digests import digest_files
from ...runs.labels import cache_label
from ...runs.results import build_document
from .metrics import check_metric
from .prediction_files import find_predictions, read_predictions
from .scoring import average, score, score_by_length
from .tasks import Task, find_tasks

__all__ = ["score_directory", "summarize"]

_Records = Mapping[tuple[str, int], Mapping[str, Any]]


def score_directory(
    directory: Path, tasks: Sequence[str] | None = None, *, longbench_e: bool = False
) -> dict[str, Any]:
    """Score files of predictions, of this evaluation or of the benchmark's own code, without a model.

    Args:
        directory (`Path`): Holds `<task>.jsonl` files, or folders that do, one for every cache.
        tasks (`Sequence[str]`, *optional*): Only these; by default all that are there.
        longbench_e (`bool`): Score by groups of lengths.

    Returns:
        `dict`: A document as `results.json` holds it, without what only a run can measure.

    Raises:
        ValueError: If there is nothing to score, or a file is not as it should be.
    """
    results, digests = [], []
    for label, cache_config, paths in find_predictions(directory, tasks, longbench_e=longbench_e):
        rows = {}
        for task in find_tasks(paths):
            check_metric(task.metric)
            rows[task] = read_predictions(paths[task.name], task, longbench_e=longbench_e)
        digests.append(digest_files(list(paths.values())))
        results.append({"cache_config": cache_config, "label": label} | _scores(rows, longbench_e))
    settings = {
        "score_only": True,
        "directory": directory.resolve().name,
        "tasks": None if tasks is None else list(tasks),
        "longbench_e": longbench_e,
    }
    return build_document("longbench", results, settings=settings, inputs={"predictions": digests})


def summarize(
    cache_config: dict[str, Any],
    rows: Mapping[Task, Sequence[Mapping[str, Any]]],
    records: _Records,
    dense: _Records,
    *,
    dense_bits: int,
    longbench_e: bool,
    query_agnostic: bool,
) -> dict[str, Any]:
    """Return the result of one cache.

    Args:
        cache_config (`dict`): The cache.
        rows (`Mapping`): Its predictions by task.
        records (`Mapping`): What was measured for each of them, by task and number.
        dense (`Mapping`): The same for the dense cache.
        dense_bits (`int`): Bits of one value in the dense cache.
        longbench_e (`bool`): Also score by groups of lengths.
        query_agnostic (`bool`): Noted in the result.

    Returns:
        `dict`: `scores` by task and their `average`; `rows` and `truncated` prompts by task; `kv_bytes` of
        the largest cache; `memory_fraction`, the mean over the rows of the bytes per token against dense, and
        `bits_per_value` from it; `prompt_tokens` of the longest prompt; `seconds` of all rows.
    """
    fractions = [_bytes_per_token(record) / _bytes_per_token(dense[key]) for key, record in records.items()]
    fraction = sum(fractions) / len(fractions)
    return {
        "cache_config": cache_config,
        "label": cache_label(cache_config),
        **_scores(rows, longbench_e),
        "truncated": {
            task.name: sum(
                record["is_truncated"] for (name, _), record in records.items() if name == task.name
            )
            for task in rows
        },
        "prompt_tokens": max(record["prompt_tokens"] for record in records.values()),
        "query_agnostic": query_agnostic,
        "kv_bytes": max(record["kv_bytes"] for record in records.values()),
        "bits_per_value": dense_bits * fraction,
        "memory_fraction": fraction,
        "seconds": sum(record["seconds"] for record in records.values()),
    }


def _scores(rows: Mapping[Task, Sequence[Mapping[str, Any]]], longbench_e: bool) -> dict[str, Any]:
    scores = {task.name: score(task, of_task) for task, of_task in rows.items()}
    result: dict[str, Any] = {
        "scores": scores,
        "average": average(scores),
        "rows": {task.name: len(of_task) for task, of_task in rows.items()},
    }
    if longbench_e:
        result["scores_by_length"] = {
            task.name: score_by_length(task, of_task) for task, of_task in rows.items()
        }
    return result


def _bytes_per_token(record: Mapping[str, Any]) -> float:
    return float(record["kv_bytes"] / record["cached_tokens"])
