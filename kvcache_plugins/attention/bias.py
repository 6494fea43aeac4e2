"""Whatever may hide a slot or move a logit, in the terms of the kernels: an additive bias, a causal flag.

All layers of a model are shown the same mask in one step, so what the latest one amounts to is remembered:
the work is done once per step and not once per layer.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from .reference import AttentionOptions

__all__ = ["LogitBias", "logit_bias", "per_head"]


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


class _Seen(NamedTuple):
    mask: weakref.ref[Tensor]
    version: int
    of: tuple[int, bool, int]
    result: LogitBias


_latest: _Seen | None = None


def logit_bias(
    options: AttentionOptions,
    query_length: int,
    length: int,
    *,
    hidden: int = 0,
    device: torch.device | str = "cpu",
) -> LogitBias:
    """Turn the mask and the position bias of a call into what the kernels add to the logits.

    On the CPU a mask that hides nothing is dropped, and one that is only causal beside what it hides from
    every query is reduced to the row of the newest. On other devices its content is not looked at, which
    would wait for the device.

    Args:
        options (`AttentionOptions`): Masks and biases.
        query_length (`int`): Query tokens.
        length (`int`): Slots that masks and biases speak of.
        hidden (`int`): Slots before these that the kernels are given too and no query may see; `T` counts
            them.
        device (`torch.device`): Of the queries.
    """
    is_causal = options.is_causal or options.sliding_window is not None
    window = options.sliding_window or 0
    if options.mask is None:
        bias = None
    else:
        bias, is_causal, _ = _of_mask(
            options.mask, length, is_causal, hidden, is_remembered=query_length == 1
        )
    if options.position_bias is not None:
        position_bias = _behind(_four_dimensional(options.position_bias, length).float(), hidden)
        bias = position_bias if bias is None else bias + position_bias
        bias = bias.detach()
    if query_length == 1:  # the newest token sees all the others
        window = min(window or length, length) if hidden else window
        is_causal = window > 0
    elif hidden and bias is None:
        bias = _behind(torch.zeros(1, 1, 1, length, device=device), hidden)
    return LogitBias(bias, is_causal, window)


def per_head(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    """Sink logits or slopes as the kernels take them: fp32 `(Hq,)` on `device`."""
    return None if tensor is None else tensor.detach().reshape(-1).float().to(device).contiguous()


def _of_mask(mask: Tensor, length: int, is_causal: bool, hidden: int, *, is_remembered: bool) -> LogitBias:
    global _latest
    # of many queries it would be large; of an inference tensor, whether it was written to cannot be known
    if not is_remembered or mask.is_inference():
        return _converted(mask, length, is_causal, hidden)
    of = (length, is_causal, hidden)
    latest = _latest  # another thread may replace it
    if latest is not None and latest.mask() is mask and (latest.version, latest.of) == (mask._version, of):
        return latest.result
    result = _converted(mask, length, is_causal, hidden)
    _latest = _Seen(weakref.ref(mask, _forget), mask._version, of, result)
    return result


def _forget(mask: weakref.ref[Tensor]) -> None:
    """Let go of the bias of a mask that is gone."""
    global _latest
    latest = _latest
    if latest is not None and latest.mask is mask:
        _latest = None


def _converted(mask: Tensor, length: int, is_causal: bool, hidden: int) -> LogitBias:
    mask = _four_dimensional(mask, length).detach()
    is_readable = mask.device.type == "cpu"
    if mask.dtype != torch.bool:
        if is_readable and not bool(mask.any()):
            return LogitBias(None, is_causal)
        bias = _behind(mask.float(), hidden)
        return LogitBias(bias if bias.stride(-1) == 1 else bias.contiguous(), is_causal)
    if is_readable:
        if mask.shape[2] > 1 and _is_causal_mask(mask):
            mask, is_causal = mask[:, :, -1:], True
        if bool(mask.all()):
            return LogitBias(None, is_causal)
    bias = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return LogitBias(_behind(bias.masked_fill_(~mask, -torch.inf), hidden), is_causal)


def _behind(bias: Tensor, hidden: int) -> Tensor:
    """The bias with columns before it for slots that no query may see."""
    return torch.nn.functional.pad(bias, (hidden, 0), value=-torch.inf) if hidden else bias


def _four_dimensional(tensor: Tensor, length: int) -> Tensor:
    tensor = tensor[(None,) * (4 - tensor.dim())]
    return tensor.expand(*tensor.shape[:3], length) if tensor.shape[3] == 1 else tensor[..., :length]


def _is_causal_mask(mask: Tensor) -> bool:
    query_length, length = mask.shape[2:]
    slots = torch.arange(length)
    causal = slots <= slots[length - query_length :, None]
    return torch.equal(mask, mask[:, :, -1:] & causal)
