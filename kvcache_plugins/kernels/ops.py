"""The package's torch operators: their schemas, and the functions that call those that read a cache.

Only this file and `writing_ops`, for those that write one, call `torch.ops.kvcache_plugins`. Beneath is plain
torch (`defaults`); a native library (`loader`) adds implementations for a device on top of it; nothing here
builds or loads one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .defaults import DEFAULTS
from .layout import Side

__all__ = [
    "SCHEMAS",
    "attend_latents",
    "decode_attention",
    "decode_tokens",
    "measure_attention",
    "multiply_keys",
    "multiply_values",
    "operators",
]

SCHEMAS = {
    "append_tokens": (
        "(Tensor(a!) records, Tensor key_states, Tensor value_states, Tensor(b!) key_tail, "
        "Tensor(c!) value_tail, int[] key_plan, int[] value_plan, Tensor? cos=None, Tensor? sin=None, "
        "Tensor? factors=None) -> bool"
    ),
    "attend_latents": (
        "(Tensor query, Tensor records, Tensor[] latent_segments, Tensor[] rotated_segments, "
        "Tensor?[] latent_extras, Tensor?[] rotated_extras, Tensor? sink_start, int[] latent_layout, "
        "int[] rotated_layout, float scaling, bool is_bfloat16, Tensor? bias, bool is_causal, int window, "
        "float softcap, Tensor? sink_logits) -> Tensor"
    ),
    "decode_attention": (
        "(Tensor query, Tensor records, Tensor[] key_segments, Tensor[] value_segments, "
        "Tensor?[] key_extras, Tensor?[] value_extras, Tensor? sink_start, int[] key_layout, "
        "int[] value_layout, float scaling, Tensor? bias, bool is_causal, int window, float softcap, "
        "Tensor? sink_logits, Tensor? alibi_slopes) -> Tensor"
    ),
    "decode_tokens": (
        "(Tensor records, Tensor[] segments, Tensor?[] extras, Tensor? sink_start, int[] layout, "
        "bool is_key, int start, int stop, ScalarType dtype) -> Tensor"
    ),
    "encode_levels": (
        "(Tensor(a!) records, Tensor(b!)? entries, Tensor(c!)? starts, Tensor states, bool is_key, "
        "int[] layout, Tensor boundaries, Tensor levels, int side, int start, Tensor? scale=None, "
        "Tensor? offset=None, Tensor? first_plain=None, Tensor? cos=None, Tensor? sin=None) -> bool"
    ),
    "encode_tokens": (
        "(Tensor(a!) records, Tensor states, bool is_key, int[] layout, int start, "
        "Tensor? cos=None, Tensor? sin=None) -> bool"
    ),
    "gather_tokens": (
        "(Tensor records_in, Tensor(a!) records_out, Tensor index, int[] key_layout, "
        "int[] value_layout) -> ()"
    ),
    "measure_attention": (
        "(Tensor query, Tensor records, Tensor[] segments, Tensor?[] extras, Tensor? sink_start, "
        "int[] layout, int start, float scaling, Tensor? bias, bool is_causal, int window, float softcap, "
        "Tensor? sink_logits, Tensor? alibi_slopes, Tensor? counted, bool is_strongest) -> Tensor"
    ),
    "multiply_keys": (
        "(Tensor query, Tensor records, Tensor[] segments, Tensor?[] extras, Tensor? sink_start, "
        "int[] layout, int start) -> Tensor"
    ),
    "multiply_values": (
        "(Tensor weights, Tensor records, Tensor[] segments, Tensor?[] extras, Tensor? sink_start, "
        "int[] layout, int start) -> Tensor"
    ),
}
"""Name and signature of every operator; a native library is built for exactly these. `attend_latents`,
`measure_attention` and the two products have native implementations on the CPU only."""


def attend_latents(
    query: Tensor,
    records: Tensor,
    latents: Side,
    rotated: Side,
    *,
    scaling: float,
    is_bfloat16: bool,
    sink_start: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attend from absorbed queries over packed and exact latents, and the rotated keys beside them.

    Both together are the keys of one head, the latents alone its values (see `models.latent`).

    Args:
        query (`torch.Tensor` of shape `(B, H, q, R + Dr)`): fp32, channels of the latents first; up to 64
            query tokens.
        records (`torch.Tensor` of shape `(B, 1, N, record_bytes)`): uint8, the packed blocks.
        latents (`Side`): How to read the latents, which are in the order of keys: `T` tokens of `R` channels.
        rotated (`Side`): How to read the rotated keys, which are in the order of values: as many of `Dr`.
        scaling (`float`): Factor of the products.
        is_bfloat16 (`bool`): Whether the queries come from bf16 ones, so that queries, decoded tokens and
            weights may be rounded to it; sums are in fp32 all the same.
        sink_start (`torch.Tensor` of shape `(B,)`, *optional*): int64, slot of the first sink of every row.
        bias (`torch.Tensor`, *optional*): fp32, additive, `(B or 1, H or 1, q or 1, T)`; `-inf` hides a slot.
        is_causal (`bool`): Query `i` of `q` sees the slots up to `T - q + i`.
        window (`int`): And those above `T - q + i - window`; 0 is no window.
        softcap (`float`): Bound of the logits; 0 is none.
        sink_logits (`torch.Tensor` of shape `(H,)` or `(B, H, q)`, *optional*): fp32, extra logits without a
            value.

    Returns:
        `torch.Tensor` of shape `(B, H, q, R)`: fp32, sums of latents; zeros where nothing is visible.
    """
    output: Tensor = operators.attend_latents(
        query,
        records,
        latents.contiguous_rows(),
        rotated.contiguous_rows(),
        latents.extras,
        rotated.extras,
        sink_start,
        latents.layout.integers(),
        rotated.layout.integers(),
        scaling,
        is_bfloat16,
        bias,
        is_causal,
        window,
        softcap,
        sink_logits,
    )
    return output


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
        sink_logits (`torch.Tensor` of shape `(Hq,)` or `(B, Hq, q)`, *optional*): fp32, extra logits without
            a value.
        alibi_slopes (`torch.Tensor` of shape `(Hq,)`, *optional*): fp32, linear position bias.

    Returns:
        `torch.Tensor` of shape `(B, Hq, q, Dv)`: in the dtype of `query`; zeros where nothing is visible.
    """
    output: Tensor = operators.decode_attention(
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


def decode_tokens(
    records: Tensor,
    side: Side,
    *,
    is_key: bool,
    start: int,
    stop: int,
    dtype: torch.dtype,
    sink_start: Tensor | None = None,
) -> Tensor:
    """Decode slots `[start, stop)` of the keys or values, packed and exact ones.

    Args:
        records (`torch.Tensor` of shape `(B, H, N, record_bytes)`): uint8, the packed blocks.
        side (`Side`): How to read the keys (or values): `T` tokens.
        is_key (`bool`): Whether codes are in key order.
        start (`int`): First slot.
        stop (`int`): Slot after the last; `0 <= start <= stop <= T`.
        dtype (`torch.dtype`): fp32, bf16 or fp16; numbers are rounded from fp32, and finite ones stay so in
            fp16.
        sink_start (`torch.Tensor` of shape `(B,)`, *optional*): int64, slot of the first sink of every row.

    Returns:
        `torch.Tensor` of shape `(B, H, stop - start, D)`: contiguous.
    """
    states: Tensor = operators.decode_tokens(
        records,
        side.contiguous_rows(),
        side.extras,
        sink_start,
        side.layout.integers(),
        is_key,
        start,
        stop,
        dtype,
    )
    return states


def measure_attention(
    query: Tensor,
    records: Tensor,
    keys: Side,
    *,
    scaling: float,
    start: int = 0,
    sink_start: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    counted: Tensor | None = None,
    is_strongest: bool = False,
) -> Tensor:
    """Measure how much of the attention of some queries every token receives.

    Args:
        query (`torch.Tensor` of shape `(B, Hq, q, D)`): fp32, bf16 or fp16; up to 64 query tokens.
        records (`torch.Tensor` of shape `(B, H, N, record_bytes)`): uint8, the packed blocks.
        keys (`Side`): How to read the keys: `T` tokens.
        scaling (`float`): Factor of `q.k`.
        start (`int`): First slot that counts; those before it take no share.
        sink_start (`torch.Tensor` of shape `(B,)`, *optional*): int64, slot of the first sink of every row.
        bias (`torch.Tensor`, *optional*): fp32, additive, `(B or 1, Hq or 1, q or 1, T)`; `-inf`
            hides a slot.
        is_causal (`bool`): Query `i` of `q` sees the slots up to `T - q + i`.
        window (`int`): And those above `T - q + i - window`; 0 is no window.
        softcap (`float`): Bound of the logits; 0 is none.
        sink_logits (`torch.Tensor` of shape `(Hq,)` or `(B, Hq, q)`, *optional*): fp32, extra logits, which
            take their share.
        alibi_slopes (`torch.Tensor` of shape `(Hq,)`, *optional*): fp32, linear position bias.
        counted (`torch.Tensor` of shape `(B, q)`, *optional*): bool, which queries count; all if not given.
        is_strongest (`bool`): Whether the largest weight is asked for, and not the sum of all.

    Returns:
        `torch.Tensor` of shape `(B, H, T - start)`: fp32, over all queries and the query heads of a group.
    """
    received: Tensor = operators.measure_attention(
        query,
        records,
        keys.contiguous_rows(),
        keys.extras,
        sink_start,
        keys.layout.integers(),
        start,
        scaling,
        bias,
        is_causal,
        window,
        softcap,
        sink_logits,
        alibi_slopes,
        counted,
        is_strongest,
    )
    return received


def multiply_keys(
    query: Tensor, records: Tensor, keys: Side, *, start: int = 0, sink_start: Tensor | None = None
) -> Tensor:
    """Multiply queries with packed and exact keys.

    Args:
        query (`torch.Tensor` of shape `(B, Hq, q, D)`): fp32, bf16 or fp16; up to 64 query tokens.
        records (`torch.Tensor` of shape `(B, H, N, record_bytes)`): uint8, the packed blocks.
        keys (`Side`): How to read the keys: `T` tokens.
        start (`int`): First slot that counts.
        sink_start (`torch.Tensor` of shape `(B,)`, *optional*): int64, slot of the first sink of every row.

    Returns:
        `torch.Tensor` of shape `(B, Hq, q, T - start)`: fp32.
    """
    logits: Tensor = operators.multiply_keys(
        query, records, keys.contiguous_rows(), keys.extras, sink_start, keys.layout.integers(), start
    )
    return logits


def multiply_values(
    weights: Tensor, records: Tensor, values: Side, *, start: int = 0, sink_start: Tensor | None = None
) -> Tensor:
    """Sum packed and exact values by weights.

    Args:
        weights (`torch.Tensor` of shape `(B, Hq, q, T - start)`): fp32, bf16 or fp16, finite and not
            negative; up to 64 query tokens.
        records (`torch.Tensor` of shape `(B, H, N, record_bytes)`): uint8, the packed blocks.
        values (`Side`): How to read the values: `T` tokens.
        start (`int`): Slot of the first weight.
        sink_start (`torch.Tensor` of shape `(B,)`, *optional*): int64, slot of the first sink of every row.

    Returns:
        `torch.Tensor` of shape `(B, Hq, q, Dv)`: in the dtype of the weights. What has weight 0 counts for
        nothing, whatever it holds.
    """
    sums: Tensor = operators.multiply_values(
        weights, records, values.contiguous_rows(), values.extras, sink_start, values.layout.integers(), start
    )
    return sums


def _register() -> None:
    """Define the operators, once per process: a module may be imported again, a registration may not."""
    if hasattr(torch.ops.kvcache_plugins, "decode_attention"):
        return
    for name, (default, shape) in DEFAULTS.items():
        torch.library.define(f"kvcache_plugins::{name}", SCHEMAS[name])
        torch.library.impl(f"kvcache_plugins::{name}", "default", default)
        torch.library.register_fake(f"kvcache_plugins::{name}", shape)


_register()
operators = torch.ops.kvcache_plugins
"""All of them, registered."""
