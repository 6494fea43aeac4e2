"""Whatever may hide a slot or move a logit, in the terms of the kernels: an additive bias, a causal flag."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.layout import dense_rows
from .reference import AttentionOptions, four_dimensional
from .remembered import remembered
from .row_masks import row_mask

__all__ = [
    "LogitBias",
    "as_boolean",
    "logit_bias",
    "per_head",
    "row_bias",
    "sinks_for_kernels",
    "sinks_of_pass",
]


class LogitBias(NamedTuple):
    """What is added to the logits.

    Args:
        bias (`torch.Tensor`, *optional*): fp32 `(B or 1, Hq or 1, q or 1, T)`, `-inf` where hidden.
        is_causal (`bool`): Whether attention is causal besides.
        window (`int`): A query in slot `s` sees slots above `s - window`; 0 for all.
    """

    bias: Tensor | None
    is_causal: bool
    window: int = 0


class _Question(NamedTuple):
    """What is asked of a mask, in the terms of `logit_bias`."""

    length: int
    beside: LogitBias
    hidden: int
    window: int | None
    of_all: bool
    """Whether only a row for all queries is an answer."""


def logit_bias(
    options: AttentionOptions,
    query_length: int,
    length: int,
    *,
    hidden: int = 0,
    window: int | None = None,
    device: torch.device | str = "cpu",
) -> LogitBias:
    """Turn the mask and the position bias of a call into what the kernels add to the logits.

    On the CPU a mask that hides nothing is dropped, and one that is only causal, or a sliding window, beside
    what it hides from every query is reduced to one row. On other devices its content is not looked at, which
    would wait for the device.

    Args:
        options (`AttentionOptions`): Masks and biases.
        query_length (`int`): Query tokens.
        length (`int`): Slots that masks and biases speak of.
        hidden (`int`): Slots before these that the kernels are given too and no query may see; `T` counts
            them.
        window (`int`, *optional*): A window that the mask may be found to be.
        device (`torch.device`): Of the queries.
    """
    found = beside = _beside(options)
    if options.mask is not None:
        question = _Question(length, beside, hidden, window, of_all=False)
        find = _remembered if query_length == 1 else _converted  # of more the answer may be large
        answer = find(options.mask, question)
        assert answer is not None
        found = answer
    return _completed(found, options, query_length, length, hidden, device)


def row_bias(
    options: AttentionOptions,
    query_length: int,
    length: int,
    *,
    hidden: int = 0,
    window: int | None = None,
) -> LogitBias | None:
    """What [`logit_bias`] returns of many queries on a CPU, if it is one row for all of them; else `None`.

    Args:
        options (`AttentionOptions`): Masks and biases.
        query_length (`int`): Query tokens.
        length (`int`): Slots that masks and biases speak of.
        hidden (`int`): Slots before these, which no query may see.
        window (`int`, *optional*): A window that the mask may be found to be.
    """
    positions = options.position_bias
    if positions is not None and four_dimensional(positions, length).shape[2] > 1:
        return None
    beside = _beside(options)
    found: LogitBias | None = beside
    if options.mask is not None:
        found = _remembered(options.mask, _Question(length, beside, hidden, window, of_all=True))
    return None if found is None else _completed(found, options, query_length, length, hidden, "cpu")


def _beside(options: AttentionOptions) -> LogitBias:
    """What attention is beside a mask."""
    window = options.sliding_window or 0
    return LogitBias(None, options.is_causal or window > 0, window)


def _completed(
    found: LogitBias,
    options: AttentionOptions,
    query_length: int,
    length: int,
    hidden: int,
    device: torch.device | str,
) -> LogitBias:
    """A mask's bias with that of positions, and with what stands for slots that no query may see."""
    bias, is_causal, window = found
    if options.position_bias is not None:
        position_bias = _behind(four_dimensional(options.position_bias, length).float(), hidden)
        bias = position_bias if bias is None else bias + position_bias
        bias = dense_rows(bias.detach())  # T5 makes them with all heads of a slot side by side
    if query_length == 1:  # the newest token sees all the others
        window = min(window or length, length) if hidden else window
        is_causal = window > 0
    elif hidden and bias is None:
        bias = _behind(torch.zeros(1, 1, 1, length, dtype=torch.float32, device=device), hidden)
    return LogitBias(bias, is_causal, window)


def per_head(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    """One number for every query head as the kernels take them: fp32 `(Hq,)` on `device`."""
    return None if tensor is None else tensor.detach().reshape(-1).float().to(device).contiguous()


def sinks_for_kernels(
    sink_logits: Tensor | None, device: torch.device, queries: slice = slice(None)
) -> Tensor | None:
    """Sink logits of some queries as the kernels take them: fp32 `(Hq,)` or `(B, Hq, q)` on `device`."""
    if sink_logits is None:
        return None
    if sink_logits.dim() != 3:
        return per_head(sink_logits, device)
    return sink_logits[:, :, queries].detach().float().to(device).contiguous()


def sinks_of_pass(
    options: AttentionOptions, device: torch.device, queries: slice, behind: int
) -> Tensor | None:
    """Sink logits of some queries as the kernels take them, which take such queries for the newest ones.

    Where they are not, ALiBi adds too little to all logits of a head, by one number. Without sinks no weight
    depends on it; sinks, which are in the same softmax, are lowered by as much.

    Args:
        options (`AttentionOptions`): Sink logits and slopes of the call.
        device (`torch.device`): Of the queries.
        queries (`slice`): Those of the pass.
        behind (`int`): Later queries whose tokens these see as well; none where attention is causal.
    """
    sinks = sinks_for_kernels(options.sink_logits, device, queries)
    slopes = per_head(options.alibi_slopes, device)
    if sinks is None or slopes is None or not behind:
        return sinks
    return sinks - behind * (slopes if sinks.dim() == 1 else slopes[:, None])


def _remembered(mask: Tensor, question: _Question) -> LogitBias | None:
    """What `_converted` returns, of small answers: those for one query, and of a row for all."""
    return remembered(mask, question, lambda: _converted(mask, question))


def _converted(mask: Tensor, question: _Question) -> LogitBias | None:
    """The bias of a mask, and what attention is beside it; `None` if a row is asked for and it is none."""
    mask, beside = four_dimensional(mask, question.length).detach(), question.beside
    if mask.device.type != "cpu":
        return beside._replace(bias=_behind(_added(mask), question.hidden))
    if mask.shape[2] > 1:
        found = row_mask(mask, question.window or beside.window or None)
        if found is None and question.of_all:
            return None
        if found is not None:
            mask, window = found.row, found.window or beside.window
            beside = beside._replace(is_causal=beside.is_causal or found.is_causal, window=window)
    visible = mask if mask.dtype == torch.bool else as_boolean(mask)
    if visible is not None and (visible is mask or bool(visible.any(-1).all())):
        mask = visible
    if mask.dtype == torch.bool and bool(mask.all()):
        return beside
    return beside._replace(bias=_behind(_added(mask), question.hidden))


def _added(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        zeros = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        return zeros.masked_fill_(~mask, -torch.inf)
    return dense_rows(mask.float())


def as_boolean(mask: Tensor) -> Tensor | None:
    """An additive mask of zeros and the least number of its dtype, as eager attention is given; else `None`.

    A query from which it hides everything sees all of it alike, which the booleans do not say.
    """
    if not mask.is_floating_point():
        return None
    visible = mask == 0
    return visible if bool((visible | (mask == torch.finfo(mask.dtype).min)).all()) else None


def _behind(bias: Tensor, hidden: int) -> Tensor:
    """The bias with columns before it for slots that no query may see."""
    return torch.nn.functional.pad(bias, (hidden, 0), value=-torch.inf) if hidden else bias
