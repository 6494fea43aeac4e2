"""Whether a layer is whole, and what it is given fits what it holds: asked before anything of it is taken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .dense import tokens_seen

if TYPE_CHECKING:
    from .base import PackedLayer

__all__ = ["changing", "check_agreement", "check_in_step", "check_states", "check_whole"]

_ALLOWED = "Allowed are a copy made before it, a new cache, and this one after its `reset()`."


@contextmanager
def changing(*layers: PackedLayer) -> Iterator[None]:
    """Let layers be torn as long as they are being changed, and for good if that is interrupted."""
    outer = [layer.is_torn for layer in layers]
    for layer in layers:
        layer.is_torn = True
    yield
    for layer, was_torn in zip(layers, outer, strict=True):
        layer.is_torn = was_torn and layer.is_initialized  # one that has been emptied is whole


def check_whole(layer: PackedLayer) -> None:
    """Raise `ValueError` if a change of the layer was interrupted, which leaves it half done."""
    if layer.is_torn:
        raise ValueError(
            f"Layer {layer.layer_idx} of this cache was interrupted while it took tokens or moved some, so "
            f"what it holds is not whole. {_ALLOWED}"
        )


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
        ValueError: If they are of different tokens, or their batch, heads or channels are not the layer's, or
            that is not whole.
    """
    parts, shape = layer.uniform_layers, key_states.shape
    if (
        parts[0] is layer and not layer.is_torn and len(shape) == 4
    ):  # one answer for all, as a step takes no longer than it must
        batch_size, heads, *_ = layer.records.data.shape
        pads = layer.padding.lengths
        if (
            shape == (batch_size, heads, shape[2], layer.stored_keys.head_dim)
            and value_states.shape == (batch_size, heads, shape[2], layer.stored_values.head_dim)
            and (pads is None or len(pads) == batch_size)
        ):
            return
    check_whole(layer)
    check_agreement(key_states, value_states)
    expected = tuple(parts[0].records.shape[:2])
    if len(parts) > 1:
        expected = expected[0], sum(part.records.shape[1] for part in parts)
    if key_states.shape[:2] != expected:
        raise ValueError(
            f"Layer {layer.layer_idx} holds (batch, heads) = {expected}, got states of "
            f"{tuple(key_states.shape[:2])}. batch_repeat_interleave and batch_select_indices change the "
            "batch."
        )
    given = (key_states.shape[3], value_states.shape[3])
    if given != (held := tuple(stream.head_dim for stream in parts[0].streams)):
        raise ValueError(f"Layer {layer.layer_idx} holds keys and values of {held} channels, got {given}.")
    pads = layer.padding.lengths
    if pads is not None and len(pads) != expected[0]:
        raise ValueError(
            f"The cache was bound to an attention mask of {len(pads)} rows, got a batch of {expected[0]}."
        )


def check_in_step(layers: Iterable[PackedLayer], others: Iterable[Any] = ()) -> None:
    """Raise `ValueError` unless all layers are whole and have seen the same tokens.

    Args:
        layers (`Iterable[PackedLayer]`): Those that are packed.
        others (`Iterable[CacheLayerMixin | LinearAttentionLayer]`): Transformers' own beside them.
    """
    layers = list(layers)
    for layer in layers:
        if layer.is_torn and layer.cumulative_length == 0:
            layer._forget()  # its first tokens: it begins anew
        for part in (layer, *layer.uniform_layers):
            check_whole(part)
    seen = tokens_seen([*layers, *others])
    if len(seen) > 1:
        raise ValueError(
            f"The layers of this cache have seen from {min(seen)} to {max(seen)} tokens: a forward was "
            f"interrupted between them. {_ALLOWED}"
        )
    waiting = [layer.layer_idx for layer in layers if layer.awaits_scores]
    if waiting:
        raise ValueError(
            f"Layers {waiting} of this cache have not been shown what their newest tokens are worth: a "
            "forward was interrupted before its end, or the model did not show them, because its attention "
            "function is none that the backend serves, or the cache was not bound to it (`cache.bind`). "
            f"{_ALLOWED}"
        )
