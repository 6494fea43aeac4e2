"""Histograms keep what k-means needs, and levels are the best there are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcache_plugins.calibration.fitting import fit_codebook, normalized_levels
from kvcache_plugins.calibration.histograms import (
    NUM_BINS,
    Histogram,
    Normalized,
    normalize_keys,
    normalize_values,
    squared_gradient,
)


def filled(numbers: torch.Tensor, weights: torch.Tensor) -> Histogram:
    histogram = Histogram()
    normalized = Normalized(numbers, torch.ones(1), torch.ones_like(numbers, dtype=torch.bool))
    histogram.add(normalized, weights.double())
    return histogram


def test_bins_keep_exact_means() -> None:
    numbers = torch.tensor([-1.0, -1.0 + 1e-5, 0.0, 0.5, 0.50001, 1.0])
    histogram = filled(numbers, torch.tensor([1.0, 3.0, 2.0, 1.0, 1.0, 5.0]))
    points, weights = histogram.points()
    assert weights.tolist() == [4.0, 2.0, 2.0, 5.0]
    exact = numbers.double()
    expected = [(exact[0] + 3 * exact[1]) / 4, exact[2], (exact[3] + exact[4]) / 2, exact[5]]
    np.testing.assert_allclose(points, expected, rtol=1e-12)
    assert histogram.count.sum() == 6 and histogram.mass.shape == (NUM_BINS,)


def test_keys_are_normalized_by_their_channel() -> None:
    keys = torch.randn(2, 40, 3) * 5
    lower, upper = torch.full((2, 3), -2.0), torch.tensor([[6.0, 6.0, 6.0], [2.0, 2.0, -2.0]])
    normalized = normalize_keys(keys, lower, upper)
    for head in range(2):
        for token in range(40):
            for channel in range(3):
                low, high = lower[head, channel].item(), upper[head, channel].item()
                key = keys[head, token, channel].item()
                inside = low <= key <= high and high > low
                assert normalized.inside[head, token, channel].item() == inside
                if inside:
                    expected = (key - (high + low) / 2) / ((high - low) / 2)
                    assert normalized.numbers[head, token, channel].item() == pytest.approx(
                        expected, abs=1e-6
                    )
    assert normalized.inside.any() and not normalized.inside.all()
    assert not normalized.inside[1, :, 2].any(), "a channel without a range"


def test_a_vector_without_a_range_needs_no_levels() -> None:
    keys = torch.randn(2, 9, 3)
    keys[0, :, 1] = 2.5
    channels = normalize_keys(keys, keys.amin(1), keys.amax(1))
    assert not channels.inside[0, :, 1].any() and channels.inside.sum() == 5 * 9
    values = torch.randn(2, 9, 3)
    values[:, 4] = 0.0
    tokens = normalize_values(values, 0)
    assert not tokens.inside[:, 4].any() and tokens.inside.sum() == 8 * 6
    for normalized in (channels, tokens):
        histogram = Histogram()
        histogram.add(normalized, torch.ones(2, 9, 3).double())
        assert np.isfinite(histogram.first).all() and np.isfinite(histogram.count_second).all()


@pytest.mark.parametrize("outliers", [0, 1, 3])
def test_values_are_normalized_by_their_token_over_all_heads(outliers: int) -> None:
    values = torch.randn(2, 7, 8)
    normalized = normalize_values(values, outliers)
    for token in range(7):
        ordered = values[:, token].flatten().sort().values
        low, high = ordered[outliers].item(), ordered[-1 - outliers].item()
        vector = values[:, token]
        assert torch.equal(normalized.inside[:, token], (vector >= low) & (vector <= high))
        assert normalized.inside[:, token].sum() == 16 - 2 * outliers
        expected = (vector - (high + low) / 2) / ((high - low) / 2)
        inside = normalized.inside[:, token]
        torch.testing.assert_close(normalized.numbers[:, token][inside], expected[inside])
        assert normalized.scale[0, token, 0].item() == pytest.approx((high - low) / 2)


def test_outliers_are_not_counted() -> None:
    numbers = torch.tensor([0.1, 0.2, 0.3])
    histogram = Histogram()
    inside = torch.tensor([True, False, True])
    histogram.add(Normalized(numbers, torch.ones(1), inside), torch.tensor([1.0, 100.0, 2.0]).double())
    assert histogram.mass.sum() == 3.0 and histogram.count.sum() == 2


def test_weights_of_any_size() -> None:
    """The last tokens of a text have gradients next to nothing; their bins must not end as levels."""
    numbers = torch.linspace(-1, 1, 400)
    weights = torch.where(numbers.abs() > 0.9, 1e-60, 1.0).double() * 1e-30
    levels = fit_codebook(filled(numbers, weights), 3)
    assert np.isfinite(levels).all() and np.abs(levels).max() < 0.9 and (np.diff(levels) > 0).all()


def test_what_weighs_little_has_levels_where_there_are_enough() -> None:
    numbers = torch.linspace(-1, 1, 8)
    weights = torch.tensor([1.0, 1e-9] * 4)
    np.testing.assert_allclose(fit_codebook(filled(numbers, weights), 3), numbers.double(), atol=1e-6)


def test_fisher_information_needs_finite_gradients() -> None:
    gradient = torch.tensor([3.0, -1e-30])
    assert squared_gradient(gradient).tolist() == pytest.approx([9.0, 1e-60], rel=1e-6)
    with pytest.raises(ValueError, match=r"gradients.*finite.*--dtype"):
        squared_gradient(torch.tensor([float("inf")]))


@pytest.mark.parametrize("nbits", [2, 3, 4])
def test_levels_are_as_good_as_those_of_the_numbers_themselves(nbits: int) -> None:
    """Lloyd's iterations on the numbers themselves, from these levels, find nothing to improve."""
    numbers = (torch.randn(20_000) * 0.4).clamp(-1, 1)
    weights = torch.rand(20_000) ** 4
    levels = fit_codebook(filled(numbers, weights), nbits)
    assert levels.shape == (2**nbits,) and (np.diff(levels) > 0).all() and np.abs(levels).max() <= 1

    x, w = numbers.double().numpy(), weights.double().numpy()

    def cost(centers: np.ndarray) -> float:
        return float((w * ((x[:, None] - centers) ** 2).min(1)).sum())

    refined = levels.copy()
    for _ in range(20):
        nearest = np.abs(x[:, None] - refined).argmin(1)
        refined = np.array([np.average(x[nearest == i], weights=w[nearest == i]) for i in range(2**nbits)])
    assert cost(levels) <= cost(refined) * (1 + 1e-6)
    assert cost(levels) < 0.9 * cost(np.linspace(-1, 1, 2**nbits))


def test_q_norm_restores_mean_and_deviation() -> None:
    numbers = (torch.randn(20_000) * 0.3 + 0.2).clamp(-1, 1)
    histogram = filled(numbers, torch.rand(20_000))
    codebook = fit_codebook(histogram, 2)
    levels = normalized_levels(histogram, codebook)
    x = numbers.double().numpy()
    codes = np.abs(x[:, None] - codebook).argmin(1)
    assert levels[codes].mean() == pytest.approx(x.mean(), abs=1e-4)
    assert levels[codes].std() == pytest.approx(x.std(), rel=1e-3)
    # which the codebook itself does not: a mean of many numbers varies less than they do
    assert codebook[codes].std() < 0.98 * x.std()


def test_q_norm_of_numbers_that_share_a_level() -> None:
    histogram = filled(torch.tensor([0.5, 0.5, 0.5]), torch.ones(3))
    levels = normalized_levels(histogram, np.array([-1.0, -0.5, 0.25, 1.0]))
    assert levels.tolist() == [-0.75, -0.25, 0.5, 1.25]
