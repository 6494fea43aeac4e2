"""LagKV: when and against what a token is judged, and what of it an eviction leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvcache_plugins
from kvcache_plugins.backends import lagkv
from kvcache_plugins.eviction.layer import EvictingLayer
from kvcache_plugins.layers.stream import Stream
from kvcache_plugins.layers.view import StreamView
from tests.eviction.feeding import bound_cache, mask_of, model_of
from tests.reference.lagkv import LagPartitions

HEADS, DIM, SINKS, LAG = 2, 16, 2, 10
COUNTS = [33, 41, 64, 7, 60, 50, 45, *[1] * 140]
"""The first seven calls are the prompt of 300 tokens; generated ones make room twice."""
STORAGES: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "int8": {"backend": "int8"},
    "k8v4-window": {"backend": "int4", "key_bits": 8, "residual_length": 5},
}


def _states(total: int = sum(COUNTS), batch: int = 1, seed: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(2, batch, HEADS, 1, DIM, generator=generator) * 4
    keys, values = torch.randn(2, batch, HEADS, total, DIM, generator=generator) * scales
    return keys, values


def _layer(prompt: int | None, mask: Tensor | None = None, **options: Any) -> EvictingLayer:
    config = {"backend": "lagkv", "sink_length": SINKS, "lag_size": LAG, "budget": 60, **options}
    return bound_cache(model_of(), config, prompt, mask).evicting_layers[1]


def _feed(layer: Any, states: tuple[Tensor, Tensor], counts: list[int]) -> EvictingLayer:
    keys, values = states
    for count in counts:
        seen = layer.cumulative_length
        layer.update(keys[:, :, seen : seen + count], values[:, :, seen : seen + count])
    return layer  # type: ignore[no-any-return]


@pytest.mark.parametrize("budget", [60, 24, 19], ids=["ample", "two-partitions", "fewer"])
@pytest.mark.parametrize("pads", [None, [0, 47, 150]], ids=["plain", "padded"])
@pytest.mark.parametrize("storage", STORAGES)
def test_scores(storage: str, pads: list[int] | None, budget: int) -> None:
    stored, first = STORAGES[storage], pads or [0]
    mask = None if pads is None else mask_of(300, pads)
    options = {"storage": stored, "budget": budget, "local_length": 5, "stabilizer_length": 5}
    layer = _layer(300, mask, evict_at_decode=True, **options)
    states = _states(batch=len(first))
    for row, start in enumerate(first):  # what is in no partition must not be seen
        states[0][row, :, : start + SINKS] *= 50
    kept = list(states)
    if stored is not None:  # what is stored of every token, which nothing changes later
        exact = {"residual_length": 0} if storage == "k8v4-window" else {}
        everything = kvcache_plugins.build_cache(model_of(), {**stored, **exact, "sink_length": SINKS})
        other = everything.bind(model_of(), mask).packed_layers[1]
        other.update(*states)
        kept = [s.decode(0, s.packed_length) for s in other.streams]
    heads = [(row, head) for row in range(len(first)) for head in range(HEADS)]
    expected = {(row, head): LagPartitions(LAG, first[row] + SINKS) for row, head in heads}
    judged, lost = 0, 0
    for count in COUNTS:
        seen = layer.cumulative_length
        before = {place: layer.ledger.positions[place].tolist() if seen else [] for place in expected}
        _feed(layer, states, [count])
        new, window = range(seen, seen + count), layer.stored_keys.tail.length
        evicted = layer.held_length < len(before[0, 0]) + count
        for place, partitions in expected.items():
            both = [_read(kept[i][place], states[i][place], seen + count - window) for i in (0, 1)]
            held = [p for p in [*before[place], *new] if p >= first[place[0]]]
            already = set(partitions.places)
            if evicted:
                partitions.judge(held, seen + count, both)
            positions, scores = (t[place].tolist() for t in (layer.ledger.positions, layer.ledger.scores))
            for position, score in zip(positions, scores, strict=True):
                better = partitions.places.get(position, -1)
                assert score == pytest.approx((LAG - 1 - better) / LAG), (place, position)
            fresh = [p for p in partitions.places if p not in already]
            judged += len(fresh)
            lost += len({(p - first[place[0]] - SINKS) // LAG for p in fresh}) * LAG - len(fresh)
    assert judged > 100 * len(heads)
    assert (lost > 0) == (budget < SINKS + 2 * LAG - 1), "what goes before it can be judged"


def _read(packed: Tensor, exact: Tensor, first_exact: int) -> Any:
    return lambda positions: torch.stack([(exact if p >= first_exact else packed)[p] for p in positions])


def test_a_prompt_in_chunks_is_the_prompt_at_once() -> None:
    # While as many tokens are unjudged after every chunk, what goes early would have gone in the end.
    states, total = _states(), SINKS + 32 * LAG
    whole = _feed(_layer(total), states, [total])
    for counts in ([SINKS + 8 * LAG] * 1 + [LAG] * 24, [SINKS + 12 * LAG, 5 * LAG, 12 * LAG, 3 * LAG]):
        layer = _feed(_layer(total), states, counts)
        assert torch.equal(layer.ledger.positions, whole.ledger.positions)
        assert torch.equal(layer.ledger.scores, whole.ledger.scores)


def test_every_partition_loses_the_same_share() -> None:
    total = SINKS + 21 * LAG + 4
    layer = _feed(_layer(total, budget=100), _states(), [total])
    # The last partition, which has no other after it, and the 4 tokens of none are kept: 84 are left of 20.
    for positions in layer.ledger.positions.flatten(0, 1).tolist():
        held = [(p - SINKS) // LAG for p in positions if p >= SINKS]
        assert [held.count(partition) for partition in range(22)] == [4] * 16 + [5] * 4 + [10, 4]
        assert positions[:SINKS] == [0, 1]


@pytest.mark.parametrize(
    ("budget", "lag"),
    [(5, 2), (23, 2), (24, 3), (192, 24), (1023, 127), (1024, 128), (10**6, 128)],
)
def test_usual_partitions_are_at_most_an_eighth_of_the_budget(budget: int, lag: int) -> None:
    assert lagkv.LagKVConfig(budget=budget).lag_at(budget) == lag
    assert lagkv.LagKVConfig(budget=budget, lag_size=129).lag_at(budget) == 129, "what is given is taken"


def test_a_longer_turn_has_longer_partitions() -> None:
    # Of 120 and of 300 tokens a fraction is kept: 48 and 120. What was judged by sixes stays judged.
    states = _states(total=300)
    layer = _layer(120, budget=0.4, lag_size=None, local_length=0, stabilizer_length=0)
    expected = [LagPartitions(6, SINKS) for _ in range(HEADS)]
    scores: list[dict[int, float]] = [{} for _ in range(HEADS)]
    for lag, count in ((6, 120), (15, 100), (15, 80)):
        if count == 100:
            layer.set_prompt_length(300)
        before = layer.ledger.positions[0].tolist() if layer.cumulative_length else [[]] * HEADS
        seen = layer.cumulative_length + count
        _feed(layer, states, [count])
        for head, partitions in enumerate(expected):
            partitions.lag = lag
            held = [*before[head], *range(seen - count, seen)]
            partitions.judge(held, seen, [t[0, head].__getitem__ for t in states])
            fresh = partitions.places.keys() - scores[head].keys()
            assert fresh
            scores[head] |= {p: (lag - 1 - partitions.places[p]) / lag for p in fresh}
            held = layer.ledger.positions[0, head].tolist()
            found = layer.ledger.scores[0, head].tolist()
            assert found == pytest.approx([scores[head].get(p, 1.0) for p in held])
    assert layer.held_length == 120


def test_of_less_than_two_partitions_the_newest_are_kept() -> None:
    total = SINKS + 2 * LAG - 1
    layer = _feed(_layer(total, budget=14, local_length=0), _states(), [total])
    assert layer.ledger.positions[0].tolist() == [[*range(SINKS), *range(total - 12, total)]] * HEADS
    assert bool((layer.ledger.scores == 1).all())
    # one token more, and the first partition is judged
    layer = _feed(_layer(total + 1, budget=14, local_length=0), _states(), [total + 1])
    assert layer.ledger.positions[0, :, 4:].tolist() == [[*range(SINKS + LAG, total + 1)]] * HEADS
    assert layer.ledger.scores[0, :, 2:4].sort().values.tolist() == [pytest.approx([0.8, 0.9])] * HEADS


def test_channels_that_are_constant_in_the_next_partition_do_not_count() -> None:
    keys, values = _states()
    constant = slice(SINKS + LAG, SINKS + 2 * LAG)
    keys[:, :, constant, 3], values[:, :, constant, 5:8] = 7.0, 0.0
    options = {"budget": 4, "local_length": 1}
    found = []
    for factor in (1.0, 100.0, 0.0):
        own = slice(SINKS, SINKS + LAG)
        changed = keys.clone(), values.clone()
        changed[0][:, :, own, 3] *= factor
        changed[1][:, :, own, 5:8] *= factor
        layer = _layer(None, **options)
        scores = _judged(layer, changed, SINKS + 2 * LAG)
        assert scores[..., own].sort().values[0, 0].tolist() == pytest.approx([i / LAG for i in range(LAG)])
        found.append(scores)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_states_of_zeros() -> None:
    # Nothing varies: of equal tokens the newer is the better.
    zeros = torch.zeros(1, HEADS, 100, DIM)
    layer = _layer(None)
    scores = _judged(layer, (zeros, zeros), SINKS + 3 * LAG)
    ranks = [i / LAG for i in range(LAG)]
    assert scores[0, 0].tolist() == pytest.approx([1.0] * SINKS + ranks * 2 + [1.0] * LAG)


def _judged(layer: Any, states: tuple[Tensor, Tensor], total: int) -> Tensor:
    """Scores of `total` tokens as they are when some must go, before they go."""
    layer.evicts = False
    _feed(layer, states, [total])
    layer.ranks()
    return layer.ledger.scores.clone()  # type: ignore[no-any-return]


def test_reading_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    total, batch, pads = 1000, 3, [0, 47, 913]
    states, mask = _states(total, batch), mask_of(total, pads)
    whole = _feed(_layer(total, mask), states, [total])
    lengths: list[int] = []
    compared: list[int] = []
    read, deviations = StreamView.read, lagkv._deviations

    def watched(view: StreamView, start: int, stop: int) -> Tensor:
        lengths.append(stop - start)
        return read(view, start, stop)

    def watched_partitions(partitions: Tensor) -> Tensor:
        compared.append(partitions.shape[2] * LAG)
        return deviations(partitions)

    monkeypatch.setattr(StreamView, "read", watched)
    monkeypatch.setattr(lagkv, "_deviations", watched_partitions)
    for slab in (64, 20, 1):
        monkeypatch.setattr(Stream, "slab_tokens", slab)
        lengths.clear()
        tiled = _feed(_layer(total, mask), states, [total])
        assert torch.equal(tiled.ledger.scores, whole.ledger.scores)
        assert torch.equal(tiled.ledger.positions, whole.ledger.positions)
        # the partitions, the one after them, and what rows are shifted against each other
        assert max(lengths) <= max(slab // LAG, 1) * LAG + 2 * LAG
    # What was judged before is not read again: of a chunk, its own tokens and the newest before it.
    lengths.clear()
    monkeypatch.setattr(Stream, "slab_tokens", 10**6)
    layer = _feed(_layer(total, mask), states, [500])
    assert 2 * 500 - 4 * LAG <= sum(lengths) <= 2 * 500
    lengths.clear()
    _feed(layer, states, [30])
    assert 0 < sum(lengths) <= 2 * (30 + 3 * LAG)
    assert max(compared) <= 500 + 2 * LAG


def test_what_is_judged_stays_judged() -> None:
    # Tokens that a partition was compared with are taken back, and others come in their place.
    total, first = SINKS + 9 * LAG + 3, SINKS + 8 * LAG
    states, other = _states(), _states(seed=4)
    layer = _feed(_layer(total), states, [total])
    before = layer.ledger.scores.clone()
    assert before[..., -LAG - 3 :].tolist() == [[[1.0] * (LAG + 3)] * HEADS]
    layer.crop(-5)
    assert torch.equal(layer.ledger.scores, before[..., :-5])
    mixed = [
        torch.cat([a[:, :, : total - 5], b[:, :, total - 5 :]], 2) for a, b in zip(states, other, strict=True)
    ]
    layer.evicts = False
    _feed(layer, (mixed[0], mixed[1]), [2 * LAG])
    layer.ranks()
    scores, positions = layer.ledger.scores[0], layer.ledger.positions[0]
    for head in range(HEADS):
        assert torch.equal(scores[head, : 60 - LAG - 3], before[0, head, : 60 - LAG - 3])
        fresh = LagPartitions(LAG, SINKS)
        fresh.judge([*range(first, first + LAG)], total + 15, [t[0, head].__getitem__ for t in mixed])
        expected = [(LAG - 1 - fresh.places[p]) / LAG for p in range(first, first + LAG)]
        judged = (positions[head] >= first) & (positions[head] < first + LAG)
        assert scores[head, judged].tolist() == pytest.approx(expected)
