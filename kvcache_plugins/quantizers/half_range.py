"""What fp16 holds of numbers that codes stand for.

A scale is rounded, so that the code of a number close to the largest one of fp16 may stand for a little more,
which a cast would make infinite: a product with it is then no number.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["kept_finite"]

_LARGEST = torch.finfo(torch.float16).max


def kept_finite(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers whose cast to `dtype` is finite wherever they are, where that is fp16.

    Args:
        numbers (`torch.Tensor`): Of any shape; infinities, and what is not a number, stay so.
        dtype (`torch.dtype`): What they will be cast to.

    Returns:
        `torch.Tensor`: `numbers` itself where nothing can be infinite by the cast.
    """
    if dtype != torch.float16 or numbers.dtype == torch.float16:
        return numbers
    return torch.where(numbers.isinf(), numbers, numbers.clamp(-_LARGEST, _LARGEST))
