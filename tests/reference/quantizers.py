"""Scalar quantizers, written from their formulas in fp32.

Every function reduces over `axis` (one axis or several) and returns a `Quantized` tuple whose `scale` and
`minimum` keep the reduced axes with length 1, so that they broadcast against the input. A caller that wants
groups reshapes first: keys `(B, H, T, D)` in groups of `G` tokens become `(B, H, T/G, G, D)` with `axis=3`.

`scale` and `minimum` are returned as fp32 tensors that hold the *stored* values: fp16 numbers, except where
fp16 would overflow and the fp32 number is kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["FLOAT8_FORMATS", "SMALLEST_HALF", "Quantized", "asymmetric", "float8", "symmetric8"]

SMALLEST_HALF = 2.0**-24
"""The smallest positive fp16 number (a subnormal)."""

FLOAT8_FORMATS: dict[str, tuple[torch.dtype, float]] = {
    "e4m3": (torch.float8_e4m3fn, 448.0),
    "e5m2": (torch.float8_e5m2, 57344.0),
}
"""Format name -> (dtype, largest finite value)."""


class Quantized(NamedTuple):
    """What a quantizer stores and what reading it gives.

    Attributes:
        codes: `torch.Tensor` of the input's shape: uint8 (`asymmetric`, and the bit patterns of `float8`) or
            int8.
        scale: fp32 `torch.Tensor`, the reduced axes of length 1.
        minimum: fp32 `torch.Tensor` of the shape of `scale`; zero for the symmetric quantizers.
        dequantized: fp32 `torch.Tensor` of the input's shape.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor
    dequantized: torch.Tensor


def asymmetric(
    x: torch.Tensor, nbits: int, *, axis: int | tuple[int, ...], valid: torch.Tensor | None = None
) -> Quantized:
    """Affine quantizer: `code = round((x - minimum) / scale)`, read back as `code * scale + minimum`.

    `scale` is `(max - min) / (2**nbits - 1)` and `minimum` is `min`, both rounded to fp16 *before* the codes
    are computed. Rounding is half to even; codes are clamped, because the rounded metadata may not span the
    whole range. A stored scale of zero (constant group, or range too small for fp16) or infinity (range too
    large for fp32) gives codes 0 and scale 0: every member reads as `minimum`.

    Args:
        x: `torch.Tensor` of any shape and floating dtype.
        nbits: Bits per code, 1 to 8.
        axis: The axes whose members share one scale.
        valid: Boolean `torch.Tensor` that broadcasts to `x`. False (padding) keeps an entry out of the
            statistics and gives it code 0. Non-finite entries are kept out too; `+inf` takes the highest
            code, `-inf` and NaN code 0.

    Returns:
        `Quantized` with uint8 codes. A group without a single usable member has scale 0 and minimum 0.
    """
    highest_code = 2**nbits - 1
    x = x.to(torch.float32)
    valid = torch.ones_like(x, dtype=torch.bool) if valid is None else valid.expand(x.shape)

    usable = valid & torch.isfinite(x)
    any_usable = usable.any(dim=axis, keepdim=True)
    highest = torch.where(usable, x, float("-inf")).amax(dim=axis, keepdim=True)
    lowest = torch.where(usable, x, float("inf")).amin(dim=axis, keepdim=True)
    highest = torch.where(any_usable, highest, 0.0)
    lowest = torch.where(any_usable, lowest, 0.0)

    # A tensor divisor, not a Python number: some devices turn the latter into a multiplication by the
    # reciprocal.
    scale = _round_to_half((highest - lowest) / torch.full_like(highest, highest_code))
    scale = torch.where(torch.isfinite(scale), scale, 0.0)
    minimum = _round_to_half(lowest)

    divisor = torch.where(scale == 0, 1.0, scale)
    codes = torch.round((x - minimum) / divisor).clamp(0, highest_code)
    codes = torch.where(torch.isnan(codes) | (scale == 0) | ~valid, 0.0, codes)
    return Quantized(codes.to(torch.uint8), scale, minimum, codes * scale + minimum)


def symmetric8(x: torch.Tensor, *, axis: int | tuple[int, ...]) -> Quantized:
    """Symmetric int8: `code = round(x / scale)` in -127..127, read back as `code * scale`.

    `scale` is `max|x| / 127` rounded *up* to fp16, so that no finite member exceeds 127 steps, and at least
    the smallest fp16 number, so that an all-zero vector needs no special case. -128 is never used.

    Args:
        x: `torch.Tensor` of any shape and floating dtype. Non-finite entries are kept out of the maximum;
            infinities take code +-127, NaN takes code 0.
        axis: The axes whose members share one scale.

    Returns:
        `Quantized` with int8 codes and a minimum of zeros.
    """
    x = x.to(torch.float32)
    scale = _symmetric_scale(x, 127.0, axis)
    codes = torch.nan_to_num(torch.round(x / scale).clamp(-127, 127), nan=0.0)
    return Quantized(codes.to(torch.int8), scale, torch.zeros_like(scale), codes * scale)


def float8(x: torch.Tensor, fmt: str, *, axis: int | tuple[int, ...]) -> Quantized:
    """8-bit floating point with a dynamic scale: `x / scale` cast to the format, read back times `scale`.

    `scale` is `max|x|` over the largest value of the format, rounded up to fp16, at least the smallest fp16
    number.

    Args:
        x: `torch.Tensor` of any shape and floating dtype. Non-finite entries are kept out of the maximum;
            infinities take the largest value of the format, NaN reads as zero.
        fmt: `"e4m3"` (largest value 448) or `"e5m2"` (57344).
        axis: The axes whose members share one scale.

    Returns:
        `Quantized` whose codes are the bit patterns (uint8), with a minimum of zeros.
    """
    dtype, largest = FLOAT8_FORMATS[fmt]
    x = x.to(torch.float32)
    scale = _symmetric_scale(x, largest, axis)
    scaled = torch.nan_to_num((x / scale).clamp(-largest, largest), nan=0.0)
    cast = scaled.to(dtype)
    return Quantized(cast.view(torch.uint8), scale, torch.zeros_like(scale), cast.to(torch.float32) * scale)


def _symmetric_scale(x: torch.Tensor, largest: float, axis: int | tuple[int, ...]) -> torch.Tensor:
    """`max|x| / largest` over the finite members, rounded up to fp16, at least `SMALLEST_HALF`."""
    absmax = torch.where(torch.isfinite(x), x, 0.0).abs().amax(dim=axis, keepdim=True)
    return _round_up_to_half(absmax / torch.full_like(absmax, largest)).clamp(min=SMALLEST_HALF)


def _round_to_half(value: torch.Tensor) -> torch.Tensor:
    """The nearest fp16 number, as fp32; the fp32 number itself where fp16 overflows."""
    half = value.to(torch.float16).to(torch.float32)
    return torch.where(torch.isinf(half), value, half)


def _round_up_to_half(value: torch.Tensor) -> torch.Tensor:
    """The smallest fp16 number that is not below `value >= 0`, as fp32; `value` where fp16 overflows."""
    half = value.to(torch.float16)
    # Non-negative fp16 numbers are ordered like their bit patterns, so the next number is the next pattern.
    next_half = (half.view(torch.int16) + 1).view(torch.float16)
    rounded = torch.where(half.to(torch.float32) < value, next_half, half).to(torch.float32)
    return torch.where(torch.isinf(rounded), value, rounded)
