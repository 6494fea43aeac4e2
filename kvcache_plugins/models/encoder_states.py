"""Decoders that can attend to an encoder: what they are given of it must not reach a cache of text."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from .cache_argument import by_name, given_cache, holds_both
from .decoder import decoder_of
from .hooks import add_hooks
from .origins import is_of_family

__all__ = ["refuse_encoder_states"]

_STATES = "encoder_hidden_states"
_SEPARATING_FAMILIES = frozenset({"gpt2"})
"""Families that keep what is of an encoder in a cache of its own, beside the one they are given."""


def refuse_encoder_states(model: nn.Module) -> None:
    """Refuse later calls of `model` that give it a cache of ours and states of an encoder; not twice.

    Without a second cache, such models store keys and values of the encoder among those of the text.
    """
    decoder = decoder_of(model)
    is_separating = is_of_family(getattr(decoder, "config", None), _SEPARATING_FAMILIES)
    if not is_separating and _STATES in inspect.signature(decoder.forward).parameters:
        add_hooks(decoder, before=_refuse)


def _refuse(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    kv_cache = given_cache(kwargs, args)
    is_ours = hasattr(kv_cache, "kv_bytes")
    if not is_ours or holds_both(kv_cache) or by_name(decoder, args, kwargs).get(_STATES) is None:
        return
    raise ValueError(
        f"This cache of the backend {kv_cache.backend!r} is for the text of a decoder alone; "
        f"{type(decoder).__name__} was given `{_STATES}`, of which it would store keys and values among "
        "those of the text. Allowed are calls without them; for an encoder-decoder model what `build_cache` "
        "returns; in loops of your own EncoderDecoderCache(cache, DynamicCache()), if the model takes one."
    )
