"""Dividing bits among layers: the least summed loss under a limit on their number, found exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

__all__ = ["allocate_bits"]


def allocate_bits(losses: Sequence[Mapping[int, float]], target_bits: float) -> list[int]:
    """Choose bits for every item so that their mean is at most the target and their losses sum to the least.

    By dynamic programming over the bits spent so far (a knapsack with one choice from each group). More bits
    are taken to lose no more than fewer do: where a measurement says otherwise it is rounding, of a model in
    bf16 for example, whose divergences have a floor of some 1e-4 nats.

    Args:
        losses (`Sequence[Mapping[int, float]]`): For every item, the loss at each number of bits it may have.
        target_bits (`float`): Mean bits of the items, at most.

    Returns:
        `list[int]`: Bits of every item. Among equally good choices the one of more bits.

    Raises:
        ValueError: If even the fewest bits of all items exceed the target.
    """
    budget = math.floor(target_bits * len(losses) + 1e-9)
    # best[spent]: least loss of the items so far with exactly so many bits, and the choices that lead there
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for item in losses:
        extended: dict[int, tuple[float, tuple[int, ...]]] = {}
        for spent, (loss, chosen) in best.items():
            for bits, added in _decreasing(item).items():
                total, candidate = spent + bits, (loss + added, (*chosen, bits))
                if total <= budget and (total not in extended or candidate[0] < extended[total][0]):
                    extended[total] = candidate
        best = extended
    if not best:
        fewest = sum(min(item) for item in losses) / len(losses)
        raise ValueError(f"An average of {target_bits} bits is less than the fewest possible, {fewest}.")
    # sums of equal numbers in another order differ by roundings, which must not leave bits unspent
    least = min(loss for loss, _ in best.values())
    spent = max(spent for spent, (loss, _) in best.items() if math.isclose(loss, least, rel_tol=1e-9))
    return list(best[spent][1])


def _decreasing(losses: Mapping[int, float]) -> dict[int, float]:
    """The losses, by bits, none larger than one of fewer bits."""
    bits = sorted(losses)
    return dict(zip(bits, accumulate((losses[b] for b in bits), min), strict=True))
