"""Properties of the choice of slots, over random scores, padding and protection."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kvcache_plugins.eviction.selection import choose_slots

NUMBERS = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0]) | st.floats(
    -(2.0**90), 2.0**90, width=32
)


@st.composite
def _requests(draw: st.DrawFn) -> dict[str, Any]:
    rows, heads, length = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(2, 24))
    count = draw(st.integers(1, length))
    sinks = draw(st.integers(0, count))
    recent = draw(st.integers(0, count - sinks))
    exact = draw(st.integers(0, count - sinks))
    numbers = draw(st.lists(NUMBERS, min_size=rows * heads * length, max_size=rows * heads * length))
    pads = draw(st.none() | st.lists(st.integers(0, length), min_size=rows, max_size=rows))
    return {
        "scores": torch.tensor(numbers, dtype=torch.float32).view(rows, heads, length),
        "count": count,
        "pads": None if pads is None else torch.tensor(pads),
        "sink_length": sinks,
        "recent": recent,
        "exact": exact,
    }


def _sorts(number: float) -> float:
    """The number as it counts: one that is none is the lowest."""
    largest = torch.finfo(torch.float32).max
    return -largest if math.isnan(number) else max(-largest, min(largest, number))


@settings(max_examples=400, deadline=None)
@given(_requests())
def test_every_choice(request: dict[str, Any]) -> None:
    scores, count, pads = request["scores"], request["count"], request["pads"]
    before = scores.clone()
    chosen = choose_slots(**request)
    assert torch.equal(scores.nan_to_num(), before.nan_to_num())  # scores are not written to
    rows, heads, length = scores.shape
    assert chosen.shape == (rows, heads, count)
    assert chosen.dtype == torch.int64
    for row in range(rows):
        first = 0 if pads is None else int(pads[row])
        for head in range(heads):
            kept = chosen[row, head].tolist()
            assert kept == sorted(set(kept))
            assert kept[0] >= 0 and kept[-1] < length
            real = set(range(first, length))
            exact = set(range(length - request["exact"], length))
            assert exact <= set(kept)
            # Pads go first: one stays only if all real tokens do, or if its storage is shared.
            if any(slot < first for slot in set(kept) - exact):
                assert real <= set(kept)
            stays = {slot for slot in real if slot < first + request["sink_length"]}
            stays |= {slot for slot in real if slot >= length - request["recent"]}
            # Rows whose pads reach into the exact window hold all their real tokens anyway.
            assert stays <= set(kept)
            # Of equal ones the newer stay.
            free = [(_sorts(float(scores[row, head, s])), s) for s in set(kept) & real - stays - exact]
            gone = [(_sorts(float(scores[row, head, s])), s) for s in real - set(kept)]
            if free and gone:
                assert min(free) > max(gone)


def test_nothing_to_choose() -> None:
    scores = torch.randn(2, 2, 7)
    assert choose_slots(scores, 7).tolist() == torch.arange(7).expand(2, 2, 7).tolist()


def test_a_known_choice() -> None:
    # A pad, a sink, a number that is none, the best of three, and the newest.
    scores = torch.tensor([[[9.0, 0.0, math.nan, 3.0, 5.0, 4.0, -9.0]]])
    chosen = choose_slots(scores, 4, pads=torch.tensor([1]), sink_length=1, recent=1)
    assert chosen.tolist() == [[[1, 4, 5, 6]]]


@pytest.mark.parametrize("pads", [5, 64, 256, 1000])
def test_a_padded_row_keeps_of_equal_scores_what_it_would_alone(pads: int) -> None:
    generator = torch.Generator().manual_seed(pads)
    scores = torch.randint(8, (2, 2, 700 + pads), generator=generator).float()
    alone = choose_slots(scores[1:, :, pads:], 192, sink_length=2, recent=32)
    padded = choose_slots(scores, 192, pads=torch.tensor([0, pads]), sink_length=2, recent=32)
    assert torch.equal(padded[1] - pads, alone[0])
