"""Feeding a layer directly, and reading back what it holds."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...layers.base import PackedLayer

__all__ = ["decoded", "fed", "feed", "state_bytes"]


def feed(layer: PackedLayer, keys: Tensor, values: Tensor, chunks: Iterable[int]) -> None:
    """Feed `(B, H, T, D)` keys and values to a layer in calls of the given lengths."""
    start = 0
    for count in chunks:
        layer.update(keys[:, :, start : start + count], values[:, :, start : start + count])
        start += count


def decoded(layer: PackedLayer) -> tuple[Tensor, Tensor]:
    """Everything a layer holds, as attention would read it next: two `(B, H, T, D)` tensors."""
    read = []
    for stream in layer.streams:
        parts = [stream.decode(0, stream.packed_length)] if stream.packed_length else []
        read.append(torch.cat([*parts, stream.tail.view().float()], dim=2))
    return read[0], read[1]


def state_bytes(layer: PackedLayer) -> dict[str, Tensor]:
    """The tensors in use, without slack, for comparing two layers bit for bit."""
    return layer.state()[0]


def fed(layer: PackedLayer, keys: Tensor, values: Tensor, chunks: Iterable[int]) -> PackedLayer:
    """Feed a layer as [`feed`] does and return it."""
    feed(layer, keys, values, chunks)
    return layer
