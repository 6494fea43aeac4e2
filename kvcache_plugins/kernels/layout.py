"""How a kernel finds the keys or values of a layer: plain integers and tensors, no notion of a cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from ..quantizers.packing import BLOCK_TOKENS

__all__ = ["FORMATS", "MAX_HEAD_DIM", "MAX_METADATA", "Side", "SideLayout", "dense_rows"]

FORMATS = {"affine": 0, "symmetric": 1, "e4m3": 2, "e5m2": 3, "nonuniform": 4}
"""Meaning of a code; the numbers of `Format` in `csrc/{cpu/decode_attention,cuda/arguments}.h`."""
MAX_HEAD_DIM = 512
"""Channels of a head, of keys or of values."""
MAX_METADATA = 4096
"""Scales in a record, per side."""


class SideLayout(NamedTuple):
    """Where the codes and metadata of the keys (or values) lie in a record, and what they mean.

    The op takes it as a list of integers in the order of the fields.

    Args:
        packed_length (`int`): Slots `[0, packed_length)` are read from codes.
        nbits (`int`): Bits per code.
        format (`int`): One of `FORMATS`.
        head_dim (`int`): Channels, at most `MAX_HEAD_DIM` for kernels.
        group_tokens (`int`): Tokens that share a row of metadata, 1 to 64.
        width (`int`): Metadata entries in a row.
        metadata_bytes (`int`): 2 for fp16, 4 for fp32.
        interleaved (`int`): 1 if the pairs of channels that key codes are laid out by are neighbours, as
            rotary pairs then are, too.
        codes_offset (`int`), scale_offset (`int`), minimum_offset (`int`): Bytes from the start of a record;
            -1 where there is no such field.
        period (`int`), rotary_dim (`int`): Rows and twice the columns of the rotation tables; 0 without.
    """

    packed_length: int
    nbits: int
    format: int
    head_dim: int
    group_tokens: int
    width: int
    metadata_bytes: int
    interleaved: int
    codes_offset: int
    scale_offset: int = -1
    minimum_offset: int = -1
    period: int = 0
    rotary_dim: int = 0

    @property
    def rows(self) -> int:
        """Metadata rows in a record."""
        return BLOCK_TOKENS // self.group_tokens

    def integers(self) -> list[int]:
        """The fields in order, as the op takes them."""
        return list(self)


@dataclass(eq=False, slots=True)  # not frozen, which would cost five times as much: a step makes two a layer
class Side:
    """The keys or values a kernel reads: the packed tokens, then exact segments.

    Nothing of it changes once it is made.

    Args:
        layout (`SideLayout`): Codes and metadata inside the records.
        segments (`list[torch.Tensor]`): Exact tokens `(B, H, n, D)` that follow the packed ones, in order.
        static_scale (`torch.Tensor` of shape `(H,)`, *optional*): fp32 scale instead of a stored one.
        factors (`torch.Tensor` of shape `(B, H, D)`, *optional*): fp32, multiply what was decoded.
        cos (`torch.Tensor` of shape `(period, rotary_dim / 2)`, *optional*), sin: fp32 rotation that packed
            keys of slot `t` still need, row `t % period`.
        sinks (`torch.Tensor` of shape `(B, H, n, D)`, *optional*): Exact tokens in place of packed ones.
        levels (`torch.Tensor` of shape `(2 ** nbits,)`, *optional*): fp32, what non-uniform codes stand for;
            numbers that bf16 holds exactly.
        channel_scale (`torch.Tensor` of shape `(1 or B, H, D)`, *optional*), channel_offset: fp32, in place
            of stored ones.
        inv_freq (`torch.Tensor` of shape `(rotary_dim / 2,)`, *optional*): fp64, if packed keys are from
            before the rotary embedding: slot `t` still needs the rotation by `(t + position) * inv_freq`.
        positions (`torch.Tensor` of shape `(B,)`, *optional*): int64, of slot 0; zero if not given.
        outliers (`torch.Tensor` of shape `(B, N, capacity)`, *optional*), outlier_starts: What the codes of
            a block lack, before any rotation (see `quantizers.outliers`).
    """

    layout: SideLayout
    segments: list[Tensor]
    static_scale: Tensor | None = None
    factors: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    sinks: Tensor | None = None
    levels: Tensor | None = None
    channel_scale: Tensor | None = None
    channel_offset: Tensor | None = None
    inv_freq: Tensor | None = None
    positions: Tensor | None = None
    outliers: Tensor | None = None
    outlier_starts: Tensor | None = None

    @property
    def extras(self) -> list[Tensor | None]:
        """The optional tensors in the order in which the op takes them, up to the last that is given."""
        extras = [
            self.static_scale,
            self.factors,
            self.cos,
            self.sin,
            self.sinks,
            self.levels,
            self.channel_scale,
            self.channel_offset,
            self.inv_freq,
            self.positions,
            self.outliers,
            self.outlier_starts,
        ]
        while extras and extras[-1] is None:  # every element costs the op time
            extras.pop()
        return extras

    @property
    def length(self) -> int:
        """Tokens in all."""
        length = self.layout.packed_length
        for segment in self.segments:
            length += segment.shape[2]
        return length

    def without_newest(self, count: int) -> Side:
        """The side less its `count` newest tokens, which are part of the last segment."""
        if count == 0:
            return self
        return replace(self, segments=[*self.segments[:-1], self.segments[-1][:, :, :-count]])

    @classmethod
    def from_op(cls, layout: list[int], segments: list[Tensor], extras: list[Tensor | None]) -> Side:
        """Inverse of `layout.integers()`, `segments` and `extras`."""
        return cls(SideLayout(*layout), list(segments), *extras)

    def contiguous_rows(self) -> list[Tensor]:
        """The segments with their channels next to each other, as kernels read them."""
        return [s if s.stride(3) == 1 or s.shape[3] == 1 else s.contiguous() for s in self.segments]


def dense_rows(states: Tensor) -> Tensor:
    """A tensor, or a copy, with the numbers of a row next to each other, as kernels read them."""
    return states if states.stride(-1) == 1 else states.contiguous()
