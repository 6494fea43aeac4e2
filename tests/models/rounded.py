"""A dense cache that rounds: what a packed one must equal, where only rounding is between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

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
