"""Whether what a layer is given fits what it holds, asked before anything of it is taken."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .base import PackedLayer

__all__ = ["check_agreement", "check_in_step", "check_states"]


def check_agreement(key_states: Tensor, value_states: Tensor) -> None:
    """Raise `ValueError` unless keys `(B, H, n, D)` and values `(B, H, n, Dv)` are of the same tokens."""
    if key_states.shape[:3] != value_states.shape[:3]:
        raise ValueError(
            f"Keys and values of a layer must agree in all but head_dim, got {tuple(key_states.shape)} and "
            f"{tuple(value_states.shape)}."
        )


def check_states(layer: PackedLayer, key_states: Tensor, value_states: Tensor) -> None:
    """Check new keys `(B, H, n, D)` and values `(B, H, n, Dv)` against an initialized layer.

    Raises:
        ValueError: If they are of different tokens, or their batch or heads are not the layer's.
    """
    check_agreement(key_states, value_states)
    parts = layer.uniform_layers
    expected = tuple(parts[0].records.shape[:2])
    if len(parts) > 1:
        expected = expected[0], sum(part.records.shape[1] for part in parts)
    if key_states.shape[:2] != expected:
        raise ValueError(
            f"Layer {layer.layer_idx} holds (batch, heads) = {expected}, got states of "
            f"{tuple(key_states.shape[:2])}. batch_repeat_interleave and batch_select_indices change the "
            "batch."
        )
    pads = layer.padding.lengths
    if pads is not None and len(pads) != expected[0]:
        raise ValueError(
            f"The cache was bound to an attention mask of {len(pads)} rows, got a batch of {expected[0]}."
        )


def check_in_step(layers: Iterable[PackedLayer]) -> None:
    """Raise `ValueError` unless all layers have seen the same tokens, as a forward that ended leaves them."""
    seen = {layer.get_seq_length() for layer in layers}
    if len(seen) > 1:
        raise ValueError(
            f"The layers of this cache have seen from {min(seen)} to {max(seen)} tokens: a forward was "
            "interrupted between them. Allowed are a copy made before it, a new cache, and "
            "this one after its `reset()`."
        )
