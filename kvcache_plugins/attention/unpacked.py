"""Attention over plain tensors, where torch multiplies what a mask hides or does not know what is asked for.

Of softcaps, sink logits and biases it does not know.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .arguments import attention_options
from .cuda import can_attend_tiles_on_device
from .exact import TorchAttention
from .limits import MOST_QUERIES
from .query_blocks import attend_query_blocks, can_attend_query_blocks
from .reference import AttentionOptions, DenseView, attend
from .tiles import attend_tiles

__all__ = ["attend_tensors", "attend_unpacked"]


def attend_tensors(
    instead_of: TorchAttention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None] | None:
    """Attend from many new tokens on a CPU, a block of queries at a time, where that is faster.

    Args:
        instead_of (`TorchAttention`): What would attend. Without a mask torch leaves out itself what comes
            later than a query.
        module (`torch.nn.Module`): The attention module.
        query (`torch.Tensor` of shape `(B, Hq, q, D)`): The newest tokens' queries.
        key (`torch.Tensor` of shape `(B, Hkv, T, D)`): What they attend to.
        value (`torch.Tensor` of shape `(B, Hkv, T, Dv)`): The values.
        attention_mask (`torch.Tensor`, *optional*): As attention functions of transformers take it. Where it
            is given it says alone what is hidden, as to torch.
        scaling (`float`, *optional*): Factor of the logits.
        kwargs: What else [`arguments.attention_options`] knows.

    Returns:
        `tuple[torch.Tensor, None] | None`: `(B, q, Hq, Dv)`, and no attention weights; `None` where it is not
            faster, or these arguments ask for something else.
    """
    is_eager = instead_of is TorchAttention.EAGER
    hides_in_vain = attention_mask is not None and instead_of is TorchAttention.FLASH
    if not query.is_cpu or not _has_many_queries(query) or not (is_eager or hides_in_vain):
        return None
    if attention_mask is not None:
        kwargs.pop("sliding_window", None)
    options = attention_options(module, query, key.shape[2], attention_mask, scaling, **kwargs)
    if (options.sink_logits is not None and not is_eager) or not can_attend_query_blocks(query, key, options):
        return None
    return attend_query_blocks(query, key, value, options).transpose(1, 2).contiguous(), None


def attend_unpacked(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """Attend over tensors: many queries by flash attention, a part of them at a time, where that can be.

    What no query of a part sees is left out, so a layer with a window takes time for what is in its windows
    alone. For 4096 tokens of 16 heads of 64 channels with sink logits the reference takes 3.0 seconds in fp32
    and 3.7 in bf16, blocks take 0.7 in both; with a window of 128 tokens 3.4, 4.0 and 0.11 (one thread of a
    Zen 3 core).

    Args:
        query (`torch.Tensor` of shape `(B, Hq, q, D)`): The newest tokens' queries.
        keys (`torch.Tensor` of shape `(B, Hkv, T, D)`): What they attend to.
        values (`torch.Tensor` of shape `(B, Hkv, T, Dv)`): The values.
        options (`AttentionOptions`): Scaling, masks and biases.

    Returns:
        `torch.Tensor` of shape `(B, Hq, q, Dv)`: in the dtype of `query`.
    """
    if _has_many_queries(query):
        if can_attend_query_blocks(query, keys, options):
            return attend_query_blocks(query, keys, values, options)
        if can_attend_tiles_on_device(query, values.shape[3], keys.shape[2], options):
            return attend_tiles(query, DenseView(keys), DenseView(values), options)
    return attend(query, DenseView(keys), DenseView(values), options)


def _has_many_queries(query: Tensor) -> bool:
    """Whether there are many, and their masks may be looked at and outputs merged in place."""
    return query.shape[2] > MOST_QUERIES and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
