"""Lists of outliers: what is kept, what is dropped, and that it all comes back."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kvcache_plugins.layers.outliers import OutlierStore
from kvcache_plugins.quantizers.outliers import add_outliers, choose_outliers


def sparse(batch: int, heads: int, blocks: int, channels: int, share: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    residuals = torch.randn(batch, heads, 64 * blocks, channels, generator=generator)
    return residuals, torch.rand(residuals.shape, generator=generator) < share


@pytest.mark.parametrize(("heads", "channels"), [(1, 64), (8, 128), (3, 80), (2, 256)])
def test_what_fits_comes_back_to_half_precision(heads: int, channels: int) -> None:
    residuals, qualifies = sparse(2, heads, 3, channels, 0.01)
    outliers = choose_outliers(residuals, qualifies, capacity=int(0.02 * heads * 64 * channels) + 8)
    base = torch.randn_like(residuals)
    got = add_outliers(base.clone(), outliers)
    expected = torch.where(qualifies, base + residuals.half().float(), base)
    assert torch.equal(got, expected)
    assert (got != base).any()


def test_of_too_many_those_that_lose_most_are_kept() -> None:
    residuals, qualifies = sparse(1, 2, 2, 64, 0.05)
    capacity = 40
    kept = add_outliers(torch.zeros_like(residuals), choose_outliers(residuals, qualifies, capacity))
    for block in range(2):
        part = (slice(None), slice(None), slice(64 * block, 64 * block + 64))
        losses = residuals[part].half().float().abs()[qualifies[part]].sort(descending=True).values
        assert len(losses) > capacity
        assert torch.equal(
            kept[part].abs().flatten().sort(descending=True).values[:capacity], losses[:capacity]
        )
        assert (kept[part] != 0).sum() == capacity


def test_lists_are_sorted_by_head_and_their_parts_are_found() -> None:
    residuals, qualifies = sparse(1, 4, 1, 32, 0.03)
    qualifies[:, 2] = False  # a head without any
    entries, starts = choose_outliers(residuals, qualifies, capacity=400)
    counts = qualifies[0].flatten(1).sum(1).tolist()
    bounds = starts[0, 0].tolist()
    assert [b - a for a, b in pairwise(bounds)] == counts and counts[2] == 0 < counts[3]
    for head, (begin, end) in enumerate(pairwise(bounds)):
        places = [(e >> 16 >> 10 & 63, e >> 16 & 1023) for e in entries[0, 0, begin:end].tolist()]
        assert places == [tuple(p) for p in qualifies[0, head].nonzero().tolist()]


def test_the_highest_token_and_channel_fit_an_entry() -> None:
    residuals = torch.zeros(1, 1, 64, 256)
    residuals[0, 0, 63, 255] = -1.5
    outliers = choose_outliers(residuals, residuals != 0, capacity=2)
    assert torch.equal(add_outliers(torch.zeros_like(residuals), outliers), residuals)


def test_residuals_beyond_half_precision_saturate() -> None:
    residuals = torch.full((1, 1, 64, 16), 1e6)
    outliers = choose_outliers(residuals, residuals > 0, capacity=4)
    assert add_outliers(torch.zeros_like(residuals), outliers).max() == torch.finfo(torch.float16).max


def test_without_any_nothing_is_added() -> None:
    residuals, _ = sparse(2, 2, 2, 16, 0.0)
    outliers = choose_outliers(residuals, torch.zeros_like(residuals, dtype=torch.bool), capacity=8)
    assert torch.equal(add_outliers(residuals.clone(), outliers), residuals)
    assert not outliers.entries.any() and not outliers.starts.any()


def test_a_store_grows_and_follows_the_batch() -> None:
    residuals, qualifies = sparse(2, 2, 2, 16, 0.02)
    store = OutlierStore(2, 2, 64, torch.device("cpu"))
    store.ensure(5)
    store.write(1, choose_outliers(residuals, qualifies, 64))
    store.ensure(9)
    store.index_batch(torch.tensor([1, 0, 1]))
    got = add_outliers(torch.zeros(3, 2, 128, 16), store.read(1, 3))
    expected = torch.where(qualifies, residuals.half().float(), 0.0)[[1, 0, 1]]
    assert torch.equal(got, expected)
    assert store.entries.shape == (3, 9, 64) and not store.read(3, 9).entries.any()


def test_a_list_longer_than_can_be_addressed_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 32767"):
        OutlierStore(1, 1, 40000, torch.device("cpu"))
