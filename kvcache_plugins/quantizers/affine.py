"""Uniform quantizers, asymmetric and symmetric, with scales as they are stored.

Asymmetric, `b` bits, `Q = 2^b - 1` (KIVI, LMDeploy, QServe):

    scale = (max - min) / Q     code = clamp(round((x - min) / scale), 0, Q)        x' = code * scale + min

Symmetric, 8 bits:

    scale = max|x| / 127        code = clamp(round(x / scale), -127, 127) + 128     x' = (code - 128) * scale

Rounding is half to even. The division is by the *stored* scale, which is the fp16 rounding of the ideal one
(fp32 where fp16 would overflow), so encoder and decoder agree to the last bit. The minimum is stored rather
than a zero point: a zero point explodes for groups with a small range far from zero (keys with a bias). bf16
is never used for metadata.

Entries that are not finite, or masked out by `valid`, are left out of the statistics; their codes saturate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..device_dtypes import has_every_dtype
from .granularity import Granularity

__all__ = [
    "SMALLEST_SCALE",
    "choose_qparams_asymmetric",
    "choose_qparams_symmetric",
    "dequantize_asymmetric",
    "dequantize_symmetric",
    "quantize_asymmetric",
    "quantize_symmetric",
    "round_to_half",
    "round_up_to_half",
]

SMALLEST_SCALE = 2.0**-24
"""Smallest positive fp16 number: the scale of an all-zero group."""


def round_to_half(values: Tensor) -> Tensor:
    """Round fp32 `values` to the nearest fp16, keeping fp32 where fp16 would overflow."""
    half = values.to(torch.float16).float()
    return torch.where(torch.isinf(half), values, half)


def round_up_to_half(values: Tensor) -> Tensor:
    """Round non-negative fp32 `values` up to an fp16, keeping fp32 where fp16 would overflow."""
    half = values.to(torch.float16)
    # The next larger positive fp16 is the next larger bit pattern.
    above = (half.view(torch.int16) + 1).view(torch.float16)
    up = torch.where(half.float() < values, above, half).float()
    return torch.where(torch.isinf(up), values, up)


def choose_qparams_asymmetric(
    states: Tensor, granularity: Granularity, nbits: int, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose scale and minimum of every group.

    Args:
        states (`torch.Tensor` of shape `(B, H, T, D)`): fp32 values.
        granularity (`Granularity`): What shares a scale.
        nbits (`int`): Bits per code.
        valid (`torch.Tensor` of shape `(B, T)`, *optional*): Tokens that take part in the statistics.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: scale and minimum, fp32, of the granularity's scale shape. A
        group without any valid finite entry, or with a range of zero or beyond fp32, has scale 0.
    """
    groups = granularity.split(states)
    low, high = _range(groups, granularity, valid)
    # 0.0 is added because zeros of either sign are equal: which of them is the least, the order would decide
    scale = round_to_half((high - low + 0.0) / (2**nbits - 1))
    return scale.masked_fill(torch.isinf(scale), 0.0), round_to_half(low + 0.0)


def quantize_asymmetric(
    states: Tensor,
    scale: Tensor,
    minimum: Tensor,
    granularity: Granularity,
    nbits: int,
    valid: Tensor | None = None,
) -> Tensor:
    """Return uint8 codes of shape `(B, H, T, D)`; invalid tokens get code 0."""
    # A zero scale means a constant group: dividing by infinity gives code 0, and decoding the minimum.
    divisor = torch.where(scale > 0, scale, torch.inf)
    codes = granularity.split(states) - granularity.spread(minimum)
    codes.div_(granularity.spread(divisor)).round_()
    codes = _saturate(codes, 0, 2**nbits - 1).to(torch.uint8).reshape(states.shape)
    return codes if valid is None else codes * valid[:, None, :, None]


def dequantize_asymmetric(codes: Tensor, scale: Tensor, minimum: Tensor, granularity: Granularity) -> Tensor:
    """Return fp32 values of shape `(B, H, T, D)` from uint8 codes."""
    values = granularity.split(codes.to(torch.float32))
    return values.mul_(granularity.spread(scale)).add_(granularity.spread(minimum)).reshape(codes.shape)


def choose_qparams_symmetric(
    states: Tensor, granularity: Granularity, valid: Tensor | None = None, largest_code: float = 127.0
) -> Tensor:
    """Choose the scale of every group, rounded up so that no code exceeds `largest_code`.

    Args:
        states (`torch.Tensor` of shape `(B, H, T, D)`): fp32 values.
        granularity (`Granularity`): What shares a scale.
        valid (`torch.Tensor` of shape `(B, T)`, *optional*): Tokens that take part in the statistics.
        largest_code (`float`): 127 for int8, the largest number of the format for float8.
    """
    magnitude = granularity.split(states).abs()
    largest = _masked(magnitude, valid, 0.0).amax(granularity.reduced, keepdim=True)
    return round_up_to_half(_per_row(largest) / largest_code).clamp_min(SMALLEST_SCALE)


def quantize_symmetric(
    states: Tensor, scale: Tensor, granularity: Granularity, valid: Tensor | None = None
) -> Tensor:
    """Return uint8 codes, biased by 128; invalid tokens get 128, which decodes to zero."""
    codes = (granularity.split(states) / granularity.spread(scale)).round_()
    codes = _saturate(codes, -127, 127).add_(128).to(torch.uint8).reshape(states.shape)
    return codes if valid is None else codes.masked_fill(~valid[:, None, :, None], 128)


def dequantize_symmetric(codes: Tensor, scale: Tensor, granularity: Granularity) -> Tensor:
    """Return fp32 values of shape `(B, H, T, D)` from biased uint8 codes."""
    values = granularity.split(codes.to(torch.float32)).sub_(128.0)
    return values.mul_(granularity.spread(scale)).reshape(codes.shape)


def _range(groups: Tensor, granularity: Granularity, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of every group's valid finite entries; (0, 0) where there are none."""
    low = _masked(groups, valid, torch.inf).amin(granularity.reduced, keepdim=True)
    high = _masked(groups, valid, -torch.inf).amax(granularity.reduced, keepdim=True)
    empty = low > high
    low, high = low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)
    return _per_row(low), _per_row(high)


def _per_row(reduced: Tensor) -> Tensor:
    return reduced.squeeze(5).squeeze(3)


def _masked(groups: Tensor, valid: Tensor | None, fill: float) -> Tensor:
    """Replace invalid and non-finite entries by `fill`, without a copy where there are none."""
    keep: Tensor | None = None
    # A sum is finite only if every term is; it may overflow for huge finite terms, which costs just the copy.
    wide = torch.float64 if has_every_dtype(groups.device) else torch.float32
    if not groups.is_meta and not bool(torch.isfinite(groups.sum(dtype=wide))):
        keep = torch.isfinite(groups)
    if valid is not None:
        batch, _, rows, tokens, _, _ = groups.shape
        mask = valid.reshape(batch, 1, rows, tokens, 1, 1)
        keep = mask if keep is None else keep & mask
    return groups if keep is None else torch.where(keep, groups, fill)


def _saturate(codes: Tensor, low: int, high: int) -> Tensor:
    """Clamp rounded codes in place; NaN becomes the code of zero, infinities the ends."""
    return codes.nan_to_num_(nan=max(low, 0), posinf=high, neginf=low).clamp_(low, high)
