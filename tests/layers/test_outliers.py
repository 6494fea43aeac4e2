"""Lists of outliers: what is kept, what is dropped, and that it all comes back."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kvcache_plugins.layers.outliers import OutlierStore
from kvcache_plugins.quantizers.outliers import add_outliers, choose_outliers, gather_outliers


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


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3])
def test_chosen_tokens_are_listed_anew(share: float) -> None:
    residuals, qualifies = sparse(3, 4, 5, 16, share)
    outliers = choose_outliers(residuals, qualifies, capacity=2000)
    generator = torch.Generator().manual_seed(2)
    index = torch.rand(3, 4, 320, generator=generator).topk(128).indices.sort().values
    moved, dropped = gather_outliers(outliers, index, 10)
    assert dropped == 0
    got = add_outliers(torch.zeros(3, 4, 128, 16), moved)
    everything = add_outliers(torch.zeros(3, 4, 320, 16), outliers)
    chosen = index[..., None].expand(-1, -1, -1, 16)
    assert torch.equal(got, everything.gather(2, chosen))
    # as if they had been listed there in the first place, in lists as long as the longest
    again = choose_outliers(
        residuals.gather(2, chosen), qualifies.gather(2, chosen), capacity=moved.entries.shape[2]
    )
    assert torch.equal(moved.entries, again.entries) and torch.equal(moved.starts, again.starts)
    assert moved.entries.shape[2] == max(10, int(moved.starts[..., -1].max()))


def test_a_store_keeps_chosen_tokens_and_takes_new_ones() -> None:
    residuals, qualifies = sparse(2, 2, 4, 16, 0.05)
    store = OutlierStore(2, 2, 60, torch.device("cpu"))
    store.ensure(6)
    store.write(0, choose_outliers(residuals, qualifies, 60))
    before = [t.clone() for t in store.read(0, 6)]
    slots = torch.arange(0, 256, 2).expand(2, 2, -1).clone()
    slots[:, 1] += 1
    chosen = store.gathered(slots, 4)
    assert all(torch.equal(*pair) for pair in zip(store.read(0, 6), before, strict=True))
    everything = add_outliers(torch.zeros(2, 2, 256, 16), store.read(0, 4))
    expected = everything.gather(2, slots[..., None].expand(-1, -1, -1, 16))
    chosen.entries = torch.nn.functional.pad(chosen.entries, (0, 7))  # whatever they had to grow by
    chosen.entries[:, 2] = -1  # what was there before tokens were taken back
    chosen.write(2, store.read(1, 2))
    got = add_outliers(torch.zeros(2, 2, 256, 16), chosen.read(0, 4))
    assert torch.equal(got[:, :, :128], expected)
    assert torch.equal(got[:, :, 128:192], everything[:, :, 64:128])
    assert not got[:, :, 192:].any()
    assert not chosen.entries[:, 2:, 60:].any()
    assert chosen.capacity == 60 and chosen.entries.shape[2] >= 67


def test_of_a_list_that_would_grow_too_long_the_least_are_dropped() -> None:
    residuals, qualifies = sparse(2, 3, 4, 16, 0.4)
    residuals[0, :, 64:] = residuals[0, :, 64:].sign() * residuals[0, :, 64:].abs().ceil()  # many alike
    qualifies[1, :, 32:] = False
    outliers = choose_outliers(residuals, qualifies, capacity=2000)
    slots = torch.arange(0, 256, 2).expand(2, 3, -1).clone()
    whole, none = gather_outliers(outliers, slots, 10)
    most = 400
    moved, dropped = gather_outliers(outliers, slots, 10, most)
    assert moved.entries.shape[2] == most < int(whole.starts[..., -1].max()) and none == 0
    before, after = (add_outliers(torch.zeros(2, 3, 128, 16), found) for found in (whole, moved))
    lost = 0
    for row in range(2):
        for tokens in (slice(0, 64), slice(64, 128)):
            entries, kept = before[row, :, tokens].flatten(), after[row, :, tokens].flatten()
            sizes = entries.abs().sort(descending=True, stable=True)
            expected = torch.zeros_like(entries)
            expected[sizes.indices[:most]] = entries[sizes.indices[:most]]
            assert torch.equal(kept, expected)
            lost += int((entries != 0).sum() - (expected != 0).sum())
    assert dropped == lost > 0
    assert int((after[1] != 0).sum()) == int((before[1] != 0).sum())  # of a row whose lists fit, none


def test_a_store_drops_what_no_list_can_address() -> None:
    residuals = torch.ones(1, 8, 128, 64)
    residuals[0, 5, 64, 7] = 0.5
    store = OutlierStore(1, 8, 32767, torch.device("cpu"))
    store.ensure(2)
    qualifies = torch.zeros_like(residuals, dtype=torch.bool)
    qualifies[:, :, ::2] = True  # 16384 of each block: together they do not fit one, by one
    store.write(0, choose_outliers(residuals, qualifies, 32767))
    slots = torch.arange(0, 128, 2).expand(1, 8, -1)
    chosen = store.gathered(slots, 1)
    assert (store.dropped, chosen.dropped) == (0, 1)
    got = add_outliers(torch.zeros(1, 8, 64, 64), chosen.read(0, 1))
    assert got[0, 5, 32, 7] == 0 and int(got.sum()) == 8 * 64 * 64 - 1
    assert chosen.gathered(slots[..., :0], 1).dropped == 1
