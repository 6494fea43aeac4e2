"""What attention reads of a stream in one call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..quantizers.half_range import kept_finite
from .gradients import refusing_gradients
from .rows import stream_of_row

if TYPE_CHECKING:
    from .stream import Stream

__all__ = ["StreamView", "joined"]


@dataclass(eq=False, slots=True)  # not frozen, which would cost three times as much: a step makes two a layer
class StreamView:
    """What attention reads of a stream in one call: the tokens packed before it, then exact segments.

    Nothing of it changes once it is made.

    Args:
        stream (`Stream`): Where packed tokens are decoded from.
        packed_length (`int`): Tokens read from codes.
        segments (`tuple[torch.Tensor, ...]`): Exact tokens `(B, H, n, D)` that follow, in order.
        first (`int`): Packed tokens of the stream that come before and are not read; 0 if none is packed.
    """

    stream: Stream
    packed_length: int
    segments: tuple[Tensor, ...]
    first: int = 0

    @classmethod
    def of(cls, stream: Stream) -> StreamView:
        """All that a stream holds now."""
        return cls(stream, stream.packed_length, (stream.tail.view(),))

    @property
    def length(self) -> int:
        """Tokens in all."""
        length = self.packed_length
        for segment in self.segments:
            length += segment.shape[2]
        return length

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Slots at which one source of tokens ends and the next begins."""
        ends = [self.packed_length]
        for segment in self.segments:
            ends.append(ends[-1] + segment.shape[2])
        return tuple(ends)

    def real_slots(self) -> Tensor | None:
        """Which slots are no pads, bool `(B, 1, 1, T)`; `None` if none is."""
        if self.stream.padding.lengths is None:
            return None
        newest = self.segments[-1]
        slots = torch.arange(self.first, self.first + self.length, device=newest.device)
        return (slots >= self.stream.padding.starts(newest)[:, None])[:, None, None, :]

    def read(self, start: int, stop: int) -> Tensor:
        """Return tokens `[start, stop)`, fp32 where they come from codes, else in their own dtype."""
        parts = [self._decode(start, min(stop, self.packed_length))] if start < self.packed_length else []
        begin = self.packed_length
        for segment in self.segments:
            low, high = max(start, begin), min(stop, begin + segment.shape[2])
            if low < high:
                parts.append(segment[:, :, low - begin : high - begin])
            begin += segment.shape[2]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.float() if part.dtype != torch.float64 else part for part in parts], dim=2)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Materialize all as one tensor `(B, H, length, D)`, block by block; finite numbers stay so."""
        first = self.segments[0]
        out = first.new_empty(first.shape[0], first.shape[1], self.length, first.shape[3], dtype=dtype)
        step = self.stream.slab_tokens
        for start in range(0, self.packed_length, step):
            stop = min(start + step, self.packed_length)
            out[:, :, start:stop] = kept_finite(self._decode(start, stop), dtype)
        for segment, stop in zip(self.segments, self.boundaries[1:], strict=True):
            out[:, :, stop - segment.shape[2] : stop] = kept_finite(segment, dtype)
        return out

    def of_row(self, row: int) -> StreamView:
        """The same tokens of one row of the batch, from 0 on, as a batch of one."""
        segments = tuple(segment[row : row + 1] for segment in self.segments)
        return replace(self, stream=stream_of_row(self.stream, row), segments=segments)

    def without_oldest(self, count: int) -> StreamView:
        """The view less its `count` oldest tokens, of which at least one remains."""
        if count < self.packed_length:
            return replace(self, packed_length=self.packed_length - count, first=self.first + count)
        segments, surplus = [], count - self.packed_length
        for segment in self.segments:
            if surplus < segment.shape[2]:
                segments.append(segment[:, :, surplus:])
            surplus = max(0, surplus - segment.shape[2])
        return StreamView(self.stream, 0, tuple(segments))

    def _decode(self, start: int, stop: int) -> Tensor:
        return self.stream.decode(self.first + start, self.first + stop)


def joined(view: StreamView, *sources: Tensor) -> Tensor:
    """Return a view of which nothing is packed as one tensor `(B, H, T, D)`, for attention to read.

    Args:
        view (`StreamView`): What to read.
        sources (`torch.Tensor`): Its newest tokens as the model gave them.
    """
    states = view.segments[0] if len(view.segments) == 1 else torch.cat(view.segments, dim=2)
    return refusing_gradients(states, *sources)
