"""The name by which models, `generate()` and their outputs know a cache.

Transformers 5.24 renamed `past_key_values`, and the `cache_params` of recurrent models, to `cache`; what is
called by an older name passes it on under the new one. A few families give their attention modules the cache
as `layer_past`.

Nothing of transformers is imported at the top, because importing this package costs next to nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

__all__ = ["CACHE_NAMES", "as_argument", "by_name", "cache_name", "cache_of", "given_cache", "holds_both"]

CACHE_NAMES = ("cache", "past_key_values")
"""Of `generate()`, models and their outputs, the newest first."""
_NAMES_INSIDE = (*CACHE_NAMES, "layer_past", "past_key_value")
"""Those of attention modules besides."""


@cache
def cache_name() -> str:
    """The name by which the installed transformers passes a cache on."""
    from transformers.generation.utils import GenerationMixin

    parameters = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return next(name for name in CACHE_NAMES if name in parameters)


def as_argument(kv_cache: Any) -> dict[str, Any]:
    """A cache as the keyword argument of a model's call, or of `generate()`."""
    return {cache_name(): kv_cache}


def given_cache(kwargs: Mapping[str, Any], args: Sequence[Any] = ()) -> Any:
    """The cache among the arguments of `generate()`, a model, or a module of it; `None` if there is none.

    Args:
        kwargs (`dict`): Those given by name, whatever the name.
        args (`Sequence`): Those given by position.
    """
    for name in _NAMES_INSIDE:
        if kwargs.get(name) is not None:
            return kwargs[name]
    if not args:
        return None
    from transformers.cache_utils import Cache

    return next((argument for argument in args if isinstance(argument, Cache)), None)


def by_name(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a module's call by name, those given by position included.

    Args:
        module (`torch.nn.Module`): What is called.
        args (`Sequence`): Those given by position, for all of which its `forward` has names.
        kwargs (`dict`): Those given by name.

    Raises:
        TypeError: If it has not.
    """
    if not args:
        return dict(kwargs)
    parameters = inspect.signature(module.forward).parameters.values()
    names = [each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if len(args) > len(names):
        raise TypeError(
            f"{type(module).__name__}.forward was given {len(args)} arguments by position, and has names for "
            f"{len(names)} of them. Allowed with this cache are arguments by name."
        )
    return {**dict(zip(names, args, strict=False)), **kwargs}


def cache_of(output: Any) -> Any:
    """The cache that a model, or `generate()`, has returned in its output."""
    return getattr(output, cache_name())


def holds_both(kv_cache: Any) -> bool:
    """Whether a cache is that of an encoder-decoder model, of its text and of what its encoder has read."""
    return hasattr(kv_cache, "cross_attention_cache")
