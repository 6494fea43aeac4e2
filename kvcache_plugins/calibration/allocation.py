"""Dividing bits among layers: the least summed loss under a limit on their number, found exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

__all__ = ["allocate_bits"]


def allocate_bits(losses: Sequence[Mapping[int, float]], target_bits: float) -> list[int]:
    """Choose bits for every item so that their mean is at most the target and their losses sum to the least.

    By dynamic programming over the bits spent so far (a knapsack with one choice from each group), so no
    assumption on the losses is made, such as that more bits lose less.

    Args:
        losses (`Sequence[Mapping[int, float]]`): For every item, the loss at each number of bits it may have.
        target_bits (`float`): Mean bits of the items, at most.

    Returns:
        `list[int]`: Bits of every item. Among equally good choices the one of fewer bits.

    Raises:
        ValueError: If even the fewest bits of all items exceed the target.
    """
    budget = math.floor(target_bits * len(losses) + 1e-9)
    # best[spent]: least loss of the items so far with exactly so many bits, and the choices that lead there
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for item in losses:
        extended: dict[int, tuple[float, tuple[int, ...]]] = {}
        for spent, (loss, chosen) in best.items():
            for bits, added in sorted(item.items()):
                total, candidate = spent + bits, (loss + added, (*chosen, bits))
                if total <= budget and (total not in extended or candidate[0] < extended[total][0]):
                    extended[total] = candidate
        best = extended
    if not best:
        fewest = sum(min(item) for item in losses) / len(losses)
        raise ValueError(f"An average of {target_bits} bits is less than the fewest possible, {fewest}.")
    return list(min(sorted(best.items()), key=lambda entry: entry[1][0])[1][1])
