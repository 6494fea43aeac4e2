"""A dense cache that rounds: what a packed one must equal, where only rounding is between them."""

from __future__ import annotations

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
    """Count the tokens of a cache, by head, some of whose codes are others than those of a rounding one.

    What two ways of attending give differs in its last digits, and of what is made of it in the next layer
    lies now and then a number just so between two codes, or a token's scale between two of fp16, by which
    several of its codes tip over at once.

    Args:
        layers (`list[PackedLayer]`): Of int8, with nothing in their exact windows.
        rounded (`Rounded`): A cache that has been given the same.
    """
    count = 0
    for layer in layers:
        there = rounded.layers[layer.layer_idx]
        for stream, expected in zip(layer.streams, (there.keys, there.values), strict=True):
            assert stream.packed_length == expected.shape[2]
            step = expected.abs().amax(-1, keepdim=True) / 127
            apart = (stream.decode(0, stream.packed_length) - expected).abs()
            count += int((apart > 0.5 * step).any(-1).sum())
    return count
