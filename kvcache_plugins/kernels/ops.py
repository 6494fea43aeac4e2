"""The package's torch operators: schemas, plain-torch defaults, shape functions.

The only file that calls `torch.ops.kvcache_plugins`. A native library (`loader`) adds implementations for a
device on top of the defaults; nothing here builds or loads one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .decoding import attend_dense, decode_side
from .layout import Side

__all__ = ["SCHEMAS", "decode_attention", "encode_tokens"]

SCHEMAS = {
    "decode_attention": (
        "(Tensor query, Tensor records, Tensor[] key_segments, Tensor[] value_segments, "
        "Tensor?[] key_extras, Tensor?[] value_extras, Tensor? sink_start, int[] key_layout, "
        "int[] value_layout, float scaling, Tensor? bias, bool is_causal, int window, float softcap, "
        "Tensor? sink_logits, Tensor? alibi_slopes) -> Tensor"
    ),
    "encode_tokens": "(Tensor(a!) records, Tensor states, bool is_key, int[] layout, int start) -> bool",
}
"""Name and signature of every operator; a native library is built for exactly these."""


def decode_attention(
    query: Tensor,
    records: Tensor,
    keys: Side,
    values: Side,
    *,
    scaling: float,
    sink_start: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Attend from a few new tokens over packed and exact keys and values.

    Args:
        query (`torch.Tensor` of shape `(B, Hq, q, D)`): fp32, bf16 or fp16.
        records (`torch.Tensor` of shape `(B, H, N, record_bytes)`): uint8, the packed blocks.
        keys (`Side`): How to read the keys: `T` tokens.
        values (`Side`): How to read the values: as many.
        scaling (`float`): Factor of `q.k`.
        sink_start (`torch.Tensor` of shape `(B,)`, *optional*): int64, slot of the first sink of every row.
        bias (`torch.Tensor`, *optional*): fp32, additive, `(B or 1, Hq or 1, q or 1, T)`; `-inf`
            hides a slot.
        is_causal (`bool`): Query `i` of `q` sees the slots up to `T - q + i`.
        window (`int`): And those above `T - q + i - window`; 0 is no window.
        softcap (`float`): Bound of the logits; 0 is none.
        sink_logits (`torch.Tensor` of shape `(Hq,)`, *optional*): fp32, extra logits without a value.
        alibi_slopes (`torch.Tensor` of shape `(Hq,)`, *optional*): fp32, linear position bias.

    Returns:
        `torch.Tensor` of shape `(B, Hq, q, Dv)`: in the dtype of `query`; zeros where nothing is visible.
    """
    output: Tensor = torch.ops.kvcache_plugins.decode_attention(
        query,
        records,
        keys.contiguous_rows(),
        values.contiguous_rows(),
        keys.extras,
        values.extras,
        sink_start,
        keys.layout.integers(),
        values.layout.integers(),
        scaling,
        bias,
        is_causal,
        window,
        softcap,
        sink_logits,
        alibi_slopes,
    )
    return output


def encode_tokens(records: Tensor, states: Tensor, is_key: bool, layout: list[int], start: int) -> bool:
    """Encode new tokens into their places in the records.

    Args:
        records (`torch.Tensor` of shape `(B, H, N, record_bytes)`): uint8, zero where nothing is written yet.
        states (`torch.Tensor` of shape `(B, H, n, D)`): fp32, bf16 or fp16; whole groups of tokens.
        is_key (`bool`): Whether codes go in key order.
        layout (`list[int]`): `[nbits, format, head_dim, group_tokens, width, metadata_bytes, interleaved,
            codes_offset, scale_offset, minimum_offset]`, offsets in bytes inside a record, -1 if absent.
        start (`int`): Slot of the first token.

    Returns:
        `bool`: Whether it was done. If not, nothing was written: no native library is loaded, or the states
        hold what only the torch path handles (numbers that are not finite, metadata beyond fp16).
    """
    done: bool = torch.ops.kvcache_plugins.encode_tokens(records, states, is_key, layout, start)
    return done


def _encode_tokens(*args: object) -> bool:
    """Leave the encoding to the codecs, which are the torch implementation."""
    return False


def _decode_attention(
    query: Tensor,
    records: Tensor,
    key_segments: list[Tensor],
    value_segments: list[Tensor],
    key_extras: list[Tensor | None],
    value_extras: list[Tensor | None],
    sink_start: Tensor | None,
    key_layout: list[int],
    value_layout: list[int],
    scaling: float,
    bias: Tensor | None,
    is_causal: bool,
    window: int,
    softcap: float,
    sink_logits: Tensor | None,
    alibi_slopes: Tensor | None,
) -> Tensor:
    keys = Side.from_op(key_layout, key_segments, key_extras)
    values = Side.from_op(value_layout, value_segments, value_extras)
    return attend_dense(
        query,
        decode_side(keys, records, is_key=True, sink_start=sink_start),
        decode_side(values, records, is_key=False, sink_start=sink_start),
        scaling,
        bias,
        is_causal,
        window,
        softcap,
        sink_logits,
        alibi_slopes,
    )


def _decode_attention_shape(query: Tensor, *args: object) -> Tensor:
    value_layout = args[7]
    assert isinstance(value_layout, (list, tuple))
    return query.new_empty((*query.shape[:3], value_layout[3]))


def _register() -> None:
    """Define the operators, once per process: a module may be imported again, a registration may not."""
    if hasattr(torch.ops.kvcache_plugins, "decode_attention"):
        return
    for name, default, shape in (
        ("decode_attention", _decode_attention, _decode_attention_shape),
        ("encode_tokens", _encode_tokens, _encode_tokens),
    ):
        torch.library.define(f"kvcache_plugins::{name}", SCHEMAS[name])
        torch.library.impl(f"kvcache_plugins::{name}", "default", default)
        torch.library.register_fake(f"kvcache_plugins::{name}", shape)


_register()
