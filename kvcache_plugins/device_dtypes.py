"""Number formats that not every device has: Apple's GPUs know neither fp64 nor float8."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["doubled", "has_every_dtype"]


def has_every_dtype(device: torch.device) -> bool:
    """Whether a device is known to compute in fp64, and to convert to float8."""
    return device.type in ("cpu", "cuda", "meta")


def doubled(numbers: Tensor) -> Tensor:
    """Return numbers in fp64: where they are, or on the CPU if their device may have no such numbers."""
    return (numbers if has_every_dtype(numbers.device) else numbers.cpu()).double()
