"""Sharing a budget among heads: by brute force, and by what must hold."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from kvcache_plugins.eviction.shares import grouped_shares, share_out


def _by_hand(rows: list[list[list[float]]], total: int, floor: int) -> list[float]:
    """Mean shares over the rows `[row][head][token]`; -inf is a pad, inf is protected."""
    counts = [0] * len(rows[0])
    for row in rows:
        ordered = [sorted((rank for rank in head if rank > -torch.inf), reverse=True) for head in row]
        own = [head[:floor] for head in ordered]
        rest = sorted(((rank, h) for h, head in enumerate(ordered) for rank in head[floor:]), reverse=True)
        for _, h in rest[: total - sum(map(len, own))]:
            own[h].append(0.0)
        for h, kept in enumerate(own):
            counts[h] += len(kept)
    return [count * total / sum(counts) for count in counts]


@pytest.mark.parametrize("seed", range(20))
def test_shares(seed: int) -> None:
    generator = random.Random(seed)
    heads, batch, floor = generator.randint(1, 6), generator.randint(1, 3), generator.randint(0, 5)
    budget = generator.randint(max(1, floor), 12)
    lengths = [generator.randint(budget, 30) for _ in range(heads)]
    rows = [[[generator.gauss(h, 2) for _ in range(n)] for h, n in enumerate(lengths)] for _ in range(batch)]
    for row in rows:
        pads = generator.randint(0, 3)
        for head in row:
            head[:pads] = [-torch.inf] * pads
            head[-1] = torch.inf
    ranks = [torch.tensor([row[h] for row in rows], dtype=torch.float64) for h in range(heads)]
    got = share_out(ranks, budget * heads, floor)
    assert got == pytest.approx(_by_hand(rows, budget * heads, floor))
    assert sum(got) == pytest.approx(budget * heads)


def test_of_equal_ranks_the_newer_count_whatever_their_head() -> None:
    ranks = [torch.zeros(1, 100), torch.zeros(1, 60), torch.full((1, 80), -1.0)]
    assert share_out(ranks, 42, floor=2) == [20.0, 20.0, 2.0]


def _squares(shares: list[float], cuts: tuple[int, ...]) -> float:
    total = 0.0
    for start, stop in itertools.pairwise([0, *cuts, len(shares)]):
        mean = sum(shares[start:stop]) / (stop - start)
        total += sum((share - mean) ** 2 for share in shares[start:stop])
    return total


@pytest.mark.parametrize("seed", range(20))
def test_groups_are_the_nearest(seed: int) -> None:
    generator = random.Random(seed)
    shares = [generator.uniform(8, 60) for _ in range(generator.randint(1, 9))]
    groups = grouped_shares(shares, [1000] * len(shares), floor=8)
    assert sorted(head for heads, _ in groups for head in heads) == list(range(len(shares)))
    assert [share for _, share in groups] == sorted((share for _, share in groups), reverse=True)
    for heads, share in groups:
        assert share == int(sum(shares[head] for head in heads) / len(heads))
    descending = sorted(shares, reverse=True)
    got = tuple(itertools.accumulate(len(heads) for heads, _ in groups))[:-1]
    least = [
        min(_squares(descending, cuts) for cuts in itertools.combinations(range(1, len(shares)), count - 1))
        for count in range(1, min(4, len(shares)) + 1)
    ]
    assert _squares(descending, got) == pytest.approx(least[len(groups) - 1])
    assert len(groups) == min(4, len(shares)) or least[len(groups) - 1] - least[len(groups)] < 1.0
    assert all(less - more >= 1.0 for less, more in itertools.pairwise(least[: len(groups)]))


def test_groups_keep_what_there_is_and_what_is_protected() -> None:
    assert grouped_shares([30.0, 30.0, 2.0], [40, 25, 40], floor=6) == [([0, 1], 25), ([2], 6)]
    assert grouped_shares([20.0] * 8, [30] * 8, floor=4) == [(list(range(8)), 20)]
    assert len(grouped_shares([float(10 * n) for n in range(20)], [500] * 20, floor=0)) == 4
