"""KVQuant's codecs against a number-by-number reading of the paper."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvcache_plugins.layers.nonuniform import (
    ChannelNonUniformCodec,
    TokenNonUniformCodec,
    UnrotatedCodec,
    outliers_per_side,
)
from kvcache_plugins.layers.padding import Padding
from kvcache_plugins.models.rotary import Rotary
from kvcache_plugins.quantizers.nonuniform import normal_float_codebook

HEADS, DIM = 3, 32
BOOK = normal_float_codebook(3).bfloat16().float()


def nearest(number: float) -> float:
    return min(BOOK.tolist(), key=lambda level: abs(level - number))


def states(tokens: int, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    channels = torch.linspace(0.2, 5.0, DIM)
    return torch.randn(batch, HEADS, tokens, DIM, generator=generator) * channels + channels.flip(0)


def half_ulp(number: float) -> float:
    """Half the distance of fp16 numbers about `number`."""
    return 2.0 ** (max(math.frexp(abs(number))[1] - 11, -24) - 1)


class TestValues:
    def test_a_token_is_its_range_its_levels_and_its_outliers(self) -> None:
        side = 2
        values = states(64)
        encoded = TokenNonUniformCodec(3, BOOK, None, side).encode(values, 0)
        got = TokenNonUniformCodec(3, BOOK, None, side).decode(encoded, 0)
        for row in range(2):
            for token in range(64):
                vector = sorted(values[row, :, token].flatten().tolist())
                low, high = vector[side], vector[-1 - side]
                scale = float(torch.tensor((high - low) / 2).half())
                offset = float(torch.tensor((high + low) / 2).half())
                for exact, found in zip(
                    values[row, :, token].flatten().tolist(),
                    got[row, :, token].flatten().tolist(),
                    strict=True,
                ):
                    if low <= exact <= high:
                        expected = nearest((exact - offset) / scale) * scale + offset
                        # two levels may be equally near to rounding
                        assert abs(found - exact) == pytest.approx(abs(expected - exact), abs=1e-4)
                    else:
                        assert abs(found - exact) <= half_ulp(exact - offset) + 1e-6 * abs(exact)

    def test_without_outliers_the_range_is_whole(self) -> None:
        values = states(64)
        codec = TokenNonUniformCodec(3, BOOK, None, 0)
        encoded = codec.encode(values, 0)
        assert encoded.outliers is None and codec.outlier_capacity == 0
        error = (codec.decode(encoded, 0) - values).abs()
        spread = values.amax((1, 3), keepdim=True) - values.amin((1, 3), keepdim=True)
        gap = (BOOK[1:] - BOOK[:-1]).max()
        assert (error <= spread / 2 * (gap / 2 + 2e-3)).all()

    def test_tokens_left_out_have_no_outliers(self) -> None:
        values = states(64)
        valid = torch.ones(2, 64, dtype=torch.bool)
        valid[0, :7] = False
        encoded = TokenNonUniformCodec(3, BOOK, None, 2).encode(values, 0, valid)
        assert encoded.outliers is not None
        counts = encoded.outliers.starts[:, 0, -1].tolist()
        assert counts == [2 * 2 * 57, 2 * 2 * 64]


class TestKeys:
    def test_a_channel_has_one_range_and_what_lies_outside_is_exact(self) -> None:
        keys = states(128)
        lower, upper = keys.quantile(0.03, 2).amin(0), keys.quantile(0.97, 2).amax(0)
        codec = ChannelNonUniformCodec(3, BOOK, None, side=20, lower=lower, upper=upper)
        got = codec.decode(codec.encode(keys, 0), 0)
        scale, offset = ((upper - lower) / 2)[:, None], ((upper + lower) / 2)[:, None]
        outside = (keys - offset).abs() > scale
        assert 0.01 < outside.float().mean() < 0.08
        nearest_levels = (
            BOOK[((keys - offset) / scale)[..., None].sub(BOOK).abs().argmin(-1)] * scale + offset
        )
        error, expected = (got - keys).abs(), (nearest_levels - keys).abs()
        assert torch.allclose(error[~outside], expected[~outside], atol=1e-5)
        assert (error[outside] < 2e-3 * (keys - offset).abs()[outside]).all()
        assert (expected[outside] > error[outside]).all()

    def test_the_range_is_that_of_the_first_tokens_where_none_was_calibrated(self) -> None:
        keys = states(256)
        codec = ChannelNonUniformCodec(3, BOOK, None, 4, fraction=0.1, warmup_tokens=100)
        valid = torch.zeros(2, 256, dtype=torch.bool)
        valid[0, :100], valid[1, 50:150] = True, True
        codec.calibrate(keys, valid)
        assert codec.scale is not None and codec.offset is not None
        for row, part in ((0, keys[0, :, :100]), (1, keys[1, :, 50:150])):
            low, high = part.quantile(0.05, 1), part.quantile(0.95, 1)
            assert torch.allclose(codec.scale[row, :, 0], (high - low) / 2, atol=1e-5)
            assert torch.allclose(codec.offset[row, :, 0], (high + low) / 2, atol=1e-5)
        assert set(codec.batch_state()) == {"scale", "offset"}

    def test_calibrated_ranges_do_not_follow_the_batch(self) -> None:
        codec = ChannelNonUniformCodec(3, BOOK, None, 1, torch.zeros(HEADS, DIM), torch.ones(HEADS, DIM))
        assert codec.batch_state() == {}
        codec.load_batch_state({})
        assert codec.decode(codec.encode(torch.rand(1, HEADS, 64, DIM), 0), 0).isfinite().all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [DIM, DIM // 2])
@pytest.mark.parametrize("pads", [None, [0, 9]])
def test_keys_are_stored_as_they_were_before_the_rotation(
    interleaved: bool, rotary_dim: int, pads: list[int] | None
) -> None:
    """What the inner codec sees is the key before the rotary embedding, at any position, to 1e-6."""
    rotary = Rotary(tuple((10000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)).tolist()), interleaved)
    padding = Padding(0, None if pads is None else torch.tensor(pads))
    before = torch.randn(2, HEADS, 64, DIM)
    start = 64 * 512
    after = torch.empty_like(before)
    for row in range(2):
        positions = torch.arange(start, start + 64) - (pads or [0, 0])[row]
        for token, position in enumerate(positions.tolist()):
            vector = before[row, :, token].double().clone()
            for i in range(rotary_dim // 2):
                a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + rotary_dim // 2)
                angle = position * rotary.inv_freq[i]
                x, y = vector[:, a].clone(), vector[:, b].clone()
                vector[:, a] = x * math.cos(angle) - y * math.sin(angle)
                vector[:, b] = y * math.cos(angle) + x * math.sin(angle)
            after[row, :, token] = vector.float()

    class Recorder(ChannelNonUniformCodec):
        seen: Tensor

        def encode(self, states: Tensor, position: int, valid: Tensor | None = None):  # type: ignore[no-untyped-def]
            self.seen = states
            return super().encode(states, position, valid)

    inner = Recorder(
        4, normal_float_codebook(4), None, 1, torch.full((HEADS, DIM), -3.0), torch.full((HEADS, DIM), 3.0)
    )
    codec = UnrotatedCodec(inner, rotary, padding)
    encoded = codec.encode(after, start)
    assert torch.allclose(inner.seen, before, atol=2e-6)
    turned = codec.decode(encoded, start)
    assert torch.allclose(turned.norm(dim=-1), inner.decode(encoded, start).norm(dim=-1), rtol=1e-5)
    assert (turned - after).norm() < 0.2 * after.norm()


def test_outliers_come_in_equal_numbers_above_and_below() -> None:
    assert outliers_per_side(0.0, 4096) == 0
    assert outliers_per_side(0.01, 4096) == 20
    assert outliers_per_side(0.01, 64) == 1, "at least one where any are kept"
