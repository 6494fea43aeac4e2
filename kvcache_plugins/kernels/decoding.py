"""Decode attention in plain torch from the description a kernel gets: what every kernel must compute.

It materializes the keys and values, because it is the default of the op and the oracle of its tests, not the
path a user takes: without a kernel, attention runs tile by tile (`attention.reference`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..models.rotary import Rotary
from ..quantizers import affine, float8
from ..quantizers.granularity import Granularity
from ..quantizers.nonuniform import dequantize_nonuniform
from ..quantizers.outliers import Outliers, add_outliers
from ..quantizers.packing import BLOCK_TOKENS, packed_bytes, padded_head_dim, unpack_keys, unpack_values
from .layout import FORMATS, Side, SideLayout

__all__ = ["attend_dense", "decode_side", "measure_dense"]


def decode_side(side: Side, records: Tensor, *, is_key: bool, sink_start: Tensor | None) -> Tensor:
    """Return all tokens of a side: fp32 `(B, H, T, D)`."""
    packed = side.layout.packed_length
    parts = [segment.float() for segment in side.segments]
    if packed:
        states = _decode_records(side, records[:, :, : -(-packed // BLOCK_TOKENS)], is_key=is_key)
        states = states[:, :, :packed]
        if side.sinks is not None:
            _place_sinks(states, side.sinks, sink_start)
        parts.insert(0, states)
    return torch.cat(parts, dim=2)


def attend_dense(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    bias: Tensor | None,
    is_causal: bool,
    window: int,
    softcap: float,
    sink_logits: Tensor | None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Attend from `query` `(B, Hq, q, D)` over fp32 `keys` and `values`; see the op for the arguments."""
    kv_heads, length = keys.shape[1], keys.shape[2]
    logits = _dense_logits(query, keys, scaling, bias, is_causal, window, softcap, alibi_slopes)
    weights, total = _exponentials(logits, sink_logits)
    # a slot no query sees may hold anything
    values = torch.where((weights > 0).any(2).unflatten(1, (kv_heads, -1)).any(2)[..., None], values, 0.0)
    output = weights.view(len(query), kv_heads, -1, length) @ values
    output = output.view(*query.shape[:3], -1) / total.masked_fill(total == 0, 1.0)
    return output.to(query.dtype)


def measure_dense(
    query: Tensor,
    keys: Tensor,
    start: int,
    scaling: float,
    bias: Tensor | None,
    is_causal: bool,
    window: int,
    softcap: float,
    sink_logits: Tensor | None,
    alibi_slopes: Tensor | None,
    counted: Tensor | None,
    is_strongest: bool,
) -> Tensor:
    """What fp32 `keys` receive of attention from `query` `(B, Hq, q, D)`; see the op for the arguments."""
    logits = _dense_logits(query, keys, scaling, bias, is_causal, window, softcap, alibi_slopes)
    weights, total = _exponentials(logits[..., start:], sink_logits)
    weights = weights / total.masked_fill(total == 0, 1.0)
    if counted is not None:
        weights = weights * counted[:, None, :, None]
    weights = weights.reshape(len(query), keys.shape[1], -1, weights.shape[3])
    return weights.amax(2) if is_strongest else weights.sum(2)


def _dense_logits(
    query: Tensor,
    keys: Tensor,
    scaling: float,
    bias: Tensor | None,
    is_causal: bool,
    window: int,
    softcap: float,
    alibi_slopes: Tensor | None,
) -> Tensor:
    """Logits `(B, Hq, q, T)`, minus infinity where nothing is seen."""
    batch_size, query_heads, query_length, head_dim = query.shape
    kv_heads, length = keys.shape[1], keys.shape[2]
    rows = (query.float() * scaling).reshape(batch_size, kv_heads, -1, head_dim)
    logits = (rows @ keys.transpose(2, 3)).view(batch_size, query_heads, query_length, length)
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    slots = torch.arange(length, device=query.device)
    query_slots = slots[length - query_length :, None]
    if alibi_slopes is not None:
        logits = logits + alibi_slopes[:, None, None] * (slots - query_slots)
    if bias is not None:
        logits = torch.where(bias == -torch.inf, -torch.inf, logits + bias)
    if is_causal:
        logits = logits.masked_fill(slots > query_slots, -torch.inf)
    if window > 0:
        logits = logits.masked_fill(slots <= query_slots - window, -torch.inf)
    return logits


def _exponentials(logits: Tensor, sink_logits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of logits less the largest of their row, and what they add up to; 0 where a query sees nothing."""
    best = logits.amax(-1, keepdim=True)
    if sink_logits is not None:
        sinks = sink_logits[..., None] if sink_logits.dim() == 3 else sink_logits[None, :, None, None]
        best = torch.maximum(best, sinks)
    best = best.masked_fill(best == -torch.inf, 0.0)
    weights = (logits - best).exp()
    total = weights.sum(-1, keepdim=True)
    if sink_logits is not None:
        total = total + (sinks - best).exp()
    return weights, total


def _decode_records(side: Side, records: Tensor, *, is_key: bool) -> Tensor:
    layout = side.layout
    padded = padded_head_dim(layout.head_dim)
    stop = layout.codes_offset + packed_bytes(layout.head_dim, layout.nbits)
    data = records[..., layout.codes_offset : stop]
    if is_key:
        codes = unpack_keys(data, layout.nbits, padded, bool(layout.interleaved))
    else:
        codes = unpack_values(data, layout.nbits, padded)
    codes = codes.flatten(2, 3)[..., : layout.head_dim]
    if layout.format == FORMATS["nonuniform"]:
        return _decode_nonuniform(side, records, codes)
    granularity = Granularity(layout.group_tokens, layout.head_dim // layout.width)
    if layout.scale_offset < 0:
        assert side.static_scale is not None
        scale = side.static_scale[None, :, None, None]
        granularity = Granularity()
    else:
        scale = _metadata(records, layout, layout.scale_offset)
    if layout.format == FORMATS["affine"]:
        minimum = _metadata(records, layout, layout.minimum_offset)
        states = affine.dequantize_asymmetric(codes, scale, minimum, granularity)
    elif layout.format == FORMATS["symmetric"]:
        states = affine.dequantize_symmetric(codes, scale, granularity)
    else:
        name = next(name for name, number in FORMATS.items() if number == layout.format)
        states = float8.dequantize_float8(codes, scale, granularity, name)
    if side.factors is not None:
        states = states * side.factors[:, :, None]
    if side.cos is not None and side.sin is not None:
        deltas = torch.arange(states.shape[2], device=states.device) % layout.period
        rotary = Rotary((0.0,) * (layout.rotary_dim // 2), bool(layout.interleaved))
        states = rotary.turn(states, side.cos[deltas], side.sin[deltas])
    return states


def _decode_nonuniform(side: Side, records: Tensor, codes: Tensor) -> Tensor:
    layout = side.layout
    assert side.levels is not None
    if side.channel_scale is not None and side.channel_offset is not None:
        scale, offset = side.channel_scale[:, :, None], side.channel_offset[:, :, None]
    else:
        scale, offset = (
            _metadata(records, layout, at) for at in (layout.scale_offset, layout.minimum_offset)
        )
    states = dequantize_nonuniform(codes, side.levels, scale, offset)
    if side.outliers is not None and side.outlier_starts is not None:
        blocks = records.shape[2]
        add_outliers(states, Outliers(side.outliers[:, :blocks], side.outlier_starts[:, :blocks]))
    if side.inv_freq is None:
        return states
    rotary = Rotary(tuple(side.inv_freq.tolist()), bool(layout.interleaved))
    positions = torch.arange(states.shape[2], device=states.device)[None]
    if side.positions is not None:
        positions = positions + side.positions[:, None]
    cos, sin = (table.view(*positions.shape, -1)[:, None] for table in rotary.tables(positions.flatten()))
    return rotary.turn(states, cos, sin)


def _metadata(records: Tensor, layout: SideLayout, offset: int) -> Tensor:
    """fp32 `(B, H, rows, width)`."""
    size = layout.rows * layout.width * layout.metadata_bytes
    raw = records[..., offset : offset + size].contiguous()
    numbers = raw.view(torch.float16 if layout.metadata_bytes == 2 else torch.float32)
    return numbers.float().view(*numbers.shape[:2], -1, layout.width)


def _place_sinks(states: Tensor, sinks: Tensor, sink_start: Tensor | None) -> None:
    starts = torch.zeros(len(states), dtype=torch.long, device="cpu") if sink_start is None else sink_start
    slots = starts.to(states.device)[:, None] + torch.arange(sinks.shape[2], device=states.device)
    # those beyond the packed slots, or before them, where a window has left some, are not among them
    rows, columns = ((slots >= 0) & (slots < states.shape[2])).nonzero(as_tuple=True)
    states[rows, :, slots[rows, columns]] = sinks[rows, :, columns].float()
