"""What the arguments of an attention function in transformers' sense ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_mask

from .reference import AttentionOptions

__all__ = ["attention_options", "mask_of_blocks", "whole_mask"]


def attention_options(
    module: nn.Module,
    query: Tensor,
    kv_length: int,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> AttentionOptions:
    """What the arguments of an attention function in transformers' sense ask for.

    Args:
        module (`torch.nn.Module`): The attention module.
        query (`torch.Tensor` of shape `(B, Hq, q, D)`): Queries.
        kv_length (`int`): Slots they may see.
        attention_mask (`torch.Tensor`, *optional*): As [`dispatch.forward_over_handles`] takes it.
        scaling (`float`, *optional*): Factor of the logits.
        kwargs: As [`dispatch.forward_over_handles`] takes them.
    """
    is_causal = attention_mask is None
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        # The block mask of flex attention: a function of the slots.
        length = attention_mask.shape[-1]  # of the layer it was made for
        attention_mask = create_mask(
            attention_mask.mask_mod, query.shape[0], 1, query.shape[2], length, query.device
        )
    elif attention_mask is not None and attention_mask.dim() == 2:
        # (B, T), of the flash functions: which keys are real.
        attention_mask, is_causal = attention_mask.bool()[:, None, None, :], True
    if kwargs.get("indices") is not None:
        attention_mask = _with_chosen(attention_mask, kwargs["indices"], kv_length)
    requested = kwargs.get("is_causal")
    if requested is None:
        requested = getattr(module, "is_causal", True)
    return AttentionOptions(
        scaling=scaling,
        mask=attention_mask,
        is_causal=bool(is_causal and requested and query.shape[2] > 1),
        sliding_window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sink_logits=_sink_logits(kwargs.get("s_aux"), kwargs.get("sinks")),
        alibi_slopes=kwargs.get("alibi_slopes"),
        position_bias=kwargs.get("position_bias"),
    )


def whole_mask(options: AttentionOptions, query: Tensor, kv_length: int) -> Tensor | None:
    """A mask that says alone what a causal call hides; `None` if torch sees it by itself.

    Where queries are fewer than slots, torch takes them for the first, and they are the newest: of a model
    that asks for the last logits only, layers that attend to another one's keys are given no other queries.

    Args:
        options (`AttentionOptions`): What is asked for.
        query (`torch.Tensor` of shape `(B, Hq, q, D)`): The newest tokens' queries.
        kv_length (`int`): Slots they may see.
    """
    query_length, mask = query.shape[2], options.mask
    if not options.is_causal or (mask is None and query_length >= kv_length):
        return mask
    past = kv_length - query_length
    visible = torch.ones(query_length, kv_length, dtype=torch.bool, device=query.device).tril(past)
    if options.sliding_window is not None:
        visible = visible.triu(past - options.sliding_window + 1)
    if mask is None:
        return visible[None, None]
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -torch.inf)


def mask_of_blocks(
    module: nn.Module,
    query: Tensor,
    kv_length: int,
    attention_mask: Any,
    block_indices: Tensor,
    is_causal: bool | None = None,
) -> Tensor | None:
    """A mask that hides whatever lies in blocks of neighbouring slots that an indexer has not chosen, too.

    Models that have such an indexer (MiniMax-M3) make it themselves for `eager` and `sdpa`.

    Args:
        module (`torch.nn.Module`): The attention module, whose `indexer.block_size` says how many slots a
            block has.
        query (`torch.Tensor` of shape `(B, Hq, q, D)`): Queries.
        kv_length (`int`): Slots they may see.
        attention_mask (`torch.Tensor`, *optional*): As [`dispatch.forward_over_handles`] takes it.
        block_indices (`torch.Tensor` of shape `(B, H, q, k)`): Blocks of every query, chosen for `Hq / H`
            neighbouring heads; -1 for none.
        is_causal (`bool`, *optional*): As the attention function is told.

    Raises:
        ValueError: If the module does not say the size of a block.
    """
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if not isinstance(size, int):
        raise ValueError(
            f"{type(module).__name__} hands `block_indices` to its attention function and does not say how "
            "many slots a block has. Allowed are modules with `indexer.block_size`, and for this model the "
            "attention functions 'eager' and 'sdpa'."
        )
    blocks = -(-kv_length // size)
    hidden = block_indices.new_ones((*block_indices.shape[:3], blocks + 1), dtype=torch.bool)
    chosen = block_indices.masked_fill(block_indices < 0, blocks).long()
    hidden = hidden.scatter_(-1, chosen, False)[..., :blocks].repeat_interleave(size, dim=3)[..., :kv_length]
    hidden = hidden.repeat_interleave(query.shape[1] // block_indices.shape[1], dim=1)
    options = attention_options(module, query, kv_length, attention_mask, is_causal=is_causal)
    return whole_mask(replace(options, mask=_with_hidden(options.mask, hidden)), query, kv_length)


def _with_chosen(mask: Tensor | None, indices: Tensor, kv_length: int) -> Tensor:
    """A mask that hides whatever an indexer has not chosen, slots `(B, q, k)`, too."""
    hidden = indices.new_ones((*indices.shape[:2], kv_length), dtype=torch.bool)
    hidden = hidden.scatter_(-1, indices.long(), False)[:, None]
    return _with_hidden(mask, hidden)


def _with_hidden(mask: Tensor | None, hidden: Tensor) -> Tensor:
    if mask is None:
        return ~hidden
    return mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, -torch.inf)


def _sink_logits(of_heads: Tensor | None, of_queries: Tensor | None) -> Tensor | None:
    """Sink logits by either name: `s_aux` `(Hq,)` of gpt-oss, `sinks` `(B, Hq, q, 1)` of Inkling 2."""
    return of_heads if of_queries is None else of_queries.squeeze(-1)
