"""The uniform quantizers against the oracle of `tests/reference`, bit for bit, and the bounds they promise.

Every granularity is compared on every kind of input: well-behaved ones, constants, outliers, denormals,
numbers that fp16 cannot hold, numbers that are not finite, masked tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcache_plugins.quantizers import affine
from kvcache_plugins.quantizers.granularity import (
    Granularity,
    per_block,
    per_channel_group,
    per_token,
    per_token_group,
    per_token_head,
)
from tests.reference import quantizers as oracle

INF, NAN = float("inf"), float("nan")
BITS = (1, 2, 3, 4, 8)


class Case(NamedTuple):
    """A granularity of ours, and the same written for the oracle."""

    granularity: Granularity
    regroup: Callable[[Tensor], Tensor]
    axis: int | tuple[int, ...]
    squeezed: int | None


CASES = {
    "token-head": Case(per_token_head(), lambda x: x, -1, None),
    "token-group-16": Case(per_token_group(16), lambda x: x.unflatten(-1, (-1, 16)), -1, -1),
    "token": Case(per_token(), lambda x: x, (1, 3), None),
    "channel-group-32": Case(per_channel_group(32), lambda x: x.unflatten(2, (-1, 32)), 3, 3),
    "block-64": Case(per_block(64), lambda x: x.unflatten(2, (-1, 64)), (1, 3, 4), -1),
}
SHAPE = (2, 3, 128, 80)


def _sprinkled(x: Tensor) -> Tensor:
    """Some entries not finite, one whole token, one whole channel group."""
    x.view(-1)[::97], x.view(-1)[::101], x.view(-1)[::103] = NAN, INF, -INF
    x[1, 1, 7], x[0, 2, 32:64, 3] = NAN, -INF
    return x


INPUTS: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: torch.randn(SHAPE),
    "uneven-channels": lambda: torch.randn(SHAPE) * torch.logspace(-3, 3, 80),
    "key-bias": lambda: torch.randn(SHAPE) + torch.randn(80) * 500,
    "constant": lambda: torch.full(SHAPE, -3.2109),
    "one-outlier": lambda: torch.randn(SHAPE).masked_fill_(
        torch.arange(2 * 3 * 128 * 80).view(SHAPE) == 54321, 3e4
    ),
    "outlier-channel": lambda: torch.randn(SHAPE).masked_fill_(torch.arange(80) == 5, 1000.0),
    "all-zero": lambda: torch.zeros(SHAPE),
    "denormal": lambda: torch.randn(SHAPE) * 1e-40,
    "range-near-the-smallest-half": lambda: torch.randn(SHAPE) * 2.0**-24,
    "1e4-scale": lambda: torch.randn(SHAPE) * 1e4,
    "fp16": lambda: (torch.randn(SHAPE) * 20).half().float(),
    "bf16": lambda: (torch.randn(SHAPE) * 20).bfloat16().float(),
    "beyond-half": lambda: torch.randn(SHAPE) * 1e8,
    "around-the-largest-half": lambda: 65504.0 + torch.randn(SHAPE) * 20,
    "beyond-single": lambda: torch.randn(SHAPE) * 2e38,
    "not-finite": lambda: _sprinkled(torch.randn(SHAPE)),
    "nothing-finite": lambda: torch.full(SHAPE, NAN),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def assert_asymmetric_equal(states: Tensor, case: Case, nbits: int, valid: Tensor | None = None) -> None:
    """Codes, scale, minimum and decoded values are the oracle's."""
    given_states = states.clone()
    scale, minimum = affine.choose_qparams_asymmetric(states, case.granularity, nbits, valid)
    codes = affine.quantize_asymmetric(states, scale, minimum, case.granularity, nbits, valid)
    values = affine.dequantize_asymmetric(codes, scale, minimum, case.granularity)
    assert torch.equal(states.nan_to_num(), given_states.nan_to_num())

    mask = None if valid is None else case.regroup(valid[:, None, :, None].expand(states.shape))
    expected = oracle.asymmetric(case.regroup(states), nbits, axis=case.axis, valid=mask)
    flat = [
        t if case.squeezed is None else t.squeeze(case.squeezed) for t in (expected.scale, expected.minimum)
    ]
    assert codes.dtype == torch.uint8 and scale.dtype == minimum.dtype == torch.float32
    assert torch.equal(scale, flat[0])
    assert torch.equal(minimum, flat[1])
    assert torch.equal(codes, expected.codes.reshape(states.shape))
    assert torch.equal(values, expected.dequantized.reshape(states.shape))
    assert torch.isfinite(values).all()


def assert_symmetric_equal(states: Tensor, case: Case, valid: Tensor | None = None) -> None:
    """As above, with the bias of our codes; for the oracle masked tokens are NaN, which decodes to zero."""
    scale = affine.choose_qparams_symmetric(states, case.granularity, valid)
    codes = affine.quantize_symmetric(states, scale, case.granularity, valid)
    values = affine.dequantize_symmetric(codes, scale, case.granularity)
    masked = states if valid is None else states.masked_fill(~valid[:, None, :, None], NAN)
    expected = oracle.symmetric8(case.regroup(masked), axis=case.axis)
    assert torch.equal(
        scale, expected.scale if case.squeezed is None else expected.scale.squeeze(case.squeezed)
    )
    assert torch.equal(codes.int() - 128, expected.codes.reshape(states.shape).int())
    assert torch.equal(values, expected.dequantized.reshape(states.shape))
    assert int(codes.min()) >= 1


@pytest.mark.parametrize("kind", INPUTS)
def test_asymmetric_equals_the_oracle(case: Case, kind: str) -> None:
    states = INPUTS[kind]()
    for nbits in BITS:
        assert_asymmetric_equal(states, case, nbits)


@pytest.mark.parametrize("kind", INPUTS)
def test_symmetric_equals_the_oracle(case: Case, kind: str) -> None:
    assert_symmetric_equal(INPUTS[kind](), case)


@pytest.mark.parametrize("kind", ["normal", "not-finite", "beyond-half"])
def test_masked_tokens_do_not_count(case: Case, kind: str) -> None:
    states = INPUTS[kind]()
    valid = torch.rand(2, 128) > 0.3
    valid[0, :64] = False  # whole groups
    states[~valid[:, None, :].expand(2, 3, 128)] = 1e30
    assert_asymmetric_equal(states, case, 4, valid)
    assert_symmetric_equal(states, case, valid)
    scale, minimum = affine.choose_qparams_asymmetric(states, case.granularity, 4, valid)
    codes = affine.quantize_asymmetric(states, scale, minimum, case.granularity, 4, valid)
    assert (codes.transpose(1, 2)[~valid] == 0).all() and (codes.transpose(1, 2)[valid] != 0).any()
    assert minimum.abs().max() < 1e30


def test_strided_input(case: Case) -> None:
    base = torch.randn(2, 128, 3, 160)
    for states in (base.transpose(1, 2)[..., ::2], base.permute(0, 2, 1, 3)[..., 37:117]):
        assert not states.is_contiguous()
        assert_asymmetric_equal(states, case, 3)
        assert_symmetric_equal(states, case)


FLOATS = st.floats(width=32, allow_subnormal=True)
MODERATE = st.floats(-65504, 65504, width=32)


@st.composite
def _states(draw: st.DrawFn, elements: st.SearchStrategy[float]) -> Tensor:
    batch, heads, rows = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    count = batch * heads * rows * 4 * 6
    few = draw(st.lists(elements, min_size=1, max_size=24))
    seed = draw(st.integers(0, 2**16))
    order = torch.randint(len(few), (count,), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(few)[order].view(batch, heads, rows * 4, 6)


SMALL_CASES = st.sampled_from(
    [
        Case(per_token_head(), lambda x: x, -1, None),
        Case(per_token_group(3), lambda x: x.unflatten(-1, (-1, 3)), -1, -1),
        Case(per_token(), lambda x: x, (1, 3), None),
        Case(per_channel_group(4), lambda x: x.unflatten(2, (-1, 4)), 3, 3),
        Case(per_block(2), lambda x: x.unflatten(2, (-1, 2)), (1, 3, 4), -1),
    ]
)


@given(states=_states(FLOATS), case=SMALL_CASES, nbits=st.sampled_from(BITS), seed=st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_anything_equals_the_oracle(states: Tensor, case: Case, nbits: int, seed: int) -> None:
    valid = torch.rand(states.shape[0], states.shape[2], generator=torch.Generator().manual_seed(seed)) > 0.25
    for mask in (None, valid):
        assert_asymmetric_equal(states, case, nbits, mask)
        assert_symmetric_equal(states, case, mask)


@given(states=_states(MODERATE), case=SMALL_CASES, nbits=st.sampled_from(BITS))
@settings(max_examples=150, deadline=None)
def test_asymmetric_error_is_half_a_step(states: Tensor, case: Case, nbits: int) -> None:
    scale, minimum = affine.choose_qparams_asymmetric(states, case.granularity, nbits)
    codes = affine.quantize_asymmetric(states, scale, minimum, case.granularity, nbits)
    values = affine.dequantize_asymmetric(codes, scale, minimum, case.granularity)
    ones = case.granularity.split(torch.ones_like(states))
    step, low = ((ones * case.granularity.spread(t)).reshape(states.shape).double() for t in (scale, minimum))
    top = low + (2**nbits - 1) * step
    x, error = states.double(), (states.double() - values.double()).abs()
    rounding = 2.0**-22 * (x.abs() + low.abs())  # fp32, in the encoder and in the decoder
    inside = (x >= low) & (x <= top)
    assert (error <= step / 2 + rounding)[inside].all()
    # What rounding minimum and scale to fp16 leaves outside: half an ulp of each, the scale's once per step.
    ulp = 2.0**-11 * (low.abs() + (2**nbits - 1) * step) + 2.0**nbits * 2.0**-25
    assert (error <= step / 2 + ulp + rounding).all()


@given(states=_states(MODERATE), case=SMALL_CASES)
@settings(max_examples=100, deadline=None)
def test_symmetric_error_is_half_a_step(states: Tensor, case: Case) -> None:
    scale = affine.choose_qparams_symmetric(states, case.granularity)
    codes = affine.quantize_symmetric(states, scale, case.granularity)
    values = affine.dequantize_symmetric(codes, scale, case.granularity)
    step = (case.granularity.split(torch.ones_like(states)) * case.granularity.spread(scale)).reshape(
        states.shape
    )
    assert ((states - values).abs() <= step / 2 * (1 + 1e-5)).all()


@given(values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=50))
@settings(max_examples=200, deadline=None)
def test_rounding_of_metadata(values: list[float]) -> None:
    x = torch.tensor(values)
    half = torch.isfinite(x.half())
    nearest = affine.round_to_half(x)
    assert torch.equal(nearest, torch.where(half, x.half().float(), x))
    up = affine.round_up_to_half(x.abs())
    assert (up >= x.abs()).all()
    stored_as_half = up.half().float() == up
    # Beyond the largest fp16 number nothing but fp32 will do; below it, the smallest that covers.
    assert torch.equal(stored_as_half | (x.abs() > 65504), torch.ones_like(half))
    below = torch.nextafter(up.half(), torch.tensor(-INF).half()).float()
    covered = (x.abs() <= 65504) & (x != 0)
    assert (below < x.abs())[covered].all()
    assert torch.equal(up[x == 0], torch.zeros(int((x == 0).sum())))


def test_the_smallest_scale_is_the_smallest_half() -> None:
    assert torch.tensor(affine.SMALLEST_SCALE).half().view(torch.int16).item() == 1
    zeros = torch.zeros(1, 1, 2, 16)
    assert affine.choose_qparams_symmetric(zeros, per_token_head()).unique().tolist() == [
        affine.SMALLEST_SCALE
    ]
