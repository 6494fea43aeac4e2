"""Pooling as a stage of eviction: its option, and a layer that keeps some slots and pools the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...errors import ArtifactError
from ..keeping import keep_slots
from ..selection import choose_slots
from .convolution import pool_evicted, pooled_last
from .merging import merge_evicted
from .weights import LayerWeights, load_pooling_weights

if TYPE_CHECKING:
    from ..layer import EvictingLayer

__all__ = ["Pooling", "keep_and_pool", "read_pooling", "weights_of"]

_FRACTION = 0.125


@dataclass(frozen=True)
class Pooling:
    """What becomes of evicted tokens.

    Args:
        weights (`str`, *optional*): File of [`load_pooling_weights`] for pooling by convolution; without,
            evicted values are merged into those that stay.
        fraction (`float`): Part of the budget that pooled units take.
    """

    weights: str | None = None
    fraction: float = _FRACTION

    def pooled_length(self, budget: int) -> int:
        """Units of the budget that stand for many tokens."""
        return 0 if self.weights is None else round(self.fraction * budget)

    def check_budget(self, owner: str, budget: int, protected: int) -> None:
        """Raise `ValueError` unless some of a budget is pooled, and some neither that nor `protected`."""
        pooled = self.pooled_length(budget)
        if self.weights is not None and (pooled < 1 or budget - pooled <= protected):
            raise ValueError(
                f"{owner}.pool: of a budget of {budget}, {pooled} units are pooled (fraction "
                f"{self.fraction}) and up to {protected} are protected; at least one must be pooled, and one "
                "neither."
            )


def read_pooling(pool: Any, owner: str, *, storage: Any, positions: str) -> Pooling | None:
    """Read the option `pool`.

    Args:
        pool (`str | dict`, *optional*): `"merge"`, or `{"kind": "conv", "weights": FILE, "fraction": 0.125}`.
        owner (`str`): Class of the options, for messages.
        storage (`dict`, *optional*): The option of this name.
        positions (`str`): The option of this name.

    Raises:
        ValueError: If it is none of these, or does not go with the others.
    """
    if pool is None:
        return None
    if pool != "merge":
        _check_convolution(pool, owner)
    if storage is not None:
        raise ValueError(
            f"{owner}.pool changes what is stored, so it cannot stay packed: storage must be None, got "
            f"{storage!r}."
        )
    if positions != "absolute":
        raise ValueError(
            f"{owner}.pool makes units of tokens from many places, which cannot move together: positions "
            f"must be 'absolute', got {positions!r}."
        )
    return Pooling() if pool == "merge" else Pooling(pool["weights"], float(pool.get("fraction", _FRACTION)))


def _check_convolution(pool: Any, owner: str) -> None:
    allowed = "'merge', {'kind': 'conv', 'weights': FILE, 'fraction': 0.125} or None"
    if not isinstance(pool, Mapping) or pool.get("kind") != "conv":
        raise ValueError(f"{owner}.pool must be {allowed}, got {pool!r}.")
    weights, fraction = pool.get("weights"), pool.get("fraction", _FRACTION)
    is_number = isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
    if not isinstance(weights, str) or not weights or set(pool) - {"kind", "weights", "fraction"}:
        raise ValueError(f"{owner}.pool must be {allowed}, with the name of a file, got {dict(pool)!r}.")
    if not is_number or not 0 < fraction < 1:
        raise ValueError(f"{owner}.pool must have a fraction between 0 and 1, got {fraction!r}.")


def weights_of(
    layer: EvictingLayer, pooling: Pooling, key_dim: int, value_dim: int, budget: int | None
) -> LayerWeights | None:
    """Return what `layer` pools with; `None` if it merges.

    Args:
        layer (`EvictingLayer`): Whose weights.
        pooling (`Pooling`): Names the file.
        key_dim (`int`): Channels of its keys.
        value_dim (`int`): Channels of its values.
        budget (`int`, *optional*): Units it will hold, if that is known yet.

    Raises:
        ArtifactError: If the file is missing or damaged.
        ValueError: If it holds nothing for this layer, or weights of another shape.
    """
    if pooling.weights is None:
        return None
    owner = f"{type(layer.config).__name__}.pool"
    try:
        layers = load_pooling_weights(pooling.weights)
        if layer.layer_idx >= len(layers):
            raise ValueError(f"there are weights of {len(layers)} layers, none of layer {layer.layer_idx}.")
        weights = layers[layer.layer_idx]
        weights.check(key_dim, value_dim, None if budget is None else pooling.pooled_length(budget))
    except ArtifactError as error:
        raise ArtifactError(f"{owner}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{owner}: {pooling.weights}: {error}") from error
    return weights


def keep_and_pool(layer: EvictingLayer, pooling: Pooling, count: int, recent: int) -> None:
    """Make `layer`, which packs nothing, hold `count` units, and let the others live on in them.

    Args:
        layer (`EvictingLayer`): Holds more than `count` tokens.
        pooling (`Pooling`): What becomes of the others.
        count (`int`): Units to hold.
        recent (`int`): Newest slots that stay as they are.

    Raises:
        ValueError: If the weights do not fit the layer; the cache has looked, unless it was not told how long
            the prompt is that `budget` is a fraction of.
    """
    pads, sink_length = layer.padding.lengths, layer.config.sink_length
    keys, values = (stream.tail.view() for stream in layer.streams)
    ranks = layer.ranks()
    weights = None if keys.is_meta else weights_of(layer, pooling, keys.shape[3], values.shape[3], count)
    if weights is None:
        index = choose_slots(ranks, count, pads=pads, sink_length=sink_length, recent=recent)
        merged = None if keys.is_meta else merge_evicted(keys, values, index, pads)
        keep_slots(layer, index)
        if merged is not None:
            layer.stored_values.tail.view().copy_(merged)
        return
    positions = layer.ledger.positions
    found = pool_evicted(
        keys, values, pooled_last(ranks, positions), count, weights, positions=positions, pads=pads,
        sink_length=sink_length, recent=recent,
    )  # fmt: skip
    keep_slots(layer, found.index)
    layer.stored_keys.tail.view().copy_(found.keys)
    layer.stored_values.tail.view().copy_(found.values)
    layer.ledger.positions.masked_fill_(found.is_pooled, -layer.cumulative_length)
    layer.ledger.scores.masked_fill_(found.is_pooled, -torch.finfo(torch.float32).max)
