"""Which tokens of a text a layer still holds, for whoever wants to see what was thought worth keeping."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .layer import EvictingLayer

__all__ = ["kept_positions"]


def kept_positions(layer: EvictingLayer) -> Tensor:
    """Return where in the text the tokens stood that a layer holds.

    Args:
        layer (`EvictingLayer`): One that has been given tokens.

    Returns:
        `torch.Tensor` of shape `(B, H, m)`: int64, in the order of the slots; -1 where a slot holds no token
        of the text, for the heads may hold different numbers, and rows be padded.
    """
    parts = getattr(layer, "parts", ())
    if not parts:
        positions = layer.ledger.positions.long()
        # pads come first, and what pooling has made of several tokens has a negative number
        first = 0 if layer.pads is None else layer.pads.to(positions.device)[:, None, None]
        return positions.masked_fill(positions < first, -1)
    found = [(group.heads, kept_positions(part)) for group, part in parts]
    rows, width = found[0][1].shape[0], max(held.shape[2] for _, held in found)
    whole = torch.full((rows, layer.num_heads, width), -1, device=found[0][1].device)
    for heads, held in found:
        whole[:, list(heads), : held.shape[2]] = held
    return whole
