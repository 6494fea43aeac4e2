"""Masks of many queries that are one row for all of them, against a comparison of every number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvcache_plugins.attention import row_masks
from kvcache_plugins.attention.row_masks import RowMask, row_mask

LEAST = torch.finfo(torch.float32).min


def visible(query_length: int, length: int, window: int | None = None) -> Tensor:
    slots, own = torch.arange(length), torch.arange(length - query_length, length)[:, None]
    shown = slots <= own
    return (shown if window is None else shown & (slots > own - window))[None, None].clone()


def compared(mask: Tensor, window: int | None) -> RowMask | None:
    """What a mask is by its definition: every number of it, for every kind."""
    query_length, length = mask.shape[2:]
    row = mask.any(2, keepdim=True)
    if torch.equal(mask, row.expand_as(mask)):
        return RowMask(row, False)
    if torch.equal(mask, row & visible(query_length, length)):
        return RowMask(row, True)
    if window is not None and torch.equal(mask, row & visible(query_length, length, window)):
        return RowMask(row, True, window)
    return None


def as_numbers(mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


@pytest.fixture(params=[1, 40, 1 << 18], autouse=True)
def compared_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One query at a time, some, and all."""
    monkeypatch.setattr(row_masks, "_COMPARED", request.param)


@st.composite
def masks(draw: st.DrawFn) -> tuple[Tensor, int | None]:
    """A mask of some kind with some slots hidden from all queries, of which a number may be another one."""
    length = draw(st.integers(2, 24))
    query_length = draw(st.integers(2, length))
    window = draw(st.none() | st.integers(1, length + 2))
    made = draw(st.sampled_from([None, window, 3]))
    mask = visible(query_length, length, made).repeat(draw(st.integers(1, 2)), 1, 1, 1)
    if draw(st.booleans()):
        mask[:] = True
    rows = torch.tensor(draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    mask[0] &= rows | draw(st.booleans())
    if draw(st.booleans()):
        place = draw(st.integers(0, mask.numel() - 1))
        mask.view(-1)[place] ^= True
    return mask, window


@given(masks())
def test_a_row_is_found_where_there_is_one(drawn: tuple[Tensor, int | None]) -> None:
    mask, window = drawn
    expected, found = compared(mask, window), row_mask(mask, window)
    assert (found is None) == (expected is None)
    if found is None or expected is None:
        return
    # where several kinds are the same, which one is told does not matter: what they say together does
    assert torch.equal(said(found, mask), mask) and torch.equal(said(expected, mask), mask)
    assert not found.window or found.window == window


def said(found: RowMask, mask: Tensor) -> Tensor:
    query_length, length = mask.shape[2:]
    shown = found.row.expand_as(mask)
    return shown & visible(query_length, length, found.window or None) if found.is_causal else shown


@given(masks())
def test_numbers_say_what_booleans_do(drawn: tuple[Tensor, int | None]) -> None:
    mask, window = drawn
    expected, found = row_mask(mask, window), row_mask(as_numbers(mask), window)
    if expected is None or not bool(mask.any(-1).all()):
        assert found is None
        return
    assert found is not None and torch.equal(found.row, expected.row) and found[1:] == expected[1:]


@pytest.mark.parametrize("number", [-1.0, LEAST / 2, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", [(0, 0), (3, 9), (4, 11), (0, 11)])
def test_other_numbers_are_no_row(number: float, place: tuple[int, int]) -> None:
    mask = as_numbers(visible(5, 12))
    assert row_mask(mask) is not None
    mask[0, 0, place[0], place[1]] = number
    assert row_mask(mask) is None


def test_integers_are_added_so_they_are_no_row() -> None:
    assert row_mask(visible(5, 12).long()) is None


@pytest.mark.parametrize(
    "expand",
    [
        lambda mask: mask.expand(3, 1, -1, -1),
        lambda mask: mask.expand(3, 4, -1, -1),
        lambda mask: mask[:, :, :1].expand(2, 4, 5, -1),
    ],
    ids=["rows", "heads", "queries"],
)
def test_what_was_expanded_is_looked_at_once(expand: Callable[[Tensor], Tensor]) -> None:
    mask = expand(visible(5, 12))
    found = row_mask(mask)
    assert found is not None and found.row.shape == (1, 1, 1, 12)
    assert torch.equal(said(found, mask), mask)


def test_heads_and_rows_may_hide_different_slots() -> None:
    mask = visible(70, 150).repeat(2, 3, 1, 1)
    mask[0, 1, :, :9] = False
    mask[1, 2, :, 100] = False
    found = row_mask(mask)
    assert found is not None and found.row.shape == (2, 3, 1, 150) and found.is_causal
    assert torch.equal(said(found, mask), mask)


def test_more_queries_than_slots_are_no_row() -> None:
    assert row_mask(torch.ones(1, 1, 5, 4, dtype=torch.bool).tril()) is None
