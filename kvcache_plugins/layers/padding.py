"""Left padding of a batch, and the sink tokens that follow it in every row."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor

__all__ = ["Padding", "first_slots", "left_padding"]


class Padding:
    """Where the real tokens of every row begin.

    Pads carry arbitrary states, so they are left out of every statistic. Sinks are the first `sink_length`
    real tokens of a row; they are kept exact beside the packed blocks, and left out of the statistics too.

    Args:
        sink_length (`int`): Sink tokens per row.
        lengths (`torch.Tensor` of shape `(B,)`, *optional*): Pads on the left of every row; none if not
            given.

    Attributes:
        dropped (`int`): Oldest tokens of every row that are gone; slot 0 is the first one after them.
    """

    def __init__(self, sink_length: int = 0, lengths: Tensor | None = None) -> None:
        self.sink_length = sink_length
        self.lengths: Tensor | None = None
        self.longest = 0
        self.columns: int | None = None
        self.dropped = 0
        self.set(lengths)

    def __len__(self) -> int:
        """Rows whose padding is known; 0 if none has any."""
        return 0 if self.lengths is None else len(self.lengths)

    def set(self, lengths: Tensor | None, columns: int | None = None) -> None:
        """Replace the padding of the batch.

        Args:
            lengths (`torch.Tensor` of shape `(B,)`, *optional*): Pads on the left of every row.
            columns (`int`, *optional*): Tokens of the mask that says so.
        """
        self.columns, self.dropped = columns, 0
        self.longest = int(lengths.max()) if lengths is not None and lengths.numel() else 0
        self.lengths = lengths if self.longest else None

    def fits(self, count: int) -> bool:
        """Whether a model's first call, of `count` tokens, begins with the pads.

        Not if it has more tokens than the mask: the model put tokens of its own before those of the mask (a
        soft prompt), and which slots the pads came to is not known.
        """
        return self.lengths is None or self.columns is None or count <= self.columns

    def index(self, indices: Tensor) -> None:
        """Follow the batch."""
        if self.lengths is not None:
            dropped = self.dropped
            self.set(self.lengths[indices.to(self.lengths.device)], self.columns)
            self.dropped = dropped

    def without_oldest(self, count: int) -> Padding:
        """The padding of what is left without the `count` oldest tokens of every row."""
        later = copy.copy(self)
        later.dropped += count
        return later

    @property
    def first_plain_slot(self) -> int:
        """First slot that is neither pad nor sink in any row."""
        return max(0, self.longest + self.sink_length - self.dropped)

    @property
    def begins_at_zero(self) -> bool:
        """Whether slot 0 holds the first real token of every row."""
        return self.lengths is None and self.dropped == 0

    def starts(self, states: Tensor) -> Tensor:
        """Slot of the first real token of every row of `states` `(B, ...)`: `(B,)`, on the same device.

        Negative where that token is gone.
        """
        if self.lengths is None:
            return torch.full((states.shape[0],), -self.dropped, dtype=torch.long, device=states.device)
        if self.lengths.device != states.device:
            self.lengths = self.lengths.to(states.device)
        return self.lengths - self.dropped if self.dropped else self.lengths

    def plain_mask(self, start: int, states: Tensor) -> Tensor | None:
        """Which tokens of `states` `(B, H, n, D)`, from slot `start` on, are neither pad nor sink.

        Returns:
            `torch.Tensor | None`: bool `(B, n)`; `None` if all are.
        """
        if start >= self.first_plain_slot:
            return None
        slots = torch.arange(start, start + states.shape[2], device=states.device)
        return slots >= self.starts(states)[:, None] + self.sink_length

    def first_tokens(self, count: int, states: Tensor) -> Tensor:
        """Which tokens of `states` `(B, H, n, D)`, from slot 0, are the first `count` behind pads and sinks.

        Returns:
            `torch.Tensor`: bool `(B, n)`.
        """
        slots = torch.arange(states.shape[2], device=states.device)
        begin = self.starts(states)[:, None] + self.sink_length
        return (slots >= begin) & (slots < begin + count)

    def read_sinks(self, states: Tensor, start: int, sinks: Tensor) -> None:
        """Copy the sinks found in `states` `(B, H, n, D)`, whose first slot is `start`, into `sinks`."""
        if states.is_meta:
            return
        offsets, is_found = self._sink_offsets(states, start, sinks.shape[2])
        # every sink is written, lest the host has to ask a GPU which ones
        places = offsets.clamp(0, states.shape[2] - 1)[:, None, :, None]
        found = states.gather(2, places.expand(-1, states.shape[1], -1, states.shape[3]))
        sinks.copy_(torch.where(is_found[:, None, :, None], found.to(sinks.dtype), sinks))

    def write_sinks(self, states: Tensor, start: int, sinks: Tensor) -> None:
        """Copy `sinks` over their places in `states`, in place."""
        if start < self.first_plain_slot:
            offsets, is_found = self._sink_offsets(states, start, sinks.shape[2])
            rows, columns = is_found.nonzero(as_tuple=True)
            states[rows, :, offsets[rows, columns]] = sinks[rows, :, columns].to(states.dtype)

    def _sink_offsets(self, states: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Offsets into `states` of the first `count` sinks of every row, and which of these it contains."""
        offsets = self.starts(states)[:, None] + torch.arange(count, device=states.device) - start
        return offsets, (offsets >= 0) & (offsets < states.shape[2])


def first_slots(pads: Tensor | None, device: torch.device) -> Tensor:
    """Slot of the first real token of every row: `(B,)` where rows have pads, else one 0 for all."""
    return torch.zeros(1, dtype=torch.long, device=device) if pads is None else pads.to(device)


def left_padding(attention_mask: object) -> tuple[Tensor | None, int | None]:
    """Return the pads of every row of a mask `(B, T)`, `(B,)`, and `T`; `None` of both for other masks.

    Raises:
        ValueError: If it looks like such a mask and is none: numbers that are no tensor, or of one row alone.
    """
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        # cumsum is zero exactly over the leading zeros
        return (attention_mask.long().cumsum(-1) == 0).sum(-1), attention_mask.shape[1]
    if isinstance(attention_mask, (list, tuple, np.ndarray)):
        given = f"a {type(attention_mask).__name__}"
    elif isinstance(attention_mask, Tensor) and attention_mask.dim() < 2:
        given = f"one of shape {tuple(attention_mask.shape)}"
    else:  # of more dimensions, or of another kind, such as flex attention's
        return None, None
    raise ValueError(f"`attention_mask` must be a tensor of shape (batch, tokens), got {given}.")
