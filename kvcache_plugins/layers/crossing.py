"""Packed layers of cross-attention: keys and values of images, which the model's text attends to.

Llama 3.2 Vision has such layers among those of its text. An image's keys and values come once, with the
prompt that shows it, and are read by every token after it; until then such a layer is empty, and the model
leaves it out. It asks the layer itself for them, not `update`. What happens to the text (padding, tokens
taken back) does not concern them.
"""

from __future__ import annotations

from torch import Tensor

from ..models.facts import LayerFacts
from .base import PackedLayer
from .extending import extended
from .shown import ShownLayer
from .view import StreamView

__all__ = ["CrossAttentionLayer", "with_cross_attention"]


class CrossAttentionLayer(ShownLayer):
    """A packed layer whose tokens are those of images. Made by [`with_cross_attention`]."""

    is_ragged = True

    def bind(
        self, facts: LayerFacts, pads: Tensor | None, final_length: int | None, columns: int | None = None
    ) -> None:
        super().bind(facts, None, self.cumulative_length or None)

    def _append(
        self, key_states: Tensor, value_states: Tensor, *, defer: bool
    ) -> tuple[StreamView, StreamView]:
        # more only comes with another image, so nothing is kept ready for it
        self.final_length = self.cumulative_length + key_states.shape[2]
        for stream in self.streams:
            stream.final_length = self.final_length
        return super()._append(key_states, value_states, defer=defer)

    def room(self, limit: int) -> int:
        """All of them: tokens of the text bring nothing to this layer."""
        return limit

    def activate_past_recording(self) -> None:
        """Nothing: what may be taken back is text."""

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing: what is taken back is text."""


def with_cross_attention(layer_class: type[PackedLayer]) -> type[CrossAttentionLayer]:
    """Return the class of a backend's layers that store images.

    Args:
        layer_class (`type[PackedLayer]`): The backend's class.
    """
    made: type[CrossAttentionLayer] = extended(CrossAttentionLayer, layer_class)
    return made
