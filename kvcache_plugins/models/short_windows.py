"""Windows that stay with transformers' own layer, without the prompt that it keeps alive."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

__all__ = ["ShortWindowLayer"]


class ShortWindowLayer(DynamicSlidingWindowLayer):
    """Transformers' layer of a window, whose tensors lie in no more memory than a window takes.

    Its own are views of all that the last call attended to: of a whole prompt, in every such layer at once,
    until the first token is generated. Here they are copies where that is a window more than is needed.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take new states `(B, H, q, D)` and return all that attention reads, as transformers' layer does."""
        shown = super().update(key_states, value_states, *args, **kwargs)
        assert self.keys is not None
        is_full = self.keys.shape[-2] == self.sliding_window - 1
        if is_full and shown[0].shape[-2] >= 2 * self.sliding_window:
            self.keys, self.values = (self._window_of(states) for states in shown)
        return shown

    def _window_of(self, states: Tensor) -> Tensor:
        """What the next token sees, in as much memory as generated tokens leave it in."""
        return states[..., -self.sliding_window :, :].clone()[..., 1:, :]
