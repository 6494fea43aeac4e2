"""Codecs: runs of tokens to codes and back, and what rotating or scaling the channels first buys.

The thresholds on biased keys are those of the table in `RotatedCodec`'s specification: unit-variance keys,
six channels with a constant offset before the rotary embedding, error of the logits of unit-variance queries.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvcache_plugins.layers.codec import (
    AffineCodec,
    Codec,
    Encoded,
    Float8Codec,
    RotatedCodec,
    ScaledCodec,
    SymmetricCodec,
)
from kvcache_plugins.models.rotary import Rotary
from kvcache_plugins.quantizers.granularity import (
    per_block,
    per_channel_group,
    per_token,
    per_token_group,
    per_token_head,
)
from tests.reference.caches import KiviOracle, rotate_half_split, smoothing_factors
from tests.reference.quantizers import asymmetric, float8, symmetric8

FULL = Rotary(tuple(10000.0 ** (-i / 64) for i in range(64)))
ROTARIES = {
    "half-split": FULL,
    "interleaved": Rotary(FULL.inv_freq, interleaved=True),
    "partial": Rotary(tuple(10000.0 ** (-i / 16) for i in range(16))),
    "partial-interleaved": Rotary(tuple(10000.0 ** (-i / 16) for i in range(16)), interleaved=True),
    "large-theta": Rotary(tuple(5e5 ** (-i / 64) for i in range(64))),
}


def round_trip(codec: Codec, states: Tensor, position: int = 0, valid: Tensor | None = None) -> Tensor:
    return codec.decode(codec.encode(states, position, valid), position)


# -- plain codecs


CODECS: dict[str, tuple[Callable[[], Codec], Callable[[Tensor], Tensor]]] = {
    "channel-3bit": (
        lambda: AffineCodec(3, per_channel_group(32)),
        lambda x: asymmetric(x.unflatten(2, (-1, 32)), 3, axis=3).dequantized.flatten(2, 3),
    ),
    "channel-g128": (
        lambda: AffineCodec(4, per_channel_group(128)),
        lambda x: asymmetric(x.unflatten(2, (-1, 128)), 4, axis=3).dequantized.flatten(2, 3),
    ),
    "token-group": (
        lambda: AffineCodec(4, per_token_group(16)),
        lambda x: asymmetric(x.unflatten(3, (-1, 16)), 4, axis=-1).dequantized.flatten(3),
    ),
    "int8-token-head": (
        lambda: SymmetricCodec(per_token_head()),
        lambda x: symmetric8(x, axis=-1).dequantized,
    ),
    "int8-token": (lambda: SymmetricCodec(per_token()), lambda x: symmetric8(x, axis=(1, 3)).dequantized),
    "int8-block": (
        lambda: SymmetricCodec(per_block(64)),
        lambda x: symmetric8(x.unflatten(2, (-1, 64)), axis=(1, 3, 4)).dequantized.flatten(2, 3),
    ),
    "e5m2": (lambda: Float8Codec("e5m2", per_token_head()), lambda x: float8(x, "e5m2", axis=-1).dequantized),
}


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_reads_back_what_the_oracle_does(name: str) -> None:
    build, expected = CODECS[name]
    states = torch.randn(2, 3, 256, 48) * torch.logspace(-1, 1, 48)
    codec = build()
    encoded = codec.encode(states, 0)
    assert encoded.codes.shape == states.shape and encoded.codes.dtype == torch.uint8
    assert tuple(encoded.metadata) == codec.metadata_names
    for rows in encoded.metadata.values():
        # one row per group; a group longer than a block has one in each of its blocks
        assert rows.shape[2] == 256 // min(codec.group_tokens, 64)
        assert rows.shape[3] == codec.granularity.width(48)
    # Metadata shared by the heads is stored with each of them.
    stored = {key: rows.expand(-1, 3, -1, -1) for key, rows in encoded.metadata.items()}
    assert torch.equal(codec.decode(Encoded(encoded.codes, stored), 0), expected(states))


@pytest.mark.parametrize("name", CODECS)
def test_a_run_in_pieces_is_the_run(name: str) -> None:
    codec = CODECS[name][0]()
    states = torch.randn(2, 2, 256, 48)
    whole = round_trip(codec, states)
    pieces = [round_trip(codec, states[:, :, at : at + 128], position=at) for at in (0, 128)]
    assert torch.equal(torch.cat(pieces, dim=2), whole)


def test_what_can_be_gathered() -> None:
    assert [name for name, (build, _) in CODECS.items() if not build().is_gatherable] == [
        "channel-3bit", "channel-g128", "int8-block",
    ]  # fmt: skip
    rows = {name: build().rows_per_block for name, (build, _) in CODECS.items()}
    assert rows == {
        "channel-3bit": 2, "channel-g128": 1, "token-group": 64, "int8-token-head": 64, "int8-token": 64,
        "int8-block": 1, "e5m2": 64,
    }  # fmt: skip


@pytest.mark.parametrize("build", [SymmetricCodec, lambda *a: Float8Codec("e4m3", *a)], ids=["int8", "e4m3"])
def test_a_static_scale_is_not_stored(build: Callable[..., Codec]) -> None:
    codec = build(per_token_head(), torch.tensor([0.01, 0.02]).view(1, 2, 1, 1))
    assert codec.metadata_names == ()
    states = torch.tensor([0.5, -1.0, 1e6, float("nan")]).expand(1, 2, 3, 4)
    encoded = codec.encode(states, 0)
    assert encoded.metadata == {}
    largest = 127.0 if isinstance(codec, SymmetricCodec) else 448.0
    read = codec.decode(encoded, 0)
    for head, step in enumerate((0.01, 0.02)):
        assert read[0, head, 0].tolist() == pytest.approx(
            [0.5, -1.0, largest * step, 0.0], abs=step / 2 + 1e-6, rel=2**-4
        )


# -- keys whose rotation is undone


@pytest.mark.parametrize("name", ROTARIES)
@pytest.mark.parametrize("period", [32, 64])
def test_rotating_first_loses_nothing_but_the_codes(name: str, period: int) -> None:
    states = torch.randn(2, 3, 192, 128)
    codec = RotatedCodec(AffineCodec(8, per_channel_group(32)), ROTARIES[name], period)
    assert (codec.nbits, codec.group_tokens, codec.metadata_names) == (8, 32, ("scale", "minimum"))
    error = round_trip(codec, states) - states
    assert 0 < error.abs().max() <= 2e-2
    assert error.square().mean().sqrt() <= 1e-2
    assert torch.equal(
        round_trip(codec, states[:, :, 96:], position=96), round_trip(codec, states)[:, :, 96:]
    )


def test_only_the_place_inside_a_period_counts() -> None:
    # No absolute position is needed, so left padding does not matter.
    states = torch.randn(1, 1, 64, 128)
    codec = RotatedCodec(AffineCodec(4, per_channel_group(32)), FULL, 64)
    first, later = codec.encode(states, 0), codec.encode(states, 640)
    assert torch.equal(first.codes, later.codes)
    assert not torch.equal(first.codes, codec.encode(states, 32).codes)


def test_equals_the_oracle() -> None:
    states = torch.randn(2, 2, 128, 128)
    inv_freq = torch.tensor(FULL.inv_freq, dtype=torch.float64)
    oracle = KiviOracle(q_group_size=32, rope_mode="block", rope_period=64, inv_freq=inv_freq)
    expected = oracle.read_keys(states, 128, torch.ones(2, 128, dtype=torch.bool), 128)
    got = round_trip(RotatedCodec(AffineCodec(4, per_channel_group(32)), FULL, 64), states)
    # The two round sums of products in a different order; a code on the edge may then fall to the other side.
    difference = (got - expected).abs()
    assert difference.median() < 1e-6
    assert (difference > 1e-4).float().mean() < 1e-3


def test_a_wrong_rotation_costs_nothing_but_the_benefit() -> None:
    states = torch.randn(1, 2, 128, 128)
    for rotary in (ROTARIES["interleaved"], Rotary((0.3, 7.0, 1e-5))):
        codec = RotatedCodec(AffineCodec(8, per_channel_group(32)), rotary, 32)
        assert (round_trip(codec, states) - states).square().mean().sqrt() <= 1e-2


def biased_keys(bias: float, rotary: Rotary, tokens: int = 1024) -> Tensor:
    """Unit-variance keys, six rotating channels off by `bias`, then rotated from position 77 on."""
    keys = torch.randn(1, 1, tokens, 128)
    keys[..., torch.randperm(rotary.rotary_dim)[:6]] += bias
    return rotary.rotate(keys, torch.arange(77, 77 + tokens))


def logit_error(codec: Codec, keys: Tensor) -> float:
    query = torch.randn(1, 1, 256, 128)
    return float((query @ (round_trip(codec, keys) - keys).mT * 128**-0.5).std())


@pytest.mark.parametrize("name", ROTARIES)
@pytest.mark.parametrize(("nbits", "bound"), [(4, 0.10), (2, 0.45)], ids=["4bit", "2bit"])
def test_a_bias_costs_nothing_once_the_rotation_is_undone(name: str, nbits: int, bound: float) -> None:
    rotary = ROTARIES[name]
    codec = RotatedCodec(AffineCodec(nbits, per_channel_group(32)), rotary, 32)
    plain, biased = (logit_error(codec, biased_keys(bias, rotary)) for bias in (0.0, 100.0))
    assert bound / 3 < biased <= bound
    assert biased == pytest.approx(plain, rel=0.06)


def test_without_undoing_it_does() -> None:
    keys = biased_keys(100.0, FULL)
    assert logit_error(AffineCodec(4, per_channel_group(32)), keys) > 0.25
    assert logit_error(AffineCodec(4, per_token_head()), keys) >= 2.0
    # Telling the pairs apart wrongly loses the benefit.
    assert (
        logit_error(RotatedCodec(AffineCodec(4, per_channel_group(32)), ROTARIES["interleaved"], 32), keys)
        > 0.25
    )


# -- keys whose channels are scaled


def calibrated(keys: Tensor, valid: Tensor, rotary: Rotary | None, exponent: float = 0.5) -> ScaledCodec:
    codec = ScaledCodec(AffineCodec(4, per_token_head()), exponent, rotary, warmup_tokens=64)
    codec.calibrate(keys, valid)
    return codec


class TestScaled:
    KEYS_SHAPE = (2, 3, 80, 128)

    @pytest.fixture
    def keys(self) -> Tensor:
        return torch.randn(self.KEYS_SHAPE) * torch.logspace(-2, 2, 128)[torch.randperm(128)]

    @pytest.mark.parametrize("exponent", [0.25, 0.5, 1.0])
    def test_factors_equal_the_oracles(self, keys: Tensor, exponent: float) -> None:
        valid = torch.arange(80) >= torch.tensor([[0], [11]])
        keys[1, :, :11] = 1e6
        first = valid & (valid.cumsum(1) <= 64)
        codec = calibrated(keys, first, FULL, exponent)
        assert torch.equal(codec.factors, smoothing_factors(keys, valid, exponent))

    @pytest.mark.parametrize("name", ROTARIES)
    def test_the_channels_of_a_rotary_pair_share_one(self, keys: Tensor, name: str) -> None:
        rotary = ROTARIES[name]
        codec = calibrated(keys, torch.ones(2, 80, dtype=torch.bool), rotary)
        assert codec.factors is not None
        first, second = rotary.pairs(codec.factors)
        assert torch.equal(first, second)
        assert len(first.unique()) > first.numel() // 2
        alone = keys.abs().amax(2, keepdim=True).sqrt()
        torch.testing.assert_close(codec.factors[..., rotary.rotary_dim :], alone[..., rotary.rotary_dim :])
        # so that dividing commutes with rotating
        moved = torch.arange(80)
        scaled = rotary.rotate(keys, moved) / codec.factors
        torch.testing.assert_close(scaled, rotary.rotate(keys / codec.factors, moved), rtol=1e-4, atol=1e-4)

    def test_without_a_rotation_every_channel_has_its_own(self, keys: Tensor) -> None:
        codec = calibrated(keys, torch.ones(2, 80, dtype=torch.bool), None)
        torch.testing.assert_close(codec.factors, keys.abs().amax(2, keepdim=True).sqrt())

    def test_silent_channels_and_numbers_that_are_not_finite(self, keys: Tensor) -> None:
        keys[..., 5], keys[0, 0, 3, 9] = 0.0, float("inf")
        codec = calibrated(keys, torch.ones(2, 80, dtype=torch.bool), None)
        assert codec.factors is not None and torch.isfinite(codec.factors).all()
        assert (codec.factors[..., 5] == 1.0).all()
        clean = keys.clone()
        clean[0, 0, 3, 9] = 0.0
        assert torch.equal(
            codec.factors, calibrated(clean, torch.ones(2, 80, dtype=torch.bool), None).factors
        )

    def test_it_is_undone_on_reading_and_helps(self, keys: Tensor) -> None:
        everything = torch.ones(2, 80, dtype=torch.bool)
        codec = calibrated(keys, everything, FULL)
        assert codec.factors is not None
        expected = asymmetric(keys / codec.factors, 4, axis=-1).dequantized * codec.factors
        read = round_trip(codec, keys)
        assert torch.equal(read, expected)
        plain = round_trip(AffineCodec(4, per_token_head()), keys)
        quiet = keys.abs().mean(dim=(0, 1, 2)) < 1.0
        error, without = ((x - keys)[..., quiet].abs().mean() for x in (read, plain))
        assert error < without / 2

    def test_factors_follow_the_batch(self, keys: Tensor) -> None:
        codec = calibrated(keys, torch.ones(2, 80, dtype=torch.bool), FULL)
        encoded = codec.encode(keys, 0)
        expected = codec.decode(encoded, 0)
        state = codec.batch_state()
        assert list(state) == ["factors"]
        codec.load_batch_state({"factors": state["factors"][[1, 0]]})
        swapped = Encoded(
            encoded.codes[[1, 0]], {key: rows[[1, 0]] for key, rows in encoded.metadata.items()}
        )
        assert torch.equal(codec.decode(swapped, 0), expected[[1, 0]])
        assert ScaledCodec(AffineCodec(4, per_token_head()), 0.5, None, 64).batch_state() == {}


def test_the_rotation_used_here_is_the_oracles() -> None:
    states, positions = torch.randn(1, 2, 9, 128), torch.arange(50, 59)
    expected = rotate_half_split(states, positions, torch.tensor(FULL.inv_freq, dtype=torch.float64))
    torch.testing.assert_close(FULL.rotate(states, positions), expected, atol=1e-6, rtol=1e-6)
