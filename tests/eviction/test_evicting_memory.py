"""What evicting caches hold at once, while a prompt is read, after it, and while tokens are generated."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import kvcache_plugins
from kvcache_plugins.eviction.cache import EvictingCache
from kvcache_plugins.eviction.layer import EvictingLayer
from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.models.cache_argument import as_argument
from tests.eviction.feeding import (
    EVICTING,
    NEEDS_QUERIES,
    bound_cache,
    chunks_of,
    feed,
    ids,
    mask_of,
    model_of,
)

LAYERS, HEADS, DIM, BUDGET, CHUNK, PROMPT = 4, 2, 16, 200, 100, 1450
UNIT = 2 * HEADS * DIM * 4
"""Bytes of a token's keys and values in one layer."""
LEDGER = HEADS * 8
WAITING = 8 * 4 * DIM * 4
BESIDE = {"h2o": WAITING, "expected_attention": WAITING + 8 + 4 * (DIM + DIM * DIM) * 4}
"""Bytes, in a row of a layer, for queries of four heads that wait, and for what is remembered of all."""


def _model() -> Any:
    return model_of(num_hidden_layers=LAYERS, vocab_size=2048)


def _tokens(length: int) -> torch.Tensor:
    return torch.randint(3, 2048, (1, length), generator=torch.Generator().manual_seed(0))


def _live_bytes(cache: EvictingCache, *handed_out: Any) -> int:
    """Bytes of all storages the cache owns, and of those that attention was given and may still read."""
    tensors = [t for layer in cache.evicting_layers for t in layer.tensors().values()]
    for item in handed_out:
        if isinstance(item, KVHandle):
            view = item.tokens
            tensors += [*view.segments, view.stream.tail.buffer, view.stream.records.data]
        else:
            tensors.append(item)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@contextmanager
def _peaks(cache: EvictingCache, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Live bytes after every `update` (what it returned still being read) and around every eviction."""
    found: list[int] = []
    update, evict = EvictingLayer.update, EvictingLayer.evict_due
    read: list[Any] = []

    def watched_update(self: Any, *args: Any, **kwargs: Any) -> Any:
        read[:] = []
        result = update(self, *args, **kwargs)
        read[:] = list(result)
        found.append(_live_bytes(cache, *read))
        return result

    def watched_evict(self: Any) -> None:
        before = list(self.tensors().values())  # what the views of this call read
        evict(self)
        found.append(_live_bytes(cache, *read, *before))

    monkeypatch.setattr(EvictingLayer, "update", watched_update)
    monkeypatch.setattr(EvictingLayer, "evict_due", watched_evict)
    yield found
    read[:] = []


def _with_slack(tokens: int) -> int:
    return tokens + tokens // 32 + 16 + 1


@pytest.mark.parametrize("backend", EVICTING)
def test_peak_while_a_prompt_is_read(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    cache = bound_cache(model, {"backend": backend, "budget": BUDGET}, PROMPT)
    with _peaks(cache, monkeypatch) as peaks:
        feed(model, cache, _tokens(PROMPT), chunks_of(PROMPT, CHUNK))
    # All layers hold their budget; one besides what it held with the chunk, and the chunk itself where
    # attention reads the very tensors the model made.
    unit = UNIT + LEDGER
    most = LAYERS * unit * _with_slack(BUDGET) + unit * _with_slack(BUDGET + CHUNK)
    if backend in ("kvzip", "sirllm"):  # their layers wait for the end of the model: a chunk in each of them
        most += LAYERS * unit * CHUNK + 64 * 4
    beside = LAYERS * BESIDE.get(backend, 0)
    most += beside
    assert max(peaks) <= most
    # The bound is tight: half a chunk less would not do.
    assert max(peaks) > LAYERS * unit * BUDGET + unit * (BUDGET + CHUNK // 2) + beside
    gc.collect()
    held = cache.kv_bytes() - beside
    assert LAYERS * unit * BUDGET <= held <= LAYERS * unit * _with_slack(BUDGET) + 64 * 4


@pytest.mark.parametrize("backend", ["knorm", "h2o"])
def test_the_peak_does_not_grow_with_the_prompt(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    found = []
    for length in (650, PROMPT):
        cache = bound_cache(model, {"backend": backend, "budget": BUDGET}, length)
        with monkeypatch.context() as patch, _peaks(cache, patch) as peaks:
            feed(model, cache, _tokens(length), chunks_of(length, CHUNK))
        found.append((max(peaks), cache.kv_bytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize("backend", ["knorm", "h2o"])
def test_peak_over_packed_storage(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    config = {
        "backend": backend, "budget": BUDGET, "sink_length": 0,
        "storage": {"backend": "int4", "key_bits": 8, "value_bits": 4, "residual_length": 0},
    }  # fmt: skip
    cache = bound_cache(model, config, PROMPT)
    with _peaks(cache, monkeypatch) as peaks:
        feed(model, cache, _tokens(PROMPT), chunks_of(PROMPT, CHUNK))

    def packed(tokens: int) -> int:
        # 16 key bytes, 8 value bytes, a scale and a minimum of 2 bytes each on both sides; whole blocks
        return HEADS * -(-tokens // 64) * 64 * (16 + 8 + 8)

    window = HEADS * 2 * 17 * DIM * 4  # an empty exact window has room for 16 tokens and the newest
    least = LAYERS * (packed(BUDGET) + LEDGER * BUDGET)
    most = LAYERS * (packed(BUDGET) + LEDGER * _with_slack(BUDGET) + window)
    assert least <= cache.kv_bytes() <= most
    # Meanwhile one layer has its old records with the chunk in them, and the chunk as the model made it.
    during = packed(BUDGET + CHUNK) + LEDGER * _with_slack(BUDGET + CHUNK) + UNIT * CHUNK + window
    assert max(peaks) <= most + during


@pytest.mark.parametrize("storage", [None, {"backend": "int8"}], ids=["dense", "int8"])
@pytest.mark.parametrize("backend", ["knorm", "h2o"])
def test_generated_tokens_cost_the_same_after_any_prompt(backend: str, storage: Any) -> None:
    model, config = _model(), {"backend": backend, "budget": BUDGET, "storage": storage, "sink_length": 0}
    held, moves = [], []
    for length in (450, PROMPT):
        cache = bound_cache(model, config, length)
        feed(model, cache, _tokens(length), chunks_of(length, CHUNK))
        pointers, count = [-1] * LAYERS, 0
        tokens = _tokens(40)
        for step in range(40):
            feed(model, cache, tokens[:, step : step + 1], [1])
            for index, layer in enumerate(cache.evicting_layers):
                buffer = layer.records.data if storage else layer.stored_keys.tail.buffer
                count += buffer.data_ptr() != pointers[index]
                pointers[index] = buffer.data_ptr()
        held.append(cache.kv_bytes())
        moves.append(count)
    assert held[0] == held[1]
    assert moves[0] == moves[1]
    assert moves[0] <= LAYERS * (40 // 4 + 1)  # with 1/32 of room: once every four tokens or less


@pytest.mark.parametrize("backend", EVICTING)
def test_bounded_generation(backend: str) -> None:
    model = model_of(num_hidden_layers=1, vocab_size=2048)
    cache = bound_cache(model, {"backend": backend, "budget": 32, "evict_at_decode": True}, 40)
    tokens = _tokens(340)
    feed(model, cache, tokens[:, :40], [40])
    most = 0
    for step in range(40, 340):
        feed(model, cache, tokens[:, step : step + 1], [1])
        assert cache.num_held() <= 32 + 64
        most = max(most, cache.kv_bytes())
    assert most <= (UNIT + LEDGER) * _with_slack(32 + 65) + BESIDE.get(backend, 0)
    assert cache.report().tokens_seen == 340
    assert cache.report().tokens_held == cache.num_held() == 32 + (300 % 65)


@pytest.mark.parametrize("storage", [None, {"backend": "int8"}, {"backend": "int4", "residual_length": 8}])
@pytest.mark.parametrize("backend", EVICTING)
def test_estimate_is_what_is_held_after_a_prompt(backend: str, storage: Any) -> None:
    model = model_of()
    config = {"backend": backend, "budget": 64, "chunk_size": 50, "storage": storage, "sink_length": 0}
    for length in (300, 40):
        cache = bound_cache(model, config, length)
        feed(model, cache, ids(length, 2), chunks_of(length, 50))
        assert kvcache_plugins.estimate(model, config, length, 2) == cache.kv_bytes()


@pytest.mark.parametrize("count", [1, 2, 70, 150])
@pytest.mark.parametrize(
    "options",
    [
        {"backend": "knorm"},
        {"backend": "knorm", "evict_at_decode": True},
        {"backend": "tova", "evict_at_decode": True, "storage": {"backend": "int8"}},
        {"backend": "snapkv", "storage": {"backend": "int4", "residual_length": 8}},
        {"backend": "keydiff", "storage": {"backend": "int8"}, "budget": 200},
        {"backend": "kvzip", "skip_layers": [0]},
    ],
    ids=["exact", "bounded", "bounded-packed", "packed", "kept", "remembered"],
)
def test_estimate_is_what_is_held_after_an_answer(options: dict[str, Any], count: int) -> None:
    model: Any = model_of()
    config = {"budget": 64, "chunk_size": 50, **options}
    cache = kvcache_plugins.build_cache(model, config)
    model.generate(
        ids(110, 2), **as_argument(cache), do_sample=False, max_new_tokens=count, min_new_tokens=count
    )
    assert kvcache_plugins.estimate(model, config, 110, 2, new_tokens=count) == cache.kv_bytes()


@pytest.mark.parametrize("backend", EVICTING)
def test_nothing_is_kept_alive_by_views(backend: str) -> None:
    # Bytes of the storages, not of the views: a slice of a long buffer counts with all of it.
    model = model_of()
    pads = [0, 30]
    cache = bound_cache(model, {"backend": backend, "budget": 32}, 300, mask_of(300, pads))
    feed(model, cache, ids(300, 2, pads=pads), [300], mask_of(300, pads))
    used = 2 * 2 * (2 * 2 * DIM * 4 + 2 * 8) * _with_slack(32)
    used += 2 * 2 * BESIDE.get(backend, 0)
    assert cache.kv_bytes() <= used + 4 * 2 * 8  # and two numbers per row for the pads


def test_handles_are_what_is_returned_only_where_needed() -> None:
    model = model_of()
    for backend in EVICTING:
        cache = bound_cache(model, {"backend": backend, "budget": 32}, 40)
        states = torch.randn(1, 2, 20, 16)
        returned = cache.evicting_layers[0].update(states, states)
        # KVzip sees those of a repetition alone
        assert isinstance(returned[0], KVHandle) == (backend in NEEDS_QUERIES and backend != "kvzip")
