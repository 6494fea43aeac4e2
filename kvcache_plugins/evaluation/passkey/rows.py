"""The answers of the passkey evaluation, put together: one row of results for each cache."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...runs.cache_names import CacheNames
from ...runs.journal import Journal
from ...runs.labels import cache_label
from .prompts import Trial

__all__ = ["build_rows", "record_key"]


def record_key(cache: str, trial: Trial) -> str:
    """Return the key of a trial's record in the journal, of a cache by its name there."""
    return f"{cache} {trial.length} {trial.depth} {trial.index}"


def build_rows(
    journal: Journal,
    names: CacheNames,
    trials: list[Trial],
    dense_bits: int,
    facts: int,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of the results, and what failed.

    Args:
        journal (`Journal`): Holds a record of every trial, or of a failure, for every cache.
        names (`CacheNames`): Of the caches, the dense one first.
        trials (`list[Trial]`): The prompts.
        dense_bits (`int`): Of one value in the dense cache.
        facts (`int`): Keys in a prompt.
    """
    rows: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    dense_bytes: dict[int, float] = {}
    for cache_config, name in names:
        found = {t: journal[key] for t in trials if (key := record_key(name, t)) in journal}
        reason = next((r["failed"] for r in found.values() if "failed" in r), None)
        if reason is not None:
            failed.append({"cache_config": cache_config, "reason": reason, "is_failure": True})
            continue
        per_token = {
            length: _mean(
                [r["kv_bytes"] / r["cached_tokens"] for t, r in found.items() if t.length == length]
            )
            for length in dict.fromkeys(trial.length for trial in trials)
        }
        dense_bytes = dense_bytes or per_token
        row = _row(cache_config, found, per_token, dense_bytes, dense_bits)
        # with one fact, the prompt that a cache compresses holds the question
        rows.append(row | {"facts": facts, "query_aware": facts == 1})
    return rows, failed


def _row(
    cache_config: dict[str, Any],
    records: Mapping[Trial, Mapping[str, Any]],
    bytes_per_token: Mapping[int, float],
    dense_bytes_per_token: Mapping[int, float],
    dense_bits: int,
) -> dict[str, Any]:
    """Return one row. Bytes are those of one prompt; at the top level, of the longest."""
    longest = max(bytes_per_token)
    fractions = {
        length: per_token / dense_bytes_per_token[length] for length, per_token in bytes_per_token.items()
    }
    accuracy = _accuracy(records)
    return {
        "cache_config": cache_config,
        "label": cache_label(cache_config),
        "accuracy": accuracy,
        "stderr": math.sqrt(accuracy * (1 - accuracy) / len(records)),
        "trials": len(records),
        "by_length": {
            str(length): _accuracy(records, length=length)
            for length in dict.fromkeys(trial.length for trial in records)
        },
        "by_depth": {
            f"{depth:.4g}": _accuracy(records, depth=depth)
            for depth in dict.fromkeys(trial.depth for trial in records)
        },
        "grid": [
            {"length": length, "depth": depth, "accuracy": _accuracy(records, length, depth)}
            for length, depth in dict.fromkeys((trial.length, trial.depth) for trial in records)
        ],
        "kv_bytes": round(_mean([r["kv_bytes"] for t, r in records.items() if t.length == longest])),
        "bits_per_value": dense_bits * fractions[longest],
        "memory_fraction": fractions[longest],
        "memory_fraction_by_length": {str(length): fraction for length, fraction in fractions.items()},
        "seconds": sum(record["seconds"] for record in records.values()),
    }


def _accuracy(
    records: Mapping[Trial, Mapping[str, Any]], length: int | None = None, depth: float | None = None
) -> float:
    """Return the share of right answers among the trials of a length and a depth, or of all."""
    return _mean(
        [
            float(record["is_right"])
            for trial, record in records.items()
            if length in (None, trial.length) and depth in (None, trial.depth)
        ]
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
