"""What is done to a filled cache, beside what the conformance suite asks of every backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcache_plugins
from kvcache_plugins.eviction.cache import EvictingCache
from kvcache_plugins.testing.eviction.feeding import snapshot
from tests.eviction.feeding import bound_cache, chunks_of, feed, ids, mask_of, model_of

PADS = [0, 9, 30]
KNORM = {"backend": "knorm", "budget": 24}
PROMPT = 50


def _same(left: list[dict[str, Tensor]], right: list[dict[str, Tensor]]) -> None:
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_reset_forgets_what_calls_have_told() -> None:
    # by torch, which reads the prompt of a cache that was bound, and of one that was not
    model, config = model_of(num_hidden_layers=3), {**KNORM, "kernel": "torch"}
    cache, fresh = bound_cache(model, config, PROMPT), kvcache_plugins.build_cache(model, config)
    assert isinstance(fresh, EvictingCache)
    feed(model, cache, ids(PROMPT), chunks_of(PROMPT, 16))
    cache.bind(model, prompt_length=PROMPT + 9)  # a later turn, whose tokens are protected
    cache.activate_past_recording()
    feed(model, cache, ids(9, seed=2), [9])
    cache.reset()
    tokens = ids(2 * PROMPT, seed=3)
    feed(model, cache, tokens, chunks_of(2 * PROMPT, 16))
    feed(model, fresh, tokens, chunks_of(2 * PROMPT, 16))
    _same(snapshot(cache), snapshot(fresh))


@pytest.mark.parametrize("how", ["bound", "loaded"])
def test_a_later_turn_goes_on_in_calls_that_are_told_of_it_again(how: str, tmp_path: Path) -> None:
    model, config = model_of(num_hidden_layers=3), {"backend": "knorm", "budget": 24}
    once, again = (bound_cache(model, config, PROMPT) for _ in range(2))
    for cache in (once, again):
        feed(model, cache, ids(PROMPT), chunks_of(PROMPT, 16))
        cache.bind(model, prompt_length=PROMPT + 6)
        feed(model, cache, ids(5, seed=2), [5])
    # which protects the newest of the turn, and not those of its end alone
    if how == "bound":
        again.bind(model, prompt_length=PROMPT + 6)
    else:
        again.save_pretrained(tmp_path)
        again = EvictingCache.from_pretrained(tmp_path, model)
    for cache in (once, again):
        feed(model, cache, ids(1, seed=3), [1])
    _same(snapshot(once), snapshot(again))


def test_reset_forgets_what_a_fraction_came_to() -> None:
    model = model_of(num_hidden_layers=3)
    cache = kvcache_plugins.build_cache(model, {**KNORM, "budget": 0.5})
    for length in (60, 90):
        feed(model, cache, ids(length), [length])
        assert cache.num_held() == length // 2
        cache.reset()


def test_rows_go_together_while_they_are_away() -> None:
    model, mask = model_of(num_hidden_layers=3), mask_of(PROMPT, PADS)
    cache = bound_cache(model, {"backend": "h2o", "budget": 24}, PROMPT, mask)
    feed(model, cache, ids(PROMPT, len(PADS), pads=PADS), chunks_of(PROMPT, 16), mask)
    before = snapshot(cache)
    cache.evicting_layers[0].device = torch.device("meta")  # where it lives; it has been brought here
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    _same(snapshot(cache), [{key: tensor[[2, 2, 0]] for key, tensor in state.items()} for state in before])


@pytest.mark.parametrize("storage", [None, {"backend": "int8"}], ids=["exact", "int8"])
def test_a_crop_that_one_layer_refuses_changes_none(storage: dict[str, Any] | None) -> None:
    model = model_of(num_hidden_layers=3)
    config = {"backend": "streaming_llm", "budget": 24, "sink_length": 0, "storage": storage}
    cache = bound_cache(model, {**config, "layer_overrides": {"0": {"budget": 46}}}, PROMPT)
    feed(model, cache, ids(PROMPT), [PROMPT])
    before = snapshot(cache)
    with pytest.raises(NotImplementedError, match="layer 1 has evicted some of the newest 30 tokens"):
        cache.crop(-30)
    for now, state in zip(snapshot(cache), before, strict=True):
        assert now.keys() == state.keys() and all(torch.equal(now[name], state[name]) for name in now)
    cache.crop(-20)
    assert {layer.get_seq_length() for layer in cache.layers} == {PROMPT - 20}


@pytest.mark.parametrize("storage", [None, {"backend": "int8"}], ids=["exact", "int8"])
def test_crop_of_all_that_is_held(storage: dict[str, Any] | None) -> None:
    # What came before was evicted, and is counted still.
    model, tokens = model_of(), ids(60)
    config = {"backend": "streaming_llm", "budget": 24, "sink_length": 0, "storage": storage}
    cache = bound_cache(model, config, 50)
    feed(model, cache, tokens[:, :50], [50])
    cache.crop(-24)
    assert (cache.get_seq_length(), cache.num_held()) == (26, 0)
    positions = torch.arange(26, 36)[None]
    with torch.no_grad():
        expected = model(tokens[:, 50:], position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(feed(model, cache, tokens[:, 50:], [10]), expected, atol=1e-4, rtol=0.0)


AGAIN: dict[str, dict[str, Any]] = {
    "exact": KNORM,
    "int8": {**KNORM, "storage": {"backend": "int8"}},
    "compact": {"backend": "streaming_llm", "positions": "compact"},
    "one-budget": {"backend": "h2o"},
    "shared-budget": {"backend": "h2o", "head_floor": 0.2},
}


@pytest.mark.parametrize("how", ["bound", "loaded"])
@pytest.mark.parametrize("name", AGAIN)
def test_what_was_cropped_whole_knows_its_padding(name: str, how: str, tmp_path: Path) -> None:
    # Nothing of the first chunk is evicted, so pads are among what the second one finds.
    model, mask, chunks = model_of(num_hidden_layers=3), mask_of(PROMPT, PADS), [25, 15, 10]
    tokens, config = ids(PROMPT, len(PADS), pads=PADS), {**AGAIN[name], "budget": chunks[0]}
    cache, fresh = (bound_cache(model, config, PROMPT, mask) for _ in range(2))
    expected = feed(model, fresh, tokens, chunks, mask)
    feed(model, cache, tokens, chunks, mask)
    if how == "loaded":
        cache.save_pretrained(tmp_path)
        cache = EvictingCache.from_pretrained(tmp_path, model)
    cache.crop(-PROMPT)
    assert cache.num_held() == 0
    logits = feed(model, cache, tokens, chunks, mask)
    _same(snapshot(cache), snapshot(fresh))
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()])


def test_what_was_cropped_whole_knows_how_many_tokens_its_mask_had() -> None:
    model, mask = model_of(num_hidden_layers=3), mask_of(PROMPT, PADS)
    cache = bound_cache(model, KNORM, PROMPT, mask)
    feed(model, cache, ids(PROMPT, len(PADS), pads=PADS), [PROMPT], mask)
    cache.crop(-PROMPT)
    with pytest.raises(kvcache_plugins.UnsupportedOperationError, match="was given 51 tokens at first"):
        feed(model, cache, ids(PROMPT + 1, len(PADS)), [PROMPT + 1])


def test_a_later_turn_is_saved(tmp_path: Path) -> None:
    # What a later turn protects goes on being protected while its answer is generated.
    model, tokens = model_of(), ids(140, 2)
    cache = bound_cache(model, {"backend": "knorm", "budget": 24, "evict_at_decode": True}, 40)
    feed(model, cache, tokens[:, :40], [40])
    cache.bind(model, prompt_length=60)
    feed(model, cache, tokens[:, 40:60], [20])
    cache.save_pretrained(tmp_path)
    loaded = kvcache_plugins.KVCache.from_pretrained(tmp_path, model)
    feed(model, cache, tokens[:, 60:], [1] * 80)
    feed(model, loaded, tokens[:, 60:], [1] * 80)
    assert isinstance(loaded, EvictingCache)
    _same(snapshot(loaded), snapshot(cache))
