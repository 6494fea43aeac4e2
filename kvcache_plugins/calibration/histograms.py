"""Numbers normalized as the cache will, counted in fine bins with the weights of their errors."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..device_dtypes import doubled

__all__ = ["NUM_BINS", "Histogram", "Normalized", "normalize_keys", "normalize_values", "squared_gradient"]

NUM_BINS = 16384
"""Bins on `[-1, 1]`. A bin stands for its numbers by their exact mean; a boundary between two levels can only
miss the best place by the width of a bin, 1 / 1000 of the mean distance of 4-bit levels."""
_NEGLIGIBLE = 2.0**-50
"""Share of all weight below which a bin counts for nothing: four times the rounding of fp64."""


@dataclass(frozen=True)
class Normalized:
    """Numbers in units of their vector's range.

    Args:
        numbers (`torch.Tensor`): fp32 `u = (x - offset) / scale`, of the shape of the states.
        scale (`torch.Tensor`): fp32, half the range, broadcastable to it.
        inside (`torch.Tensor`): Whether a number lies within the range, so that it is not an outlier.
    """

    numbers: Tensor
    scale: Tensor
    inside: Tensor


def normalize_keys(keys: Tensor, lower: Tensor, upper: Tensor) -> Normalized:
    """Normalize keys `(H, T, D)`, fp32, by the static range `(H, D)` of their channel."""
    return _normalize(keys, lower[:, None].to(keys.device), upper[:, None].to(keys.device))


def normalize_values(values: Tensor, outliers: int) -> Normalized:
    """Normalize values `(H, T, D)`, fp32, by the range of their token over all heads.

    Args:
        values (`torch.Tensor`): Values.
        outliers (`int`): So many numbers at each end of a token are outliers.
    """
    vectors = values.transpose(0, 1).flatten(1)  # (T, H * D)
    upper = vectors.topk(outliers + 1, dim=-1).values[:, -1]
    lower = vectors.topk(outliers + 1, dim=-1, largest=False).values[:, -1]
    return _normalize(values, lower[None, :, None], upper[None, :, None])


def _normalize(states: Tensor, lower: Tensor, upper: Tensor) -> Normalized:
    scale, offset = (upper - lower) / 2, (upper + lower) / 2
    # a vector without a range needs no levels
    inside = (states >= lower) & (states <= upper) & (scale > 0)
    numbers = ((states - offset) / scale).clamp(-1.0, 1.0)  # an end may come out a rounding beyond
    return Normalized(numbers, scale, inside)


def _bins() -> NDArray[np.float64]:
    return np.zeros(NUM_BINS)


@dataclass
class Histogram:
    """Weighted numbers in `[-1, 1]`, with the exact mean of every bin.

    Args:
        mass (`numpy.ndarray` of shape `(NUM_BINS,)`): Sums of weights.
        first (`numpy.ndarray` of shape `(NUM_BINS,)`): Sums of weights times numbers.
        count (`numpy.ndarray` of shape `(NUM_BINS,)`), count_first (`numpy.ndarray`), count_second
            (`numpy.ndarray`): Sums of 1, of numbers and of their squares.
    """

    mass: NDArray[np.float64] = field(default_factory=_bins)
    first: NDArray[np.float64] = field(default_factory=_bins)
    count: NDArray[np.float64] = field(default_factory=_bins)
    count_first: NDArray[np.float64] = field(default_factory=_bins)
    count_second: NDArray[np.float64] = field(default_factory=_bins)

    def add(self, normalized: Normalized, weights: Tensor) -> None:
        """Count the numbers inside of their ranges.

        Args:
            normalized (`Normalized`): Numbers.
            weights (`torch.Tensor`): fp64, not negative, of their shape.
        """
        inside = normalized.inside
        # on the CPU and in fp64: sums in a fixed order, the same in every run
        numbers = doubled(normalized.numbers[inside]).cpu().numpy()
        chosen = weights[inside.to(weights.device)].cpu().numpy()
        bins = np.minimum(((numbers + 1) * (NUM_BINS / 2)).astype(np.int64), NUM_BINS - 1)
        for sums, parts in (
            (self.mass, chosen),
            (self.first, chosen * numbers),
            (self.count, None),
            (self.count_first, numbers),
            (self.count_second, numbers**2),
        ):
            sums += np.bincount(bins, parts, NUM_BINS)

    def points(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the means of the bins and their weights, without bins that vanish beside all others.

        Weights span many orders of magnitude; what is lost in the rounding of their sum could not move a
        level, and would be a cluster of no weight to k-means.
        """
        used = self.mass > self.mass.sum() * _NEGLIGIBLE
        return self.first[used] / self.mass[used], self.mass[used]


def squared_gradient(gradient: Tensor) -> Tensor:
    """Return the empirical Fisher information of states, fp64, from the gradient of the loss.

    Raises:
        ValueError: If a number of the gradient is not finite.
    """
    if not bool(torch.isfinite(gradient).all()):
        raise ValueError("The gradients of a calibration must be finite; use --dtype bf16 or fp32.")
    return doubled(gradient) ** 2
