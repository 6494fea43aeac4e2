"""A layer's streams in the terms of the kernels (`kernels.layout`)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..kernels.cuda_inputs import rotation_tables
from ..kernels.layout import FORMATS, MAX_HEAD_DIM, MAX_METADATA, Side
from ..layers.codec import RotatedCodec, ScaledCodec, code_format_of
from ..layers.field_layout import side_layout
from ..layers.nonuniform import ChannelNonUniformCodec, NonUniformCodec, UnrotatedCodec
from ..layers.view import StreamView
from ..models.rotary import Rotary

__all__ = ["describe", "first_sinks"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BEYOND = 1 << 40
"""A slot that no cache reaches."""


def describe(view: StreamView) -> Side | None:
    """Describe what attention reads of a stream to the kernels; `None` if they cannot read it.

    Their slot 0 is the first token of the records, of which the view may leave out some.
    """
    stream, packed_length = view.stream, view.first + view.packed_length
    codec = outer = stream.codec
    factors, period, rotary_dim = None, 0, 0
    cos: Tensor | None = None
    sin: Tensor | None = None
    nonuniform: dict[str, Any] = {}
    if type(outer) is ScaledCodec:
        codec, factors = outer.inner, outer.factors
    elif type(outer) is RotatedCodec:
        codec, period, rotary_dim = outer.inner, outer.period, outer.rotary.rotary_dim
        cos, sin = rotation_tables(outer.rotary, period, stream.records.data.device)
    code_format = code_format_of(codec)
    if code_format is None:
        nonuniform = _describe_nonuniform(view)
        if not nonuniform:
            return None
        code_format = FORMATS["nonuniform"]
        rotary_dim = 2 * nonuniform["inv_freq"].shape[0] if "inv_freq" in nonuniform else 0
    layout = side_layout(stream, packed_length, code_format, period=period, rotary_dim=rotary_dim)
    sinks = stream.sinks if packed_length else None
    dtype = view.segments[0].dtype
    if (
        layout.head_dim > MAX_HEAD_DIM
        or layout.rows * layout.width > MAX_METADATA
        or dtype not in _DTYPES
        or any(exact.dtype != dtype for exact in view.segments[1:])
        or (sinks is not None and sinks.dtype != dtype)
    ):
        return None
    static = getattr(codec, "static_scale", None)
    return Side(
        layout,
        list(view.segments),
        static_scale=None if static is None else _of_heads(static, stream.records.data.shape[1]),
        factors=None if factors is None or packed_length == 0 else factors.squeeze(2),
        cos=cos,
        sin=sin,
        sinks=sinks,
        **nonuniform,
    )


def _describe_nonuniform(view: StreamView) -> dict[str, Tensor]:
    """What kernels are told of non-uniform codes besides the layout; nothing of other codecs."""
    stream = view.stream
    outer = stream.codec
    codec = outer.inner if type(outer) is UnrotatedCodec else outer
    if not isinstance(codec, NonUniformCodec):
        return {}
    found = {"levels": codec.levels}
    if isinstance(codec, ChannelNonUniformCodec) and codec.scale is not None:
        found["channel_scale"], found["channel_offset"] = codec.ranges_of_channels()
    if isinstance(outer, UnrotatedCodec):
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


@lru_cache(maxsize=256)
def _of_heads(static_scale: Tensor, heads: int) -> Tensor:
    """A scale for each head, fp32 `(heads,)`."""
    with torch.inference_mode(False):
        return static_scale.reshape(-1).float().expand(heads).contiguous()


@lru_cache(maxsize=64)
def _frequencies(rotary: Rotary) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(rotary.inv_freq, dtype=torch.float64, device="cpu")
