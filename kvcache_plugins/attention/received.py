"""How much attention every token received: column sums of the attention weights, without the weights.

A native kernel adds them up where one serves (`measured`), else torch:

Queries come in runs whose logits are few enough to be kept, and a causal run reads no key behind it. Where
there are too many keys for that, every run reads them twice: to find the log-sum-exp of every query, and then
to add up what each tile got, of logits that are computed again. No large matrix of queries by tokens is ever
held, and no model has to return its weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..layers.view import StreamView
from .limits import tile_scores
from .measured import measure_received
from .reference import (
    AttentionOptions,
    DenseView,
    TokenView,
    adjust_logits,
    cut_tiles,
    first_visible_slot,
    of_queries,
    sink_column,
)

__all__ = ["received_attention"]

_SHORTEST_RUN = 16
"""Queries of a run whose logits are kept: for fewer, reading the keys would take longer than multiplying."""
_RUN = 256
"""Queries of a run that reads the keys twice, and turns them to fp32 each time."""


def received_attention(
    query: Tensor,
    keys: TokenView,
    options: AttentionOptions,
    counted: Tensor | None = None,
    *,
    kernel: str = "auto",
) -> Tensor:
    """Sum the attention weights of all queries and of all query heads of a group.

    Args:
        query (`torch.Tensor` of shape `(B, Hq, q, D)`): Queries of the newest `q` tokens.
        keys (`TokenView`): `T` tokens, the newest included, of `Hkv` heads.
        options (`AttentionOptions`): As the queries were answered. Sink logits take their share.
        counted (`torch.Tensor` of shape `(B, q)`, *optional*): Which queries count; pads do not.
        kernel (`str`): The option of a cache of that name.

    Returns:
        `torch.Tensor` of shape `(B, Hkv, T)`: fp32. Every counted query adds `Hq / Hkv` in all, less what
        sink logits take.
    """
    with torch.autocast(query.device.type, enabled=False):
        if type(keys) is StreamView:
            measured = measure_received(query, keys, options, counted, kernel)
            if measured is not None:
                return measured
        return _received(query, keys, options, counted)


@dataclass(frozen=True)
class _Prefix:
    """The first `length` of some tokens."""

    whole: TokenView
    length: int

    @property
    def boundaries(self) -> tuple[int, ...]:
        return self.whole.boundaries

    def read(self, start: int, stop: int) -> Tensor:
        return self.whole.read(start, stop)


def _received(query: Tensor, keys: TokenView, options: AttentionOptions, counted: Tensor | None) -> Tensor:
    batch_size, _, query_length, _ = query.shape
    length = keys.length
    kv_heads = keys.read(length - 1, length).shape[1]
    received = query.new_zeros((batch_size, kv_heads, length), dtype=torch.float32)
    run_length = _run_length(query, length, kv_heads, options)
    if _SHORTEST_RUN <= run_length < min(query_length, _RUN):  # every run reads them
        keys = DenseView(keys.read(0, length).float())
    for start in range(0, query_length, run_length):
        stop = min(start + run_length, query_length)
        seen = length - (query_length - stop if options.is_causal else 0)
        own = None if counted is None else counted[:, start:stop]
        of_run = of_queries(options, start, stop)
        received[:, :, :seen] += _of_run(query[:, :, start:stop], _Prefix(keys, seen), kv_heads, of_run, own)
    return received


def _run_length(query: Tensor, length: int, kv_heads: int, options: AttentionOptions) -> int:
    """How many queries `(B, Hq, q, D)` are taken at once."""
    batch_size, query_heads, query_length, head_dim = query.shape
    is_placed = options.sliding_window is not None or options.alibi_slopes is not None
    if is_placed and not options.is_causal:  # all of them are the newest, which some would not be
        return query_length
    most = tile_scores(is_cpu=query.is_cpu)
    kept = most // (batch_size * query_heads * length)
    if kept >= query_length:
        return query_length
    has_room = batch_size * kv_heads * length * head_dim <= most
    return kept if has_room and kept >= _SHORTEST_RUN else _RUN


def _of_run(
    query: Tensor, keys: TokenView, kv_heads: int, options: AttentionOptions, counted: Tensor | None
) -> Tensor:
    batch_size, query_heads, query_length, head_dim = query.shape
    length = keys.length
    scaling = options.scale_for(head_dim)
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
    total = total.masked_fill(~gives, torch.inf)[..., None]
    received = query.new_zeros((batch_size, kv_heads, length), dtype=torch.float32)
    for start, stop in tiles:
        found = kept.pop(start) if are_kept else logits(start, stop)
        weights = found.sub_(total).exp_()
        received[:, :, start:stop] = weights.view(batch_size, kv_heads, -1, stop - start).sum(2)
    return received
