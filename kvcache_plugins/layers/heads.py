"""Heads of one layer that hold different numbers of tokens: which go together, and how they are moved.

A stream holds as many tokens of every head. Heads that hold fewer or more are streams of their own, so what
leaves one of them is really gone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import UnsupportedOperationError
from .handle import KVHandle
from .padding import Padding
from .records import Records
from .stream import Stream
from .tail import Tail

if TYPE_CHECKING:
    from .base import PackedLayer

__all__ = [
    "GroupedHandle",
    "HeadGroup",
    "joined_records",
    "joined_streams",
    "records_of_heads",
    "stream_of_heads",
]


class HeadGroup:
    """Some of the key-value heads of a layer.

    Args:
        heads (`Sequence[int]`): Their indices, in the order in which they are stored.
        device (`torch.device`): Where states are.
    """

    def __init__(self, heads: Sequence[int], device: torch.device) -> None:
        self.heads = tuple(heads)
        self.index = torch.tensor(self.heads, device=device)
        self._query_heads: dict[int, Tensor] = {}

    def of_states(self, states: Tensor) -> Tensor:
        """Their part of keys or values `(B, H, n, D)`."""
        return states.index_select(1, self.index)

    def query_heads(self, group_size: int) -> Tensor:
        """Query heads that read them, `group_size` each: int64 `(n * group_size,)`."""
        if group_size not in self._query_heads:
            offsets = torch.arange(group_size, device=self.index.device)
            self._query_heads[group_size] = (self.index[:, None] * group_size + offsets).flatten()
        return self._query_heads[group_size]


class GroupedHandle(KVHandle):
    """Keys or values of heads that hold different numbers of tokens; as long as the longest.

    Attributes:
        parts (`tuple[tuple[HeadGroup, KVHandle], ...]`): All heads, group by group.
    """

    parts: tuple[tuple[HeadGroup, KVHandle], ...]

    @staticmethod
    def __new__(
        cls, layer: PackedLayer, parts: Sequence[tuple[HeadGroup, KVHandle]], source: Tensor
    ) -> GroupedHandle:
        longest = max((handle.tokens for _, handle in parts), key=lambda tokens: tokens.length)
        handle: GroupedHandle = cls.standing_for(
            layer, longest, heads=source.shape[1], head_dim=source.shape[3]
        )
        handle.parts, handle.sources = tuple(parts), (source,)
        return handle

    def _made(self) -> Tensor:
        """There is no such tensor.

        Raises:
            UnsupportedOperationError: Always.
        """
        raise UnsupportedOperationError(
            f"The heads of layer {self.layer.layer_idx} hold from "
            f"{min(handle.tokens.length for _, handle in self.parts)} to {self.tokens.length} tokens "
            "(head_floor), which no tensor can show an attention function. Allowed are 'sdpa', the flash and "
            "flex ones and 'kvcache_plugins' (model.set_attn_implementation), without attention weights or "
            "dropout."
        )


def records_of_heads(records: Records, group: HeadGroup) -> Records:
    """A copy of what belongs to some heads."""
    chosen = copy.copy(records)
    chosen.data = group.of_states(records.data)
    return chosen


def stream_of_heads(stream: Stream, group: HeadGroup, records: Records, padding: Padding) -> Stream:
    """Return a stream of some heads, whose codes are in `records`; the one they come from stays as it is."""
    chosen = copy.copy(stream)
    chosen.records, chosen.padding, chosen.codec = records, padding, copy.copy(stream.codec)
    chosen.codec.load_batch_state(
        {name: group.of_states(tensor) for name, tensor in stream.codec.batch_state().items()}
    )
    chosen.tail = _tail_of(stream, group.of_states(stream.tail.view()))
    chosen.sinks = None if stream.sinks is None else group.of_states(stream.sinks)
    return chosen


def joined_records(parts: Sequence[Records]) -> Records:
    """Records of the heads of all parts, which have as many blocks; with fp32 metadata if any of them has."""
    if any(records.layout.metadata_bytes == 4 for records in parts):
        for records in parts:
            if records.layout.metadata_bytes != 4:
                records.widen_metadata()
    joined = copy.copy(parts[0])
    joined.data = torch.cat([records.data for records in parts], dim=1)
    return joined


def joined_streams(parts: Sequence[Stream], records: Records, padding: Padding) -> Stream:
    """A stream of the heads of all parts, which hold as many tokens, packed and exact."""
    joined = copy.copy(parts[0])
    joined.records, joined.padding, joined.codec = records, padding, copy.copy(parts[0].codec)
    states = [stream.codec.batch_state() for stream in parts]
    joined.codec.load_batch_state(
        {name: torch.cat([state[name] for state in states], dim=1) for name in states[0]}
    )
    joined.tail = _tail_of(parts[0], torch.cat([stream.tail.view() for stream in parts], dim=1))
    sinks = [stream.sinks for stream in parts if stream.sinks is not None]
    joined.sinks = torch.cat(sinks, dim=1) if sinks else None
    return joined


def _tail_of(stream: Stream, states: Tensor) -> Tail:
    """The tail of a stream, with other states `(B, H, n, D)` in it."""
    old = stream.tail
    kind = (old.limit, old.buffer.dtype, old.buffer.device, old.slack)
    tail = Tail(states.shape[0], states.shape[1], states.shape[3], *kind)
    tail.replace(states, stream.length)
    return tail
