"""Holding some of the slots and nothing else: codes move as they are, exact tokens are copied.

Streams, records and padding are replaced and not changed, because a view that attention has yet to read, or
is reading, goes on with the old ones.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels import cuda_loader
from ..kernels.gathering import gather_records
from ..kernels.layout import MAX_HEAD_DIM
from ..kernels.writing_ops import gather_tokens
from ..layers.field_layout import side_layout
from ..layers.padding import Padding
from ..layers.records import Records
from ..layers.stream import Stream
from .renumbering import turn_to_slots

if TYPE_CHECKING:
    from .layer import EvictingLayer

__all__ = ["keep_slots"]


def keep_slots(layer: EvictingLayer, index: Tensor) -> None:
    """Make `layer` hold the slots `index` `(B, H, K)`, ascending, and nothing else."""
    count = index.shape[2]
    keys, values = layer.streams
    before, padding = layer.padding, _padding_among(layer, count)
    records = layer.records
    if keys.packed_length:
        records = _gathered_records(layer, index[:, :, : count - keys.tail.length])
    layer.padding, layer.records = padding, records
    layer.stored_keys = keys.gathered(index, records, padding)
    layer.stored_values = values.gathered(index, records, padding)
    if layer.config.positions == "compact" and layer.facts.rotary is not None:
        turned, packed_length = layer.stored_keys, layer.stored_keys.packed_length
        if turned.tail is keys.tail:  # as it is, views of the old stream still read it
            turned.tail = copy.deepcopy(keys.tail)
        moved = index[:, :, packed_length:]
        turn_to_slots(turned.tail.view(), moved, layer.facts.rotary, before, padding, packed_length)
    layer.ledger.gather(index)


def _gathered_records(layer: EvictingLayer, index: Tensor) -> Records:
    old, keys = layer.records, layer.stored_keys
    batch_size, num_heads = old.data.shape[:2]
    chosen = Records(old.layout, batch_size, num_heads, old.data.device)
    final = keys.final_length
    chosen.ensure(index.shape[2], keys.spec.packed_length(final) if final else None)
    if not index.is_meta:  # `estimate` runs on shapes alone
        fields = [side_layout(stream, stream.packed_length, 0) for stream in layer.streams]
        is_native = all(_may_gather(stream, old.data.device) for stream in layer.streams)
        gather = gather_tokens if is_native else gather_records
        gather(old.data, chosen.data, index.contiguous(), *fields)
    return chosen


def _may_gather(stream: Stream, device: torch.device) -> bool:
    """Whether `gather_tokens` may be called on a device: not if its kernels have failed their check.

    Nor if heads have more channels than kernels take.
    """
    if not stream.use_native or stream.head_dim > MAX_HEAD_DIM:
        return False
    return device.type != "cuda" or cuda_loader.try_load(device)


def _padding_among(layer: EvictingLayer, count: int) -> Padding:
    """Padding of `count` tokens held: all real tokens are kept before any pad."""
    kept = Padding(layer.padding.sink_length)
    if layer.pads is not None:
        evicted = layer.cumulative_length - count
        kept.set((layer.pads - evicted).clamp_min(0), layer.padding.columns)
    return kept
