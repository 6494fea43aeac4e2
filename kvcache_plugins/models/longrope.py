"""Models with two sets of rotary frequencies (longrope): one for short texts, one for long ones.

Transformers chooses by the largest position of a call, so a prompt that is read in chunks would have its
first keys rotated by the frequencies of short texts and the rest by the others; and a prompt read whole makes
such a model throw away the cache it was given. A cache of ours that is to hold a long text therefore has the
model use the frequencies of long texts from the first chunk on, in the calls it takes part in and no others.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .cache_argument import given_cache
from .decoder import decoder_of
from .frequencies import TOLD, state, withdraw
from .hooks import add_hooks
from .rotary import rotary_module

__all__ = ["choose_frequencies", "follow_cache", "switch_length"]


def switch_length(model: nn.Module) -> int | None:
    """Tokens beyond which `model` changes its frequencies and discards its cache; `None` if it never does."""
    rotary = _long_rotary(decoder_of(model))
    if rotary is None or not hasattr(getattr(model, "config", None), "original_max_position_embeddings"):
        return None
    return int(rotary.config.rope_parameters["original_max_position_embeddings"])


@contextmanager
def follow_cache(model: nn.Module, cache: Any) -> Iterator[None]:
    """Let a cache decide on the frequencies meanwhile, and in every call that it takes part in.

    Args:
        model (`torch.nn.Module`): The model. Nothing is done to one with a single set.
        cache (`Cache`): Decides by its attribute `reads_long_text`.
    """
    decoder = decoder_of(model)
    rotary = _long_rotary(decoder)
    if not _reads_long_text(cache) or rotary is None:
        yield
        return
    add_hooks(decoder, before=_choose, after=_put_back)
    state(rotary, TOLD, original_inv_freq=_long_frequencies(rotary))
    try:
        yield
    finally:
        withdraw(rotary, TOLD)


def choose_frequencies(
    model: nn.Module, cache: Any, prompt_length: int | None, max_cache_length: int | None
) -> None:
    """Decide, before a prompt is read, which frequencies a model with two sets is to use.

    Args:
        model (`torch.nn.Module`): The model. Nothing is decided for one with a single set.
        cache (`KVCache`): Is told in `reads_long_text` and `longest_call`.
        prompt_length (`int`, *optional*): Tokens of all that will have been read then.
        max_cache_length (`int`, *optional*): Tokens of the end.

    Raises:
        ValueError: If the text becomes long and begins with tokens that were read as a short one.
    """
    cache.longest_call = switch = switch_length(model)
    if switch is None:
        return
    name = f"{type(model).__name__} changes its rotary frequencies at {switch} tokens"
    if (prompt_length or 0) > switch:
        if cache.get_seq_length() and not cache.reads_long_text:
            raise ValueError(
                f"{name}, and this cache holds {cache.get_seq_length()} tokens from before; a text of "
                f"{prompt_length} tokens needs a new cache that reads all of it."
            )
        cache.reads_long_text = True
    elif (max_cache_length or 0) > switch and not cache.reads_long_text:
        warnings.warn(
            f"{name}: if generation passes them, transformers discards this cache there and goes on with "
            f"a dense one. A prompt of more than {switch} tokens, or a max_length of at most {switch}, "
            "avoids it.",
            stacklevel=4,
        )


_CALL = "call"
_known: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()
"""Of rotary embeddings; beside them, so that nothing of ours stays on a model. Copies begin without."""


def _long_frequencies(rotary: Any) -> Tensor:
    """What serves long texts, as transformers derives it, where the module is now."""
    short, found = rotary.original_inv_freq, _known.get(rotary)
    if found is None:
        length = rotary.config.rope_parameters["original_max_position_embeddings"] + 1
        found, _ = ROPE_INIT_FUNCTIONS["longrope"](rotary.config, short.device, seq_len=length)
    _known[rotary] = found = found.to(short.device)
    return found


def _choose(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    rotary = _long_rotary(decoder)
    if _reads_long_text(given_cache(kwargs, args)):
        state(rotary, _CALL, original_inv_freq=_long_frequencies(rotary))
    else:
        withdraw(rotary, _CALL)  # of a call before, which was interrupted


def _put_back(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    withdraw(_long_rotary(decoder), _CALL)


def _reads_long_text(cache: Any) -> bool:
    return bool(getattr(cache, "reads_long_text", False))


def _long_rotary(decoder: nn.Module) -> Any:
    rotary: Any = rotary_module(decoder)
    return rotary if getattr(rotary, "rope_type", None) == "longrope" else None
