"""Encoding by a native kernel, where one fits; the codecs remain the reference and serve everything else."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import cuda_loader, loader
from ..kernels.cuda_inputs import rotation_tables
from ..kernels.layout import MAX_HEAD_DIM
from ..kernels.ops import encode_tokens
from .codec import Codec, RotatedCodec, ScaledCodec, code_format_of
from .padding import Padding
from .records import Records

__all__ = ["encode_native"]


def encode_native(
    codec: Codec, side: str, records: Records, states: Tensor, start: int, interleaved: bool, padding: Padding
) -> bool:
    """Encode tokens and write them into the records, with the same bytes as the codec would give.

    Args:
        codec (`Codec`): What encodes the stream.
        side (`str`): `"key"` or `"value"`.
        records (`Records`): Where to write.
        states (`torch.Tensor` of shape `(B, H, n, D)`): Whole groups of tokens.
        start (`int`): Slot of the first.
        interleaved (`bool`): Whether rotary pairs are neighbours, for the order of key codes.
        padding (`Padding`): Pads and sinks take no part in statistics, which is the codec's to respect.

    Returns:
        `bool`: Whether it was done; if not, nothing was written.
    """
    factors = codec.factors if isinstance(codec, ScaledCodec) else None
    inner = codec.inner if isinstance(codec, (RotatedCodec, ScaledCodec)) else codec
    code_format = code_format_of(inner)
    head_dim = states.shape[3]
    if code_format is None or "scale" not in inner.metadata_names or inner.granularity.across_heads:
        return False
    device = records.data.device
    if states.device != device or head_dim > MAX_HEAD_DIM or start < padding.first_plain_slot:
        return False
    if isinstance(codec, RotatedCodec) and codec.rotary.interleaved != interleaved:
        return False
    if not _has_kernels(device):
        return False
    if factors is not None:
        states = states.float() / factors
    fields = records.layout.fields
    layout = [
        inner.nbits,
        code_format,
        head_dim,
        inner.group_tokens,
        inner.granularity.width(head_dim),
        records.layout.metadata_bytes,
        int(interleaved),
        *(fields.get(f"{side}_{name}", (-1, 0))[0] for name in ("codes", "scale", "minimum")),
    ]
    states = states if states.stride(-1) == 1 else states.contiguous()
    tables = rotation_tables(codec.rotary, codec.period, device) if isinstance(codec, RotatedCodec) else ()
    return encode_tokens(records.data, states, side == "key", layout, start, *tables)


def _has_kernels(device: torch.device) -> bool:
    if device.type == "cuda":
        return cuda_loader.try_load(device)
    return device.type == "cpu" and loader.try_load()
