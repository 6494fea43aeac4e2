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
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .rotary import rotary_module

__all__ = ["follow_cache", "switch_length"]

_MARK = "_kvcache_plugins_longrope"


def switch_length(model: nn.Module) -> int | None:
    """Tokens beyond which `model` changes its frequencies and discards its cache; `None` if it never does."""
    rotary = _long_rotary(model)
    if rotary is None or not hasattr(getattr(model, "config", None), "original_max_position_embeddings"):
        return None
    return int(rotary.config.rope_parameters["original_max_position_embeddings"])


def follow_cache(model: nn.Module) -> None:
    """Let the cache of every call decide on the frequencies, by its attribute `reads_long_text`; idempotent.

    Args:
        model (`torch.nn.Module`): A model for which `switch_length` is a number.
    """
    decoder = getattr(model, "get_decoder", lambda: None)() or model
    rotary = _long_rotary(model)
    if rotary is None or _MARK in decoder.__dict__:
        return
    short = rotary.original_inv_freq
    long, _ = ROPE_INIT_FUNCTIONS["longrope"](
        rotary.config,
        short.device,
        seq_len=rotary.config.rope_parameters["original_max_position_embeddings"] + 1,
    )
    owner = weakref.ref(rotary)

    def choose(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wanted = long if getattr(kwargs.get("past_key_values"), "reads_long_text", False) else short
        _set_frequencies(owner(), wanted)

    decoder.__dict__[_MARK] = decoder.register_forward_pre_hook(choose, with_kwargs=True)


def _set_frequencies(rotary: Any, frequencies: Tensor) -> None:
    """Set what serves short texts; what serves long ones is derived by transformers."""
    if rotary is not None and not torch.equal(rotary.original_inv_freq, frequencies.to(_device(rotary))):
        rotary.original_inv_freq = frequencies.to(_device(rotary))


def _device(rotary: Any) -> torch.device:
    found: torch.device = rotary.original_inv_freq.device
    return found


def _long_rotary(model: nn.Module) -> Any:
    decoder = getattr(model, "get_decoder", lambda: None)() or model
    rotary: Any = rotary_module(decoder)
    return rotary if getattr(rotary, "rope_type", None) == "longrope" else None
