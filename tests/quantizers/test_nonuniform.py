"""The nearest level, by a loop; NormalFloat, by its definition."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch

from kvcache_plugins.quantizers.nonuniform import (
    dequantize_nonuniform,
    normal_float_codebook,
    quantize_nonuniform,
)


@pytest.mark.parametrize("nbits", [2, 3, 4])
def test_every_number_takes_its_nearest_level(nbits: int) -> None:
    codebook = torch.rand(2**nbits).mul(2).sub(1).sort().values
    numbers = torch.randn(3, 5, 40) * 0.7
    codes = quantize_nonuniform(numbers, codebook)
    assert codes.dtype == torch.uint8 and codes.shape == numbers.shape
    assert len(codes.unique()) == 2**nbits
    for number, code in zip(numbers.flatten().tolist(), codes.flatten().tolist(), strict=True):
        distances = [abs(number - level) for level in codebook.tolist()]
        assert distances[code] == pytest.approx(min(distances), abs=1e-7)


def test_ties_go_down_and_the_ends_take_what_lies_beyond() -> None:
    codebook = torch.tensor([-1.0, 0.0, 0.5, 1.0])
    numbers = torch.tensor([-math.inf, -3.0, -0.5, 0.25, 0.75, 3.0, math.inf])
    assert quantize_nonuniform(numbers, codebook).tolist() == [0, 0, 0, 1, 2, 3, 3]


def test_what_is_no_number_takes_the_last_code() -> None:
    assert quantize_nonuniform(torch.tensor([math.nan]), torch.tensor([-1.0, 0.0, 0.5, 1.0])).item() == 3


@pytest.mark.parametrize("nbits", [2, 3, 4])
def test_comparing_finds_what_searching_finds(nbits: int) -> None:
    """The CPU compares, other devices search."""
    codebook = torch.rand(2**nbits).mul(2).sub(1).bfloat16().float().sort().values
    numbers = torch.randn(3, 40, 5) * 0.7
    boundaries = (codebook[1:] + codebook[:-1]) / 2
    edges = torch.cat(
        [boundaries, boundaries.nextafter(torch.tensor(2.0)), torch.tensor([math.nan, math.inf])]
    )
    numbers.view(-1)[: len(edges)] = edges
    numbers = numbers.transpose(1, 2)
    codes = torch.bucketize(numbers.contiguous(), boundaries)
    assert torch.equal(quantize_nonuniform(numbers, codebook), codes.to(torch.uint8))


def test_decoding_scales_and_shifts_the_level() -> None:
    levels = torch.tensor([-1.0, -0.25, 0.5, 1.0])
    codes = torch.tensor([[0, 1], [2, 3]], dtype=torch.uint8)
    scale, offset = torch.tensor([2.0, 10.0]), torch.tensor([100.0, 0.0])
    assert dequantize_nonuniform(codes, levels, scale, offset).tolist() == [[98.0, -2.5], [101.0, 10.0]]


@pytest.mark.parametrize("nbits", [2, 3, 4])
def test_normal_float_divides_a_normal_distribution_evenly(nbits: int) -> None:
    half, last = 2 ** (nbits - 1), 1 - (1 / 32 + 1 / 30) / 2
    normal = NormalDist()
    negative = [normal.inv_cdf(1 - last + (last - 0.5) * i / (half - 1)) for i in range(half - 1)]
    positive = [normal.inv_cdf(0.5 + (last - 0.5) * i / half) for i in range(1, half + 1)]
    expected = [x / -negative[0] for x in negative] + [0.0] + [x / positive[-1] for x in positive]
    codebook = normal_float_codebook(nbits)
    assert codebook.tolist() == pytest.approx(expected, abs=1e-5)
    assert codebook[0] == -1 and codebook[-1] == 1 and (codebook == 0).sum() == 1
    assert codebook.tolist() == sorted(codebook.tolist())


def test_four_bits_are_the_published_levels() -> None:
    # Of QLoRA's NF4, as its authors' code has them.
    expected = [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ]  # fmt: skip
    assert normal_float_codebook(4).tolist() == pytest.approx(expected, rel=0, abs=1e-6)


def test_two_bits_have_one_negative_level() -> None:
    assert normal_float_codebook(2).tolist() == pytest.approx([-1.0, 0.0, 0.3379152, 1.0], rel=0, abs=1e-6)
