"""Where the tokens stood that are kept: the keys that are held are those that a dense cache has there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvcache_plugins import build_cache
from kvcache_plugins.eviction.cache import EvictingCache
from kvcache_plugins.eviction.kept import kept_positions
from kvcache_plugins.models.cache_argument import as_argument
from tests.eviction.feeding import bound_cache, feed, ids, mask_of, model_of, real_positions

TOKENS, CHUNKS = 300, [120, 100, 80]
KNORM = {"backend": "knorm", "budget": 90}


@torch.no_grad()
def dense_keys(tokens: Tensor, mask: Tensor | None = None) -> list[Tensor]:
    """Keys of a whole text, of every layer: `(B, H, T, D)`."""
    model, cache = model_of(), DynamicCache(config=model_of().config)
    feed(model, cache, tokens, [tokens.shape[1]], mask)
    return [layer.keys for layer in cache.layers]


def check_keys(cache: EvictingCache, keys: list[Tensor]) -> None:
    """Compare what is held of the first layer, which depends on no other, with a dense cache's keys there."""
    kept = cache.kept_positions()
    layer, positions = cache.evicting_layers[0], kept[0]
    assert positions.dtype == torch.int64
    for row, head in torch.cartesian_prod(*map(torch.arange, positions.shape[:2])).tolist():
        is_token = positions[row, head] >= 0
        held: Any = layer.keys
        expected = keys[0][row, head, positions[row, head][is_token]]
        torch.testing.assert_close(held[row, head][is_token], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["knorm", "random", "streaming_llm"])
def test_they_are_the_places_of_the_keys_that_are_held(backend: str) -> None:
    tokens = ids(TOKENS, 2)
    cache = bound_cache(model_of(), {**KNORM, "backend": backend}, TOKENS)
    feed(model_of(), cache, tokens, CHUNKS)
    kept = cache.kept_positions()
    assert list(kept) == [0, 1] and all(found.shape == (2, 2, 90) for found in kept.values())
    assert all(bool((found.diff() > 0).all()) and int(found.min()) >= 0 for found in kept.values())
    check_keys(cache, dense_keys(tokens))
    if backend == "streaming_llm":
        expected = torch.tensor([*range(4), *range(TOKENS - 86, TOKENS)])
        assert bool((kept[0] == expected).all())


def test_pads_are_no_tokens() -> None:
    """They are held only where a row has fewer tokens than the budget."""
    pads = (0, 240)
    tokens = ids(TOKENS, 2, pads=pads)
    mask = mask_of(TOKENS, pads)
    cache = bound_cache(model_of(), KNORM, TOKENS, mask)
    feed(model_of(), cache, tokens, CHUNKS, mask)
    kept = cache.kept_positions()[0]
    assert int((kept[0] >= 0).sum(-1).min()) == 90
    assert kept[1, 0].tolist() == [-1] * 30 + [*range(240, 300)]
    check_keys(cache, dense_keys(tokens, mask))


def test_heads_that_hold_different_numbers() -> None:
    config = {"backend": "expected_attention", "budget": 64, "chunk_size": 100, "head_floor": 0.2}
    cache = bound_cache(model_of(), config, TOKENS)
    feed(model_of(), cache, ids(TOKENS, 2), [100, 100, 100])
    uneven = 0
    for layer in cache.evicting_layers:
        found = cache.kept_positions()[layer.layer_idx]
        assert [[[p for p in head if p >= 0] for head in row] for row in found.tolist()] == real_positions(
            layer
        )
        counts = (found >= 0).sum(-1)
        assert found.shape[2] == int(counts.max()) and 126 <= int(counts[0].sum()) <= 128
        uneven += int(counts.min() < counts.max())
    assert uneven, "both heads of every layer hold as many"


def test_what_was_pooled_is_no_token() -> None:
    cache = bound_cache(model_of(), {**KNORM, "pool": "merge"}, TOKENS)
    feed(model_of(), cache, ids(TOKENS), CHUNKS)
    assert int(cache.kept_positions()[0].min()) >= 0, "merged values stay where a token stood"
    ledger = SimpleNamespace(positions=torch.tensor([[[-2, -1, 4, 9]]]))
    units: Any = SimpleNamespace(ledger=ledger, pads=None)
    assert kept_positions(units).tolist() == [[[-1, -1, 4, 9]]], "units of a convolution stood nowhere"


def test_layers_that_keep_all_are_left_out() -> None:
    config = {**KNORM, "skip_layers": [0]}
    cache = bound_cache(model_of(), config, TOKENS)
    assert cache.kept_positions() == {}, "nothing has been read"
    feed(model_of(), cache, ids(TOKENS), CHUNKS)
    assert list(cache.kept_positions()) == [1]
    cache.reset()
    assert cache.kept_positions() == {}


def test_generated_tokens_are_among_them() -> None:
    model, tokens = model_of(), ids(120)
    cache = build_cache(model, KNORM)
    out = model.generate(tokens, max_new_tokens=12, do_sample=False, **as_argument(cache))
    assert isinstance(cache, EvictingCache)
    newest = cache.kept_positions()[0][0, 0, -11:].tolist()
    assert newest == [*range(120, 131)] and out.shape == (1, 132)
