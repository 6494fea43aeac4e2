"""Transformers' own layers, which a cache keeps among packed ones: what is asked of them as of these."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from transformers.cache_utils import CacheLayerMixin

from ..errors import UnsupportedOperationError

__all__ = ["cropped", "tokens_seen"]


def tokens_seen(layers: Iterable[Any]) -> set[int]:
    """Return how many tokens layers have seen, of those that count any: recurrent ones do not."""
    return {int(layer.get_seq_length()) for layer in layers if isinstance(layer, CacheLayerMixin)}


def cropped(layer: Any, tokens_to_remove: int) -> dict[str, Any]:
    """Return the attributes that a layer has after its `crop`, and leave it as it is.

    Raises:
        UnsupportedOperationError: If it refuses, as those with a window do that forget what leaves it.
    """
    trial = copy.copy(layer)
    for name, value in vars(layer).items():  # `crop` replaces these and their items, and writes to no tensor
        if isinstance(value, dict):
            setattr(trial, name, dict(value))
    try:
        trial.crop(tokens_to_remove)
    except RuntimeError as error:
        raise UnsupportedOperationError(
            f"crop({tokens_to_remove}): a {type(layer).__name__} of this cache: {error}"
        ) from error
    return dict(vars(trial))
