"""Non-uniform quantizer: a codebook of levels in `[-1, 1]`, scaled and shifted per vector (nuqX of KVQuant).

    u = (x - offset) / scale      code = nearest level to u      x' = levels[code] * scale + offset

`scale` and `offset` are half the range and the middle of a vector's numbers without its outliers, so every
other number lies in `[-1, 1]`. Numbers beyond take the code at the end; what is missing is an outlier's
business.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["boundaries_of", "dequantize_nonuniform", "normal_float_codebook", "quantize_nonuniform"]

_LARGEST_QUANTILE = 0.9677083
"""`1 - (1/32 + 1/30) / 2`: keeps the outermost levels of a normal distribution finite (QLoRA, appendix E)."""


def normal_float_codebook(nbits: int) -> Tensor:
    """Return levels that divide a normal distribution evenly: NormalFloat (QLoRA, arXiv 2305.14314, 3).

    Half of the levels are positive and half are not, with a single zero; each side is stretched to end at -1
    and 1. Those of 4 bits are the 16 numbers of NF4, up to rounding.

    Args:
        nbits (`int`): Bits per code, 2 or more.

    Returns:
        `torch.Tensor` of shape `(2 ** nbits,)`: fp32, increasing.
    """
    half = 2 ** (nbits - 1)
    up_to_zero = torch.linspace(1 - _LARGEST_QUANTILE, 0.5, half, dtype=torch.float64, device="cpu")
    positive = torch.linspace(0.5, _LARGEST_QUANTILE, half + 1, dtype=torch.float64, device="cpu")[1:]
    low, high = torch.special.ndtri(up_to_zero), torch.special.ndtri(positive)
    return torch.cat([low / low[0].abs(), high / high[-1]]).float()


def boundaries_of(codebook: Tensor) -> Tensor:
    """Return what lies halfway between neighbouring levels of a `codebook`: fp32 `(2 ** nbits - 1,)`."""
    return (codebook[1:] + codebook[:-1]) / 2


def quantize_nonuniform(normalized: Tensor, codebook: Tensor) -> Tensor:
    """Return the nearest level of each number, the lower one of two equally near.

    Args:
        normalized (`torch.Tensor`): fp32 `u`, of any shape; what is not a number takes the last code.
        codebook (`torch.Tensor` of shape `(2 ** nbits,)`): fp32, increasing.

    Returns:
        `torch.Tensor`: uint8 codes of the shape of `normalized`.
    """
    boundaries = boundaries_of(codebook)
    if normalized.device.type != "cpu":
        return torch.bucketize(normalized.contiguous(), boundaries).to(torch.uint8)
    # so few that comparing with each is 3 to 10 times as fast as searching; what is no number is below none
    codes = torch.full(normalized.shape, len(boundaries), dtype=torch.uint8, device="cpu")
    for boundary in boundaries.tolist():
        codes -= (normalized <= boundary).view(torch.uint8)
    return codes


def dequantize_nonuniform(codes: Tensor, levels: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Return `levels[codes] * scale + offset`.

    Args:
        codes (`torch.Tensor`): uint8 codes.
        levels (`torch.Tensor` of shape `(2 ** nbits,)`): fp32 levels.
        scale (`torch.Tensor`): fp32, broadcastable to the shape of `codes`.
        offset (`torch.Tensor`): As `scale`.
    """
    return levels[codes.long()] * scale + offset
