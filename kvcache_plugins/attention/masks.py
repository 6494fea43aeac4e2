"""Whether a model's mask is for the tokens a layer holds, and what is used where it is not.

All layers share one mask, which is made for as many tokens as one of them holds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..layers.handle import KVHandle
from .reference import AttentionOptions

__all__ = ["fitted", "mask_fits"]


def mask_fits(key: KVHandle, attention_mask: Any = None, *args: Any, **kwargs: Any) -> bool:
    """Whether the mask among the arguments of an attention function is for the tokens of a handle."""
    return attention_mask is None or attention_mask.shape[-1] == key.tokens.length


def fitted(options: AttentionOptions, key: KVHandle, query_length: int) -> AttentionOptions:
    """Options whose mask fits the layer: its own where the model's was made for another number of tokens."""
    mask = options.mask
    if mask is None or mask.shape[-1] in (1, key.tokens.length):
        return options
    return replace(options, mask=key.layer.own_mask(key.tokens), is_causal=query_length > 1)
