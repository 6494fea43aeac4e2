"""Moving packed tokens between records without decoding them to numbers: the torch default of the op.

A token can leave a block only if nothing it needs is shared with its neighbours, so metadata in the records
must be per token. Codes are unpacked to bytes, chosen, and packed again, a bounded number of heads at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..quantizers.packing import (
    BLOCK_TOKENS,
    pack_keys,
    pack_values,
    packed_bytes,
    padded_head_dim,
    unpack_keys,
    unpack_values,
)
from .layout import SideLayout

__all__ = ["gather_records"]

_SLAB_CODES = 1 << 22
"""Codes unpacked at once: 4 MB, unless a single head has more."""


def gather_records(
    records_in: Tensor, records_out: Tensor, index: Tensor, keys: SideLayout, values: SideLayout
) -> None:
    """Copy chosen slots; see `ops.gather_tokens` for the arguments.

    Raises:
        ValueError: If groups span tokens, shapes do not fit, the records share memory, or a slot is not a
            packed one.
    """
    _check(records_in, records_out, index, (keys, values))
    if not index.numel():
        return
    sources, targets = records_in.flatten(0, 1), records_out.flatten(0, 1)
    choices = index.flatten(0, 1)
    tokens = max(records_in.shape[2], -(-index.shape[2] // BLOCK_TOKENS)) * BLOCK_TOKENS
    step = max(1, _SLAB_CODES // (tokens * max(keys.head_dim, values.head_dim)))
    for start in range(0, len(choices), step):
        slab = slice(start, start + step)
        for layout, is_key in ((keys, True), (values, False)):
            _gather_side(sources[slab], targets[slab], choices[slab], layout, is_key=is_key)


def _gather_side(source: Tensor, target: Tensor, choice: Tensor, layout: SideLayout, *, is_key: bool) -> None:
    """Gather the fields of one side: records `(n, N or M, record_bytes)`, `choice` `(n, K)`."""
    width, interleaved = padded_head_dim(layout.head_dim), bool(layout.interleaved)
    count = choice.shape[1]
    blocks = -(-count // BLOCK_TOKENS)
    used = slice(layout.codes_offset, layout.codes_offset + packed_bytes(layout.head_dim, layout.nbits))
    if is_key:
        codes = unpack_keys(source[..., used], layout.nbits, width, interleaved)
    else:
        codes = unpack_values(source[..., used], layout.nbits, width)
    chosen = _chosen(codes.flatten(1, 2), choice).unflatten(1, (blocks, BLOCK_TOKENS))
    packed = pack_keys(chosen, layout.nbits, interleaved) if is_key else pack_values(chosen, layout.nbits)
    target[:, :blocks, used] = packed
    size = layout.width * layout.metadata_bytes
    for offset in (layout.scale_offset, layout.minimum_offset):
        if offset >= 0:
            used = slice(offset, offset + BLOCK_TOKENS * size)
            rows = source[..., used].unflatten(-1, (BLOCK_TOKENS, size)).flatten(1, 2)
            target[:, :blocks, used] = _chosen(rows, choice).view(len(choice), blocks, -1)


def _chosen(tokens: Tensor, choice: Tensor) -> Tensor:
    """Rows `choice` `(n, K)` of bytes `(n, T, size)`, and zeros up to whole blocks."""
    count, size = choice.shape[1], tokens.shape[2]
    chosen = tokens.new_zeros(len(choice), -(-count // BLOCK_TOKENS) * BLOCK_TOKENS, size)
    chosen[:, :count] = tokens.gather(1, choice[..., None].expand(-1, -1, size))
    return chosen


def _check(
    records_in: Tensor, records_out: Tensor, index: Tensor, sides: tuple[SideLayout, SideLayout]
) -> None:
    for layout in sides:
        has_metadata = layout.scale_offset >= 0 or layout.minimum_offset >= 0
        if layout.group_tokens != 1 and has_metadata:
            raise ValueError(
                f"gather_tokens moves tokens that share no metadata (group_tokens 1, or no stored metadata), "
                f"got {layout.group_tokens}."
            )
    if records_in.shape[:2] != records_out.shape[:2] or records_in.shape[3] != records_out.shape[3]:
        raise ValueError(
            f"gather_tokens needs records of the same rows, heads and bytes, got {tuple(records_in.shape)} "
            f"and {tuple(records_out.shape)}."
        )
    if index.shape[:2] != records_in.shape[:2] or index.dim() != 3 or index.dtype != torch.int64:
        raise ValueError(
            f"gather_tokens needs an int64 index (B, H, K) for records {tuple(records_in.shape)}, got "
            f"{index.dtype} {tuple(index.shape)}."
        )
    if index.shape[2] > records_out.shape[2] * BLOCK_TOKENS:
        raise ValueError(
            f"gather_tokens got {index.shape[2]} slots for records with room for "
            f"{records_out.shape[2] * BLOCK_TOKENS}."
        )
    if records_in.untyped_storage().data_ptr() == records_out.untyped_storage().data_ptr():
        raise ValueError("gather_tokens needs two records in different memory, got the same.")
    length = min(layout.packed_length for layout in sides)
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= length):
        raise ValueError(
            f"gather_tokens needs slots in [0, {length}), got {int(index.min())} to {int(index.max())}."
        )
