"""What the CUDA kernels take beside the records: small tables, moved to the GPU once and kept there."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..models.rotary import Rotary
from .layout import Side

__all__ = ["MAX_QUERIES", "on_device", "rotation_tables"]

MAX_QUERIES = 64
"""Query tokens that one call of `decode_attention` takes."""
_EXTRAS = (
    "static_scale", "factors", "cos", "sin", "sinks", "levels", "channel_scale", "channel_offset", "inv_freq",
    "positions", "outliers", "outlier_starts",
)  # fmt: skip


def on_device(side: Side, device: torch.device) -> Side:
    """The side with every optional tensor on `device`; what lies elsewhere is copied once and remembered."""
    moved: dict[str, Any] = {
        name: _copied(tensor, device)
        for name in _EXTRAS
        if (tensor := getattr(side, name)) is not None and tensor.device != device
    }
    return replace(side, **moved) if moved else side


@lru_cache(maxsize=256)
def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return tensor.to(device)


@lru_cache(maxsize=256)
def rotation_tables(rotary: Rotary, period: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the first `period` positions, as `encode_tokens` takes them."""
    with torch.inference_mode(False):
        cos, sin = rotary.tables(torch.arange(period))
        return cos.to(device), sin.to(device)
