"""What the CUDA kernels take beside the records, and which of them takes it.

Small tables are moved to the GPU once and kept there.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..quantizers.packing import BLOCK_TOKENS, packed_bytes
from .layout import FORMATS, Side, SideLayout

__all__ = ["MAX_QUERIES", "is_fast", "on_device"]

MAX_QUERIES = 64
"""Query tokens that one call of `decode_attention` takes."""
_MOST_FAST_CHANNELS = 256
"""Channels of keys, and of values, that tensor cores read: sums of values are kept in registers."""
_EXTRAS = tuple(field.name for field in fields(Side) if field.name not in ("layout", "segments"))


def on_device(side: Side, device: torch.device) -> Side:
    """The side with every optional tensor on `device`; what lies elsewhere is copied once and remembered."""
    if all(extra is None or extra.device == device for extra in side.extras):  # as in all steps but the first
        return side
    moved: dict[str, Any] = {
        name: _copied(tensor, device)
        for name in _EXTRAS
        if (tensor := getattr(side, name)) is not None and tensor.device != device
    }
    return replace(side, **moved)


@lru_cache(maxsize=256)
def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return tensor.to(device)


def is_fast(dtype: torch.dtype, record_bytes: int, keys: Side, values: Side, shared_bytes: int) -> bool:
    """Whether `decode_attention` reads packed tokens by tensor cores, for queries that see some.

    The other kernel reads everything, in fp32, at a small part of the speed. The decision is made in
    `csrc/cuda/decode_attention_binding.cpp`, of which this is a mirror.

    Args:
        dtype (`torch.dtype`): Of the queries.
        record_bytes (`int`): Of a record.
        keys (`Side`): As the op gets them.
        values (`Side`): As the op gets them.
        shared_bytes (`int`): Shared memory a thread block of the GPU may have
            (`torch.cuda.get_device_properties(device).shared_memory_per_block_optin`).
    """
    if dtype not in (torch.float16, torch.bfloat16) or record_bytes % 16:
        return False
    if min(keys.layout.packed_length, values.layout.packed_length) == 0:
        return False
    levels = FORMATS["nonuniform"]
    if (keys.layout.format == levels) != (values.layout.format == levels):
        return False
    if not all(_has_aligned_fields(side.layout, record_bytes) for side in (keys, values)):
        return False
    return _are_keys_fast(keys) and _are_values_fast(values) and _fast_bytes(keys, values) <= shared_bytes


def _has_aligned_fields(layout: SideLayout, record_bytes: int) -> bool:
    codes = packed_bytes(layout.head_dim, layout.nbits)
    offsets = (layout.scale_offset, layout.minimum_offset)
    fields = [offset - layout.codes_offset for offset in offsets if offset >= 0]
    return (
        layout.head_dim % 16 == 0
        and layout.head_dim <= _MOST_FAST_CHANNELS
        and layout.codes_offset % 16 == 0
        and (
            layout.format == FORMATS["nonuniform"]
            or layout.scale_offset >= 0
            or (layout.minimum_offset < 0 and layout.width == 1)
        )
        and all(field >= codes and field % 16 == 0 for field in fields)
        and (not fields or layout.metadata_bytes == 2)
        and layout.codes_offset + _copied_bytes(layout) <= record_bytes
    )


def _copied_bytes(layout: SideLayout) -> int:
    row = layout.rows * layout.width * layout.metadata_bytes
    end = layout.codes_offset + packed_bytes(layout.head_dim, layout.nbits)
    end = max([end, *(at + row for at in (layout.scale_offset, layout.minimum_offset) if at >= 0)])
    return -(-(end - layout.codes_offset) // 16) * 16


def _are_keys_fast(side: Side) -> bool:
    layout = side.layout
    whole = layout.rotary_dim == layout.head_dim
    if layout.format == FORMATS["nonuniform"]:
        is_paired = side.inv_freq is None or bool(layout.interleaved) or whole
        is_served = side.channel_scale is not None and side.cos is None and side.factors is None
        return is_paired and is_served and layout.packed_length % BLOCK_TOKENS == 0
    if side.inv_freq is not None or side.outliers is not None:
        return False
    is_affine = layout.format == FORMATS["affine"] and min(layout.scale_offset, layout.minimum_offset) >= 0
    per_channel = is_affine and layout.width == layout.head_dim and layout.group_tokens >= 16
    if side.cos is not None:
        return per_channel and layout.nbits < 8 and whole and layout.period % 16 == 0
    is_grouped = layout.format == FORMATS["symmetric"] and layout.head_dim // layout.width % 16 == 0
    is_grouped = is_grouped and layout.group_tokens == 1 and layout.scale_offset >= 0
    per_channel = per_channel and (bool(layout.interleaved) or layout.nbits == 8)
    return per_channel or is_grouped or layout.width == 1


def _are_values_fast(side: Side) -> bool:
    layout = side.layout
    if side.cos is not None or side.inv_freq is not None:
        return False
    if layout.format == FORMATS["nonuniform"]:
        is_per_token = min(layout.scale_offset, layout.minimum_offset) >= 0
        is_per_token = is_per_token and layout.width == layout.group_tokens == 1
        return is_per_token and side.factors is None and layout.packed_length % BLOCK_TOKENS == 0
    has_minima = layout.format != FORMATS["affine"] or layout.minimum_offset >= 0
    return side.outliers is None and layout.head_dim // layout.width % 16 == 0 and has_minima


def _fast_bytes(keys: Side, values: Side) -> int:
    """Least shared memory of a thread block: `FastMemory`, `LevelMemory` in `csrc/cuda`, of 8 query rows."""
    pairs, value_dim = keys.layout.head_dim // 2, values.layout.head_dim
    unit = max(_copied_bytes(side.layout) for side in (keys, values))
    ring = max(8 * _aligned(unit), 128 * (value_dim + 6)) + 4096 + 128
    sinks = 16 if keys.sinks is not None and keys.sinks.shape[2] else 0
    if keys.layout.format != FORMATS["nonuniform"]:
        turns = _aligned(8 * keys.layout.period * (pairs + 4)) if keys.cos is not None else 0
        has_two_sizes = keys.layout.width > 1 and keys.layout.nbits == 8 and keys.cos is None
        has_two_sizes = has_two_sizes and keys.layout.format == FORMATS["affine"]
        return (64 if has_two_sizes else 32) * pairs + turns + ring + sinks
    has_outliers = keys.outliers is not None or values.outliers is not None
    patches = 4 * (4096 if value_dim <= 128 else 8192) if has_outliers else 0
    turns = 16 * 16 * (pairs // 2 + 4)
    return 128 * pairs + _aligned(8 * pairs) + 128 + turns + 4 * _aligned(8 * pairs) + patches + ring


def _aligned(size: int) -> int:
    return -(-size // 128) * 128
