"""Which rows of a batch are chosen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["chosen_rows", "num_rows"]


def chosen_rows(indices: Any, count: int) -> Tensor:
    """Return indices of rows as integers from 0 on, checked before anything follows them.

    Args:
        indices (`torch.Tensor`): Integers, negative ones from the end, or a boolean mask over the rows; or
            what torch makes such a tensor of.
        count (`int`): Rows there are; 0 if that is not known, as of a cache that holds nothing.

    Raises:
        IndexError: If there is no such row, or a mask is for another number of them.
    """
    chosen = torch.as_tensor(indices)
    if chosen.dtype == torch.bool:
        if count and chosen.shape != (count,):
            raise IndexError(f"A mask of rows must be for {count}, got one of shape {tuple(chosen.shape)}.")
        return chosen.nonzero().squeeze(1)
    if chosen.dim() != 1 or chosen.is_floating_point() or chosen.is_complex():
        raise IndexError(f"Indices of rows must be a list of integers, got {indices!r}.")
    if count and bool(((chosen < -count) | (chosen >= count)).any()):
        raise IndexError(f"Indices of rows must be from {-count} to {count - 1}, got {chosen.tolist()}.")
    return torch.where(chosen < 0, chosen + count, chosen).long()


def num_rows(layer: Any) -> int:
    """Return how many rows a [`PackedLayer`] has; 0 if neither tokens nor padding have told."""
    return int(layer.uniform_layers[0].records.shape[0]) if layer.is_initialized else len(layer.padding)
