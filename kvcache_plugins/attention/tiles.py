"""Attention of many query tokens over packed data: decode a tile, attend to it densely, merge.

A tile of tokens is decoded by a native kernel into the dtype of the queries and attended to by torch's own
flash attention, which returns the log-sum-exp of every row. Two tiles with outputs `a`, `b` and log-sum-exps
`la`, `lb` merge exactly: `out = a + w (b - a)` with `w = sigmoid(lb - la)`, and `log(exp(la) + exp(lb))`;
both are kept in fp32. So the cost is that of dense attention plus decoding once, and the temporary memory is
one tile beside what dense attention needs for the output.

The query heads of a group are rows of one product over their kv head, whose tile is then read once. Tiles
that every query sees whole, most of a long past, take no mask; the others are cut along the queries too, and
what no query of a part sees is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from .flash import attend_flash
from .reference import AttentionOptions, first_visible_slot, four_dimensional, sink_column

__all__ = ["TileSource", "Visibility", "attend_tile", "attend_tiles", "can_attend_tiles", "widened"]

_TILE_VALUES = {"cpu": 1 << 21, "cuda": 1 << 25}
"""Decoded values in a tile of keys: 2048 tokens of 8 heads of 128 channels, and 32768 on a GPU. Shorter tiles
merge more often; longer ones gain nothing once attention is bound by its products."""
_PART = 512
"""Queries, and new tokens, of one masked product: flash attention works on 512 tokens at a time itself."""
_FAR = -1e4
"""Finite additive mask values below are meant to hide: beside them an fp32 logit is known to 1e-3 at best."""


class TileSource(Protocol):
    """Keys or values that can be read in runs and in a dtype; `decoded.DecodedView` is one."""

    @property
    def length(self) -> int:
        """Tokens in all."""
        ...

    @property
    def heads(self) -> int:
        """Heads of a token."""
        ...

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        ...

    def read_as(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Tokens `[start, stop)`: `(B, H, stop - start, D)`."""
        ...


@dataclass(frozen=True)
class Visibility:
    """Which of `length` slots the newest `query_length` tokens see, and what is added to their logits.

    Args:
        length (`int`): Slots in all; query `i` is the token of slot `length - query_length + i`.
        query_length (`int`): Query tokens.
        is_causal (`bool`): A query sees no slot above its own.
        window (`int`, *optional*): Nor one at or below its own minus `window`.
        mask (`torch.Tensor`, *optional*): Boolean (true = attend) or additive, `(B or 1, Hq or 1, q or 1,
            length)`.
        device (`torch.device`): Where masks are made.
    """

    length: int
    query_length: int
    is_causal: bool
    window: int | None
    mask: Tensor | None
    device: torch.device

    @classmethod
    def of(
        cls, options: AttentionOptions, length: int, query_length: int, device: torch.device
    ) -> Visibility:
        """What the options say."""
        mask = None if options.mask is None else four_dimensional(options.mask, length)
        is_causal = options.is_causal or options.sliding_window is not None
        return cls(length, query_length, is_causal, options.sliding_window, mask, device)

    @property
    def first_slot(self) -> int:
        """First slot that the window lets any query see."""
        return first_visible_slot(self.window, self.length, self.query_length)

    def part(self, slots: tuple[int, int], queries: tuple[int, int]) -> Tensor | bool:
        """What a range of queries sees of a range of slots.

        Returns:
            `torch.Tensor | bool`: True for everything, false for nothing, else the mask, boolean or additive,
            `(B or 1, Hq or 1, n or 1, t)`.
        """
        oldest, newest = (self.length - self.query_length + i for i in (queries[0], queries[1] - 1))
        structure: Tensor | None = None
        if self.is_causal:
            low = -1 if self.window is None else oldest - self.window
            if slots[0] > newest or slots[1] - 1 <= low:
                return False
            if slots[1] - 1 > oldest or (self.window is not None and slots[0] <= newest - self.window):
                structure = self._structure(slots, oldest, newest)
        if self.mask is None:
            return True if structure is None else structure
        mask = self.mask if self.mask.shape[2] == 1 else self.mask[:, :, queries[0] : queries[1]]
        mask = mask[..., slots[0] : slots[1]]
        if mask.dtype == torch.bool:
            mask = mask if structure is None else mask & structure
            return True if bool(mask.all()) else mask if bool(mask.any()) else False
        mask = mask if structure is None else mask.masked_fill(~structure, -torch.inf)
        if not bool(mask.any()):
            return True
        return mask if bool((mask > -torch.inf).any()) else False

    def _structure(self, slots: tuple[int, int], oldest: int, newest: int) -> Tensor:
        """Causality and window as a mask `(1, 1, n, t)`."""
        tokens = torch.arange(*slots, device=self.device)
        own = torch.arange(oldest, newest + 1, device=self.device)[:, None]
        visible = tokens <= own
        if self.window is not None:
            visible = visible & (tokens > own - self.window)
        return visible[None, None]


def can_attend_tiles(options: AttentionOptions, length: int, query_length: int) -> bool:
    """Whether a scale, a mask and a merge of log-sum-exps express these options.

    Softcap, ALiBi and position biases change logits in between. A row that is hidden from end to end by
    finite numbers has weights all the same, which its log-sum-exp is too coarse to carry.

    Args:
        options (`AttentionOptions`): What is asked for.
        length (`int`): Slots in all.
        query_length (`int`): Query tokens.
    """
    if options.softcap is not None or options.alibi_slopes is not None or options.position_bias is not None:
        return False
    if options.mask is None:
        return True
    visibility = Visibility.of(options, length, query_length, options.mask.device)
    mask = visibility.mask
    assert mask is not None
    if mask.dtype == torch.bool or not bool(((mask < _FAR) & (mask > -torch.inf)).any()):
        return True
    best = mask.amax(-1)
    return not visibility.is_causal and not bool(((best < _FAR) & (best > -torch.inf)).any())


def attend_tiles(query: Tensor, keys: TileSource, values: TileSource, options: AttentionOptions) -> Tensor:
    """Attend from many new tokens over packed and exact keys and values.

    Args:
        query (`torch.Tensor` of shape `(B, Hq, q, D)`): fp32, bf16 or fp16; on a GPU what
            `why_no_flash` has nothing against.
        keys (`TileSource`): `T` tokens.
        values (`TileSource`): As many; each tile is read after that of the keys.
        options (`AttentionOptions`): What `can_attend_tiles` accepts.

    Returns:
        `torch.Tensor` of shape `(B, Hq, q, Dv)`: in the dtype of `query`; zeros where nothing is visible.
    """
    batch_size, query_heads, query_length, head_dim = query.shape
    kv_heads, value_dim = keys.heads, values.head_dim
    scaling = options.scaling if options.scaling is not None else head_dim**-0.5
    visibility = Visibility.of(options, keys.length, query_length, query.device)
    width = max(head_dim, value_dim)  # flash attention wants one
    grouped = widened(query, width).reshape(batch_size, kv_heads, -1, query_length, width)
    merged = _Merged(grouped, value_dim)
    with torch.autocast(query.device.type, enabled=False):
        for slots in _tiles(visibility, batch_size * kv_heads * width):
            parts = _parts(visibility, slots)
            if not parts:
                continue
            tile_keys, tile_values = (
                widened(side.read_as(*slots, query.dtype), width) for side in (keys, values)
            )
            for queries, mask in parts:
                rows = grouped[:, :, :, queries[0] : queries[1]]
                merged.add(queries, *attend_tile(rows, tile_keys, tile_values, mask, scaling))
        if options.sink_logits is not None:
            merged.add_sinks(options.sink_logits)
    return merged.output.view(batch_size, query_heads, query_length, value_dim).to(query.dtype)


class _Merged:
    """What has been attended to so far: outputs and log-sum-exps in fp32."""

    def __init__(self, grouped: Tensor, value_dim: int) -> None:
        self.output = grouped.new_zeros((*grouped.shape[:4], value_dim), dtype=torch.float32)
        self.total = grouped.new_full(grouped.shape[:4], -torch.inf, dtype=torch.float32)

    def add(self, queries: tuple[int, int], output: Tensor, total: Tensor) -> None:
        """Merge a tile: `output` `(B, H, group, n, >= Dv)`, `total` `(B, H, group, n)`, -inf for nothing."""
        old_output, old_total = (x[:, :, :, queries[0] : queries[1]] for x in (self.output, self.total))
        weight = _share(total, total - old_total)
        old_output.lerp_(output[..., : old_output.shape[-1]].float(), weight[..., None])
        old_total.copy_(torch.logaddexp(old_total, total))

    def add_sinks(self, sink_logits: Tensor) -> None:
        """Merge logits `(Hq,)` or `(B, Hq, q)` that have no value."""
        sinks = sink_column(sink_logits.detach().float())[..., 0].unflatten(1, self.total.shape[1:3])
        self.output *= _share(self.total, self.total - sinks)[..., None]


def _share(total: Tensor, difference: Tensor) -> Tensor:
    """Weight of what has the log-sum-exp `total` beside something that has `difference` less."""
    return torch.sigmoid(difference).masked_fill_(total == -torch.inf, 0.0)


def attend_tile(
    rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attend from rows of queries to one tile.

    Args:
        rows (`torch.Tensor` of shape `(B, H, group, n, D)`): The queries of every kv head's group.
        keys (`torch.Tensor` of shape `(B, H, t, D)`): In the dtype of the rows.
        values (`torch.Tensor` of shape `(B, H, t, D)`): The same.
        mask (`torch.Tensor`, *optional*): Boolean or additive, `(B or 1, H * group or 1, n or 1, t)`.
        scaling (`float`): Factor of `q.k`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Outputs `(B, H, group, n, D)`, zeros where nothing is visible,
            and log-sum-exps `(B, H, group, n)`, -inf there.
    """
    kv_heads, group, count = rows.shape[1:4]
    hidden: Tensor | None = None
    if mask is not None:
        mask = mask.expand(-1, -1, count, -1)
        mask = mask.unflatten(1, (kv_heads, group)) if mask.shape[1] > 1 else mask[:, :, None]
        hidden = ~mask.any(-1) if mask.dtype == torch.bool else (mask == -torch.inf).all(-1)
        mask = mask.expand(-1, -1, group, -1, -1).flatten(2, 3)
        if mask.dtype == torch.bool:
            mask = rows.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)
        else:
            mask = mask.float()
    output, total = attend_flash(rows.flatten(2, 3), keys, values, mask, scaling)
    output, total = output.unflatten(2, (group, count)), total.unflatten(2, (group, count))
    if hidden is not None and bool(hidden.any()):  # what such a row returns is not specified
        output = output.masked_fill(hidden[..., None], 0.0)
        total = total.masked_fill(hidden, -torch.inf)
    return output, total


def _tiles(visibility: Visibility, values_per_token: int) -> list[tuple[int, int]]:
    """Cut the slots: long tiles of the past, then the new tokens in parts like those of the queries."""
    step = max(_PART, _TILE_VALUES[visibility.device.type] // values_per_token // _PART * _PART)
    first, new = visibility.first_slot, visibility.length - visibility.query_length
    past = [(start, min(start + step, new)) for start in range(first, new, step)]
    length = visibility.length
    return past + [(start, min(start + _PART, length)) for start in range(max(first, new), length, _PART)]


def _parts(visibility: Visibility, slots: tuple[int, int]) -> list[tuple[tuple[int, int], Tensor | None]]:
    """Ranges of queries that see something of a tile, with their masks."""
    query_length = visibility.query_length
    seen = visibility.part(slots, (0, query_length))
    if seen is True:
        return [((0, query_length), None)]
    parts: list[tuple[tuple[int, int], Tensor | None]] = []
    for start in range(0, query_length, _PART) if seen is not False else ():
        queries = (start, min(start + _PART, query_length))
        seen = visibility.part(slots, queries)
        if seen is not False:
            parts.append((queries, None if seen is True else seen))
    return parts


def widened(states: Tensor, width: int) -> Tensor:
    """States `(..., D)` with zeros behind, up to `width` channels."""
    return F.pad(states, (0, width - states.shape[-1])) if states.shape[-1] < width else states
