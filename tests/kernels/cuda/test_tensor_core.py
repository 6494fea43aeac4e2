"""The emulated tensor core: sums of a row at once are, bit for bit, those made singly, which are right."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvcache_plugins.kernels import compiler

SOURCE = Path(__file__).with_name("tensor_core_library.cpp")
COUNT = 200
A, B = 16 * 16, 16 * 8  # the numbers of a tile: A, B, and as many sums as B has numbers
DTYPES = [torch.float16, torch.bfloat16]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    found = compiler.find_compiler()
    if found is None:
        pytest.skip("no C++ compiler")
    output = tmp_path_factory.mktemp("tensor_core") / "library.so"
    flags = ["-std=c++20", "-O2", "-fPIC", "-shared", "-Wall", "-Werror"]
    subprocess.run([found.path, *flags, str(SOURCE), "-o", str(output)], check=True)
    return ctypes.CDLL(str(output))


def scaled(numbers: Tensor, low: int, high: int) -> Tensor:
    """By powers of two between these."""
    return numbers * torch.exp2(torch.randint(low, high, numbers.shape).float())


def some_zeros(numbers: Tensor) -> Tensor:
    return numbers * (torch.rand(numbers.shape) < 0.3)


def not_finite(numbers: Tensor) -> Tensor:
    chance = torch.rand(numbers.shape)
    return numbers.masked_fill(chance < 1e-3, torch.inf).masked_fill(chance > 1 - 1e-3, torch.nan)


# What A and B are made of, and what the sums so far are.
NUMBERS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "plain": (lambda x: x, lambda x: x),
    "of all sizes": (lambda x: scaled(x, -12, 12), lambda x: scaled(x, -20, 20)),
    "zeros": (some_zeros, some_zeros),
    "zeros alone": (torch.zeros_like, torch.zeros_like),
    "subnormal in fp16": (lambda x: scaled(x, -24, -12), lambda x: scaled(x, -48, -24)),
    "subnormal products": (lambda x: scaled(x, -80, -60), lambda x: scaled(x, -149, -120)),
    "subnormal in bf16": (lambda x: scaled(x, -133, -120), lambda x: scaled(x, -149, -120)),
    "large": (lambda x: scaled(x, 0, 14), lambda x: scaled(x, 90, 127)),
    "beyond fp32": (lambda x: scaled(x, 50, 80), lambda x: x),
    "not finite": (not_finite, not_finite),
}


def tiles(name: str, dtype: torch.dtype) -> Tensor:
    factors, sums = NUMBERS[name]
    numbers = factors(torch.randn(COUNT, A + B)).to(dtype).float()
    return torch.cat([numbers, sums(torch.randn(COUNT, B))], 1)


def multiplied(function: Callable[..., int], numbers: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
    own = numbers.clone()
    finite = function(ctypes.c_void_p(own.data_ptr()), COUNT, dtype is torch.bfloat16)
    return own[:, A + B :], finite


def bits(numbers: Tensor) -> Tensor:
    """Of which all that are not numbers have the same."""
    return numbers.masked_fill(numbers.isnan(), torch.nan).view(torch.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_rows_are_their_sums(name: str, dtype: torch.dtype, library: ctypes.CDLL) -> None:
    numbers = tiles(name, dtype)
    expected, _ = multiplied(library.multiply_singly, numbers, dtype)
    found, _ = multiplied(library.multiply, numbers, dtype)
    assert torch.equal(bits(found), bits(expected))
    found, finite = multiplied(library.multiply_without_avx512, numbers, dtype)
    assert torch.equal(bits(found), bits(expected))
    if name == "not finite":
        assert finite < COUNT
    elif "beyond" not in name:
        assert finite == COUNT


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_cut_off_as_the_papers_say(dtype: torch.dtype, library: ctypes.CDLL) -> None:
    """In exact fractions: shifted to the largest exponent, cut off, added up, and cut off to fp32."""
    numbers = tiles("of all sizes", dtype)
    found, _ = multiplied(library.multiply_singly, numbers, dtype)
    for tile, sums in zip(numbers[:4], found[:4], strict=True):
        a, b, c = tile[:A].view(16, 16), tile[A : A + B].view(16, 8), tile[A + B :].view(16, 8)
        for row in range(16):
            for column in range(8):
                expected = Fraction(c[row, column].item())
                for first in (0, 8):
                    pairs = [(a[row, k].item(), b[k, column].item()) for k in range(first, first + 8)]
                    expected = summed(expected, pairs, -14 if dtype is torch.float16 else -126)
                assert Fraction(sums.view(16, 8)[row, column].item()) == expected


def summed(total: Fraction, pairs: list[tuple[float, float]], least: int) -> Fraction:
    terms = [total, *(Fraction(x) * Fraction(y) for x, y in pairs)]
    exponents = [exponent(x, least) + exponent(y, least) for x, y in pairs if x and y]
    largest = max([*exponents, *([exponent(float(total), -126)] if total else [])], default=0)
    unit = Fraction(2) ** (largest - 24)
    exact = sum(int(term / unit) for term in terms)  # each towards zero
    excess = max(abs(exact).bit_length() - 24, 0)
    return (abs(exact) >> excess << excess) * (1 if exact >= 0 else -1) * unit


def exponent(number: float, least: int) -> int:
    whole = Fraction(abs(number))
    found = whole.numerator.bit_length() - whole.denominator.bit_length()
    return max(found if Fraction(2) ** found <= whole else found - 1, least)
