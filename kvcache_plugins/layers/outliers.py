"""The outliers of a stream: lists beside the records, in tensors that grow with them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..quantizers.outliers import MAX_CAPACITY, Outliers

__all__ = ["OutlierStore"]


class OutlierStore:
    """The lists of one stream, one for every block of a row (see `quantizers.outliers`).

    Args:
        batch_size (`int`), num_heads (`int`): Of the states.
        capacity (`int`): Entries of a block.
        device (`torch.device`): Where they live.
    """

    def __init__(self, batch_size: int, num_heads: int, capacity: int, device: torch.device) -> None:
        if capacity > MAX_CAPACITY:
            raise ValueError(f"A block holds at most {MAX_CAPACITY} outliers, {capacity} would be kept.")
        self.entries = torch.zeros(batch_size, 0, capacity, dtype=torch.int32, device=device)
        self.starts = torch.zeros(batch_size, 0, num_heads + 1, dtype=torch.int16, device=device)

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
        last = first + outliers.entries.shape[1]
        self.entries[:, first:last], self.starts[:, first:last] = outliers

    def read(self, first: int, last: int) -> Outliers:
        """The lists of blocks `[first, last)`, as views."""
        return Outliers(self.entries[:, first:last], self.starts[:, first:last])

    def tensors(self) -> dict[str, Tensor]:
        """Both tensors, by name."""
        return Outliers(self.entries, self.starts).named()

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `tensors` returned."""
        self.entries, self.starts = tensors["outliers"], tensors["outlier_starts"]

    def index_batch(self, indices: Tensor) -> None:
        """Replace the rows of the batch by rows `indices`."""
        self.entries, self.starts = (t.index_select(0, indices) for t in (self.entries, self.starts))

    def to(self, device: torch.device) -> None:
        """Move to a device."""
        self.entries, self.starts = self.entries.to(device), self.starts.to(device)
