"""A stream in the terms of the kernels: where its codes and metadata lie in a record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..kernels.layout import SideLayout

if TYPE_CHECKING:
    from .stream import Stream

__all__ = ["side_layout"]


def side_layout(
    stream: Stream, packed_length: int, code_format: int, *, period: int = 0, rotary_dim: int = 0
) -> SideLayout:
    """Describe the fields of a stream in its records.

    Args:
        stream (`Stream`): Keys or values of a layer.
        packed_length (`int`): Slots that may be read from codes.
        code_format (`int`): One of `kernels.layout.FORMATS`; without meaning for kernels that only move
            codes.
        period (`int`): Rows of the rotation tables that packed keys still need; 0 without.
        rotary_dim (`int`): Channels that these rotate.
    """
    layout = stream.records.layout
    places = layout.places[stream.side]
    return SideLayout(
        packed_length,
        places.nbits,
        code_format,
        stream.head_dim,
        places.group_tokens,
        places.width,
        layout.metadata_bytes,
        int(stream.codec.interleaved),
        places.codes,
        places.scale,
        places.minimum,
        period,
        rotary_dim,
    )
