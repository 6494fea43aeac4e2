"""Which entries share a scale: every named granularity against index arithmetic, one entry at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvcache_plugins.quantizers.granularity import (
    Granularity,
    per_block,
    per_channel_group,
    per_token,
    per_token_group,
    per_token_head,
)

B, H, T, D = 2, 3, 12, 20

# Granularity, shape of its scales, and the place of the scale of entry (h, t, d).
CASES: dict[str, tuple[Granularity, tuple[int, ...], Callable[[int, int, int], tuple[int, int, int]]]] = {
    "token-head": (per_token_head(), (B, H, T, 1), lambda h, t, d: (h, t, 0)),
    "token-group-5": (per_token_group(5), (B, H, T, 4), lambda h, t, d: (h, t, d // 5)),
    "token": (per_token(), (B, 1, T, 1), lambda h, t, d: (0, t, 0)),
    "channel-group-4": (per_channel_group(4), (B, H, 3, D), lambda h, t, d: (h, t // 4, d)),
    "block-6": (per_block(6), (B, 1, 2, 1), lambda h, t, d: (0, t // 6, 0)),
    "patch-3x10": (Granularity(tokens=3, channels=10), (B, H, 4, 2), lambda h, t, d: (h, t // 3, d // 10)),
}


@pytest.fixture(params=CASES)
def case(
    request: pytest.FixtureRequest,
) -> tuple[Granularity, tuple[int, ...], Callable[..., tuple[int, ...]]]:
    return CASES[request.param]


def test_groups_are_what_index_arithmetic_says(case: tuple) -> None:
    granularity, shape, place = case
    states = torch.randn(B, H, T, D)
    largest = granularity.split(states).amax(granularity.reduced, keepdim=True).squeeze(5).squeeze(3)
    assert largest.shape == shape
    expected = torch.full(shape, -torch.inf)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                for d in range(D):
                    where = (b, *place(h, t, d))
                    expected[where] = max(expected[where], states[b, h, t, d])
    assert torch.equal(largest, expected)


def test_spread_gives_every_entry_its_own_scale(case: tuple) -> None:
    granularity, shape, place = case
    scale = torch.randn(shape)
    ones = torch.ones(B, H, T, D)
    spread = (granularity.split(ones) * granularity.spread(scale)).reshape(B, H, T, D)
    for b, h, t, d in [
        (0, 0, 0, 0),
        (1, 2, 11, 19),
        (0, 1, 5, 9),
        (1, 0, 6, 10),
        (0, 2, 3, 4),
        (1, 1, 7, 15),
    ]:
        assert spread[b, h, t, d] == scale[(b, *place(h, t, d))]


def test_width_is_the_last_dimension_of_the_scales(case: tuple) -> None:
    granularity, shape, _ = case
    assert granularity.width(D) == shape[-1]


def test_split_keeps_the_order_of_entries(case: tuple) -> None:
    granularity, _, _ = case
    states = torch.arange(B * H * T * D).view(B, H, T, D)
    for view in (states, states.transpose(1, 2).contiguous().transpose(1, 2)):
        assert torch.equal(granularity.split(view).reshape(B, H, T, D), states)


def test_sizes_that_do_not_divide_are_named() -> None:
    with pytest.raises(ValueError, match="16 channels does not divide a head of 20"):
        per_token_group(16).split(torch.zeros(1, 1, 2, 20))
    with pytest.raises(ValueError, match="16 channels does not divide a head of 24"):
        per_token_group(16).width(24)
    with pytest.raises(ValueError, match="5 tokens do not divide 12 tokens"):
        per_channel_group(5).split(torch.zeros(1, 1, 12, 4))
