"""Attention over a packed past in plain torch: tile by tile, with an online softmax.

Tokens are decoded a tile at a time and never all at once, so the temporary memory is one tile, whatever the
length. All query heads of a group share one pass over the keys and values; nothing is repeated. Every kernel
is checked against this file.

Per logit, in this order: `z = scaling * q.k`, softcap `z = cap * tanh(z / cap)`, ALiBi
`z - slope * distance`, position bias, mask. Sink logits add `exp(sink)` to the denominator and no value, one
for every head (gpt-oss) or for every query (Inkling 2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from .limits import GPU_TILES, TILE_SCORES

__all__ = [
    "AttentionOptions",
    "DenseView",
    "TokenView",
    "adjust_logits",
    "attend",
    "cut_tiles",
    "first_visible_slot",
    "four_dimensional",
    "of_queries",
    "sink_column",
]

_TILE_VALUES = 1 << 21
"""Decoded values in a tile: 8 MB in fp32."""
_SMALLEST_TILE = 64


class TokenView(Protocol):
    """Tokens that can be read in runs; `layers.view.StreamView` is one."""

    @property
    def length(self) -> int:
        """Tokens in all."""
        ...

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Slots where the source of tokens changes."""
        ...

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens `[start, stop)`: `(B, H, stop - start, D)`."""
        ...


@dataclass(frozen=True)
class DenseView:
    """An ordinary tensor `(B, H, T, D)` as a [`TokenView`] and as a [`tiles.TileSource`]."""

    states: Tensor

    @property
    def length(self) -> int:
        """Tokens in all."""
        return self.states.shape[2]

    @property
    def boundaries(self) -> tuple[int, ...]:
        """One source only."""
        return (self.length,)

    @property
    def heads(self) -> int:
        """Heads of a token."""
        return self.states.shape[1]

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.states.shape[3]

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens `[start, stop)`, as a view."""
        return self.states[:, :, start:stop]

    def read_as(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Tokens `[start, stop)` in `dtype`."""
        return self.read(start, stop).to(dtype)


@dataclass(slots=True)  # not frozen: see `layers.view`
class AttentionOptions:
    """What may change a logit. Nothing of it changes once it is made.

    Args:
        scaling (`float`, *optional*): Factor of `q.k`; `head_dim ** -0.5` if not given.
        mask (`torch.Tensor`, *optional*): Boolean (true = attend) or additive, broadcastable to `(B, Hq, q,
            T)`.
        is_causal (`bool`): Query `i` of `q` sees the slots up to `T - q + i`.
        sliding_window (`int`, *optional*): A query in slot `s` sees slots above `s - sliding_window`.
        softcap (`float`, *optional*): Bound of the logits.
        sink_logits (`torch.Tensor` of shape `(Hq,)` or `(B, Hq, q)`, *optional*): Extra logits without a
            value, of every head or of every query.
        alibi_slopes (`torch.Tensor` of shape `(Hq,)`, *optional*): Linear position bias per head.
        position_bias (`torch.Tensor`, *optional*): Additive, broadcastable to `(B, Hq, q, T)`.
    """

    scaling: float | None = None
    mask: Tensor | None = None
    is_causal: bool = False
    sliding_window: int | None = None
    softcap: float | None = None
    sink_logits: Tensor | None = None
    alibi_slopes: Tensor | None = None
    position_bias: Tensor | None = None

    def scale_for(self, head_dim: int) -> float:
        """Factor of `q.k` for heads of `head_dim` channels."""
        return head_dim**-0.5 if self.scaling is None else self.scaling


def attend(query: Tensor, keys: TokenView, values: TokenView, options: AttentionOptions) -> Tensor:
    """Attend from `query` over all tokens of `keys` and `values`.

    Args:
        query (`torch.Tensor` of shape `(B, Hq, q, D)`): The newest `q` tokens' queries, `Hq` a multiple of
            the heads of `keys`. They occupy the last `q` slots, unless the mask says otherwise.
        keys (`TokenView`): `T` tokens of `D` channels.
        values (`TokenView`): `T` tokens of `Dv` channels.
        options (`AttentionOptions`): Scaling, masks and biases.

    Returns:
        `torch.Tensor` of shape `(B, Hq, q, Dv)`: in the dtype of `query`. A query that sees nothing gets
            zeros.
    """
    with torch.autocast(query.device.type, enabled=False):  # which would round the products below to bf16
        return _attend(query, keys, values, options)


def _attend(query: Tensor, keys: TokenView, values: TokenView, options: AttentionOptions) -> Tensor:
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch_size, query_heads, query_length, head_dim = query.shape
    scaling = options.scale_for(head_dim)
    length = keys.length
    first = first_visible_slot(options.sliding_window, length, query_length)
    newest = keys.read(length - 1, length)
    kv_heads = newest.shape[1]
    # (B, Hkv, groups * q, D): the query heads of a group are rows of one product
    rows = (query.to(compute) * scaling).reshape(batch_size, kv_heads, -1, head_dim)

    best: Tensor | None = None
    for start, stop in cut_tiles(query, keys, values, first, kv_heads):
        tile_keys = keys.read(start, stop).to(compute)
        logits = rows @ tile_keys.transpose(2, 3)
        logits = logits.view(batch_size, query_heads, query_length, stop - start)
        logits = adjust_logits(logits, start, stop, length, options)
        tile_best = logits.amax(-1, keepdim=True)
        new_best = tile_best if best is None else torch.maximum(best, tile_best)
        # Rows that have seen nothing yet keep -inf as their maximum; 0 in its place avoids inf - inf.
        shift = new_best.masked_fill(new_best == -torch.inf, 0.0)
        weights = (logits - shift).exp_()
        tile_values = values.read(start, stop).to(compute)
        product = weights.view(batch_size, kv_heads, -1, stop - start) @ tile_values
        product = product.view(batch_size, query_heads, query_length, -1)
        if best is None:
            total, output = weights.sum(-1, keepdim=True), product
        else:
            decay = (best - shift).exp_()
            total = total * decay + weights.sum(-1, keepdim=True)
            output = output * decay + product
        best = new_best
    if best is None:
        raise ValueError("Attention needs at least one token to attend to.")
    if options.sink_logits is not None:
        total, output = _add_sinks(best, total, output, options.sink_logits)
    return (output / total.masked_fill(total == 0, 1.0)).to(query.dtype)


def adjust_logits(logits: Tensor, start: int, stop: int, length: int, options: AttentionOptions) -> Tensor:
    """Apply softcap, biases and masks to the logits `(B, Hq, q, stop - start)` of one tile."""
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    query_length = logits.shape[2]
    slots = torch.arange(start, stop, device=logits.device)
    query_slots = torch.arange(length - query_length, length, device=logits.device)[:, None]
    if options.alibi_slopes is not None:
        # The distance and not just the slot: sink logits see a shift of the row.
        logits = logits + options.alibi_slopes.to(logits)[:, None, None] * (slots - query_slots)
    if options.position_bias is not None:
        logits = logits + _columns(options.position_bias, start, stop)
    if options.is_causal or options.sliding_window is not None:
        visible = slots <= query_slots
        if options.sliding_window is not None:
            visible = visible & (slots > query_slots - options.sliding_window)
        logits = logits.masked_fill(~visible, -torch.inf)
    if options.mask is not None:
        mask = _columns(options.mask, start, stop)
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    return logits


def _columns(tensor: Tensor, start: int, stop: int) -> Tensor:
    return tensor if tensor.shape[-1] == 1 else tensor[..., start:stop]


def _add_sinks(best: Tensor, total: Tensor, output: Tensor, sink_logits: Tensor) -> tuple[Tensor, Tensor]:
    sinks = sink_column(sink_logits).to(best)
    new_best = torch.maximum(best, sinks)
    shift = new_best.masked_fill(new_best == -torch.inf, 0.0)
    decay = (best - shift).exp()
    return total * decay + (sinks - shift).exp(), output * decay


def sink_column(sink_logits: Tensor) -> Tensor:
    """Sink logits as `(B or 1, Hq, q or 1, 1)`, a further column of the logits."""
    return sink_logits[..., None] if sink_logits.dim() == 3 else sink_logits[None, :, None, None]


def of_queries(options: AttentionOptions, start: int, stop: int) -> AttentionOptions:
    """Options of the queries `[start, stop)` alone, to be taken for the newest."""
    changed: dict[str, Any] = {}
    for name in ("mask", "position_bias"):
        tensor = getattr(options, name)
        if tensor is not None and tensor.dim() >= 2 and tensor.shape[-2] > 1:
            changed[name] = tensor[..., start:stop, :]
    sinks = options.sink_logits
    if sinks is not None and sinks.dim() == 3 and sinks.shape[2] > 1:
        changed["sink_logits"] = sinks[:, :, start:stop]
    return replace(options, **changed) if changed else options


def first_visible_slot(window: int | None, length: int, query_length: int) -> int:
    """First slot that a sliding window, if there is one, lets any of the newest queries see."""
    return 0 if window is None else max(0, length - query_length - window + 1)


def four_dimensional(tensor: Tensor, length: int) -> Tensor:
    """A mask or bias as `(B or 1, Hq or 1, q or 1, length)`: dimensions it lacks are added, slots cut off."""
    tensor = tensor[(None,) * (4 - tensor.dim())]
    return tensor.expand(*tensor.shape[:3], length) if tensor.shape[3] == 1 else tensor[..., :length]


def cut_tiles(
    query: Tensor, keys: TokenView, values: TokenView, first: int, kv_heads: int
) -> list[tuple[int, int]]:
    """Cut `[first, T)` into tiles of bounded size that never straddle two sources of keys or of values."""
    batch_size, query_heads, query_length, head_dim = query.shape
    step = min(
        _TILE_VALUES // (batch_size * kv_heads * head_dim),
        TILE_SCORES // (batch_size * query_heads * query_length),
    )
    step = step if query.is_cpu else GPU_TILES * step
    step = max(_SMALLEST_TILE, step // _SMALLEST_TILE * _SMALLEST_TILE)
    cuts = sorted({first, keys.length, *keys.boundaries, *values.boundaries})
    cuts = [cut for cut in cuts if first <= cut <= keys.length]
    return [
        (start, min(start + step, high)) for low, high in pairwise(cuts) for start in range(low, high, step)
    ]
