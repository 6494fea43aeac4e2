"""The package's torch operators: schemas, plain-torch defaults, shape functions.

The only file that calls `torch.ops.kvcache_plugins`. A native library (`loader`) adds implementations for a
device on top of the defaults; nothing here builds or loads one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .decoding import attend_dense, decode_side
from .gathering import gather_records
from .layout import Side, SideLayout

__all__ = ["SCHEMAS", "append_tokens", "decode_attention", "decode_tokens", "encode_tokens", "gather_tokens"]

SCHEMAS = {
    "append_tokens": (
        "(Tensor(a!) records, Tensor key_states, Tensor value_states, Tensor(b!) key_tail, "
        "Tensor(c!) value_tail, int[] key_plan, int[] value_plan, Tensor? cos=None, Tensor? sin=None, "
        "Tensor? factors=None) -> bool"
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
    "encode_tokens": (
        "(Tensor(a!) records, Tensor states, bool is_key, int[] layout, int start, "
        "Tensor? cos=None, Tensor? sin=None) -> bool"
    ),
    "gather_tokens": (
        "(Tensor records_in, Tensor(a!) records_out, Tensor index, int[] key_layout, "
        "int[] value_layout) -> ()"
    ),
}
"""Name and signature of every operator; a native library is built for exactly these."""


def append_tokens(
    records: Tensor,
    key_states: Tensor,
    value_states: Tensor,
    key_tail: Tensor,
    value_tail: Tensor,
    key_plan: list[int],
    value_plan: list[int],
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    factors: Tensor | None = None,
) -> bool:
    """Put new tokens into the exact tails, and encode those of `[tail | new tokens]` that are due.

    Args:
        records (`torch.Tensor` of shape `(B, H, N, record_bytes)`): uint8, zero where nothing is written yet.
        key_states (`torch.Tensor` of shape `(B, H, n, D)`): The new keys.
        value_states (`torch.Tensor` of shape `(B, H, n, Dv)`): The new values.
        key_tail (`torch.Tensor` of shape `(B, H, capacity, D)`): Exact keys, in the dtype of the new ones.
        value_tail (`torch.Tensor` of shape `(B, H, capacity, Dv)`): The same of the values.
        key_plan (`list[int]`): `[write, first, count, slot]`: place in the tail of the first new token, place
            of the first token that is due, how many are (new ones among them or not), and the slot of the
            first; then the integers of a layout, see `encode_tokens`, which may be left out if `count` is 0.
        value_plan (`list[int]`): The same of the values.
        cos (`torch.Tensor`, *optional*): Rotation to be undone of keys, see `encode_tokens`.
        sin (`torch.Tensor`, *optional*): Given with `cos`.
        factors (`torch.Tensor` of shape `(B, H, 1, D)`, *optional*): fp32; keys are divided by them before
            they are encoded. Not together with a rotation.

    Returns:
        `bool`: Whether all that was due is encoded. If not, the tails hold the new tokens and the records are
        what they were: see `encode_tokens`. On a GPU nobody waits for the numbers: metadata beyond fp16
        saturate there, which a later call reports by a `RuntimeError`.
    """
    done: bool = torch.ops.kvcache_plugins.append_tokens(
        records, key_states, value_states, key_tail, value_tail, key_plan, value_plan, cos, sin, factors
    )
    return done


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
        dtype (`torch.dtype`): fp32, bf16 or fp16; numbers are rounded from fp32.
        sink_start (`torch.Tensor` of shape `(B,)`, *optional*): int64, slot of the first sink of every row.

    Returns:
        `torch.Tensor` of shape `(B, H, stop - start, D)`: contiguous.
    """
    states: Tensor = torch.ops.kvcache_plugins.decode_tokens(
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


def encode_tokens(
    records: Tensor,
    states: Tensor,
    is_key: bool,
    layout: list[int],
    start: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> bool:
    """Encode new tokens into their places in the records.

    Args:
        records (`torch.Tensor` of shape `(B, H, N, record_bytes)`): uint8, zero where nothing is written yet.
        states (`torch.Tensor` of shape `(B, H, n, D)`): fp32, bf16 or fp16; whole groups of tokens.
        is_key (`bool`): Whether codes go in key order.
        layout (`list[int]`): `[nbits, format, head_dim, group_tokens, width, metadata_bytes, interleaved,
            codes_offset, scale_offset, minimum_offset]`, offsets in bytes inside a record, -1 if absent.
        start (`int`): Slot of the first token.
        cos (`torch.Tensor` of shape `(period, rotary_dim / 2)`, *optional*): fp32; a token of slot `t` is
            first rotated back by row `t % period`, in fp32 and to the last bit as `Rotary.turn` does it.
            Pairs are as `interleaved` says.
        sin (`torch.Tensor` of shape `(period, rotary_dim / 2)`, *optional*): fp32, given with `cos`.

    Returns:
        `bool`: Whether it was done. If not, nothing was written: no native library is loaded, or the states
        hold what only the torch path handles (numbers that are not finite, metadata beyond fp16, or that may
        be once rotated).
    """
    done: bool = torch.ops.kvcache_plugins.encode_tokens(records, states, is_key, layout, start, cos, sin)
    return done


def gather_tokens(
    records_in: Tensor, records_out: Tensor, index: Tensor, keys: SideLayout, values: SideLayout
) -> None:
    """Copy codes and metadata of chosen slots into slots `0..K - 1` of other records, bit for bit.

    Nothing is decoded to numbers, so a token that is kept stays what it was. Of every block that holds one of
    the `K` slots, the fields of both sides are written whole: zero beyond slot `K - 1`, as blocks are that
    later tokens complete. Other bytes of `records_out` are left alone.

    Args:
        records_in (`torch.Tensor` of shape `(B, H, N, record_bytes)`): uint8.
        records_out (`torch.Tensor` of shape `(B, H, M, record_bytes)`): uint8, at least `K` slots; other
            memory.
        index (`torch.Tensor` of shape `(B, H, K)`): int64, slots of `records_in` per row and head, in any
            order, repeated or not.
        keys (`SideLayout`): Fields of the keys in both records; groups within one token (`group_tokens ==
            1`), if any metadata is stored. Slots from `packed_length` on may not be chosen.
        values (`SideLayout`): The same of the values.
    """
    torch.ops.kvcache_plugins.gather_tokens(
        records_in, records_out, index, keys.integers(), values.integers()
    )


def _append_tokens(
    records: Tensor,
    key_states: Tensor,
    value_states: Tensor,
    key_tail: Tensor,
    value_tail: Tensor,
    key_plan: list[int],
    value_plan: list[int],
    *preparation: Tensor | None,
) -> bool:
    """Fill the tails, and leave the encoding to the codecs, which are the torch implementation."""
    with torch.no_grad():  # what a tail holds has no history
        for tail, states, plan in ((key_tail, key_states, key_plan), (value_tail, value_states, value_plan)):
            tail[:, :, plan[0] : plan[0] + states.shape[2]] = states
    return _is_nothing_due(key_plan, value_plan)


def _append_tokens_shape(*args: object) -> bool:
    key_plan, value_plan = args[5], args[6]
    assert isinstance(key_plan, (list, tuple)) and isinstance(value_plan, (list, tuple))
    return _is_nothing_due(key_plan, value_plan)


def _is_nothing_due(key_plan: Sequence[int], value_plan: Sequence[int]) -> bool:
    return key_plan[2] == 0 and value_plan[2] == 0


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


def _decode_tokens(
    records: Tensor,
    segments: list[Tensor],
    extras: list[Tensor | None],
    sink_start: Tensor | None,
    layout: list[int],
    is_key: bool,
    start: int,
    stop: int,
    dtype: torch.dtype,
) -> Tensor:
    side = Side.from_op(layout, segments, extras)
    states = decode_side(side, records, is_key=is_key, sink_start=sink_start)
    return states[:, :, start:stop].to(dtype, memory_format=torch.contiguous_format, copy=True)


def _decode_tokens_shape(records: Tensor, *args: object) -> Tensor:
    layout, start, stop, dtype = args[3], args[5], args[6], args[7]
    assert isinstance(layout, (list, tuple)) and isinstance(dtype, torch.dtype)
    assert isinstance(start, (int, torch.SymInt)) and isinstance(stop, (int, torch.SymInt))
    return records.new_empty((*records.shape[:2], stop - start, layout[3]), dtype=dtype)


def _gather_tokens(
    records_in: Tensor, records_out: Tensor, index: Tensor, key_layout: list[int], value_layout: list[int]
) -> None:
    gather_records(records_in, records_out, index, SideLayout(*key_layout), SideLayout(*value_layout))


def _gather_tokens_shape(*args: object) -> None:
    """Nothing is returned."""


def _register() -> None:
    """Define the operators, once per process: a module may be imported again, a registration may not."""
    if hasattr(torch.ops.kvcache_plugins, "decode_attention"):
        return
    for name, default, shape in (
        ("append_tokens", _append_tokens, _append_tokens_shape),
        ("decode_attention", _decode_attention, _decode_attention_shape),
        ("decode_tokens", _decode_tokens, _decode_tokens_shape),
        ("encode_tokens", _encode_tokens, _encode_tokens),
        ("gather_tokens", _gather_tokens, _gather_tokens_shape),
    ):
        torch.library.define(f"kvcache_plugins::{name}", SCHEMAS[name])
        torch.library.impl(f"kvcache_plugins::{name}", "default", default)
        torch.library.register_fake(f"kvcache_plugins::{name}", shape)


_register()
