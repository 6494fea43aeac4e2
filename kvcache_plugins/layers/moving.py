"""Layers that go on elsewhere than where they were filled: loaded without their model, or the model moved."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ..models.placement import layer_devices
from .base import PackedLayer
from .storing import storing

__all__ = ["follow_model", "move_layer"]


def follow_model(layers: list[Any], model: nn.Module) -> None:
    """Let the layers of a cache that hold something be where a model has its own."""
    if all(_device_of(layer) is None for layer in layers):
        return
    for layer, device in zip(layers, layer_devices(model, len(layers)), strict=True):
        if device is not None:
            move_layer(layer, device)


def move_layer(layer: Any, device: torch.device) -> None:
    """Let a layer be one of `device`, with all that it holds; if that fails, it is what it was.

    Args:
        layer (`CacheLayerMixin | LinearAttentionLayer`): Packed, or transformers' own.
        device (`torch.device`): Where its next keys and values will be.
    """
    if _device_of(layer) in (device, None):
        return
    if not isinstance(layer, PackedLayer):
        layer.device = device
        layer.prefetch()
        return
    if (branch := getattr(layer, "branch", None)) is not None:
        move_layer(branch, device)
    if layer.is_initialized:
        with storing():
            tensors, facts = layer.state()
            moved = copy.copy(layer)
            moved.padding = copy.copy(layer.padding)
            moved.load_state({name: tensor.to(device) for name, tensor in tensors.items()}, facts)
            vars(layer).update(vars(moved))


def _device_of(layer: Any) -> torch.device | None:
    """Where a layer is; one that never held anything is nowhere."""
    device: torch.device | None = getattr(layer, "device", None)
    return device
