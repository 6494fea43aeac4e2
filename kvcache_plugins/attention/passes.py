"""Many queries, a few at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["PASS_QUERIES", "in_passes"]

PASS_QUERIES = 64
"""Query tokens of one pass: as many rows as the kernels take at once."""


def in_passes(
    attend_pass: Callable[[int, int], Tensor], query_length: int, most: int | None = None
) -> Tensor:
    """Attend from all queries, `most` at a time.

    Args:
        attend_pass (`Callable`): Attends from the queries `[start, stop)`: `(B, Hq, stop - start, Dv)`.
        query_length (`int`): Queries in all.
        most (`int`, *optional*): Queries of one pass; [`PASS_QUERIES`] if not given.

    Returns:
        `torch.Tensor` of shape `(B, Hq, query_length, Dv)`.
    """
    most = PASS_QUERIES if most is None else most
    if query_length <= most:
        return attend_pass(0, query_length)
    starts = range(0, query_length, most)
    passes = [attend_pass(start, min(start + most, query_length)) for start in starts]
    return torch.cat(passes, dim=2)
