"""Whether a model's mask is for the tokens a layer holds, and what is used where it is not.

All layers share one mask, which is made for as many tokens as one of them holds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..layers.crossing import CrossAttentionLayer
from ..layers.handle import KVHandle
from .bias import as_boolean
from .limits import MOST_QUERIES
from .reference import AttentionOptions
from .remembered import remembered

__all__ = ["fitted", "mask_fits"]


def mask_fits(key: KVHandle, attention_mask: Any = None, *args: Any, **kwargs: Any) -> bool:
    """Whether the mask among the arguments of an attention function is for the tokens of a handle."""
    return attention_mask is None or attention_mask.shape[-1] == key.tokens.length


def fitted(options: AttentionOptions, key: KVHandle, query_length: int) -> AttentionOptions:
    """Options whose mask fits the layer: its own where the model's was made for another number of tokens.

    Raises:
        ValueError: If all layers hold as many tokens as this one, so that the model has made no such mask.
    """
    mask, length = options.mask, key.tokens.length
    if mask is None or mask.shape[-1] in (1, length):
        if mask is not None and query_length > MOST_QUERIES and mask.is_cpu:
            visible = _of_real_queries(mask, key, query_length)
            return options if visible is None else replace(options, mask=visible)
        return options
    if isinstance(key.layer, CrossAttentionLayer):
        raise ValueError(
            f"attention_mask is for {mask.shape[-1]} tokens of what the encoder has read, or of images, and "
            f"layer {key.layer.layer_idx} holds {length}. Allowed are masks for these and, for another "
            "input, a new cache, or this one after its `reset()`."
        )
    if not key.layer.is_ragged:
        raise ValueError(
            f"attention_mask is for {mask.shape[-1]} tokens, but layer {key.layer.layer_idx} holds {length}, "
            "those of this call included. Allowed are masks of shape (batch, tokens seen), of which the "
            f"model makes what it needs, or with 4 dimensions, for these {length}."
        )
    return replace(options, mask=key.layer.own_mask(key.tokens), is_causal=query_length > 1)


def _of_real_queries(mask: Tensor, key: KVHandle, query_length: int) -> Tensor | None:
    """An additive mask of zeros and the least number as booleans, if none but pads are shown nothing by it.

    A query from which such a mask hides everything sees all slots alike. In a padded batch whose model runs
    `eager` pads are such queries, and nobody reads what they get; as booleans the mask is causal beside what
    it hides of all.
    """
    padding, length = key.tokens.stream.padding, key.tokens.length
    if padding.lengths is None or mask.dim() != 4 or mask.shape[2:] != (query_length, length):
        return None
    starts = padding.starts(mask)

    def find() -> Tensor | None:
        visible = as_boolean(mask)
        if visible is None:
            return None
        is_pad = torch.arange(length - query_length, length, device=mask.device) < starts[:, None]
        return visible if bool((visible.any(-1) | is_pad[:, None]).all()) else None

    return remembered(mask, ("real queries", *starts.tolist()), find)
