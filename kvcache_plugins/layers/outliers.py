"""The outliers of a stream: lists beside the records, in tensors that grow with them."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ..quantizers.outliers import MAX_CAPACITY, Outliers, gather_outliers
from ..quantizers.packing import BLOCK_TOKENS

__all__ = ["OutlierStore"]

_DROPPED = "dropped_outliers"


class OutlierStore:
    """The lists of one stream, one for every block of a row (see `quantizers.outliers`).

    Args:
        batch_size (`int`), num_heads (`int`): Of the states.
        capacity (`int`): Entries of a block; lists of tokens that moved may need more.
        device (`torch.device`): Where they live.

    Attributes:
        dropped (`int`): Entries that found no room in the longest list there can be, when tokens moved.
    """

    def __init__(self, batch_size: int, num_heads: int, capacity: int, device: torch.device) -> None:
        if capacity > MAX_CAPACITY:
            raise ValueError(f"A block holds at most {MAX_CAPACITY} outliers, {capacity} would be kept.")
        self.capacity = capacity
        self.dropped = 0
        self.entries = torch.zeros(batch_size, 0, capacity, dtype=torch.int32, device=device)
        self.starts = torch.zeros(batch_size, 0, num_heads + 1, dtype=torch.int16, device=device)

    @property
    def lists(self) -> Outliers:
        """The lists of all blocks there is room for."""
        return Outliers(self.entries, self.starts)

    def ensure(self, num_blocks: int) -> None:
        """Make room for so many blocks."""
        missing = num_blocks - self.entries.shape[1]
        if missing > 0:
            self.entries, self.starts = (
                torch.cat([old, old.new_zeros(old.shape[0], missing, old.shape[2])], dim=1)
                for old in (self.entries, self.starts)
            )

    def write(self, first: int, outliers: Outliers) -> None:
        """Store the lists of blocks from `first` on."""
        _, blocks, capacity = outliers.entries.shape
        written = slice(first, first + blocks)
        self.entries[:, written, :capacity], self.starts[:, written] = outliers
        self.entries[:, written, capacity:] = 0

    def read(self, first: int, last: int) -> Outliers:
        """The lists of blocks `[first, last)`, as views."""
        return Outliers(self.entries[:, first:last], self.starts[:, first:last])

    def gathered(self, index: Tensor, num_blocks: int) -> OutlierStore:
        """Return the lists of chosen tokens; this store stays as it is.

        Args:
            index (`torch.Tensor` of shape `(B, H, 64 n)`): Slots, ascending, none twice.
            num_blocks (`int`): Blocks to make room for.
        """
        chosen = copy.copy(self)
        if index.is_meta:  # how many a list needs depends on the tokens
            batch_size, blocks = index.shape[0], index.shape[2] // BLOCK_TOKENS
            chosen.entries = self.entries.new_zeros(batch_size, blocks, self.capacity)
            chosen.starts = self.starts.new_zeros(batch_size, blocks, self.starts.shape[2])
        else:
            found, dropped = gather_outliers(self.lists, index, self.capacity)
            chosen.entries, chosen.starts = found
            chosen.dropped += dropped
        chosen.ensure(num_blocks)
        return chosen

    def without_oldest(self, count: int, num_blocks: int) -> OutlierStore:
        """Return the lists of all but the first `count` blocks, with room for `num_blocks`."""
        later = copy.copy(self)
        later.entries, later.starts = (
            _moved_up(old, count, num_blocks) for old in (self.entries, self.starts)
        )
        return later

    def tensors(self) -> dict[str, Tensor]:
        """Both tensors, by name."""
        return self.lists.named()

    def saved_tensors(self, num_blocks: int) -> dict[str, Tensor]:
        """The lists of the first `num_blocks` blocks by name, and how many entries were dropped, if any."""
        saved = self.read(0, num_blocks).named()
        return saved | ({_DROPPED: torch.tensor(self.dropped, device="cpu")} if self.dropped else {})

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `saved_tensors` returned."""
        self.entries, self.starts = tensors["outliers"], tensors["outlier_starts"]
        self.dropped = int(tensors[_DROPPED]) if _DROPPED in tensors else 0

    def index_batch(self, indices: Tensor) -> None:
        """Replace the rows of the batch by rows `indices`."""
        self.entries, self.starts = (t.index_select(0, indices) for t in (self.entries, self.starts))

    def to(self, device: torch.device) -> None:
        """Move to a device."""
        self.entries, self.starts = self.entries.to(device), self.starts.to(device)


def _moved_up(old: Tensor, count: int, num_blocks: int) -> Tensor:
    moved = old.new_zeros(old.shape[0], num_blocks, old.shape[2])
    kept = min(old.shape[1] - count, num_blocks)
    moved[:, :kept] = old[:, count : count + kept]
    return moved
