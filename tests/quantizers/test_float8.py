"""8-bit floating point codes against the oracle, bit for bit, with dynamic and static scales."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcache_plugins.quantizers.affine import choose_qparams_symmetric
from kvcache_plugins.quantizers.float8 import (
    FLOAT8_DTYPES,
    FLOAT8_MAX,
    _rounded_by_integers,
    dequantize_float8,
    quantize_float8,
)
from kvcache_plugins.quantizers.granularity import Granularity, per_token, per_token_group, per_token_head
from tests.reference import quantizers as oracle

INF, NAN = float("inf"), float("nan")
FORMATS = ("e4m3", "e5m2")
SHAPE = (2, 3, 37, 48)
CHANNELS, TOKENS = torch.tensor([3, 11]), torch.tensor([5])

CASES: dict[str, tuple[Granularity, Callable[[Tensor], Tensor], int | tuple[int, ...], int | None]] = {
    "token-head": (per_token_head(), lambda x: x, -1, None),
    "token-group-16": (per_token_group(16), lambda x: x.unflatten(-1, (-1, 16)), -1, -1),
    "token": (per_token(), lambda x: x, (1, 3), None),
}
INPUTS: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: torch.randn(SHAPE),
    "uneven-channels": lambda: torch.randn(SHAPE) * torch.logspace(-6, 3, 48),
    "constant": lambda: torch.full(SHAPE, 0.1),
    "one-outlier": lambda: torch.randn(SHAPE).masked_fill_(torch.arange(48) == 7, 5e4),
    "all-zero": lambda: torch.zeros(SHAPE),
    "denormal": lambda: torch.randn(SHAPE) * 1e-41,
    "1e4-scale": lambda: torch.randn(SHAPE) * 1e4,
    "bf16": lambda: torch.randn(SHAPE).bfloat16().float(),
    "beyond-half": lambda: torch.randn(SHAPE) * 1e12,
    "not-finite": lambda: torch.randn(SHAPE).index_fill_(3, CHANNELS, INF).index_fill_(2, TOKENS, NAN),
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name: str, kind: str, format: str) -> None:
    granularity, regroup, axis, squeezed = CASES[name]
    states = INPUTS[kind]()
    scale = choose_qparams_symmetric(states, granularity, largest_code=FLOAT8_MAX[format])
    codes = quantize_float8(states, scale, granularity, format)
    values = dequantize_float8(codes, scale, granularity, format)
    expected = oracle.float8(regroup(states), format, axis=axis)
    assert codes.dtype == torch.uint8
    assert torch.equal(scale, expected.scale if squeezed is None else expected.scale.squeeze(squeezed))
    assert torch.equal(codes, expected.codes.reshape(SHAPE))
    assert torch.equal(values, expected.dequantized.reshape(SHAPE))
    assert torch.isfinite(values).all()


@pytest.mark.parametrize("format", FORMATS)
def test_the_formats_are_the_ocp_ones(format: str) -> None:
    assert (FLOAT8_DTYPES[format], FLOAT8_MAX[format]) == oracle.FLOAT8_FORMATS[format]


@pytest.mark.parametrize("format", FORMATS)
def test_every_finite_bit_pattern_survives(format: str) -> None:
    patterns = torch.arange(256, dtype=torch.uint8)
    numbers = patterns.view(FLOAT8_DTYPES[format]).float()
    patterns, numbers = patterns[numbers.isfinite()], numbers[numbers.isfinite()]
    states = numbers.view(1, 1, 1, -1)
    codes = quantize_float8(states * 0.25, torch.full((1, 1, 1, 1), 0.25), per_token_head(), format)
    assert torch.equal(codes.flatten(), patterns)
    assert torch.equal(dequantize_float8(codes, torch.ones(1, 1, 1, 1), per_token_head(), format), states)


@pytest.mark.parametrize("format", FORMATS)
def test_rounding_by_integers_is_the_cast(format: str) -> None:
    """For devices without float8: at every number, between any two of them, and right beside that."""
    numbers = torch.arange(256, dtype=torch.uint8).view(FLOAT8_DTYPES[format]).float()
    numbers = numbers[numbers.isfinite()].sort().values
    between = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(between, torch.tensor(end)) for end in (-INF, INF)]
    patterns = torch.arange(-(2**31), 2**31, 9973, dtype=torch.int64).to(torch.int32).view(torch.float32)
    largest = FLOAT8_MAX[format]
    anything = patterns[patterns.isfinite()].clamp(-largest, largest)
    scaled = torch.cat([numbers, between, *beside, torch.tensor([0.0, -0.0]), anything])
    codes = _rounded_by_integers(scaled, {"e4m3": 3, "e5m2": 2}[format])
    assert torch.equal(codes, scaled.to(FLOAT8_DTYPES[format]).view(torch.uint8))


@pytest.mark.parametrize("format", FORMATS)
def test_beyond_a_static_scale_values_saturate(format: str) -> None:
    largest = FLOAT8_MAX[format]
    states = torch.tensor([0.5, 1.0, 1.5, -7e4, INF, -INF, NAN, 0.0]).view(1, 1, 1, -1)
    scale = torch.full((1, 1, 1, 1), 1 / largest)
    codes = quantize_float8(states, scale, per_token_head(), format)
    values = dequantize_float8(codes, scale, per_token_head(), format)
    assert values.flatten().tolist() == pytest.approx([0.5, 1.0, 1.0, -1.0, 1.0, -1.0, 0.0, 0.0])


@pytest.mark.parametrize("format", FORMATS)
def test_masked_tokens_are_zero_and_do_not_count(format: str) -> None:
    states = torch.randn(SHAPE)
    valid = torch.rand(2, 37) > 0.4
    dirty = states.clone()
    dirty[~valid[:, None, :].expand(2, 3, 37)] = 1e30
    for granularity in (per_token_head(), Granularity(tokens=37, across_heads=True)):
        clean = states.masked_fill(~valid[:, None, :, None], 0.0)
        scale = choose_qparams_symmetric(dirty, granularity, valid, FLOAT8_MAX[format])
        assert torch.equal(scale, choose_qparams_symmetric(clean, granularity, None, FLOAT8_MAX[format]))
        codes = quantize_float8(dirty, scale, granularity, format, valid)
        assert torch.equal(codes.transpose(1, 2)[~valid], torch.zeros_like(codes.transpose(1, 2)[~valid]))
        read, expected = (
            dequantize_float8(quantize_float8(x, scale, granularity, format, v), scale, granularity, format)
            for x, v in ((dirty, valid), (clean, None))
        )
        assert torch.equal(read, expected)


def test_strided_input() -> None:
    base = torch.randn(2, 37, 3, 96)
    states = base.transpose(1, 2)[..., ::2]
    assert not states.is_contiguous()
    scale = choose_qparams_symmetric(states, per_token_head(), largest_code=448.0)
    codes = quantize_float8(states, scale, per_token_head(), "e4m3")
    assert torch.equal(codes, oracle.float8(states, "e4m3", axis=-1).codes)


@given(
    values=st.lists(st.floats(-60000, 60000, width=32), min_size=1, max_size=40),
    format=st.sampled_from(FORMATS),
)
@settings(max_examples=150, deadline=None)
def test_relative_error_is_half_an_ulp(values: list[float], format: str) -> None:
    states = torch.tensor(values).view(1, 1, 1, -1)
    scale = choose_qparams_symmetric(states, per_token_head(), largest_code=FLOAT8_MAX[format])
    codes = quantize_float8(states, scale, per_token_head(), format)
    error = (dequantize_float8(codes, scale, per_token_head(), format) - states).abs()
    # 3 and 2 bits of mantissa; below the smallest normal number the step is constant.
    relative, smallest = {"e4m3": (2.0**-4, 2.0**-6), "e5m2": (2.0**-3, 2.0**-14)}[format]
    bound = torch.maximum(states.abs() * relative, smallest * relative * scale)
    assert (error <= bound * (1 + 1e-5)).all()
