"""Perplexity in blocks: blocks equal single tokens as long as nothing is evicted inside of a block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.eviction.feeding import EVICTING, bound_cache, feed, ids, model_of

BUDGET, TOTAL = 24, 300
# After the prompt of one token, room is made once 89 tokens are held, and from 24 on again after 65.
BLOCKS = [1, 88, *[65] * 3, TOTAL - 89 - 3 * 65]


def _run(backend: str, counts: list[int], **options: Any) -> tuple[Tensor, Any]:
    model = model_of()
    config = {"backend": backend, "budget": BUDGET, "evict_at_decode": True, **options}
    cache = bound_cache(model, config, 1)
    return feed(model, cache, ids(TOTAL, 2), counts), cache


@pytest.mark.parametrize("backend", EVICTING)
def test_blocks_that_end_where_room_is_made(backend: str) -> None:
    # SnapKV asks the newest 64 queries of a call, of which a token alone is one.
    options = {"window_length": 1} if backend == "snapkv" else {}
    slow, slow_cache = _run(backend, [1] * TOTAL, **options)
    fast, fast_cache = _run(backend, BLOCKS, **options)
    assert slow_cache.num_held() == fast_cache.num_held() == BUDGET + TOTAL - 89 - 3 * 65
    for layer, other in zip(slow_cache.evicting_layers, fast_cache.evicting_layers, strict=True):
        assert torch.equal(layer.ledger.positions, other.ledger.positions)
    torch.testing.assert_close(fast, slow, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("storage", ["int8", "float8"])
def test_over_packed_storage_blocks_are_not_tokens(storage: str) -> None:
    # A call reads its own tokens exactly, whatever is stored: so over packed storage blocks differ.
    options = {"storage": {"backend": storage}, "sink_length": 0}
    slow, slow_cache = _run("streaming_llm", [1] * TOTAL, **options)
    fast, fast_cache = _run("streaming_llm", BLOCKS, **options)
    for layer, other in zip(slow_cache.evicting_layers, fast_cache.evicting_layers, strict=True):
        assert torch.equal(layer.ledger.positions, other.ledger.positions)
    torch.testing.assert_close(fast[:, :2], slow[:, :2], atol=1e-4, rtol=0.0)
    assert (fast - slow).abs().max() > 1e-3


@pytest.mark.parametrize("backend", ["knorm", "h2o"])
def test_blocks_that_straddle_an_eviction_differ(backend: str) -> None:
    slow, _ = _run(backend, [1] * TOTAL)
    fast, _ = _run(backend, [1, 89, *[65] * 3, TOTAL - 90 - 3 * 65])
    assert (fast[:, :89] - slow[:, :89]).abs().max() < 1e-4
    assert (fast - slow).abs().max() > 1e-2


def test_the_newest_token_stays_although_nothing_protects_it() -> None:
    """Of SnapKV, whose window is the newest token alone while tokens come one at a time."""
    model, config = model_of(), {"backend": "snapkv", "budget": BUDGET, "local_length": 0}
    cache = bound_cache(model, {**config, "evict_at_decode": True}, 1)
    feed(model, cache, ids(89, 2), [1] * 89)
    assert cache.num_held() == BUDGET
    for layer in cache.evicting_layers:
        assert (layer.ledger.positions[:, :, -1] == 88).all()


@pytest.mark.parametrize("backend", ["knorm", "h2o", "snapkv"])
def test_layers_say_how_many_tokens_come_before_room_is_made(backend: str) -> None:
    model, tokens = model_of(), ids(TOTAL, 2)
    cache = bound_cache(model, {"backend": backend, "budget": BUDGET, "evict_at_decode": True}, 1)
    expected = BLOCKS if backend != "snapkv" else [1] * 95  # whose answer depends on how many come last
    seen = 0
    for count in expected:
        assert {layer.room(TOTAL - seen) for layer in cache.evicting_layers} == {count}
        feed(model, cache, tokens[:, seen : seen + count], [count])
        seen += count
