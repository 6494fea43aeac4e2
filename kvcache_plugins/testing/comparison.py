"""Comparisons that name what differs and by how much."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device_dtypes import doubled

__all__ = ["assert_close", "relative_rms", "sqnr_db"]


def relative_rms(reference: Tensor, got: Tensor) -> float:
    """Root mean square of the difference over that of `reference`."""
    reference, got = doubled(reference), doubled(got)
    return float(
        (got - reference).square().mean().sqrt() / reference.square().mean().sqrt().clamp_min(1e-300)
    )


def sqnr_db(reference: Tensor, got: Tensor) -> float:
    """Signal-to-quantization-noise ratio in dB."""
    return -20.0 * float(torch.log10(torch.tensor(max(relative_rms(reference, got), 1e-30))))


def assert_close(name: str, reference: Tensor, got: Tensor, ratio: float) -> None:
    """Fail unless shapes agree, everything is finite, and the relative RMS error is at most `ratio`."""
    assert reference.shape == got.shape, (
        f"{name}: expected shape {tuple(reference.shape)}, got {tuple(got.shape)}"
    )
    assert torch.isfinite(got).all(), f"{name}: {int((~torch.isfinite(got)).sum())} entries are not finite"
    error = relative_rms(reference, got)
    assert error <= ratio, f"{name}: relative RMS error {error:.3e} exceeds {ratio:.3e}"
