"""A layer's streams in the terms of the kernels (`kernels.layout`)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.layout import FORMATS, MAX_HEAD_DIM, MAX_METADATA, Side, SideLayout
from ..layers.codec import Codec, RotatedCodec, ScaledCodec, WrappedCodec, code_format_of
from ..layers.field_layout import side_layout
from ..layers.nonuniform import ChannelNonUniformCodec, NonUniformCodec, UnrotatedCodec
from ..layers.records import RecordLayout
from ..layers.stream import Stream
from ..layers.view import StreamView
from ..models.rotary import Rotary
from .limits import KERNEL_DTYPES

__all__ = ["describe", "first_sinks"]

_BEYOND = 1 << 40
"""A slot that no cache reaches."""


class _Format(NamedTuple):
    """What kernels are told of a stream that stays the same from step to step.

    Args:
        codec (`Codec`), records (`RecordLayout`), device (`torch.device`): What it was looked up for.
        numbers (`tuple[int, ...]`): Of a `SideLayout`, after the first.
        is_readable (`bool`): Whether the kernels know the codes, and take heads and metadata of these sizes.
        has_levels (`bool`): Whether the codes are non-uniform.
        static_scale (`torch.Tensor`, *optional*), cos, sin: As a `Side` takes them.
    """

    codec: Codec
    records: RecordLayout
    device: torch.device
    numbers: tuple[int, ...]
    is_readable: bool
    has_levels: bool
    static_scale: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None


def describe(view: StreamView) -> Side | None:
    """Describe what attention reads of a stream to the kernels; `None` if they cannot read it.

    Their slot 0 is the first token of the records, of which the view may leave out some.
    """
    stream, packed_length = view.stream, view.first + view.packed_length
    known: _Format | None = stream.described
    if (
        known is None
        or known.codec is not stream.codec
        or known.records is not stream.records.layout
        or known.device != stream.records.data.device
    ):
        known = stream.described = _format_of(stream)
    if not known.is_readable:
        return None
    sinks = stream.sinks if packed_length else None
    segments = view.segments
    dtype = segments[0].dtype
    if (
        dtype not in KERNEL_DTYPES
        or (len(segments) > 1 and any(exact.dtype != dtype for exact in segments[1:]))
        or (sinks is not None and sinks.dtype != dtype)
    ):
        return None
    factors = stream.codec.factors if packed_length and type(stream.codec) is ScaledCodec else None
    return Side(
        SideLayout(packed_length, *known.numbers),
        list(segments),
        static_scale=known.static_scale,
        factors=None if factors is None else factors.squeeze(2),
        cos=known.cos,
        sin=known.sin,
        sinks=sinks,
        **(_of_levels(view) if known.has_levels else {}),
    )


def _format_of(stream: Stream) -> _Format:
    codec: Codec = stream.codec
    outer = codec
    records, device = stream.records.layout, stream.records.data.device
    period = rotary_dim = 0
    cos: Tensor | None = None
    sin: Tensor | None = None
    is_unrotated = type(outer) is UnrotatedCodec and isinstance(outer.inner, NonUniformCodec)
    if isinstance(outer, WrappedCodec) and (type(outer) in (ScaledCodec, RotatedCodec) or is_unrotated):
        codec = outer.inner
    if isinstance(outer, RotatedCodec):
        period, rotary_dim = outer.period, outer.rotary.rotary_dim
        cos, sin = outer.rotary.block_tables(period, device)
    code_format = code_format_of(codec)
    has_levels = isinstance(codec, NonUniformCodec) and (outer is codec or is_unrotated)
    if has_levels:
        code_format = FORMATS["nonuniform"]
        rotary_dim = 2 * len(outer.rotary.inv_freq) if isinstance(outer, UnrotatedCodec) else 0
    layout = side_layout(stream, 0, code_format or 0, period=period, rotary_dim=rotary_dim)
    is_small = layout.head_dim <= MAX_HEAD_DIM and layout.rows * layout.width <= MAX_METADATA
    static = getattr(codec, "static_scale", None)
    return _Format(
        outer,
        records,
        device,
        layout[1:],
        code_format is not None and is_small,
        has_levels,
        None if static is None else _of_heads(static, stream.records.data.shape[1]),
        cos,
        sin,
    )


def _of_levels(view: StreamView) -> dict[str, Tensor]:
    """What kernels are told of non-uniform codes besides."""
    stream = view.stream
    outer: Any = stream.codec
    codec: Any = outer.inner if type(outer) is UnrotatedCodec else outer
    found = {"levels": codec.levels}
    if isinstance(codec, ChannelNonUniformCodec) and codec.scale is not None:
        found["channel_scale"], found["channel_offset"] = codec.ranges_of_channels()
    if type(outer) is UnrotatedCodec:
        found["inv_freq"] = _frequencies(outer.rotary)
        if not stream.padding.begins_at_zero:
            found["positions"] = -stream.padding.starts(stream.records.data).to(torch.int64)
    if stream.outliers is not None and view.packed_length:
        found |= {"outliers": stream.outliers.entries, "outlier_starts": stream.outliers.starts}
    return found


def first_sinks(view: StreamView, *sides: Side) -> Tensor | None:
    """Slot of the first exact sink of every row, int64 `(B,)`; `None` where there is none, or all are 0.

    Args:
        view (`StreamView`): What is read, on the device where the slots are wanted.
        sides (`Side`): The same, and the other side of the layer, in the terms of the kernels.
    """
    padding = view.stream.padding
    if padding.begins_at_zero or all(side.sinks is None for side in sides):
        return None
    starts = padding.starts(view.segments[-1]).to(torch.int64)
    # sinks that are gone are nowhere, and not before slot 0, where kernels round towards the first block
    return starts.masked_fill(starts + padding.sink_length <= 0, _BEYOND) if padding.dropped else starts


def _of_heads(static_scale: Tensor, heads: int) -> Tensor:
    """A scale for each head, fp32 `(heads,)`."""
    with torch.inference_mode(False):
        return static_scale.reshape(-1).float().expand(heads).contiguous()


@lru_cache(maxsize=64)
def _frequencies(rotary: Rotary) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(rotary.inv_freq, dtype=torch.float64, device="cpu")
