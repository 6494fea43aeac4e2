"""From statistics to levels: optimal weighted k-means of a histogram, and Q-Norm."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..quantizers.kmeans import optimal_kmeans
from .histograms import Histogram
from .statistics import Statistics

__all__ = ["fit_codebook", "fit_layers", "normalized_levels"]


def fit_layers(statistics: Statistics, nbits: Sequence[int], *, q_norm: bool) -> dict[str, Tensor]:
    """Return the tensors of an artifact (see `artifacts.codebooks`).

    Args:
        statistics (`Statistics`): Of both passes.
        nbits (`Sequence[int]`): Numbers of bits to fit levels for.
        q_norm (`bool`): Also levels to decode with.

    Raises:
        ValueError: If the errors of a layer have no weight.
    """
    tensors: dict[str, Tensor] = {}
    for index, layer in statistics.layers.items():
        prefix = f"layers.{index}"
        tensors[f"{prefix}.key_lower"], tensors[f"{prefix}.key_upper"] = layer.key_range.bounds()
        for side, histogram in layer.histograms.items():
            if not histogram.mass.any():
                raise ValueError(
                    f"The loss does not depend on the {side}s of layer {index}, so their errors have no "
                    "weight; --weight none counts all alike."
                )
            for bits in nbits:
                codebook = fit_codebook(histogram, bits)
                tensors[f"{prefix}.{side}_codebook_{bits}"] = torch.from_numpy(codebook).float()
                if q_norm:
                    levels = normalized_levels(histogram, codebook)
                    tensors[f"{prefix}.{side}_levels_{bits}"] = torch.from_numpy(levels).float()
    return tensors


def fit_codebook(histogram: Histogram, nbits: int) -> NDArray[np.float64]:
    """Return the levels `(2 ** nbits,)` of the least weighted squared error, increasing, within `[-1, 1]`."""
    return np.clip(optimal_kmeans(*histogram.points(), 2**nbits), -1.0, 1.0)


def normalized_levels(histogram: Histogram, codebook: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return levels that give decoded numbers the mean and deviation of the exact ones (Q-Norm).

    `levels = (s1 / s2) codebook + m1 - m2 s1 / s2`, where `m1`, `s1` are mean and deviation of the exact
    numbers without outliers, and `m2`, `s2` of the same numbers as the codebook has them (KVQuant, in its
    first version). Numbers are not weighted here.

    Args:
        histogram (`Histogram`): Of the exact numbers.
        codebook (`numpy.ndarray` of shape `(2 ** nbits,)`): Levels to encode with.
    """
    total = histogram.count.sum()
    mean = histogram.count_first.sum() / total
    deviation = np.sqrt(max(histogram.count_second.sum() / total - mean**2, 0.0))
    used = histogram.count > 0
    centers = histogram.count_first[used] / histogram.count[used]
    decoded = codebook[np.searchsorted((codebook[1:] + codebook[:-1]) / 2, centers)]
    share = histogram.count[used] / total
    decoded_mean = float((share * decoded).sum())
    decoded_deviation = np.sqrt((share * (decoded - decoded_mean) ** 2).sum())
    if decoded_deviation == 0:  # all numbers share a code
        return np.asarray(codebook + mean - decoded_mean)
    return np.asarray((codebook - decoded_mean) * (deviation / decoded_deviation) + mean)
