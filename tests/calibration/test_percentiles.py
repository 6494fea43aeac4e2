"""Percentiles from the extremes alone are those of all numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcache_plugins.calibration.percentiles import StreamingRange


@pytest.mark.parametrize("tail", [0.0, 0.0005, 0.005, 0.02, 0.15, 0.249])
@pytest.mark.parametrize("sizes", [(1,), (2,), (7, 1, 30), (64, 64, 64, 64), (333, 5)])
def test_numpys_percentiles(sizes: tuple[int, ...], tail: float) -> None:
    parts = [torch.randn(3, size, 5) * 10 + 100 for size in sizes]
    streaming = StreamingRange(sum(sizes), tail)
    for part in parts:
        streaming.add(part)
    everything = torch.cat(parts, dim=1).double().numpy()
    for found, percent in zip(streaming.bounds(), (tail * 100, 100 - tail * 100), strict=True):
        expected = np.percentile(everything, percent, axis=1)
        assert found.dtype == torch.float32 and found.shape == (3, 5)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


def test_portions_and_order_do_not_matter() -> None:
    numbers = torch.randn(2, 100, 4)
    whole, cut = StreamingRange(100, 0.01), StreamingRange(100, 0.01)
    whole.add(numbers)
    for part in numbers[:, torch.randperm(100)].split(9, dim=1):
        cut.add(part)
    for one, other in zip(whole.bounds(), cut.bounds(), strict=True):
        assert torch.equal(one, other)


def test_little_is_kept() -> None:
    streaming = StreamingRange(10_000, 0.005)
    for _ in range(10):
        streaming.add(torch.randn(1, 1000, 2))
    assert streaming.largest is not None and streaming.smallest is not None
    assert streaming.largest.shape == streaming.smallest.shape == (1, 51, 2)


def test_fraction_zero_is_minimum_and_maximum() -> None:
    numbers = torch.randn(2, 50, 3)
    streaming = StreamingRange(50, 0.0)
    streaming.add(numbers)
    lower, upper = streaming.bounds()
    assert torch.equal(lower, numbers.amin(1)) and torch.equal(upper, numbers.amax(1))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite(number: float) -> None:
    with pytest.raises(ValueError, match=r"finite.*--dtype"):
        StreamingRange(2, 0.0).add(torch.tensor([[[1.0], [number]]]))
