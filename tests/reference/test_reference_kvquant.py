"""The fake-quantized KVQuant cache: every step of it by hand, on a few numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from .caches import OracleLayer, rotate_half_split
from .kvquant import KVQuantOracle, kvquant_oracle_cache, outliers_per_side

HEADS, CHANNELS = 2, 16
LEVELS = torch.tensor([-1.0, -0.25, 0.5, 1.0])
INV_FREQ = 10000 ** (-torch.arange(CHANNELS // 2, dtype=torch.float64) / (CHANNELS // 2))


def oracle(**changes: Any) -> KVQuantOracle:
    options: dict[str, Any] = {
        "key_lower": torch.full((HEADS, CHANNELS), -2.0),
        "key_upper": torch.full((HEADS, CHANNELS), 6.0),
        "key_codebook": LEVELS,
        "value_codebook": LEVELS,
        "inv_freq": INV_FREQ,
        "sink_length": 0,
        "residual_length": 0,
    }
    return KVQuantOracle(**(options | changes))


def states(length: int, batch_size: int = 1) -> torch.Tensor:
    return torch.randn(batch_size, HEADS, length, CHANNELS)


def read_keys(quantizer: KVQuantOracle, before: torch.Tensor, pads: list[int] | None = None) -> torch.Tensor:
    """Keys given and returned as they are before the rotation."""
    length = before.shape[2]
    slots = torch.arange(length)[None]
    valid = (slots >= torch.tensor(pads)[:, None]) if pads else torch.ones(before.shape[0], length).bool()
    positions = valid.cumsum(-1)[:, None] - 1
    read = quantizer.read_keys(rotate_half_split(before, positions, INV_FREQ), length, valid, length)
    return rotate_half_split(read, -positions, INV_FREQ)


@pytest.mark.parametrize(
    ("length", "residual_length", "packed"),
    [(0, 0, 0), (63, 0, 0), (64, 0, 64), (191, 128, 0), (192, 128, 64), (300, 128, 128), (100, 50, 0)],
)
def test_quantized_lengths(length: int, residual_length: int, packed: int) -> None:
    assert oracle(residual_length=residual_length).quantized_lengths(length) == (packed, packed)


def test_a_key_is_the_nearest_level_of_its_channels_range() -> None:
    # Range [-2, 6]: offset 2, scale 4, so the levels are -2, 1, 4 and 6.
    keys = torch.tensor([-1.9, 0.0, 2.4, 2.6, 4.9, 5.1, 6.0, 1.0]).repeat(2).expand(1, HEADS, 64, CHANNELS)
    expected = torch.tensor([-2.0, 1.0, 1.0, 4.0, 4.0, 6.0, 6.0, 1.0]).repeat(2).expand_as(keys)
    torch.testing.assert_close(read_keys(oracle(outlier_fraction=0.0), keys), expected, atol=1e-5, rtol=0)


def test_codes_may_be_read_with_other_levels() -> None:
    keys = torch.full((1, HEADS, 64, CHANNELS), 3.9)
    read = read_keys(oracle(outlier_fraction=0.0, key_levels=LEVELS / 2), keys)
    torch.testing.assert_close(read, torch.full_like(keys, 0.25 * 4 + 2), atol=1e-5, rtol=0)
    values = torch.linspace(-1, 1, HEADS * CHANNELS).view(1, HEADS, 1, CHANNELS)
    read = oracle(outlier_fraction=0.0, value_levels=LEVELS / 2).read_values(values, 1)
    assert read.unique().tolist() == [-0.5, -0.125, 0.25, 0.5]


def test_the_offset_is_not_clamped_to_the_range() -> None:
    # Numbers far from zero on one side: the offset is a multiple of the scale.
    far: dict[str, Any] = {
        "key_lower": torch.full((HEADS, CHANNELS), 99.0),
        "key_upper": torch.full((HEADS, CHANNELS), 101.0),
    }
    keys = torch.full((1, HEADS, 64, CHANNELS), 100.5)
    torch.testing.assert_close(read_keys(oracle(**far), keys), keys, atol=1e-4, rtol=0)


def test_key_outliers_are_exact_up_to_the_limit() -> None:
    limit = 2 * 64 * outliers_per_side(0.1, HEADS * CHANNELS)
    places = torch.randperm(HEADS * 64 * CHANNELS)[: limit + 50]
    beyond = torch.ones(HEADS * 64 * CHANNELS)  # a level; another is the end of the range, 6
    beyond[places] = 10 + torch.arange(limit + 50) / 64
    within = torch.full_like(beyond, 1.25)
    within[places[50:]] = 2.0
    keys = torch.cat([block.view(1, HEADS, 64, CHANNELS) for block in (beyond, within)], dim=2)
    read = read_keys(oracle(outlier_fraction=0.1), keys)
    # Of the first block, those of the largest error are exact and the others read as the end of the range.
    found = read[:, :, :64].flatten()
    torch.testing.assert_close(found[places[50:]], beyond[places[50:]], atol=1e-2, rtol=0)
    torch.testing.assert_close(found[places[:50]], torch.full((50,), 6.0), atol=1e-4, rtol=0)
    # In the next, nothing lies beyond the range, and what its code lacks most is exact all the same.
    found = read[:, :, 64:].flatten()
    torch.testing.assert_close(found[places[50:]], within[places[50:]], atol=1e-4, rtol=0)
    assert (found - 1).abs().less(1e-4).sum() == found.numel() - limit


def test_pads_and_sinks_are_no_outliers() -> None:
    keys = torch.full((2, HEADS, 64, CHANNELS), 1.0)
    keys[:, :, :8] = 50.0
    read = read_keys(oracle(sink_length=2, outlier_fraction=0.5), keys, pads=[3, 0])
    clamped = [(read[row, 0, :, 0] - 6).abs() < 1e-3 for row in range(2)]
    assert [row.nonzero().flatten().tolist() for row in clamped] == [[0, 1, 2, 3, 4], [0, 1]]
    torch.testing.assert_close(read[:, :, 5:8], keys[:, :, 5:8], atol=0.05, rtol=0)


def test_a_value_by_hand() -> None:
    # 32 numbers 0 .. 31 of one token over both heads; one outlier a side, so the range is [1, 30].
    values = torch.arange(32.0).view(1, HEADS, 1, CHANNELS)
    read = oracle().read_values(values, 1).flatten()
    levels = LEVELS * 14.5 + 15.5  # 1, 11.875, 22.75, 30
    nearest = levels[(values.flatten()[:, None] - levels).abs().argmin(-1)]
    assert read[0] == 0 and read[31] == 31
    assert torch.equal(read[1:31], nearest[1:31])
    without = oracle(outlier_fraction=0.0).read_values(values, 1).flatten()
    assert without[0] == 0 and without[31] == 31 and without[1] == 0  # the range is [0, 31]


def test_outliers_come_from_both_ends() -> None:
    assert [outliers_per_side(*case) for case in ((0.0, 4096), (0.01, 4096), (0.01, 32))] == [0, 20, 1]


def test_sinks_and_the_newest_tokens_are_exact() -> None:
    keys, values = states(201, 2), states(201, 2)
    quantizer = oracle(
        sink_length=3,
        residual_length=70,
        key_lower=keys.amin((0, 2)) * 0.5,
        key_upper=keys.amax((0, 2)) * 0.5,
    )
    layer = OracleLayer(quantizer, padding=[0, 5])
    layer.update(keys[:, :, :200], values[:, :, :200])
    for exact, read in zip(
        (keys, values), layer.update(keys[:, :, 200:], values[:, :, 200:]), strict=True
    ):  # 200 - 70 = 130 may be packed, in whole blocks 128
        same = (read == exact).all(dim=(1, 3))
        assert same[0].tolist() == [slot < 3 or slot >= 128 for slot in range(201)]
        assert same[1, 5:].tolist() == [slot < 8 or slot >= 128 for slot in range(5, 201)]


def test_splits_do_not_matter() -> None:
    config = LlamaConfig(num_hidden_layers=2)
    tensors: dict[str, torch.Tensor] = {}
    for index in range(2):
        tensors |= {
            f"layers.{index}.key_lower": torch.full((HEADS, CHANNELS), -1.5),
            f"layers.{index}.key_upper": torch.full((HEADS, CHANNELS), 1.5),
            f"layers.{index}.key_codebook_2": LEVELS,
            f"layers.{index}.value_codebook_2": LEVELS,
        }
    keys, values = states(301, 2), states(301, 2)
    reads = []
    for sizes in ([300, 1], [7, 93, 100, 100, 1], [64] * 4 + [1] * 45):
        cache = kvquant_oracle_cache(config, tensors, INV_FREQ, nbits=2, residual_length=16)
        for chunk_keys, chunk_values in zip(keys.split(sizes, 2), values.split(sizes, 2), strict=True):
            read = cache.update(chunk_keys, chunk_values, 1)
        reads.append(read)
    for read in reads[1:]:
        assert torch.equal(read[0], reads[0][0]) and torch.equal(read[1], reads[0][1])
    assert not torch.equal(reads[0][0], keys)
