"""Attention over packed data by native kernels, where they fit; else by the torch reference.

A few query tokens are a pass over the codes (`kernels.ops.decode_attention`). Many are several passes where
the processor's vectors make those faster than torch's products; else dense attention over tiles that are
decoded natively (`tiles`) or, while nothing is packed, over what blocks of queries see (`query_blocks`). The
kernels are told of a layer's streams in their own terms (`description`), and whatever may hide a slot becomes
a window, a causal flag, or an additive bias (`bias`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import loader
from ..kernels.layout import Side, dense_rows
from ..kernels.ops import decode_attention
from ..kernels.selection import UNREADABLE, native_is_unavailable, why_no_kernels
from ..layers.handle import KVHandle
from ..layers.view import StreamView, joined
from .bias import LogitBias, logit_bias, per_head, row_bias, sinks_of_pass
from .cuda import attend_on_device, why_not_fast
from .decoded import DecodedView
from .description import describe, first_sinks
from .limits import KERNEL_DTYPES, MOST_QUERIES
from .passes import in_passes
from .query_blocks import attend_query_blocks, can_attend_query_blocks
from .reference import AttentionOptions, attend
from .tiles import attend_tiles, can_attend_tiles

__all__ = ["attend_handles", "has_fast_passes"]

_MOST_PACKED_QUERIES = 16
"""Of `MOST_QUERIES` where the heads of a group come as query tokens of one head."""


def attend_handles(query: Tensor, key: KVHandle, value: KVHandle, options: AttentionOptions) -> Tensor:
    """Attend from `query` over what two handles stand for; their layer notes which kernel served.

    Args:
        query (`torch.Tensor` of shape `(B, Hq, q, D)`): Queries of the newest tokens.
        key (`KVHandle`): What the keys are.
        value (`KVHandle`): What the values are, of the same layer and call.
        options (`AttentionOptions`): Scaling, masks and biases.

    Raises:
        KernelUnavailableError: If the layer was configured with `kernel="native"` and no kernel serves this.
    """
    layer = key.layer
    if layer.config.kernel == "torch":
        reason = "kernel='torch' was given"
    elif value.layer is not layer:
        reason = "keys and values of different layers have no native kernel"
    elif not _is_served(query, key):
        reason = (
            f"there is no native kernel for {query.dtype} queries on {query.device} and keys on {key.device}"
        )
    else:
        served = (_attend_on_cpu if query.is_cpu else _attend_on_cuda)(query, key, value, options)
        if isinstance(served, Tensor):
            layer.kernel = query.device.type
            layer.kernel_reason = None if query.is_cpu else why_not_fast(query, key.tokens, value.tokens)
            return served
        reason = served
    if layer.config.kernel == "native":
        raise native_is_unavailable(f"layer {layer.layer_idx}", reason)
    layer.kernel, layer.kernel_reason = "torch", reason
    return attend(query, key.tokens, value.tokens, options)


def _attend_on_cpu(query: Tensor, key: KVHandle, value: KVHandle, options: AttentionOptions) -> Tensor | str:
    """Attend by a native kernel; the reason if none serves this."""
    sides = _sides(key, value)
    if sides is None:
        return UNREADABLE
    if (reason := why_no_kernels(query.device)) is not None:
        return reason
    keys, values = sides
    query_length, length = query.shape[2], key.tokens.length
    is_decode = _is_decode(query, key, options)
    if is_decode or has_fast_passes(query.dtype):
        # of many queries, rows of a bias each would take more memory than the codes do
        bias_of = logit_bias if is_decode else row_bias
        added = bias_of(options, query_length, length, hidden=key.tokens.first, window=key.layer.window)
        if added is not None:
            return _attend_in_passes(query, key.tokens, keys, values, options, added)
        if not key.tokens.packed_length and not value.tokens.packed_length:
            states = joined(key.tokens), joined(value.tokens)
            # a window of 512 or of 1024 tokens takes them 0.3 or 0.65 of what it takes tiles
            if can_attend_query_blocks(query, states[0], options):
                return attend_query_blocks(query, *states, options)
    if can_attend_tiles(options, length, query_length):
        sink_start = first_sinks(key.tokens, keys, values)
        decoded = DecodedView(key.tokens, keys, sink_start), DecodedView(value.tokens, values, sink_start)
        return attend_tiles(query, *decoded, options)
    return f"no native kernel attends from {query_length} tokens at once with these masks and biases"


def _attend_on_cuda(query: Tensor, key: KVHandle, value: KVHandle, options: AttentionOptions) -> Tensor | str:
    """Attend by the CUDA kernels; the reason if they cannot serve this, or there are none."""
    sides = _sides(key, value)
    if sides is None:
        return UNREADABLE
    if (reason := why_no_kernels(query.device)) is not None:
        return reason
    return attend_on_device(query, key.tokens, value.tokens, sides, options)


def _sides(key: KVHandle, value: KVHandle) -> tuple[Side, Side] | None:
    """Both streams as the kernels read them; `None` if no kernel reads their codecs."""
    if key.tokens.first != value.tokens.first:  # all keys that are read are exact, and not all values, say
        return None
    keys, values = describe(key.tokens), describe(value.tokens)
    return None if keys is None or values is None else (keys, values)


def _is_served(query: Tensor, key: KVHandle) -> bool:
    # asked of the newest tokens: the handle, a tensor subclass, takes a microsecond to answer
    newest = key.tokens.segments[-1]
    return (
        newest.device == query.device
        and query.device.type in ("cpu", "cuda")
        and query.dtype in KERNEL_DTYPES
    )


def has_fast_passes(dtype: torch.dtype) -> bool:
    """Whether passes of the decode kernel beat dense attention for any number of queries.

    With 64 queries of 32 heads over 8192 tokens of 8 kv heads of 128 channels (one thread of a Zen 5 core),
    bf16: 34 ms by AVX-512, 90 by AVX2, 225 without either; by tiles 112, dense 124, torch using AVX-512.
    In fp32: 54, 90, 225, 108, 116. Processors with AMX have half-precision products in torch that the
    kernels here do not use. And the kernels round fp16 queries to bf16, which tiles do not: over many tokens
    that is more than twice the error of plain fp16 attention.
    """
    if dtype == torch.float16 or (dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()):
        return False
    return loader.instruction_set() in ("avx512", "avx2")


def _is_decode(query: Tensor, key: KVHandle, options: AttentionOptions) -> bool:
    """Whether the queries are so few that one pass over the codes serves them best."""
    query_length = query.shape[2]
    if query_length <= MOST_QUERIES:
        return True
    is_packed = query.shape[1] == key.shape[1] and not options.is_causal and options.sliding_window is None
    return is_packed and query_length <= _MOST_PACKED_QUERIES


def _attend_in_passes(
    query: Tensor, tokens: StreamView, keys: Side, values: Side, options: AttentionOptions, added: LogitBias
) -> Tensor:
    """Attend by the decode kernel, `PASS_QUERIES` query tokens at a time, each over what it may see."""
    query = dense_rows(query)
    query_length = query.shape[2]
    bias, is_causal, window = added
    sink_start = first_sinks(tokens, keys, values)
    alibi_slopes = per_head(options.alibi_slopes, query.device)

    def attend_pass(start: int, stop: int) -> Tensor:
        later = query_length - stop
        hidden = later if is_causal else 0
        seen = keys.length - hidden
        return decode_attention(
            query if stop - start == query_length else query[:, :, start:stop],
            tokens.stream.records.data,
            keys.without_newest(hidden) if hidden else keys,
            values.without_newest(hidden) if hidden else values,
            scaling=options.scale_for(query.shape[3]),
            sink_start=sink_start,
            bias=None if bias is None else bias[:, :, :, :seen] if bias.shape[2] == 1 else bias,
            is_causal=is_causal,
            window=window,
            softcap=options.softcap or 0.0,
            sink_logits=sinks_of_pass(options, query.device, slice(start, stop), later - hidden),
            alibi_slopes=alibi_slopes,
        )

    return in_passes(attend_pass, query_length)
