"""Which of the queries a layer is shown count."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention.reference import AttentionOptions, of_queries
from ..layers.view import StreamView

__all__ = ["counted_queries", "newest_queries"]


def newest_queries(query: Tensor, options: AttentionOptions, count: int) -> tuple[Tensor, AttentionOptions]:
    """The newest `count` of the queries `(B, Hq, q, D)`, with what masks them."""
    length = query.shape[2]
    start = max(0, length - count)
    return query[:, :, start:], of_queries(options, start, length)


def counted_queries(query: Tensor, tokens: StreamView) -> Tensor:
    """Which of the queries `(B, Hq, q, D)` of the newest tokens are no pads: bool `(B, q)`."""
    slots = torch.arange(tokens.length - query.shape[2], tokens.length, device=query.device)
    return slots >= tokens.stream.padding.starts(query)[:, None]
