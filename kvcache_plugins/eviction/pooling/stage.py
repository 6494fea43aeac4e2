"""Pooling as a stage of eviction: its option, and a layer that keeps some slots and pools the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..keeping import keep_slots
from ..selection import choose_slots
from .convolution import POOLED_POSITION, pool_evicted, pooled_last
from .merging import merge_evicted
from .weights import load_pooling_weights

if TYPE_CHECKING:
    from ..layer import EvictingLayer

__all__ = ["Pooling", "keep_and_pool", "read_pooling"]

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


def keep_and_pool(layer: EvictingLayer, pooling: Pooling, count: int, recent: int) -> None:
    """Make `layer`, which packs nothing, hold `count` units, and let the others live on in them.

    Args:
        layer (`EvictingLayer`): Holds more than `count` tokens.
        pooling (`Pooling`): What becomes of the others.
        count (`int`): Units to hold.
        recent (`int`): Newest slots that stay as they are.

    Raises:
        ValueError: If the weights do not fit the layer, or the pooled units leave too little of the budget.
    """
    pads, sink_length = layer.padding.lengths, layer.config.sink_length
    keys, values = (stream.tail.view() for stream in layer.streams)
    ranks = layer.ranks()
    if keys.is_meta or pooling.weights is None:
        index = choose_slots(ranks, count, pads=pads, sink_length=sink_length, recent=recent)
        merged = None if keys.is_meta else merge_evicted(keys, values, index, pads)
        keep_slots(layer, index)
        if merged is not None:
            layer.value_stream_.tail.view().copy_(merged)
        return
    pooled_length = pooling.pooled_length(count)
    if pooled_length < 1 or count - pooled_length <= sink_length + recent:
        raise ValueError(
            f"pool: of a budget of {count}, {pooled_length} units are pooled (fraction {pooling.fraction}) "
            f"and {sink_length + recent} are protected; at least one must be pooled, and one neither."
        )
    layers = load_pooling_weights(pooling.weights)
    if layer.layer_idx >= len(layers):
        raise ValueError(f"{pooling.weights} has weights of {len(layers)} layers, none of {layer.layer_idx}.")
    weights = layers[layer.layer_idx]
    weights.check(keys.shape[3], values.shape[3], pooled_length)
    ranks = pooled_last(ranks, layer.ledger.positions)
    found = pool_evicted(
        keys, values, ranks, count, weights, pads=pads, sink_length=sink_length, recent=recent
    )
    keep_slots(layer, found.index)
    layer.key_stream_.tail.view().copy_(found.keys)
    layer.value_stream_.tail.view().copy_(found.values)
    layer.ledger.positions.masked_fill_(found.is_pooled, POOLED_POSITION)
    layer.ledger.scores.masked_fill_(found.is_pooled, -torch.finfo(torch.float32).max)
