"""Attention over handles put one after the other: logits part by part, one softmax, values part by part."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from ..layers.concatenated import ConcatenatedHandle, Part
from ..layers.gradients import refusing_gradients
from ..layers.handle import KVHandle
from ..layers.handle_view import HandleView, Seen
from .passes import PASS_QUERIES, in_passes
from .products import multiply
from .reference import (
    AttentionOptions,
    DenseView,
    TokenView,
    adjust_logits,
    attend,
    four_dimensional,
    of_queries,
    sink_column,
)

__all__ = ["attend_concatenated"]

_MOST_LOGITS = 1 << 22
"""Logits of one pass: 16 MB in fp32."""


def attend_concatenated(
    query: Tensor, key: ConcatenatedHandle, value: ConcatenatedHandle, options: AttentionOptions
) -> Tensor:
    """Attend from `query` over all that stands there, each part read as its layer stores it.

    Args:
        query (`torch.Tensor` of shape `(B, Hq, q, D)`): Queries.
        key (`ConcatenatedHandle`): Keys.
        value (`ConcatenatedHandle`): Values, of parts as long as those of the keys.
        options (`AttentionOptions`): Scaling, masks and biases, of all tokens together.

    Returns:
        `torch.Tensor` of shape `(B, Hq, q, Dv)`.
    """
    handles = [part for part in (*key.parts, *value.parts) if isinstance(part, KVHandle)]
    sources = [source for handle in handles for source in handle.sources]
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        if any(handle.layer.config.kernel == "torch" for handle in handles):
            for handle in handles:
                handle.layer.kernel, handle.layer.kernel_reason = "torch", "kernel='torch' was given"
            output = attend(query, _Concatenated.of(key), _Concatenated.of(value), options)
        else:
            output = _in_passes(query, key, value, options)
    tensors = [part for part in (*key.parts, *value.parts) if not isinstance(part, KVHandle)]
    return refusing_gradients(output, query, *sources, *tensors)


def _in_passes(
    query: Tensor, key: ConcatenatedHandle, value: ConcatenatedHandle, options: AttentionOptions
) -> Tensor:
    """Attend with so many queries at once that their logits take little memory."""
    batch_size, query_heads, query_length, _ = query.shape
    length = key.shape[2]
    options = _with_rows(options, query_length, length, query.device)

    def attend_pass(start: int, stop: int) -> Tensor:
        return _attend(query[:, :, start:stop], key, value, of_queries(options, start, stop))

    most = _MOST_LOGITS // (batch_size * query_heads * length)
    return in_passes(attend_pass, query_length, max(1, min(PASS_QUERIES, most)))


def _attend(
    query: Tensor, key: ConcatenatedHandle, value: ConcatenatedHandle, options: AttentionOptions
) -> Tensor:
    scaling = options.scale_for(query.shape[3])
    parts = [_product(query, part, is_key=True) for part in key.parts]
    logits = adjust_logits(torch.cat(parts, dim=-1) * scaling, 0, key.shape[2], key.shape[2], options)
    if options.sink_logits is not None:
        sinks = sink_column(options.sink_logits).to(logits)
        logits = torch.cat((logits, sinks.expand(*logits.shape[:3], 1)), dim=-1)
    weights = logits.softmax(dim=-1).nan_to_num(0.0)[..., : key.shape[2]]  # what sees nothing gets zeros
    weights = weights.to(query.dtype)
    shares = zip(weights.split(value.lengths, dim=-1), value.parts, strict=True)
    products = [_product(share, part, is_key=False) for share, part in shares]
    return torch.stack(products).sum(dim=0).to(query.dtype)


def _product(rows: Tensor, part: Part, *, is_key: bool) -> Tensor:
    """Multiply rows `(B, Hq, q, n)` with the keys, transposed, or the values of one part: in fp32."""
    if isinstance(part, KVHandle) and part.tokens.packed_length:
        return multiply(rows, HandleView(part, Seen(part.dtype, is_transposed=is_key))).float()
    states = part.dense() if isinstance(part, KVHandle) else part
    grouped = rows.reshape(rows.shape[0], states.shape[1], -1, rows.shape[-1]).float()
    product = grouped @ (states.transpose(-1, -2) if is_key else states).float()
    return product.view(*rows.shape[:3], -1)


def _with_rows(
    options: AttentionOptions, query_length: int, length: int, device: torch.device
) -> AttentionOptions:
    """Options of which a bias, with a row for every query, says all that depends on a query's place."""
    if not options.is_causal and options.sliding_window is None and options.alibi_slopes is None:
        return options
    placed = AttentionOptions(
        is_causal=options.is_causal,
        sliding_window=options.sliding_window,
        alibi_slopes=options.alibi_slopes,
    )
    bias = adjust_logits(torch.zeros(1, 1, query_length, length, device=device), 0, length, length, placed)
    if options.position_bias is not None:
        bias = bias + four_dimensional(options.position_bias, length)
    return replace(options, position_bias=bias, is_causal=False, sliding_window=None, alibi_slopes=None)


@dataclass(frozen=True)
class _Concatenated:
    """Parts as one [`TokenView`]; tiles never straddle two of them."""

    views: tuple[TokenView, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, handle: ConcatenatedHandle) -> _Concatenated:
        views = tuple(part.tokens if isinstance(part, KVHandle) else DenseView(part) for part in handle.parts)
        return cls(views, tuple(accumulate(view.length for view in views)))

    @property
    def length(self) -> int:
        return self.ends[-1]

    @property
    def boundaries(self) -> tuple[int, ...]:
        begins = (0, *self.ends[:-1])
        pairs = zip(self.views, begins, strict=True)
        return tuple(sorted({*self.ends, *(begin + cut for view, begin in pairs for cut in view.boundaries)}))

    def read(self, start: int, stop: int) -> Tensor:
        index = bisect_right(self.ends, start)
        begin = self.ends[index - 1] if index else 0
        return self.views[index].read(start - begin, stop - begin)
