"""8-bit floating point codes with a scale: `code = cast(x / scale)`, `x' = code * scale`.

Formats are the OCP ones: e4m3 (`torch.float8_e4m3fn`, largest 448) and e5m2 (largest 57344). Values are
clamped before the cast, because what a cast does beyond the largest number differs between torch releases.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..device_dtypes import has_every_dtype
from .granularity import Granularity

__all__ = ["FLOAT8_DTYPES", "FLOAT8_MAX", "dequantize_float8", "quantize_float8"]

FLOAT8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FLOAT8_MAX = {name: torch.finfo(dtype).max for name, dtype in FLOAT8_DTYPES.items()}


def quantize_float8(
    states: Tensor, scale: Tensor, granularity: Granularity, format: str, valid: Tensor | None = None
) -> Tensor:
    """Return the bit patterns as uint8 codes of shape `(B, H, T, D)`; NaN and invalid tokens become zero."""
    largest = FLOAT8_MAX[format]
    scaled = (
        (granularity.split(states) / granularity.spread(scale)).nan_to_num_(nan=0.0).clamp_(-largest, largest)
    )
    codes = _to_codes(scaled.reshape(states.shape), format)
    return codes if valid is None else codes * valid[:, None, :, None]


def dequantize_float8(codes: Tensor, scale: Tensor, granularity: Granularity, format: str) -> Tensor:
    """Return fp32 values of shape `(B, H, T, D)` from uint8 bit patterns."""
    values = granularity.split(_to_float(codes, format))
    return values.mul_(granularity.spread(scale)).reshape(codes.shape)


def _to_codes(scaled: Tensor, format: str) -> Tensor:
    """Round fp32 numbers within the range of a format to the nearest bit pattern, ties to even."""
    dtype = FLOAT8_DTYPES[format]
    if has_every_dtype(scaled.device):
        return scaled.to(dtype).view(torch.uint8)
    return _rounded_by_integers(scaled, {"e4m3": 3, "e5m2": 2}[format])


def _rounded_by_integers(scaled: Tensor, mantissa: int) -> Tensor:
    """What the cast to the format with so many bits of mantissa returns, on devices that have no such cast.

    A pattern of fp32 with the mantissa cut short is one of float8 whose exponent is biased otherwise.
    """
    bias = 2 ** (6 - mantissa) - 1  # of an exponent that takes the bits that sign and mantissa leave
    magnitude, drop = scaled.abs(), 23 - mantissa
    bits = magnitude.view(torch.int32)
    to_even = (1 << (drop - 1)) - 1 + ((bits >> drop) & 1)
    normal = ((bits + to_even) >> drop) - ((127 - bias) << mantissa)
    # below the least normal number patterns are multiples of the least one, which added to a number with that
    # ulp are its last bits
    anchor = torch.tensor(2.0 ** (24 - bias - mantissa), device=scaled.device)
    subnormal = (magnitude + anchor).view(torch.int32) - anchor.view(torch.int32)
    sign = (scaled.view(torch.int32) >> 24) & 0x80
    return (torch.where(magnitude < 2.0 ** (1 - bias), subnormal, normal) | sign).to(torch.uint8)


def _to_float(codes: Tensor, format: str) -> Tensor:
    """Widen the finite bit patterns to fp32, exactly, through fp16, whose conversion is several times faster.

    e5m2 is the upper byte of an fp16. The exponent and mantissa of e4m3, put in the place of those of an
    fp16, make a number 2^8 too small, because the exponent biases are 7 and 15.
    """
    signed = codes.view(torch.int8).to(torch.int16)
    if format == "e5m2":
        return (signed << 8).view(torch.float16).float()
    return ((signed << 7) & ~0x4000).view(torch.float16).float().mul_(256.0)
