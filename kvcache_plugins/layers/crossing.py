"""Packed layers of cross-attention: keys and values that the model's text attends to, and is no part of.

Those of images, in Llama 3.2 Vision, which has such layers among those of its text, and those of what an
encoder has read. They come once, with the prompt, and are read by every token after it; until then such a
layer is empty. The model asks the layer itself for them, not `update`. What happens to the text (padding,
tokens taken back) does not concern them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..models.facts import LayerFacts
from .base import PackedLayer
from .extending import extended
from .padding import left_padding
from .shown import ShownLayer
from .view import StreamView

__all__ = ["CrossAttentionLayer", "with_cross_attention"]


class CrossAttentionLayer(ShownLayer):
    """A packed layer whose tokens are those of images or of an encoder. Made by [`with_cross_attention`].

    Attributes:
        real_tokens (`torch.Tensor` of shape `(B, T)`, *optional*): Which of those to come are no padding.
    """

    real_tokens: Tensor | None = None

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
        real_tokens, self.real_tokens = self.real_tokens, None
        if real_tokens is not None and real_tokens.shape == key_states[:, 0, :, 0].shape:
            self._keep_sinks(real_tokens)
            key_states, value_states = _without_padding(real_tokens, key_states, value_states)
        return super()._append(key_states, value_states, defer=defer)

    def _keep_sinks(self, real_tokens: Tensor) -> None:
        """Have every row begin at its first real token, if all have what the codecs learn from."""
        pads, columns = left_padding(real_tokens.to(self.device))
        learning = max(stream.codec.warmup_tokens for stream in self.streams)
        if learning:
            learning += self.padding.sink_length  # which are exact, so nothing is learnt of them
        if pads is not None and int(pads.max()) + learning <= real_tokens.shape[1]:
            self.padding.set(pads, columns)

    def reset(self) -> None:
        super().reset()
        self.real_tokens = None

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.real_tokens is not None:
            self.real_tokens = self.real_tokens[indices.to(self.real_tokens.device)]
        super().batch_select_indices(indices)

    def room(self, limit: int) -> int:
        """All of them: tokens of the text bring nothing to this layer."""
        return limit

    def activate_past_recording(self) -> None:
        """Nothing: what may be taken back is text."""

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing: what is taken back is text."""


def _without_padding(real_tokens: Tensor, *states: Tensor) -> Iterator[Tensor]:
    """Replace padding, which nothing reads, by the nearest real token: a scale that is shared stays theirs.

    Args:
        real_tokens (`torch.Tensor` of shape `(B, T)`): Which tokens are no padding.
        states (`torch.Tensor` of shape `(B, H, T, D)`): Keys, values.
    """
    is_real = real_tokens.to(states[0].device).bool()
    places = torch.arange(is_real.shape[1], device=is_real.device)
    before = torch.where(is_real, places, -1).cummax(dim=1).values
    nearest = torch.where(before < 0, is_real.long().argmax(dim=1, keepdim=True), before)
    for tokens in states:
        yield tokens.gather(2, nearest[:, None, :, None].expand(-1, tokens.shape[1], -1, tokens.shape[3]))


def with_cross_attention(layer_class: type[PackedLayer]) -> type[CrossAttentionLayer]:
    """Return the class of a backend's layers that store images, or what an encoder has read.

    Args:
        layer_class (`type[PackedLayer]`): The backend's class.
    """
    made: type[CrossAttentionLayer] = extended(CrossAttentionLayer, layer_class)
    return made
