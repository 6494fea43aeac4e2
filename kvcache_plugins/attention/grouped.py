"""Attention over heads that hold different numbers of tokens: group by group, by the kernel that fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..layers.heads import GroupedHandle
from .masks import fitted
from .native import attend_handles
from .reference import AttentionOptions

__all__ = ["attend_groups", "options_of_heads"]


def attend_groups(
    query: Tensor, key: GroupedHandle, value: GroupedHandle, options: AttentionOptions
) -> Tensor:
    """Attend from `query` `(B, Hq, q, D)` over what the handles of all groups stand for; show each its part.

    Returns:
        `torch.Tensor` of shape `(B, Hq, q, Dv)`.
    """
    batch_size, query_heads, query_length, _ = query.shape
    output = query.new_empty(batch_size, query_heads, query_length, value.shape[3])
    for (group, keys), (_, values) in zip(key.parts, value.parts, strict=True):
        chosen = group.query_heads(query_heads // key.shape[1])
        part = query.index_select(1, chosen)
        own = fitted(options_of_heads(options, chosen, query_heads), keys, query_length)
        output.index_copy_(1, chosen, attend_handles(part, keys, values, own))
        keys.layer.attended(part, keys.tokens, own)
    key.layer.attended(query, key.tokens, options)
    return output


def options_of_heads(options: AttentionOptions, chosen: Tensor, query_heads: int) -> AttentionOptions:
    """Options of some of `query_heads` query heads, int64 `(n,)`, or of all in another order."""
    changed: dict[str, Any] = {}
    for name in ("mask", "position_bias"):
        tensor = getattr(options, name)
        if tensor is not None and tensor.dim() >= 3 and tensor.shape[-3] == query_heads > 1:
            changed[name] = tensor.index_select(-3, chosen)
    for name in ("sink_logits", "alibi_slopes"):
        tensor = getattr(options, name)
        if tensor is not None:
            changed[name] = tensor.index_select(1 if tensor.dim() == 3 else 0, chosen)
    return replace(options, **changed) if changed else options
