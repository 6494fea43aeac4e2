"""How much attention every token received: column sums of the attention weights, without the weights.

Two passes over the keys, tile by tile: the first finds the log-sum-exp of every query, the second adds up
what each tile got, of its logits, which are kept where there are few of them and computed again elsewhere. No
large matrix of queries by tokens is ever held, and no model has to return its weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .limits import tile_scores
from .reference import (
    AttentionOptions,
    TokenView,
    adjust_logits,
    cut_tiles,
    first_visible_slot,
    sink_column,
)

__all__ = ["received_attention"]


def received_attention(
    query: Tensor, keys: TokenView, options: AttentionOptions, counted: Tensor | None = None
) -> Tensor:
    """Sum the attention weights of all queries and of all query heads of a group.

    Args:
        query (`torch.Tensor` of shape `(B, Hq, q, D)`): Queries of the newest `q` tokens.
        keys (`TokenView`): `T` tokens, the newest included, of `Hkv` heads.
        options (`AttentionOptions`): As the queries were answered. Sink logits take their share.
        counted (`torch.Tensor` of shape `(B, q)`, *optional*): Which queries count; pads do not.

    Returns:
        `torch.Tensor` of shape `(B, Hkv, T)`: fp32. Every counted query adds `Hq / Hkv` in all, less what
        sink logits take.
    """
    with torch.autocast(query.device.type, enabled=False):
        return _received(query, keys, options, counted)


def _received(query: Tensor, keys: TokenView, options: AttentionOptions, counted: Tensor | None) -> Tensor:
    batch_size, query_heads, query_length, head_dim = query.shape
    length = keys.length
    kv_heads = keys.read(length - 1, length).shape[1]
    scaling = options.scaling if options.scaling is not None else head_dim**-0.5
    rows = (query.float() * scaling).reshape(batch_size, kv_heads, -1, head_dim)
    first = first_visible_slot(options.sliding_window, length, query_length)
    tiles = cut_tiles(query, keys, keys, first, kv_heads)

    def logits(start: int, stop: int) -> Tensor:
        found = rows @ keys.read(start, stop).float().transpose(2, 3)
        found = found.view(batch_size, query_heads, query_length, stop - start)
        return adjust_logits(found, start, stop, length, options)

    total = query.new_full((batch_size, query_heads, query_length), -torch.inf, dtype=torch.float32)
    if options.sink_logits is not None:
        total = total.logaddexp(sink_column(options.sink_logits).float()[..., 0])
    count = batch_size * query_heads * query_length * (length - first)
    are_kept = count <= tile_scores(is_cpu=query.is_cpu)
    kept: dict[int, Tensor] = {}  # by their first slot
    for start, stop in tiles:
        found = logits(start, stop)
        total = total.logaddexp(found.logsumexp(-1))
        if are_kept:
            kept[start] = found
    # A query that sees nothing gives nothing; nor does one that is not counted.
    gives = total > -torch.inf if counted is None else (total > -torch.inf) & counted[:, None]
    received = query.new_zeros((batch_size, kv_heads, length), dtype=torch.float32)
    for start, stop in tiles:
        found = kept.pop(start) if are_kept else logits(start, stop)
        weights = found.sub_(total[..., None]).exp_().masked_fill_(~gives[..., None], 0.0)
        received[:, :, start:stop] = weights.view(batch_size, kv_heads, -1, stop - start).sum(2)
    return received
