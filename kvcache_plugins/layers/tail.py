"""The residual window of a stream: its newest tokens, exact, in one buffer, without a `cat` per token."""

from __future__ import annotations

import torch
from torch import Tensor

from .records import size_class
from .storing import storing

__all__ = ["Tail"]

_SLACK = 16
"""Room beyond what must be held: tokens leave at the front for free, and move up once per `_SLACK` tokens."""


class Tail:
    """A queue of tokens of shape `(B, H, length, D)` inside a buffer `(B, H, capacity, D)`.

    Args:
        batch_size (`int`), num_heads (`int`), head_dim (`int`): Shape.
        limit (`int`): Most tokens held between calls.
        dtype (`torch.dtype`), device (`torch.device`): As the model's states.
        slack (`int`, *optional*): Room beyond `limit`; none is needed by a window that empties at every call,
            and has nothing to move.
    """

    def __init__(
        self,
        batch_size: int,
        num_heads: int,
        head_dim: int,
        limit: int,
        dtype: torch.dtype,
        device: torch.device,
        slack: int | None = None,
    ) -> None:
        self.limit = limit
        self.slack = (_SLACK if limit > 1 else 0) if slack is None else slack
        self.buffer = torch.empty(batch_size, num_heads, 0, head_dim, dtype=dtype, device=device)
        self.start = 0
        self.length = 0

    @property
    def capacity(self) -> int:
        """Tokens the buffer has room for."""
        return self.buffer.shape[2]

    def room(self, seen: int) -> int:
        """Capacity after `seen` tokens: a function of their number alone, however they arrived."""
        return (self.limit if seen >= self.limit else min(size_class(seen), self.limit)) + self.slack

    def view(self) -> Tensor:
        """The tokens held, as a view."""
        return self.buffer.narrow(2, self.start, self.length)

    def append(self, states: Tensor, seen: int) -> None:
        """Add tokens at the end. What `view` returned before stays intact until the next call of `append`."""
        place = self.make_room(states.shape[2], seen)
        self.buffer[:, :, place : place + states.shape[2]] = states
        self.length += states.shape[2]

    def make_room(self, count: int, seen: int) -> int:
        """Make `count` tokens, the last of `seen`, fit behind those held; return where they go."""
        needed, room = self.length + count, self.room(seen)
        if self.start + needed > self.capacity or self.capacity < room:
            self._move(max(needed, room))
        return self.start + self.length

    def drop(self, count: int) -> None:
        """Forget the `count` oldest tokens."""
        self.length -= count
        self.start = self.start + count if self.length else 0

    def truncate(self, count: int) -> None:
        """Forget the `count` newest tokens."""
        self.length -= count

    def replace(self, states: Tensor, seen: int) -> None:
        """Hold exactly `states`."""
        self.start, self.length = 0, 0
        self._move(max(states.shape[2], self.room(seen)))
        self.append(states, seen)

    def gathered(self, index: Tensor) -> Tail:
        """Return a tail of the tokens `index` `(B, H, K)`; this one stays as it is."""
        batch_size, num_heads, _, head_dim = self.buffer.shape
        kind = (self.limit, self.buffer.dtype, self.buffer.device, self.slack)
        chosen = Tail(batch_size, num_heads, head_dim, *kind)
        count = index.shape[2]
        chosen.replace(self.view().gather(2, index[..., None].expand(-1, -1, -1, head_dim)), count)
        return chosen

    def shrink(self, seen: int) -> None:
        """Give back room beyond `room(seen)`, as after a call that appended more than the window holds."""
        room = self.room(seen)
        if self.capacity > room >= self.length:
            self._move(room)

    def _move(self, capacity: int) -> None:
        """Bring the tokens to the front of a buffer of `capacity` tokens, the present one if it fits."""
        held = self.view()
        if capacity != self.capacity:
            shape = (*self.buffer.shape[:2], capacity, self.buffer.shape[3])
            with storing():
                self.buffer = self.buffer.new_empty(shape)
        elif self.start < self.length:  # the two ranges overlap
            held = held.clone()
        self.buffer[:, :, : self.length] = held
        self.start = 0
