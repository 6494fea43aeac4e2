"""What is known of every token that is held: its score, and where in the text it stood."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from ..layers.heads import HeadGroup
from ..layers.storing import storing
from ..layers.tail import Tail

__all__ = ["Ledger"]

_MOST_NEW = 64
"""Generated tokens that are written down together: one by one, that takes a tenth of a step's time."""


class Ledger:
    """Scores and positions of the tokens of a layer, per row and head, in the order of their slots.

    Those of tokens that come one by one are written down when somebody asks.

    Args:
        batch_size (`int`), num_heads (`int`): Shape.
        device (`torch.device`): Where the layer's states live.
    """

    def __init__(self, batch_size: int, num_heads: int, device: torch.device) -> None:
        # Scores are fp32: ties of a narrower type would be broken differently on every device.
        self._scores, self._positions = (
            Tail(batch_size, num_heads, 1, sys.maxsize, dtype, device, slack=0)
            for dtype in (torch.float32, torch.int32)
        )
        self._new: list[Tensor] = []  # scores that are not written down yet
        self._first_new = 0

    @property
    def scores(self) -> Tensor:
        """fp32 `(B, H, m)`, a view that may be written to."""
        self._write_down()
        return self._scores.view()[..., 0]

    @property
    def positions(self) -> Tensor:
        """int32 `(B, H, m)`: index in the text, left pads included; of pooled units, negative numbers."""
        self._write_down()
        return self._positions.view()[..., 0]

    def append(self, scores: Tensor, first_position: int) -> None:
        """Add the newest tokens, with scores `(B, H, n)`."""
        if not self._new:
            self._first_new = first_position
        self._new.append(scores)
        if scores.shape[2] > 1 or len(self._new) == _MOST_NEW:
            self._write_down()

    def _write_down(self) -> None:
        if not self._new:
            return
        with storing():
            scores = self._new[0] if len(self._new) == 1 else torch.cat(self._new, dim=2)
            end = self._first_new + scores.shape[2]
            positions = torch.arange(self._first_new, end, dtype=torch.int32, device=scores.device)
            held = self._scores.length + scores.shape[2]
            self._scores.append(scores.float()[..., None], held)
            self._positions.append(positions[None, None, :, None].expand(*scores.shape, 1), held)
            self._new = []

    def gather(self, index: Tensor) -> None:
        """Keep the slots `index` `(B, H, K)`."""
        self._write_down()
        for column in (self._scores, self._positions):
            column.replace(column.view().gather(2, index[..., None]), index.shape[2])

    def truncate(self, count: int) -> None:
        """Forget the `count` newest tokens."""
        self._write_down()
        self._scores.truncate(count)
        self._positions.truncate(count)

    def index_batch(self, indices: Tensor) -> None:
        """Replace the rows of the batch by rows `indices`."""
        self._write_down()
        for column in (self._scores, self._positions):
            column.buffer = column.buffer.index_select(0, indices.to(column.buffer.device))

    def of_heads(self, group: HeadGroup) -> Ledger:
        """A copy of what is known of some heads."""
        return self._holding(group.of_states(self.scores), group.of_states(self.positions))

    @classmethod
    def joined(cls, ledgers: Sequence[Ledger]) -> Ledger:
        """What is known of all heads of ledgers that are as long."""
        columns = [[getattr(ledger, name) for ledger in ledgers] for name in ("scores", "positions")]
        return ledgers[0]._holding(*(torch.cat(column, dim=1) for column in columns))

    def _holding(self, scores: Tensor, positions: Tensor) -> Ledger:
        made = Ledger(scores.shape[0], scores.shape[1], scores.device)
        made._scores.replace(scores[..., None], scores.shape[2])
        made._positions.replace(positions[..., None], scores.shape[2])
        return made

    def to(self, device: torch.device) -> None:
        """Move to `device`."""
        self._write_down()
        for column in (self._scores, self._positions):
            column.buffer = column.buffer.to(device)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor owned, by name."""
        self._write_down()
        return {"scores": self._scores.buffer, "positions": self._positions.buffer}

    def saved_tensors(self) -> dict[str, Tensor]:
        """The same, without what is allocated and not in use."""
        self._write_down()
        return {"scores": self._scores.view(), "positions": self._positions.view()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over `saved_tensors`."""
        self._new = []
        for column, name in ((self._scores, "scores"), (self._positions, "positions")):
            column.replace(tensors[name], tensors[name].shape[2])
