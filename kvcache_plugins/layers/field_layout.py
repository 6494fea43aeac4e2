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
    codec, records = stream.codec, stream.records
    fields = {
        name.removeprefix(f"{stream.side}_"): offset
        for name, (offset, _) in records.layout.fields.items()
        if name.startswith(f"{stream.side}_")
    }
    return SideLayout(
        packed_length=packed_length,
        nbits=codec.nbits,
        format=code_format,
        head_dim=stream.head_dim,
        group_tokens=codec.stored_granularity.tokens,
        width=codec.granularity.width(stream.head_dim),
        metadata_bytes=records.layout.metadata_bytes,
        interleaved=int(stream.interleaved),
        codes_offset=fields["codes"],
        scale_offset=fields.get("scale", -1),
        minimum_offset=fields.get("minimum", fields.get("offset", -1)),
        period=period,
        rotary_dim=rotary_dim,
    )
