"""Where the layers of a model lie, which may be spread over several devices, or processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .decoder import decoder_of

__all__ = ["layer_devices", "num_processes"]


def layer_devices(model: nn.Module | None, count: int) -> list[torch.device | None]:
    """Find out on which device the keys and values of every layer of a decoder are made.

    Args:
        model (`torch.nn.Module`, *optional*): The model.
        count (`int`): How many layers its cache has.

    Returns:
        `list[torch.device | None]`: One for each. Of layers that the model does not number it is where the
        model itself is; none where nobody knows, as without a model.
    """
    if model is None:
        return [None] * count
    found: dict[int, torch.device | None] = {}
    for module in decoder_of(model).modules():
        layer_idx = getattr(module, "layer_idx", None)
        if isinstance(layer_idx, int) and found.get(layer_idx) is None:
            found[layer_idx] = _device_of(module)
    own = getattr(model, "device", None)
    own = None if own is None or own.type == "meta" else own
    return [found.get(layer_idx) or own for layer_idx in range(count)]


def num_processes(model: Any) -> int:
    """Return over how many processes `tp_plan` has spread the heads of a model."""
    return getattr(model, "tp_size", None) or 1


def _device_of(module: nn.Module) -> torch.device | None:
    """Where a module computes; of one whose weights are offloaded, accelerate knows it."""
    for part in module.modules():
        hook: Any = getattr(part, "_hf_hook", None)
        if (device := getattr(hook, "execution_device", None)) is not None:
            return torch.empty(0, device=device).device  # with its index, however it was given
    held = (tensor.device for tensor in module.parameters() if not tensor.is_meta)
    return next(held, None)
