"""The operators in plain torch, which serve where no native library does and say what one must compute.

Every operator also has a function that gives the shape of its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..quantizers.half_range import kept_finite
from .decoding import attend_dense, decode_side, measure_dense
from .gathering import gather_records
from .layout import Side, SideLayout

__all__ = ["DEFAULTS"]


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


def _leave_to_codecs(*args: object) -> bool:
    """Leave the encoding to the codecs, which are the torch implementation."""
    return False


def _attend_latents(
    query: Tensor,
    records: Tensor,
    latent_segments: list[Tensor],
    rotated_segments: list[Tensor],
    latent_extras: list[Tensor | None],
    rotated_extras: list[Tensor | None],
    sink_start: Tensor | None,
    latent_layout: list[int],
    rotated_layout: list[int],
    scaling: float,
    is_bfloat16: bool,
    *options: Any,
) -> Tensor:
    sides = (
        (Side.from_op(latent_layout, latent_segments, latent_extras), True),
        (Side.from_op(rotated_layout, rotated_segments, rotated_extras), False),
    )
    latents, rotated = (
        decode_side(side, records, is_key=is_key, sink_start=sink_start) for side, is_key in sides
    )
    keys = torch.cat((latents, rotated), dim=-1)
    return attend_dense(query, keys, latents, scaling, *options)


def _attend_latents_shape(query: Tensor, *args: object) -> Tensor:
    latent_layout = args[6]
    assert isinstance(latent_layout, (list, tuple))
    return query.new_empty((*query.shape[:3], latent_layout[3]))


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
    *options: Any,
) -> Tensor:
    keys = Side.from_op(key_layout, key_segments, key_extras)
    values = Side.from_op(value_layout, value_segments, value_extras)
    return attend_dense(
        query,
        decode_side(keys, records, is_key=True, sink_start=sink_start),
        decode_side(values, records, is_key=False, sink_start=sink_start),
        *options,
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
    return kept_finite(states[:, :, start:stop], dtype).to(
        dtype, memory_format=torch.contiguous_format, copy=True
    )


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


def _measure_attention(
    query: Tensor,
    records: Tensor,
    segments: list[Tensor],
    extras: list[Tensor | None],
    sink_start: Tensor | None,
    layout: list[int],
    *options: Any,
) -> Tensor:
    side = Side.from_op(layout, segments, extras)
    keys = decode_side(side, records, is_key=True, sink_start=sink_start)
    return measure_dense(query, keys, *options)


def _measure_attention_shape(query: Tensor, records: Tensor, *args: object) -> Tensor:
    segments, layout, start = args[0], args[3], args[4]
    assert isinstance(segments, (list, tuple)) and isinstance(layout, (list, tuple))
    length = layout[0] + sum(segment.shape[2] for segment in segments)
    return query.new_empty((*records.shape[:2], length - start), dtype=torch.float32)


def _multiply_keys(
    query: Tensor,
    records: Tensor,
    segments: list[Tensor],
    extras: list[Tensor | None],
    sink_start: Tensor | None,
    layout: list[int],
    start: int,
) -> Tensor:
    side = Side.from_op(layout, segments, extras)
    keys = decode_side(side, records, is_key=True, sink_start=sink_start)[:, :, start:]
    logits: Tensor = _grouped(query, keys) @ keys[:, :, None].transpose(-1, -2)
    return logits.flatten(1, 2)


def _multiply_keys_shape(query: Tensor, records: Tensor, *args: object) -> Tensor:
    segments, layout, start = args[0], args[3], args[4]
    assert isinstance(segments, (list, tuple)) and isinstance(layout, (list, tuple))
    length = layout[0] + sum(segment.shape[2] for segment in segments)
    return query.new_empty((*query.shape[:3], length - start), dtype=torch.float32)


def _multiply_values(
    weights: Tensor,
    records: Tensor,
    segments: list[Tensor],
    extras: list[Tensor | None],
    sink_start: Tensor | None,
    layout: list[int],
    start: int,
) -> Tensor:
    side = Side.from_op(layout, segments, extras)
    values = decode_side(side, records, is_key=False, sink_start=sink_start)[:, :, start:]
    sums: Tensor = _grouped(weights, values) @ values[:, :, None]
    return sums.flatten(1, 2).to(weights.dtype)


def _multiply_values_shape(weights: Tensor, records: Tensor, *args: object) -> Tensor:
    layout = args[3]
    assert isinstance(layout, (list, tuple))
    return weights.new_empty((*weights.shape[:3], layout[3]))


def _grouped(rows: Tensor, states: Tensor) -> Tensor:
    """Rows `(B, Hq, q, n)` as fp32 `(B, H, group, q, n)`, for states of `H` heads."""
    grouped: Tensor = rows.float().unflatten(1, (states.shape[1], -1))
    return grouped


DEFAULTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "append_tokens": (_append_tokens, _append_tokens_shape),
    "attend_latents": (_attend_latents, _attend_latents_shape),
    "decode_attention": (_decode_attention, _decode_attention_shape),
    "decode_tokens": (_decode_tokens, _decode_tokens_shape),
    "encode_levels": (_leave_to_codecs, _leave_to_codecs),
    "encode_tokens": (_leave_to_codecs, _leave_to_codecs),
    "gather_tokens": (_gather_tokens, _gather_tokens_shape),
    "measure_attention": (_measure_attention, _measure_attention_shape),
    "multiply_keys": (_multiply_keys, _multiply_keys_shape),
    "multiply_values": (_multiply_values, _multiply_values_shape),
}
"""Implementation and shape of every operator, with the arguments of its schema in order."""
