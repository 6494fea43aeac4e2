"""Keeping more tokens of some heads than of others: a layer, or its parts, become parts of other lengths."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..layers.heads import HeadGroup, joined_records, joined_streams, records_of_heads, stream_of_heads
from .keeping import keep_slots
from .ledger import Ledger
from .selection import best_slots, ranked
from .shares import grouped_shares, share_out

if TYPE_CHECKING:
    from .headwise import HeadwiseLayer

__all__ = ["HeadPart", "share_among_heads"]


class HeadPart(NamedTuple):
    """Heads that hold as many tokens.

    Args:
        group (`HeadGroup`): Which.
        layer (`HeadwiseLayer`): What they hold; it evicts nothing by itself.
    """

    group: HeadGroup
    layer: HeadwiseLayer


def share_among_heads(layer: HeadwiseLayer, budget: int, recent: int) -> tuple[HeadPart, ...]:
    """Return the best tokens of all heads of a layer, which stays as it is, for views that still read it.

    Args:
        layer (`HeadwiseLayer`): What there is, in parts or not.
        budget (`int`): Tokens to keep per head, on average.
        recent (`int`): Newest tokens that every head keeps.

    Returns:
        `tuple[HeadPart, ...]`: All heads, those first that keep most.
    """
    config, device = layer.config, layer.device
    sources = layer.parts or (HeadPart(HeadGroup(range(layer.num_heads), device), layer),)
    exact = sources[0].layer.exact_tail
    ranks: dict[int, Tensor] = {}
    for group, source in sources:
        pads = source.padding.lengths
        found = ranked(source.ranks(), pads=pads, sink_length=config.sink_length, recent=recent, exact=exact)
        ranks |= dict(zip(group.heads, found.unbind(1), strict=True))
    heads = range(layer.num_heads)
    protected = config.sink_length + max(recent, exact)
    floor = min(budget, max(math.ceil((config.head_floor or 0.0) * budget), protected + 1))
    shares = share_out([ranks[head] for head in heads], budget * layer.num_heads, floor)
    parts = []
    for chosen, share in grouped_shares(shares, [ranks[head].shape[1] for head in heads], floor):
        pieces = []
        for group, source in sources:
            places = [place for place, head in enumerate(group.heads) if head in chosen]
            if places:
                own = HeadGroup([group.heads[place] for place in places], device)
                piece = _of_heads(source, HeadGroup(places, device), share)
                keep_slots(piece, best_slots(torch.stack([ranks[head] for head in own.heads], dim=1), share))
                pieces.append(HeadPart(own, piece))
        parts.append(_joined(pieces))
    return tuple(parts)


def _of_heads(layer: HeadwiseLayer, group: HeadGroup, share: int) -> HeadwiseLayer:
    """A copy of some heads of a layer, which are counted as they lie in it, and will keep `share` tokens."""
    part = copy.copy(layer)
    part.parts, part.is_part, part.num_heads = (), True, len(group.heads)
    part.padding, part.records = copy.copy(layer.padding), records_of_heads(layer.records, group)
    part.stored_keys, part.stored_values = (
        stream_of_heads(stream, group, part.records, part.padding) for stream in layer.streams
    )
    part.ledger = layer.ledger.of_heads(group)
    part.companions = {
        name: _companion_of(tensor, group, layer.num_heads) for name, tensor in layer.companions.items()
    }
    part._budget = share
    part._set_final_length()
    return part


def _companion_of(tensor: Tensor, group: HeadGroup, num_heads: int) -> Tensor:
    """What some key-value heads have of what belongs to rows `(B,)`, or to query heads `(B, Hq, ...)`."""
    if tensor.dim() < 2:
        return tensor.clone()  # every part counts for itself
    return tensor.index_select(1, group.query_heads(tensor.shape[1] // num_heads))


def _joined(pieces: Sequence[HeadPart]) -> HeadPart:
    """One part of pieces that hold the same number of tokens, of different heads."""
    layers = [piece.layer for piece in pieces]
    heads = [head for piece in pieces for head in piece.group.heads]
    joined = layers[0]
    if len(layers) > 1:
        joined.records = joined_records([layer.records for layer in layers])
        joined.stored_keys, joined.stored_values = (
            joined_streams(streams, joined.records, joined.padding)
            for streams in zip(*(layer.streams for layer in layers), strict=True)
        )
        joined.ledger = Ledger.joined([layer.ledger for layer in layers])
        for name, tensor in joined.companions.items():
            if tensor.dim() > 1:
                joined.companions[name] = torch.cat([layer.companions[name] for layer in layers], dim=1)
    joined.num_heads = len(heads)
    joined._due = joined._postponed = None
    joined._has_missed = joined.is_torn = False  # as all are while they are divided
    return HeadPart(HeadGroup(heads, joined.device), joined)
