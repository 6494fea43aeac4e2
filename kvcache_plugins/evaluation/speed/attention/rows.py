"""The results of `bench attention`, the same on every device: one row per cache and point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....runs.labels import cache_label
from ..timing import Spread
from .states import AttentionShape

__all__ = ["result_row"]


def result_row(
    cache_config: dict[str, Any],
    shape: AttentionShape,
    baselines: Mapping[str, Spread],
    spread: Spread,
    kv_bytes: int,
    error: float,
) -> dict[str, Any]:
    """Put together what was measured of one cache.

    Args:
        cache_config (`dict`): The cache.
        shape (`AttentionShape`): The point.
        baselines (`Mapping[str, Spread]`): Times of a step of every dense way that ran.
        spread (`Spread`): Times of a step of the cache.
        kv_bytes (`int`): Bytes the step reads: all the layer holds.
        error (`float`): Of the output, relative to fp32 attention over the decoded tokens.
    """
    best_ms = min(baseline.median_ms for baseline in baselines.values())
    gqa = baselines.get("sdpa_enable_gqa")
    return {
        "cache_config": dict(cache_config),
        "label": cache_label(dict(cache_config)),
        "length": shape.length,
        "batch_size": shape.batch_size,
        "median_ms": spread.median_ms,
        "p20_ms": spread.p20_ms,
        "p80_ms": spread.p80_ms,
        "baseline_ms": {name: baseline.median_ms for name, baseline in baselines.items()},
        "ratio_to_best_dense": spread.median_ms / best_ms,
        "ratio_to_sdpa_gqa": None if gqa is None else spread.median_ms / gqa.median_ms,
        "gb_per_s": kv_bytes / spread.median_ms / 1e6,
        "kv_bytes": kv_bytes,
        "memory_fraction": kv_bytes / shape.dense_bytes,
        "bits_per_value": 8 * kv_bytes / shape.values,
        "max_rel_error": error,
    }
