"""Which rows of a batch are chosen, and one of them read beside the others."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .stream import Stream

__all__ = ["chosen_rows", "num_rows", "stream_of_row"]


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


def stream_of_row(stream: Stream, row: int) -> Stream:
    """Return what decodes one row of a stream, from 0 on: views of its tensors, and nothing is written to."""
    index, chosen = slice(row, row + 1), copy.copy(stream)
    chosen.padding = copy.copy(stream.padding)
    chosen.padding.index(torch.tensor([row], device="cpu"))
    chosen.records = stream.records.of_rows(index)
    chosen.tail = copy.copy(stream.tail)
    chosen.tail.buffer = stream.tail.buffer[index]
    chosen.sinks = None if stream.sinks is None else stream.sinks[index]
    if stream.outliers is not None:
        chosen.outliers = copy.copy(stream.outliers)
        chosen.outliers.entries, chosen.outliers.starts = (lists[index] for lists in stream.outliers.lists)
    if learnt := stream.codec.batch_state():
        chosen.codec = copy.deepcopy(stream.codec)
        chosen.codec.load_batch_state({name: tensor[index] for name, tensor in learnt.items()})
    chosen.codec = chosen.codec.with_padding(chosen.padding)
    chosen.described = None
    return chosen
