"""One growable byte buffer per layer, of records: a record is one 64-token block of one (row, head).

The buffer has the shape `(B, H, N, record_bytes)`.

A record holds key codes, key metadata, value codes and value metadata, in this order, and is padded to 64
bytes, so that a kernel walks one forward stream per (row, head), and so that every batch operation is an
index on dimension 0 and every move is one copy. Records are zero where nothing has been written: that is what
lets a partial block be completed with a bitwise or.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..quantizers.packing import BLOCK_TOKENS, packed_bytes
from .codec import Codec

__all__ = ["RecordLayout", "Records", "SidePlaces", "size_class"]

_ALIGNMENT = 64
_HALF_MAX = torch.finfo(torch.float16).max
_METADATA_DTYPES = {2: torch.float16, 4: torch.float32}


def size_class(count: int) -> int:
    """Smallest allocation size >= `count`, of sizes spaced by at most 1/32.

    A pure function of what is needed, so capacity does not depend on how the tokens arrived. Copying a layer
    once per 1/32 of its length costs nothing beside attention, which reads all of it at every token.
    """
    step = max(1, (1 << max(count.bit_length() - 1, 0)) // 32)
    return -(-count // step) * step


class SidePlaces(NamedTuple):
    """Where the fields of one side lie, and how its metadata are grouped, as plain numbers.

    Args:
        nbits (`int`): Bits per code.
        group_tokens (`int`): Tokens of a block that share a row of metadata.
        width (`int`): Metadata entries in a row.
        codes (`int`), scale (`int`), minimum (`int`): Bytes from the start of a record; -1 where there is no
            such field. A codec's offsets are its minima.
    """

    nbits: int
    group_tokens: int
    width: int
    codes: int
    scale: int
    minimum: int


class RecordLayout:
    """Byte offsets of the fields of a record.

    Args:
        codecs (`dict[str, tuple[Codec, int]]`): `{"key": (codec, head_dim), "value": (codec, head_dim)}`.
        metadata_bytes (`int`): 2 for fp16 metadata, 4 for fp32.
    """

    def __init__(self, codecs: dict[str, tuple[Codec, int]], metadata_bytes: int = 2) -> None:
        self.codecs, self.metadata_bytes = codecs, metadata_bytes
        self.fields: dict[str, tuple[int, int]] = {}
        offset = 0
        for side, (codec, head_dim) in codecs.items():
            sizes = {"codes": packed_bytes(head_dim, codec.nbits)}
            row_bytes = codec.granularity.width(head_dim) * metadata_bytes
            sizes |= dict.fromkeys(codec.metadata_names, codec.rows_per_block * row_bytes)
            for name, size in sizes.items():
                # Kernels copy codes 16 bytes at a time; fp32 metadata need 4. Those of fp16 happen to lie at
                # multiples of 16 for all backends, without which tensor cores do not read a layout.
                alignment = 16 if name == "codes" else 4
                offset = -(-offset // alignment) * alignment
                self.fields[f"{side}_{name}"] = (offset, size)
                offset += size
        self.record_bytes = -(-offset // _ALIGNMENT) * _ALIGNMENT
        self.places = {side: self._places(side) for side in codecs}

    def _places(self, side: str) -> SidePlaces:
        codec, head_dim = self.codecs[side]
        codes, scale, minimum, shift = (
            self.fields.get(f"{side}_{name}", (-1, 0))[0] for name in ("codes", "scale", "minimum", "offset")
        )
        return SidePlaces(
            nbits=codec.nbits,
            group_tokens=codec.stored_granularity.tokens,
            width=codec.granularity.width(head_dim),
            codes=codes,
            scale=scale,
            minimum=max(minimum, shift),
        )


class Records:
    """The buffer and its views.

    Args:
        layout (`RecordLayout`): Where the fields lie.
        batch_size (`int`), num_heads (`int`): Leading dimensions.
        device (`torch.device`): Where the bytes live.
    """

    def __init__(self, layout: RecordLayout, batch_size: int, num_heads: int, device: torch.device) -> None:
        self.layout = layout
        self.data = torch.zeros(
            batch_size, num_heads, 0, layout.record_bytes, dtype=torch.uint8, device=device
        )

    @property
    def shape(self) -> torch.Size:
        """Of the buffer: `(B, H, N, record_bytes)`."""
        return self.data.shape

    @property
    def num_blocks(self) -> int:
        """Blocks there is room for."""
        return self.shape[2]

    def mark_dirty(self, start: int, stop: int) -> None:
        """Take notice that blocks of the tokens `[start, stop)` are about to be written."""

    def load(self, blocks: Tensor) -> None:
        """Take over the first blocks, `(B, H, n, record_bytes)`; there will be room for them."""
        count = blocks.shape[2] * BLOCK_TOKENS
        self.ensure(count)
        self.mark_dirty(0, count)
        self.data[:, :, : blocks.shape[2]] = blocks

    def select_rows(self, indices: Tensor) -> None:
        """Keep the rows `indices` (integers) of the batch."""
        self.data = self.data.index_select(0, indices.to(self.data.device))

    def of_rows(self, index: slice) -> Records:
        """Return records of some rows of the batch, as a view of these."""
        rows = Records.__new__(Records)
        rows.layout, rows.data = self.layout, self.data[index]
        return rows

    def to(self, device: torch.device) -> None:
        """Move the bytes to `device`."""
        self.data = self.data.to(device)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor the records own, by name."""
        return {"records": self.data}

    def at_rest(self) -> Tensor:
        """The bytes, in memory that no other layer will come to lie in."""
        return self.data

    def ensure(self, num_tokens: int, final_tokens: int | None = None) -> None:
        """Make room for `num_tokens`, at most once more if the `final_tokens` of a run are known and near.

        A final length beyond twice the present need is not reserved: a run may end early, and growing is
        cheap.
        """
        blocks = -(-num_tokens // BLOCK_TOKENS)
        if blocks <= self.num_blocks:
            return
        final = -(-final_tokens // BLOCK_TOKENS) if final_tokens else 0
        capacity = final if blocks <= final <= 2 * blocks else size_class(blocks)
        grown = self.data.new_zeros(*self.data.shape[:2], capacity, self.data.shape[3])
        grown[:, :, : self.num_blocks] = self.data
        self.data = grown

    def without_oldest(self, count: int, num_blocks: int) -> Records:
        """Return records of all but the first `count` blocks, with room for `num_blocks`; these stay."""
        batch_size, num_heads = self.data.shape[:2]
        later = Records(self.layout, batch_size, num_heads, self.data.device)
        later.ensure(num_blocks * BLOCK_TOKENS, num_blocks * BLOCK_TOKENS)
        kept = min(self.num_blocks - count, num_blocks)
        later.data[:, :, :kept] = self.data[:, :, count : count + kept]
        return later

    def codes(self, side: str, start: int, stop: int) -> Tensor:
        """View of the packed codes of blocks `[start, stop)`: uint8 `(B, H, blocks, nbytes)`."""
        offset, size = self.layout.fields[f"{side}_codes"]
        return self.data[:, :, start:stop, offset : offset + size]

    def metadata(self, side: str, name: str, start: int, stop: int) -> Tensor:
        """View of a metadata field of blocks `[start, stop)`: `(B, H, blocks, rows_per_block, width)`."""
        offset, size = self.layout.fields[f"{side}_{name}"]
        codec, _ = self.layout.codecs[side]
        raw = self.data[:, :, start:stop, offset : offset + size]
        rows = raw.view(_METADATA_DTYPES[self.layout.metadata_bytes])
        width = rows.shape[-1] // codec.rows_per_block
        return rows.view(*rows.shape[:-1], codec.rows_per_block, width)

    def fit(self, metadata: Iterable[Tensor]) -> None:
        """Widen the metadata to fp32 at the first number that fp16 cannot hold."""
        if self.layout.metadata_bytes == 4 or self.data.is_meta:
            return
        if any(bool(values.abs().max() > _HALF_MAX) for values in metadata):
            self.widen_metadata()

    def widen_metadata(self) -> None:
        """Turn fp16 metadata into fp32 in place of the old buffer; codes and values stay what they are."""
        old, wide = Records.__new__(Records), RecordLayout(self.layout.codecs, metadata_bytes=4)
        old.layout, old.data = self.layout, self.data
        self.layout = wide
        self.data = old.data.new_zeros(*old.data.shape[:3], wide.record_bytes)
        for side, (codec, _) in wide.codecs.items():
            self.codes(side, 0, self.num_blocks).copy_(old.codes(side, 0, self.num_blocks))
            for name in codec.metadata_names:
                self.metadata(side, name, 0, self.num_blocks).copy_(
                    old.metadata(side, name, 0, self.num_blocks)
                )
