"""Layers that do more than a backend's: a class of both, made once, which copies and pickles find again."""

from __future__ import annotations

from functools import cache
from typing import Any

from .base import PackedLayer

__all__ = ["extended"]


@cache
def extended(part: type[PackedLayer], layer_class: type[PackedLayer]) -> Any:
    """Return the class of a backend's layers that are a `part` as well.

    Args:
        part (`type[PackedLayer]`): What they do beside; its name begins theirs.
        layer_class (`type[PackedLayer]`): The backend's class.
    """
    name = part.__name__.removesuffix("Layer") + layer_class.__name__
    return type(name, (part, layer_class), {"__doc__": layer_class.__doc__, "__reduce__": _reduced})


def _reduced(layer: PackedLayer) -> tuple[Any, ...]:
    return _made_again, type(layer).__bases__, vars(layer)


def _made_again(part: type[PackedLayer], layer_class: type[PackedLayer]) -> Any:
    return object.__new__(extended(part, layer_class))
