"""Torch's flash attention of a tile with the log-sum-exp of every row, which is what tiles are merged by.

On CPUs and GPUs torch has an operator each. That of GPUs takes no mask, so what a mask parts is attended to
here, in fp32; of a long past that is little. It is used as torch's own context-parallel attention uses it,
and compared with plain attention on a few numbers before it serves in a process.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from ..kernels.layout import dense_rows

__all__ = ["attend_flash", "why_no_flash"]

_logger = logging.getLogger(__name__)
_SCORES = 1 << 26
"""Logits in fp32 that masked attention on a GPU holds at once."""


def attend_flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attend from rows to a tile.

    Strides may be any: torch's operators are given a copy of what has the channels of a token apart. That of
    CPUs reads them as neighbours all the same, and that of GPUs refuses them.

    Args:
        query (`torch.Tensor` of shape `(B, H, n, D)`): Rows.
        key (`torch.Tensor` of shape `(B, H, t, D)`): In the dtype of the rows.
        value (`torch.Tensor` of shape `(B, H, t, D)`): The same.
        mask (`torch.Tensor`, *optional*): Additive, `(B or 1, H or 1, n, t)`.
        scaling (`float`): Factor of `q.k`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Outputs `(B, H, n, D)` and log-sum-exps `(B, H, n)` in fp32. Rows
            that see nothing hold anything.
    """
    query, key, value = dense_rows(query), dense_rows(key), dense_rows(value)
    if query.is_cpu:
        output, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=mask, scale=scaling
        )
    elif mask is None:
        output, total = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=scaling)[
            :2
        ]
    else:
        output, total = _attend_masked(query, key, value, mask, scaling)
    return output, total


def why_no_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why a GPU's flash attention cannot serve; `None` if it can.

    Args:
        device (`torch.device`): A GPU.
        dtype (`torch.dtype`): Of rows and tiles.
        head_dim (`int`): `D`.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash attention on GPUs takes bf16 and fp16, not {dtype}"
    if head_dim > 256 or head_dim % 8:
        return f"flash attention on GPUs takes heads of a multiple of 8 channels up to 256, not {head_dim}"
    return _fault(device, dtype)


@cache
def _fault(device: torch.device, dtype: torch.dtype) -> str | None:
    """What is wrong with it on a device, found on numbers that no generator was asked for."""
    given = [
        (torch.arange(2 * count * 64, device="cpu") ** 2 * step % 1009 / 504.5 - 1)
        .view(1, 2, count, 64)
        .to(dtype)
        for count, step in ((70, 37), (130, 61), (130, 83))
    ]
    try:
        rows, keys, values = (states.to(device) for states in given)
        found = [part.float().cpu() for part in attend_flash(rows, keys, values, None, 1.0)]
    except (AttributeError, RuntimeError, TypeError) as error:
        _logger.warning("flash attention cannot be used on %s: %s", device, error)
        return f"flash attention cannot be used here: {error}"
    plain = _attend_plainly(given[0], given[1], given[2], 1.0)
    if [part.shape for part in found] != [part.shape for part in plain]:
        return "flash attention here returns other shapes than are known"
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, plain, strict=True))
    # weights and outputs are rounded to the dtype
    return None if worst <= 0.02 else f"flash attention here deviates from plain attention by {worst:.2g}"


def _attend_masked(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attend in fp32, a few slots at a time."""
    batch_size, heads, rows = query.shape[:3]
    step = max(64, _SCORES // (batch_size * heads * rows))
    output = query.new_zeros(query.shape, dtype=torch.float32)
    total = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
    for start in range(0, key.shape[2], step):
        slots = slice(start, start + step)
        part, part_total = _attend_plainly(
            query, key[:, :, slots], value[:, :, slots], scaling, mask[..., slots]
        )
        seen = torch.logaddexp(total, part_total)
        is_blank = part_total == -torch.inf  # rows that see nothing of these slots, perhaps nothing yet
        share = (part_total - seen).exp().masked_fill(is_blank, 0.0)
        output.lerp_(part.masked_fill(is_blank[..., None], 0.0), share[..., None])
        total = seen
    return output, total


def _attend_plainly(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    logits = query.float() @ key.float().transpose(2, 3) * scaling
    if mask is not None:
        logits = logits + mask
    return logits.softmax(-1) @ value.float(), logits.logsumexp(-1)
