"""Ranges of tokens, cut where something else begins."""

from __future__ import annotations

from ..quantizers.packing import BLOCK_TOKENS

__all__ = ["block_runs", "cut"]


def cut(start: int, stop: int, step: int) -> list[tuple[int, int]]:
    """Split `[start, stop)` at the multiples of `step`."""
    if start >= stop:
        return []
    return [(max(low, start), min(low + step, stop)) for low in range(start - start % step, stop, step)]


def block_runs(start: int, stop: int, block: int = BLOCK_TOKENS) -> list[tuple[int, int]]:
    """Split `[start, stop)` into a partial first block, whole blocks, and a partial last block."""
    inner_start, inner_stop = -(-start // block) * block, stop // block * block
    if inner_start > inner_stop:  # inside one block
        return [(start, stop)]
    runs = [(start, inner_start), (inner_start, inner_stop), (inner_stop, stop)]
    return [(low, high) for low, high in runs if low < high]
