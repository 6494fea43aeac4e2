"""A dense cache that rounds: what a packed one must equal, where only rounding is between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvcache_plugins.layers.base import PackedLayer
from tests.reference.quantizers import symmetric8


class Rounded(DynamicCache):
    """A dense cache that rounds keys and values of some layers as int8 does, one scale per token and head."""

    def __init__(self, layers: set[int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rounded_layers = layers

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        seen = super().update(keys, values, layer_idx, *args, **kwargs)
        layer, count = self.layers[layer_idx], keys.shape[2]
        if layer_idx in self.rounded_layers:  # after they were attended to exactly
            old = layer.keys[:, :, :-count], layer.values[:, :, :-count]
            layer.keys = torch.cat((old[0], symmetric8(keys, axis=-1).dequantized), dim=2)
            layer.values = torch.cat((old[1], symmetric8(values, axis=-1).dequantized), dim=2)
        return seen


def flipped(layers: list[PackedLayer], rounded: Rounded) -> int:
    """Count the codes of a cache that are others than those of a rounding one.

    What two ways of attending give differs in its last digits, and of what is made of it in the next layer
    lies now and then a number just so between two codes.

    Args:
        layers (`list[PackedLayer]`): Of int8, with nothing in their exact windows.
        rounded (`Rounded`): A cache that has been given the same.
    """
    return sum(int((steps > 0.5).sum()) for steps in _steps_apart(layers, rounded))


def first_difference(layers: list[PackedLayer], rounded: Rounded) -> int:
    """Return the first token whose codes or scales are others than in a rounding cache; else their number."""
    found = [steps.amax((0, 1, 3)) > 1e-3 for steps in _steps_apart(layers, rounded)]
    return min(int(torch.cat([apart, torch.ones(1, dtype=torch.bool)]).int().argmax()) for apart in found)


def _steps_apart(layers: list[PackedLayer], rounded: Rounded) -> Iterator[Tensor]:
    """How many steps of a code each number of every layer's keys and values, `(B, H, T, D)`, is apart."""
    for layer in layers:
        there = rounded.layers[layer.layer_idx]
        for stream, expected in zip(layer.streams, (there.keys, there.values), strict=True):
            assert stream.packed_length == expected.shape[2]
            step = expected.abs().amax(-1, keepdim=True) / 127
            yield (stream.decode(0, stream.packed_length) - expected).abs() / step
