"""Runs of `append_tokens` against what it stands for: a copy into the tails, then `encode_tokens`.

Used for the CPU's kernel, the torch default, and the emulated GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvcache_plugins.kernels.layout import FORMATS
from kvcache_plugins.quantizers.packing import packed_bytes

CAPACITY = 300
BLOCKS = 5


class Codes(NamedTuple):
    """How one side is stored."""

    nbits: int
    format: str = "affine"
    group_tokens: int = 1
    channels: int = 0
    """Of a group; 0 for all."""

    def layout(self, head_dim: int, offset: int, metadata_bytes: int) -> tuple[list[int], int]:
        """Integers of the layout whose fields begin at `offset`, and where they end."""
        width = head_dim // (self.channels or head_dim)
        size = packed_bytes(head_dim, self.nbits)
        row_bytes = 64 // min(self.group_tokens, 64) * width * metadata_bytes
        minimum = offset + size + row_bytes if self.format == "affine" else -1
        integers = [self.nbits, FORMATS[self.format], head_dim, self.group_tokens, width, metadata_bytes, 0]
        integers += [offset, offset + size, minimum]
        return integers, offset + size + row_bytes * (1 + (minimum >= 0))


CODES = {
    **{f"{nbits}bit-token": Codes(nbits) for nbits in (2, 3, 4, 8)},
    **{f"{nbits}bit-groups": Codes(nbits, channels=8) for nbits in (2, 4)},
    **{f"{nbits}bit-channel-g{group}": Codes(nbits, "affine", group, 1) for nbits in (2, 3, 4, 8)
       for group in (16, 32, 64, 128)},
    "int8": Codes(8, "symmetric"),
    "int8-groups": Codes(8, "symmetric", 1, 8),
    "e4m3": Codes(8, "e4m3"),
    "e5m2": Codes(8, "e5m2"),
}  # fmt: skip

Op = Callable[..., bool]


class Case:
    """Two rows of three heads: records in which the tokens before `slot` are, tails, and new tokens.

    Args:
        codes (`Codes`): Of both sides.
        new (`int`): New tokens.
        due (`int`): Tokens that are due, of either side.
        write (`int`): Place of the first new token in the tails.
        first (`int`): Place of the first due one.
        slot (`int`): Slot of the first due one.
    """

    def __init__(
        self,
        codes: Codes,
        new: int,
        due: int,
        write: int,
        first: int,
        slot: int,
        *,
        head_dim: int = 32,
        dtype: torch.dtype = torch.bfloat16,
        metadata_bytes: int = 2,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.due, self.write, self.first, self.slot = due, write, first, slot
        key_layout, end = codes.layout(head_dim, 0, metadata_bytes)
        value_layout, end = codes.layout(head_dim, end, metadata_bytes)
        self.layouts = (key_layout, value_layout)
        self.records = torch.zeros(2, 3, BLOCKS, end, dtype=torch.uint8)
        self.tails = [self._random(CAPACITY, head_dim, dtype, generator) for _ in range(2)]
        self.states = [self._random(new, head_dim, dtype, generator) for _ in range(2)]
        self.preparation: list[Tensor | None] = [None, None, None]

    @staticmethod
    def _random(count: int, head_dim: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        return (torch.randn(2, 3, count, head_dim, generator=generator) * 3).to(dtype)

    def plans(self) -> list[list[int]]:
        """Both plans, as the op takes them."""
        return [[self.write, self.first, self.due, self.slot, *layout] for layout in self.layouts]

    def to(self, device: str) -> Case:
        """The same on a device."""
        moved = copy.copy(self)
        moved.records = self.records.to(device)
        moved.tails, moved.states = ([t.to(device) for t in kind] for kind in (self.tails, self.states))
        moved.preparation = [None if t is None else t.to(device) for t in self.preparation]
        return moved

    def run(self, append: Op) -> tuple[bool, Tensor, list[Tensor]]:
        """Whether it was done, the records and the tails after it."""
        records, tails = self.records.clone(), [tail.clone() for tail in self.tails]
        done = append(records, *self.states, *tails, *self.plans(), *self.preparation)
        return done, records, tails

    def expected(self, encode: Op) -> tuple[bool, Tensor, list[Tensor]]:
        """The same by copies and an operator for each side; all sides are encoded, or none."""
        records, tails = self.records.clone(), [tail.clone() for tail in self.tails]
        for tail, states in zip(tails, self.states, strict=True):
            tail[:, :, self.write : self.write + states.shape[2]] = states
        done = True
        for side, (tail, layout) in enumerate(zip(tails, self.layouts, strict=True)):
            due = tail[:, :, self.first : self.first + self.due]
            cos, sin, factors = self.preparation if side == 0 else (None, None, None)
            due = due if factors is None else due.float() / factors
            done &= encode(records, due, side == 0, layout, self.slot, cos, sin)
        return done, records if done else self.records.clone(), tails


def check(case: Case, append: Op, encode: Op) -> bool:
    """Compare every byte; return whether what was due has been encoded."""
    done, records, tails = case.run(append)
    expected_done, expected_records, expected_tails = case.expected(encode)
    assert done == expected_done
    assert torch.equal(records, expected_records)
    for tail, expected in zip(tails, expected_tails, strict=True):
        assert torch.equal(tail.view(torch.uint8), expected.view(torch.uint8))  # not numbers, among them
    return done


def due_cases(codes: Codes, new: int) -> list[tuple[int, int, int, int]]:
    """`(due, write, first, slot)`: old tokens, old and new ones, new ones only, across blocks."""
    group = codes.group_tokens
    units = -(-new // group) * group
    held = units + group
    return [
        (0, 17, 0, 0),
        (group, held, 0, group),  # old ones
        (units, units, new, 0),  # the last of them new
        (units, 3 + units, 3 + new, 128 // group * group),
        (held, held - new, 0, 64 - 64 % group if group > 1 else 63),  # over the edge of a block
        *([(new, 9, 9, 61)] if group == 1 else []),  # new ones only, over an edge
        *([(1, 9, 9 + new - 1, 130)] if group == 1 else []),  # the newest only
    ]
