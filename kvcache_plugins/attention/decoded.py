"""A stream's tokens, decoded a tile at a time by a native kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.layout import Side
from ..kernels.ops import decode_tokens
from ..layers.view import StreamView
from ..quantizers.half_range import kept_finite

__all__ = ["DecodedView"]


@dataclass(frozen=True)
class DecodedView:
    """Tokens as a [`reference.TokenView`], where a native kernel reads their codes.

    Args:
        tokens (`StreamView`): What is read.
        side (`Side`): The same in the terms of the kernels.
        sink_start (`torch.Tensor` of shape `(B,)`, *optional*): int64, slot of the first exact sink of every
            row.
    """

    tokens: StreamView
    side: Side
    sink_start: Tensor | None

    @property
    def length(self) -> int:
        """Tokens in all."""
        return self.tokens.length

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Slots where the source of tokens changes."""
        return self.tokens.boundaries

    @property
    def heads(self) -> int:
        """Heads of a token."""
        return int(self.tokens.stream.records.data.shape[1])

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.side.layout.head_dim

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens `[start, stop)`: fp32 where they come from codes, else in their own dtype."""
        if start >= self.tokens.packed_length:
            return self.tokens.read(start, stop)
        return self._decode(start, stop, torch.float32)

    def read_as(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Tokens `[start, stop)` in `dtype`: as they lie where they are exact, else decoded."""
        begin = self.tokens.packed_length
        for segment in self.side.segments:
            end = begin + segment.shape[2]
            if begin <= start and stop <= end:
                return kept_finite(segment[:, :, start - begin : stop - begin], dtype).to(dtype)
            begin = end
        return self._decode(start, stop, dtype)

    def _decode(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return decode_tokens(
            self.tokens.stream.records.data,
            self.side,
            is_key=self.tokens.stream.side == "key",
            start=self.tokens.first + start,
            stop=self.tokens.first + stop,
            dtype=dtype,
            sink_start=self.sink_start,
        )
