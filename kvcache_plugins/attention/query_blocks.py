"""Attention of many query tokens over tensors: a block of queries at a time, over what these see.

Torch's flash attention multiplies what a mask hides as well, so that layers with a window, and batches with
padding, take time for the square of a prompt. Here a block of neighbouring queries is one call of it, over
the slots from the first to the last that any of them sees. These are read off the mask, so whatever a mask
shows or hides is honoured: padding, chunks, images that see themselves whole.

Milliseconds of a layer with a mask, by torch and so (fp32, two threads of a Zen 3 core; bf16 takes as long):
8192 tokens, a window of 512, 4 heads of 256 channels 2066 and 196; 4096 tokens, a window of 128, 64 heads of
64 channels 2096 and 210; a window of 1024, 8 heads of 128 channels 525 and 149; all before them 613 and 366;
160 tokens, a window of 128 7 and 5. Blocks of 64 and of 256 queries take up to 1.3 and 1.4 times as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .limits import KERNEL_DTYPES
from .reference import AttentionOptions, four_dimensional, sink_column
from .remembered import remembered
from .tiles import attend_tile, widened

__all__ = ["attend_query_blocks", "can_attend_query_blocks"]

_QUERIES = 128
"""Queries of a block."""


class _Block(NamedTuple):
    """Queries `[start, stop)`, and the slots `[low, high)` of which they see any."""

    start: int
    stop: int
    low: int
    high: int


def can_attend_query_blocks(query: Tensor, keys: Tensor, options: AttentionOptions) -> bool:
    """Whether a scale, a mask and a log-sum-exp express these options, on a CPU.

    Softcap, ALiBi and position biases change logits in between. A query from which finite numbers hide
    everything sees all slots alike; that is only left out of account for pads, whose own slots nobody sees.

    Args:
        query (`torch.Tensor` of shape `(B, Hq, q, D)`): The newest tokens' queries.
        keys (`torch.Tensor` of shape `(B, Hkv, T, D)`): What they attend to.
        options (`AttentionOptions`): What is asked for.
    """
    if not query.is_cpu or query.dtype not in KERNEL_DTYPES or query.shape[1] % keys.shape[1]:
        return False
    if options.softcap is not None or options.alibi_slopes is not None or options.position_bias is not None:
        return False
    if options.mask is None:
        return True
    mask = options.mask[(None,) * (4 - options.mask.dim())]
    whole = (*query.shape[:3], keys.shape[2])
    if mask.dim() != 4 or any(n not in (1, full) for n, full in zip(mask.shape, whole, strict=True)):
        return False  # an error is torch's, or the model's, to raise
    if not mask.is_floating_point():
        return mask.dtype == torch.bool
    return not _hides_all_of_a_token(options.mask, keys.shape[2], query.shape[2])


def attend_query_blocks(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """Attend from many new tokens over tensors.

    Args:
        query (`torch.Tensor` of shape `(B, Hq, q, D)`): fp32, bf16 or fp16, on a CPU.
        keys (`torch.Tensor` of shape `(B, Hkv, T, D)`): What they attend to.
        values (`torch.Tensor` of shape `(B, Hkv, T, Dv)`): The values.
        options (`AttentionOptions`): What `can_attend_query_blocks` accepts.

    Returns:
        `torch.Tensor` of shape `(B, Hq, q, Dv)`: in the dtype of `query`; zeros where nothing is visible.
    """
    batch_size, query_heads, query_length, head_dim = query.shape
    kv_heads, length, value_dim = keys.shape[1], keys.shape[2], values.shape[3]
    scaling = options.scaling if options.scaling is not None else head_dim**-0.5
    mask = None if options.mask is None else four_dimensional(options.mask.detach(), length)
    width = max(head_dim, value_dim)  # flash attention wants one
    keys, values = (widened(states.to(query.dtype), width) for states in (keys, values))
    grouped = widened(query, width).unflatten(1, (kv_heads, -1))
    sinks = None if options.sink_logits is None else sink_column(options.sink_logits.detach().float())
    output = query.new_zeros(batch_size, query_heads, query_length, value_dim)
    with torch.autocast("cpu", enabled=False):
        for block in _blocks(options, length, query_length):
            queries, slots = slice(block.start, block.stop), slice(block.low, block.high)
            seen = _seen(options, mask, length - query_length, block)
            states = grouped[:, :, :, queries], keys[:, :, slots], values[:, :, slots]
            part, total = (x.flatten(1, 2) for x in attend_tile(*states, seen, scaling))
            if sinks is not None:
                own = sinks if sinks.shape[2] == 1 else sinks[:, :, queries]
                part = part * torch.sigmoid(total[..., None] - own)
            output[:, :, queries] = part[..., :value_dim]
    return output


def _blocks(options: AttentionOptions, length: int, query_length: int) -> Iterator[_Block]:
    """The blocks of which any query sees anything."""
    starts = range(0, query_length, _QUERIES)
    bounds = (
        [(0, length)] * len(starts) if options.mask is None else _bounds(options.mask, length, len(starts))
    )
    past, window = length - query_length, options.sliding_window
    for start, (low, high) in zip(starts, bounds, strict=True):
        stop = min(start + _QUERIES, query_length)
        if options.is_causal or window is not None:
            high = min(high, past + stop)
        if window is not None:
            low = max(low, past + start - window + 1)
        if low < high:
            yield _Block(start, stop, low, high)


def _bounds(mask: Tensor, length: int, blocks: int) -> list[tuple[int, int]]:
    """First slot that a mask shows to any query of each block, and the one behind the last."""

    def find() -> list[tuple[int, int]]:
        numbers = four_dimensional(mask.detach(), length)
        is_boolean = numbers.dtype == torch.bool
        numbers, hidden = (numbers.view(torch.uint8), 0) if is_boolean else (numbers, _least(numbers))
        parts = numbers.split(_QUERIES, dim=2) if numbers.shape[2] > 1 else [numbers] * blocks
        seen = torch.stack([part.amax(2).amax((0, 1)) for part in parts]) > hidden
        slots = torch.arange(length, device=mask.device)
        low = torch.where(seen, slots, length).amin(1)
        high = torch.where(seen, slots + 1, 0).amax(1)
        return list(zip(low.tolist(), high.tolist(), strict=True))

    return remembered(mask, ("bounds", length, blocks), find)


def _seen(options: AttentionOptions, mask: Tensor | None, past: int, block: _Block) -> Tensor | None:
    """What the queries of a block see of its slots, `(B or 1, Hq or 1, n or 1, t)`, boolean or additive."""
    part: Tensor | None = None
    if mask is not None:
        part = mask if mask.shape[2] == 1 else mask[:, :, block.start : block.stop]
        part = part[..., block.low : block.high]
    if not options.is_causal and options.sliding_window is None:
        return part
    slots = torch.arange(block.low, block.high, device="cpu")
    own = torch.arange(past + block.start, past + block.stop, device="cpu")[:, None]
    visible = slots <= own
    if options.sliding_window is not None:
        visible = visible & (slots > own - options.sliding_window)
    if part is None:
        return visible[None, None]
    return part & visible if part.dtype == torch.bool else part.masked_fill(~visible, -torch.inf)


def _hides_all_of_a_token(mask: Tensor, length: int, query_length: int) -> bool:
    """Whether an additive mask shows nothing to a query that is no pad."""

    def find() -> bool:
        numbers = four_dimensional(mask, length)
        hidden = _least(numbers)
        is_blank = numbers.amax(-1) <= hidden
        if not bool(is_blank.any()):
            return False
        is_seen = numbers.amax(2)[..., length - query_length :] > hidden
        return bool((is_blank & is_seen).any())

    return remembered(mask, ("hides all", length, query_length), find)


def _least(mask: Tensor) -> float:
    return torch.finfo(mask.dtype).min
