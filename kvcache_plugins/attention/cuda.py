"""Attention over packed data on a GPU: the CUDA kernels for a few query tokens, tiles they decode for many.

A decode step reads no device memory here, so it waits for nothing and can be part of a CUDA graph.
"""

from __future__ import annotations

from functools import cache
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..kernels.cuda_inputs import MAX_QUERIES, is_fast, on_device
from ..kernels.layout import FORMATS, Side, dense_rows
from ..kernels.ops import decode_attention
from ..layers.records import RecordLayout
from ..layers.view import StreamView
from .bias import logit_bias, per_head, sinks_for_kernels
from .decoded import DecodedView
from .description import describe, first_sinks
from .flash import why_no_flash
from .reference import AttentionOptions, attend
from .tiles import attend_tiles, can_attend_tiles

__all__ = ["attend_on_device", "can_attend_tiles_on_device", "why_not_fast"]

_GENERAL = (
    "the general CUDA kernel serves {dtype} queries over this layout, many times slower than the one on "
    "tensor cores (kernels.cuda_inputs.is_fast says what that takes)"
)
_LEVELS = (
    "the CUDA kernel looks up every code and rotates every key: its predecessor took 1.6 times the time of "
    "attention over a dense cache (8 sequences of 32,768 tokens on an H200); this one has not been timed"
)
_Asked: TypeAlias = tuple[torch.dtype, torch.device]
_reasons: WeakKeyDictionary[RecordLayout, dict[_Asked, str | None]] = WeakKeyDictionary()


def why_not_fast(query: Tensor, tokens: StreamView, value_tokens: StreamView) -> str | None:
    """Why attention is slower than over dense keys and values; `None` if it is not, or nothing is packed.

    So it is where tensor cores do not read what is packed, and of non-uniform levels.

    Args:
        query (`torch.Tensor` of shape `(B, Hq, q, D)`): On the GPU.
        tokens (`StreamView`): The keys.
        value_tokens (`StreamView`): The values.
    """
    if min(tokens.packed_length, value_tokens.packed_length) == 0 or query.shape[2] > MAX_QUERIES:
        return None
    layout = tokens.stream.records.layout
    known, asked = _reasons.setdefault(layout, {}), (query.dtype, query.device)
    if asked not in known:  # the same for every step of a layer
        keys, values = describe(tokens), describe(value_tokens)
        assert keys is not None and values is not None
        is_served = is_fast(query.dtype, layout.record_bytes, keys, values, _shared_bytes(query.device))
        are_levels = keys.layout.format == FORMATS["nonuniform"]
        slow = _LEVELS if are_levels else None
        known[asked] = slow if is_served else _GENERAL.format(dtype=query.dtype)
    return known[asked]


@cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory a thread block may have; the least of served GPUs where torch cannot tell."""
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 101376))


def can_attend_tiles_on_device(query: Tensor, value_dim: int, length: int, options: AttentionOptions) -> bool:
    """Whether torch's flash attention serves decoded tiles; if not, the reference does, in fp32."""
    width = max(query.shape[3], value_dim)
    if query.device.type != "cuda":
        return False
    if torch.cuda.is_current_stream_capturing():
        return False  # masks are read on the host, and so is whether flash attention is right here
    if why_no_flash(query.device, query.dtype, width) is not None:
        return False
    return can_attend_tiles(options, length, query.shape[2])


def attend_on_device(
    query: Tensor,
    tokens: StreamView,
    value_tokens: StreamView,
    sides: tuple[Side, Side],
    options: AttentionOptions,
) -> Tensor:
    """Attend from new tokens over packed and exact keys and values of the same GPU.

    Args:
        query (`torch.Tensor` of shape `(B, Hq, q, D)`): fp32, bf16 or fp16.
        tokens (`StreamView`): The keys.
        value_tokens (`StreamView`): The values.
        sides (`tuple[Side, Side]`): Keys and values as `attention.native` describes them.
        options (`AttentionOptions`): Scaling, masks and biases.

    Returns:
        `torch.Tensor` of shape `(B, Hq, q, Dv)`: in the dtype of `query`.
    """
    device = query.device
    keys, values = (on_device(side, device) for side in sides)
    sink_start = first_sinks(tokens, keys, values)
    if query.shape[2] > MAX_QUERIES:
        decoded = DecodedView(tokens, keys, sink_start), DecodedView(value_tokens, values, sink_start)
        serves = can_attend_tiles_on_device(query, values.layout.head_dim, tokens.length, options)
        return (attend_tiles if serves else attend)(query, *decoded, options)
    bias, is_causal, window = logit_bias(
        options, query.shape[2], tokens.length, hidden=tokens.first, device=device
    )
    return decode_attention(
        dense_rows(query),
        tokens.stream.records.data,
        keys,
        values,
        scaling=options.scale_for(query.shape[3]),
        sink_start=sink_start,
        bias=bias,
        is_causal=is_causal,
        window=window,
        softcap=options.softcap or 0.0,
        sink_logits=sinks_for_kernels(options.sink_logits, device),
        alibi_slopes=per_head(options.alibi_slopes, device),
    )
