"""Left padding and sinks: which tokens of a row count, against row-by-row arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcache_plugins.layers.padding import Padding, left_padding

PADS = st.lists(st.integers(0, 20), min_size=1, max_size=4)


def padding(pads: list[int] | None, sink_length: int = 0) -> Padding:
    return Padding(sink_length, None if pads is None else torch.tensor(pads))


def states(rows: int, count: int) -> Tensor:
    return torch.randn(rows, 2, count, 3)


def test_without_padding_everything_counts() -> None:
    for made in (padding(None), padding([0, 0])):
        assert (made.longest, made.first_plain_slot, made.lengths, len(made)) == (0, 0, None, 0)
        assert made.plain_mask(0, states(2, 5)) is None
    assert padding(None, 3).plain_mask(0, states(2, 5)).tolist() == [[False] * 3 + [True] * 2] * 2


@given(pads=PADS, sink_length=st.integers(0, 5), start=st.integers(0, 30), count=st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_plain_tokens_are_neither_pads_nor_sinks(
    pads: list[int], sink_length: int, start: int, count: int
) -> None:
    made = padding(pads, sink_length)
    expected = [[slot >= pad + sink_length for slot in range(start, start + count)] for pad in pads]
    mask = made.plain_mask(start, states(len(pads), count))
    if mask is None:
        assert all(map(all, expected))
    else:
        assert mask.tolist() == expected
    assert made.first_plain_slot == max(pads) + sink_length


@given(pads=PADS, sinks=st.integers(0, 3), wanted=st.integers(1, 9), count=st.integers(1, 30))
@settings(max_examples=100, deadline=None)
def test_first_tokens_behind_the_sinks(pads: list[int], sinks: int, wanted: int, count: int) -> None:
    mask = padding(pads, sinks).first_tokens(wanted, states(len(pads), count))
    expected = [[pad + sinks <= slot < pad + sinks + wanted for slot in range(count)] for pad in pads]
    assert mask.tolist() == expected


@given(
    pads=PADS,
    sink_length=st.integers(1, 4),
    cuts=st.lists(st.integers(1, 29), max_size=5, unique=True).map(sorted),
)
@settings(max_examples=100, deadline=None)
def test_sinks_are_collected_and_put_back(pads: list[int], sink_length: int, cuts: list[int]) -> None:
    made, exact = padding(pads, sink_length), states(len(pads), 30)
    sinks = torch.zeros(len(pads), 2, sink_length, 3)
    spans = list(zip([0, *cuts], [*cuts, 30], strict=True))
    for start, stop in spans:
        made.read_sinks(exact[:, :, start:stop], start, sinks)
    for row, pad in enumerate(pads):
        assert torch.equal(sinks[row], exact[row, :, pad : pad + sink_length])
    for start, stop in spans:
        part = torch.zeros_like(exact[:, :, start:stop])
        made.write_sinks(part, start, sinks)
        for row, pad in enumerate(pads):
            for slot in range(start, stop):
                is_sink = pad <= slot < pad + sink_length
                expected = exact[row, :, slot] if is_sink else torch.zeros(2, 3)
                assert torch.equal(part[row, :, slot - start], expected)


def test_sinks_take_the_dtype_of_where_they_go() -> None:
    made, exact = padding([1], 2), states(1, 6)
    sinks = torch.zeros(1, 2, 2, 3, dtype=torch.bfloat16)
    made.read_sinks(exact, 0, sinks)
    made.write_sinks(exact, 0, sinks)
    assert torch.equal(exact[:, :, 1:3], sinks.float())


def test_rows_follow_the_batch() -> None:
    made = padding([3, 0, 7])
    made.index(torch.tensor([2, 2, 1, 0]))
    assert made.lengths is not None
    assert made.lengths.tolist() == [7, 7, 0, 3] and made.longest == 7 and len(made) == 4
    made.index(torch.tensor([3]))
    assert made.longest == 3
    made.set(None)
    assert made.lengths is None and made.longest == 0


def test_rows_without_padding_left_mean_no_padding() -> None:
    made = padding([3, 0, 7])
    made.index(torch.tensor([1, 1]))
    assert made.lengths is None and made.first_plain_slot == 0
    made.index(torch.tensor([0]))  # and stay so
    assert made.lengths is None


@pytest.mark.parametrize("pads", [[2, 0], None])
def test_nothing_is_done_on_the_meta_device(pads: list[int] | None) -> None:
    made = padding(pads, 2)
    made.read_sinks(torch.empty(2, 2, 5, 3, device="meta"), 0, torch.zeros(2, 2, 2, 3, device="meta"))


def test_masks_of_rows_tell_of_their_pads() -> None:
    pads, columns = left_padding(torch.tensor([[0, 0, 1, 0], [1, 0, 1, 1]]))
    assert pads is not None and (pads.tolist(), columns) == ([2, 0], 4)


@pytest.mark.parametrize("mask", [None, {"full_attention": None}, torch.ones(2, 1, 3, 3)], ids=repr)
def test_other_masks_do_not(mask: object) -> None:
    assert left_padding(mask) == (None, None)


@pytest.mark.parametrize(
    ("mask", "given"),
    [
        ([[0, 1]], "a list"),
        (np.ones((1, 2)), "a ndarray"),
        (torch.ones(3), r"one of shape \(3,\)"),
        (torch.tensor(1), r"one of shape \(\)"),
    ],
    ids=str,
)
def test_what_looks_like_a_mask_of_rows_is_refused(mask: object, given: str) -> None:
    with pytest.raises(ValueError, match=rf"shape \(batch, tokens\), got {given}\."):
        left_padding(mask)
