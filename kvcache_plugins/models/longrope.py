"""Models with two sets of rotary frequencies (longrope): one for short texts, one for long ones.

Transformers chooses by the largest position of a call, so a prompt that is read in chunks would have its
first keys rotated by the frequencies of short texts and the rest by the others; and a prompt read whole makes
such a model throw away the cache it was given. A cache of ours that is to hold a long text therefore has the
model use the frequencies of long texts from the first chunk on, in the calls it takes part in and no others.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .facts import decoder_of
from .rotary import rotary_module

__all__ = ["follow_cache", "switch_length"]

_MARK = "_kvcache_plugins_longrope"


def switch_length(model: nn.Module) -> int | None:
    """Tokens beyond which `model` changes its frequencies and discards its cache; `None` if it never does."""
    rotary = _long_rotary(model)
    if rotary is None or not hasattr(getattr(model, "config", None), "original_max_position_embeddings"):
        return None
    return int(rotary.config.rope_parameters["original_max_position_embeddings"])


def follow_cache(model: nn.Module, cache: Any) -> None:
    """Let the cache of every call decide on the frequencies, by its attribute `reads_long_text`.

    Args:
        model (`torch.nn.Module`): A model for which `switch_length` is a number.
        cache (`Cache`): Decides until the next call.
    """
    decoder = decoder_of(model)
    if _MARK not in decoder.__dict__ and getattr(cache, "reads_long_text", False):
        decoder.__dict__[_MARK] = _Frequencies(decoder)
    if _MARK in decoder.__dict__:
        decoder.__dict__[_MARK].choose(cache)


class _Frequencies:
    """Both sets of a decoder, and the hook that chooses between them."""

    def __init__(self, decoder: nn.Module) -> None:
        rotary = _long_rotary(decoder)
        self.rotary = weakref.ref(rotary)
        self.short = rotary.original_inv_freq
        self.long, _ = ROPE_INIT_FUNCTIONS["longrope"](
            rotary.config,
            self.short.device,
            seq_len=rotary.config.rope_parameters["original_max_position_embeddings"] + 1,
        )
        decoder.register_forward_pre_hook(self._before, with_kwargs=True)

    def choose(self, cache: Any) -> None:
        """Set what serves short texts; what serves long ones is derived by transformers."""
        rotary: Any = self.rotary()
        wanted = self.long if getattr(cache, "reads_long_text", False) else self.short
        if rotary is not None:
            wanted = wanted.to(rotary.original_inv_freq.device)
            if not torch.equal(rotary.original_inv_freq, wanted):
                rotary.original_inv_freq = wanted

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.choose(kwargs.get("past_key_values"))


def _long_rotary(model: nn.Module) -> Any:
    rotary: Any = rotary_module(decoder_of(model))
    return rotary if getattr(rotary, "rope_type", None) == "longrope" else None
