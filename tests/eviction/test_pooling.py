"""Pooling of what is evicted: equal to loops over tokens, for rows with and without padding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvcache_plugins.eviction.pooling.convolution import pool_evicted, pooled_last
from kvcache_plugins.eviction.pooling.merging import left_out, merge_evicted
from kvcache_plugins.eviction.pooling.weights import LayerWeights
from kvcache_plugins.eviction.selection import choose_slots

LARGEST = torch.finfo(torch.float32).max
B, H, D, DV = 3, 2, 6, 4


def _held(length: int, pads: list[int] | None = None, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and scores; pads hold what is no number."""
    generator = torch.Generator().manual_seed(seed)
    keys, values, scores = (torch.randn(B, H, length, d, generator=generator) for d in (D, DV, 1))
    for row, count in enumerate(pads or []):
        keys[row, :, :count], values[row, :, :count] = torch.nan, torch.inf
    return keys, values, scores[..., 0].contiguous()


def _weights(pooled: int, kernel: int = 5, channels: int = D + DV, gamma: float = 0.3) -> LayerWeights:
    generator = torch.Generator().manual_seed(9)
    weight = torch.randn(pooled, channels, kernel, generator=generator)
    return LayerWeights(weight, torch.randn(pooled, generator=generator), torch.tensor(gamma))


# ---- merging ----


def _merged_by_loops(keys: Tensor, values: Tensor, kept: list[int], first: int) -> Tensor:
    """One row and head, in fp64 and token by token."""
    keys, values = keys.double(), values.double()
    sums = {slot: values[slot].clone() for slot in kept}
    weights = dict.fromkeys(kept, 1.0)
    for lost in range(first, len(keys)):
        if lost in kept:
            continue
        cosines = {
            slot: float(keys[lost] @ keys[slot] / (keys[lost].norm() * keys[slot].norm()))
            for slot in kept
            if slot >= first
        }
        nearest = max(cosines, key=lambda slot: cosines[slot])
        norm, other = float(values[lost].norm()), float(values[nearest].norm())
        weight = max(cosines[nearest], 0.0) * norm / (norm + other)
        sums[nearest] = sums[nearest] + weight * values[lost]
        weights[nearest] += weight
    return torch.stack([sums[slot] / weights[slot] for slot in kept])


@pytest.mark.parametrize("length", [24, 300])  # fewer and more than are compared at once
@pytest.mark.parametrize("pads", [None, [0, 5, 9]])
def test_merging_equals_a_loop(length: int, pads: list[int] | None) -> None:
    keys, values, scores = _held(length, pads)
    given = None if pads is None else torch.tensor(pads)
    kept = choose_slots(scores, 10, pads=given, recent=2)
    merged = merge_evicted(keys, values, kept, given)
    for row in range(B):
        for head in range(H):
            slots = kept[row, head].tolist()
            first = 0 if pads is None else pads[row]
            expected = _merged_by_loops(keys[row, head], values[row, head], slots, first)
            assert torch.allclose(merged[row, head].double(), expected, atol=1e-5)
    assert not torch.allclose(merged, values.gather(2, kept[..., None].expand(-1, -1, -1, DV)))


def test_merging_leaves_alone_what_it_should() -> None:
    keys, values, scores = _held(12, [0, 0, 8])
    pads = torch.tensor([0, 0, 8])
    kept = choose_slots(scores, 6, pads=pads)
    merged = merge_evicted(keys, values, kept, pads)
    # the last row has four real tokens, which all stay, behind two pads
    assert kept[2, 0].tolist()[2:] == [8, 9, 10, 11]
    assert torch.equal(merged[2, :, 2:], values[2, :, 8:])
    # keys that point away add nothing, and neither do values of zero
    opposite = torch.ones(1, 1, 4, D)
    opposite[:, :, 2:] = -1
    ones = torch.ones(1, 1, 4, DV)
    first_two = torch.tensor([[[0, 1]]])
    assert torch.equal(merge_evicted(opposite, ones, first_two), ones[:, :, :2])
    zeros = torch.zeros(1, 1, 4, DV)
    assert torch.equal(merge_evicted(ones.new_ones(1, 1, 4, D), zeros, first_two), zeros[:, :, :2])
    # nothing evicted, nothing changed, in any dtype
    everything = torch.arange(12).expand(B, H, 12)
    half = torch.randn(B, H, 12, DV).to(torch.bfloat16)
    assert torch.equal(merge_evicted(keys.nan_to_num(), half, everything), half)


def test_a_twin_is_averaged_in() -> None:
    keys = torch.eye(4)[[0, 1, 0]][None, None]  # the third token has the key of the first
    values = torch.tensor([[3.0, 0], [5, 5], [0, 3]])[None, None]
    merged = merge_evicted(keys, values, torch.tensor([[[0, 1]]]))
    # of the same norm, so its weight is a half: (v + v' / 2) / 1.5
    assert torch.allclose(merged[0, 0], torch.tensor([[2.0, 1.0], [5.0, 5.0]]))


def test_what_is_left_out() -> None:
    kept = torch.tensor([[[1, 4], [0, 2]]])
    assert left_out(kept, 5).tolist() == [[[0, 2, 3], [1, 3, 4]]]
    assert left_out(kept, 5).shape[2] + kept.shape[2] == 5


# ---- convolution ----


def _pooled_by_loops(
    keys: Tensor, values: Tensor, scores: Tensor, count: int, weights: LayerWeights, sinks: int, recent: int
) -> tuple[list[int | None], Tensor]:
    """One row and head without padding, fp64: the slot of each unit, None if pooled, and keys with values."""
    units = torch.cat([keys, values], dim=1).double()
    length, pooled = len(units), weights.pooled_length
    protected = {*range(sinks), *range(length - recent, length)}
    ranked = sorted(range(length), key=lambda slot: (slot not in protected, -float(scores[slot])))
    heavy = sorted(ranked[: count - pooled])
    rest = [slot for slot in range(length) if slot not in heavy]
    best = sorted(sorted(rest, key=lambda slot: -float(scores[slot]))[:pooled])
    weight, bias, gamma = weights.weight.double(), weights.bias.double(), float(weights.gamma)
    kernel = weight.shape[2]
    rows = []
    for out in range(pooled):
        logits = []
        for place in range(len(rest)):
            total = float(bias[out])
            for tap in range(kernel):
                at = place + tap - kernel // 2
                if 0 <= at < len(rest):
                    total += float(weight[out, :, tap] @ units[rest[at]])
            logits.append(max(total, 0.0))
        shares = [math.exp(x - max(logits)) for x in logits]
        mixture = gamma * sum(s / sum(shares) * units[slot] for s, slot in zip(shares, rest, strict=True))
        rows.append((1 - gamma) * units[best[out]] + mixture)
    slots: list[int | None] = [*heavy[:sinks], *[None] * pooled, *heavy[sinks:]]
    return slots, torch.stack([*units[heavy[:sinks]], *rows, *units[heavy[sinks:]]])


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("kernel", [1, 5, 21])
def test_convolution_equals_a_loop(kernel: int, sinks: int) -> None:
    keys, values, scores = _held(30)
    weights = _weights(3, kernel)
    found = pool_evicted(keys, values, scores, 14, weights, sink_length=sinks, recent=4)
    for row in range(B):
        for head in range(H):
            slots, units = _pooled_by_loops(
                keys[row, head], values[row, head], scores[row, head], 14, weights, sinks, 4
            )
            for place, slot in enumerate(slots):
                assert bool(found.is_pooled[row, head, place]) == (slot is None)
                if slot is not None:
                    assert found.index[row, head, place] == slot
                    assert torch.equal(found.keys[row, head, place], keys[row, head, slot])
                    assert torch.equal(found.values[row, head, place], values[row, head, slot])
            both = torch.cat([found.keys, found.values], dim=3)[row, head].double()
            assert torch.allclose(both, units, atol=1e-5)


@pytest.mark.parametrize("count", [14, 20])
def test_rows_with_padding_are_pooled_like_the_rows_alone(count: int) -> None:
    pads = [0, 9, 16]  # of 30: the last row has 14 real tokens and fits
    keys, values, scores = _held(30, pads)
    weights = _weights(4, 21)
    found = pool_evicted(keys, values, scores, count, weights, pads=torch.tensor(pads), recent=3)
    for row, first in enumerate(pads):
        alone = [t[row : row + 1, :, first:] for t in (keys, values, scores)]
        if 30 - first <= count:
            fillers = count - (30 - first)
            assert not found.is_pooled[row].any()
            assert torch.equal(found.keys[row, :, fillers:], alone[0][0])
            assert torch.equal(found.values[row, :, fillers:], alone[1][0])
            assert bool((found.index[row, :, :fillers] < first).all()), "pads at the left edge"
            continue
        expected = pool_evicted(*alone, count, weights, recent=3)
        assert torch.equal(found.index[row], expected.index[0] + first)
        assert torch.equal(found.is_pooled[row], expected.is_pooled[0])
        assert torch.allclose(found.keys[row], expected.keys[0], atol=1e-5)
        assert torch.allclose(found.values[row], expected.values[0], atol=1e-5)


def test_gamma_zero_keeps_the_best_of_the_rest() -> None:
    keys, values, scores = _held(20)
    found = pool_evicted(keys, values, scores, 10, _weights(3, gamma=0.0))
    best = choose_slots(scores, 10)
    assert torch.equal(found.index.sort(dim=2).values, best)
    assert torch.equal(found.keys, keys.gather(2, found.index[..., None].expand(-1, -1, -1, D)))
    assert found.is_pooled[..., :3].all() and not found.is_pooled[..., 3:].any()


def test_pooled_units_go_first_when_pooled_again() -> None:
    keys, values, scores = _held(20)
    positions = torch.arange(20, dtype=torch.int32).expand(B, H, 20).clone()
    positions[..., :3] = -1
    ranks = pooled_last(scores, positions)
    assert bool((ranks[..., :3] == -LARGEST).all()) and torch.equal(ranks[..., 3:], scores[..., 3:])
    found = pool_evicted(keys, values, ranks, 12, _weights(3))
    kept = found.index.masked_fill(found.is_pooled, 99)
    assert not bool((kept < 3).any())
    # pads go before them still
    pads = torch.tensor([4, 4, 4])
    shifted = pooled_last(scores, positions.roll(4, dims=2))
    whole = choose_slots(shifted, 16, pads=pads)
    assert torch.equal(whole, torch.arange(4, 20).expand(B, H, 16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_arithmetic_is_fp32(dtype: torch.dtype) -> None:
    keys, values, scores = _held(40)
    keys, values = keys.to(dtype), values.to(dtype)
    exact = pool_evicted(keys.float(), values.float(), scores, 16, _weights(4))
    found = pool_evicted(keys, values, scores, 16, _weights(4))
    assert found.keys.dtype == found.values.dtype == dtype
    assert torch.equal(found.keys, exact.keys.to(dtype)) and torch.equal(found.values, exact.values.to(dtype))
    kept = choose_slots(scores, 16)
    merged = merge_evicted(keys, values, kept)
    assert torch.equal(merged, merge_evicted(keys.float(), values.float(), kept).to(dtype))


def test_long_sequences_and_many_units() -> None:
    keys, values, scores = (torch.randn(1, 2, 1200, d) for d in (D, DV, 1))
    found = pool_evicted(keys, values, scores[..., 0], 600, _weights(75, 21), recent=50)
    assert found.keys.shape == (1, 2, 600, D) and bool(found.keys.isfinite().all())
    assert int(found.is_pooled.sum()) == 2 * 75
