"""Layers, and caches, that do more than a backend's: a class of both, made once, which pickles find again."""

from __future__ import annotations

from functools import cache
from typing import Any

__all__ = ["extended"]


@cache
def extended(part: Any, base: Any) -> Any:
    """Return the class of a backend's layers, or of its caches, that are a `part` as well.

    Args:
        part (`type`): What they do beside; its name begins theirs.
        base (`type`): The backend's class.
    """
    name = part.__name__.removesuffix("Layer").removesuffix("Cache") + base.__name__
    return type(name, (part, base), {"__doc__": base.__doc__, "__reduce__": _reduced})


def _reduced(instance: Any) -> tuple[Any, ...]:
    return _made_again, type(instance).__bases__, vars(instance)


def _made_again(part: Any, base: Any) -> Any:
    return object.__new__(extended(part, base))
