"""The result of a cache from the records of its windows (see `scoring.score_window`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ...runs.labels import cache_label
from .scoring import bin_edges

__all__ = ["mean_and_error", "perplexity_of", "summarize"]

Record = Mapping[str, Any]


def summarize(
    cache_config: dict[str, Any],
    records: Sequence[Record],
    dense: Sequence[Record],
    *,
    prefill: int | None,
    dense_bits: int,
) -> dict[str, Any]:
    """Put the windows of one cache together.

    Sums are taken with `math.fsum`, so that they do not depend on the number of processes.

    Args:
        cache_config (`dict`): The cache.
        records (`Sequence[Mapping]`): One per window, in order.
        dense (`Sequence[Mapping]`): Those of the dense cache for the same windows.
        prefill (`int`, *optional*): Position of the first predicted token in its window; `None` where windows
            are of many lengths, of which there is no curve.
        dense_bits (`int`): Bits in which the dense cache keeps a value: of the model's dtype.

    Returns:
        `dict`: `perplexity`, infinite where no number is as high; `nll`, the mean negative log-likelihood in
        nats per token, and `nll_stderr`, its standard error over `stderr_over`: `"windows"` if there is more
        than one (tokens of a window are alike), else `"tokens"`; `nll_increase`, the mean difference to the
        dense run on the same tokens, and `nll_increase_stderr`, far smaller than that of `nll`; `tokens` and
        `windows` counted;
        `packed_read_fraction` (`blocks.packed_shares`); `blocks`, `"exact"` or `"approximate"`;
        `kv_bytes` of a full window (the largest), `bits_per_value` and `memory_fraction` of the dense cache's
        bytes; `nll_by_position`, if windows are alike, a list of `{"start", "stop", "nll", "increase"}` and
        `"kl"`, means over windows and the positions `[start, stop)` of a window; `kernel`, what read the
        layers, if the cache is one of ours; `seconds` of all windows. Where it was measured, `kl_to_dense`,
        the mean KL(dense || cache) in nats per token, with `kl_stderr`, and `top1_agreement`, the fraction of
        tokens whose most likely prediction is the dense one.
    """
    tokens = sum(record["tokens"] for record in records)
    nll, nll_stderr = mean_and_error(records, "nll")
    # The dense run is its own reference.
    increase, increase_stderr = (
        mean_and_error(records, "increase") if "increase" in records[0] else (0.0, 0.0)
    )
    kv_bytes = max(record["kv_bytes"] for record in records)
    fraction = kv_bytes / max(record["kv_bytes"] for record in dense)
    result: dict[str, Any] = {
        "cache_config": cache_config,
        "label": cache_label(cache_config),
        "perplexity": perplexity_of(nll),
        "nll": nll,
        "nll_stderr": nll_stderr,
        "stderr_over": "windows" if len(records) > 1 else "tokens",
        "nll_increase": increase,
        "nll_increase_stderr": increase_stderr,
        "tokens": tokens,
        "windows": len(records),
        "packed_read_fraction": math.fsum(record["packed_read"] for record in records) / tokens,
        "blocks": "exact" if all(record["is_exact"] for record in records) else "approximate",
        "kv_bytes": kv_bytes,
        "bits_per_value": dense_bits * fraction,
        "memory_fraction": fraction,
        "kernel": records[0]["kernel"],
        "seconds": math.fsum(record["seconds"] for record in records),
    }
    if prefill is not None:
        result["nll_by_position"] = _curve(records, prefill)
    if "kl" in records[0]:
        divergence, stderr = mean_and_error(records, "kl")
        result |= {
            "kl_to_dense": max(divergence, 0.0),  # rounding may leave it a hair below zero
            "kl_stderr": stderr,
            "top1_agreement": sum(record["agreement"] for record in records) / tokens,
        }
    return result


def perplexity_of(nll: float) -> float:
    """Return `exp(nll)`; infinite beyond 709 nats per token, where no number is as high."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def mean_and_error(records: Sequence[Record], name: str) -> tuple[float, float]:
    """Return the mean of a measurement over all tokens, and its standard error.

    With several windows, windows are the sample: each contributes its deviation from the mean, summed over
    its tokens, `sqrt(W / (W - 1) * sum_w (sum_w - n_w mean)^2) / N` (for windows of one length, the standard
    deviation of their means over the square root of their number). With one, its tokens are:
    `sqrt((sum of squares - N mean^2) / (N (N - 1)))`. Zero for a single token.
    """
    sums = [record[name] for record in records]
    counts = [record["tokens"] for record in records]
    tokens, windows = sum(counts), len(records)
    mean = math.fsum(sums) / tokens
    if windows > 1:
        squares = math.fsum((s - n * mean) ** 2 for s, n in zip(sums, counts, strict=True))
        return mean, math.sqrt(squares * windows / (windows - 1)) / tokens
    if tokens == 1:
        return mean, 0.0
    squares = max(records[0][f"{name}_squares"] - tokens * mean**2, 0.0)
    return mean, math.sqrt(squares / (tokens * (tokens - 1)))


def _curve(records: Sequence[Record], prefill: int) -> list[dict[str, float]]:
    edges = bin_edges(records[0]["tokens"])
    points = []
    for index, (low, high) in enumerate(pairwise(edges)):
        count = len(records) * (high - low)
        point = {"start": prefill + low, "stop": prefill + high}
        means = {
            name: math.fsum(record[f"{name}_by_position"][index] for record in records) / count
            for name in ("nll", "increase", "kl")
            if f"{name}_by_position" in records[0]
        }
        points.append({**point, "increase": 0.0, **means})
    return points
