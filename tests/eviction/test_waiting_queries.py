"""Queries of generated tokens that wait to be counted together count as if each had been counted at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcache_plugins as kvp
from kvcache_plugins.attention.reference import AttentionOptions
from kvcache_plugins.backends.h2o import H2OLayer
from kvcache_plugins.eviction import accumulating
from kvcache_plugins.eviction.accumulating import MOST_WAITING, AccumulatingCache, AccumulatingLayer
from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.layers.view import StreamView
from kvcache_plugins.models.cache_argument import as_argument
from tests.eviction.feeding import bound_cache, chunks_of, feed, ids, mask_of, model_of

LENGTH, STEPS, BUDGET = 90, 41, 60
H2O: dict[str, Any] = {"backend": "h2o", "budget": BUDGET, "chunk_size": 30}
EXPECTED: dict[str, Any] = {**H2O, "backend": "expected_attention"}
BOTH = pytest.mark.parametrize("options", [H2O, EXPECTED], ids=["h2o", "expected_attention"])


def layers_of(cache: Any) -> list[AccumulatingLayer]:
    """The layers of a cache, and the parts of those that have some."""
    assert isinstance(cache, AccumulatingCache)
    layers = [part for layer in cache.evicting_layers for part in layer.uniform_layers]
    assert layers and all(isinstance(layer, AccumulatingLayer) for layer in layers)
    return layers  # type: ignore[return-value]


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let no query wait in caches made from now on."""
    monkeypatch.setattr(accumulating, "MOST_WAITING", 1)
    return monkeypatch


def check_same(cache: Any, other: Any) -> None:
    """Both hold the same tokens, of the same worth."""
    for layer, twin in zip(layers_of(cache), layers_of(other), strict=True):
        layer.count_waiting()
        assert twin._num_waiting == 0
        assert torch.equal(layer.ledger.positions, twin.ledger.positions)
        ranks, expected = layer.ranks(), twin.ranks()
        torch.testing.assert_close(ranks, expected, atol=1e-5, rtol=1e-4)
        assert not torch.equal(expected, expected[:, :, :1].expand_as(expected))


def pair(
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[[Any, Any], Any],
    options: dict[str, Any],
    family: str = "llama",
    attention: str = "sdpa",
    **bound: Any,
) -> tuple[Any, Any]:
    """The caches of a run, where queries may wait, and where none does."""
    model, made = model_of(family, attention), []
    for waits in (True, False):
        with monkeypatch.context() as patch:
            if not waits:
                one_by_one(patch)
            torch.manual_seed(0)
            cache = bound_cache(model, options, LENGTH, **bound)
            made.append(run(model, cache) or cache)
    return made[0], made[1]


def read(model: Any, cache: Any, steps: int = STEPS, batch_size: int = 2) -> None:
    """Read a prompt, and tokens one by one."""
    feed(model, cache, ids(LENGTH + steps, batch_size), [*chunks_of(LENGTH, 30), *[1] * steps])


KINDS: dict[str, dict[str, Any]] = {
    "exact": {},
    "evicting": {"evict_at_decode": True},
    "compact": {"evict_at_decode": True, "positions": "compact"},
    "heads": {"head_floor": 0.2, "evict_at_decode": True},
    "merging": {"pool": "merge", "evict_at_decode": True},
    "all-kept": {"budget": 500},
}


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_worth_is_the_same(options: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 100 if "evict_at_decode" in KINDS[kind] else STEPS  # so that something has to go
    caches = pair(monkeypatch, lambda *given: read(*given, steps), options | KINDS[kind])
    assert all(0 < layer._num_waiting < MOST_WAITING for layer in layers_of(caches[0]))
    check_same(*caches)


@pytest.mark.parametrize(
    "storage",
    [
        {"storage": {"backend": "int8"}},
        {"storage": {"backend": "int4", "residual_length": 7}, "head_floor": 0.2},
        {
            "storage": {"backend": "kvquant", "calibration": "normal_float", "residual_length": 3},
            "positions": "compact",
            "budget": 140,
        },
    ],
    ids=["int8", "int4-heads", "kvquant"],
)
def test_queries_do_not_depend_on_what_is_packed(
    storage: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EXPECTED | storage | {"evict_at_decode": True}
    check_same(*pair(monkeypatch, lambda *given: read(*given, 130), options))


@pytest.mark.parametrize("floor", [None, 0.2])
def test_tokens_packed_meanwhile_are_read_as_they_are_then(
    floor: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention has read them exactly: so much the rounding to int8 makes of it, and no more."""
    options = H2O | {"storage": {"backend": "int8", "residual_length": 20}, "head_floor": floor}
    caches = pair(monkeypatch, read, options)
    for layer, twin in zip(*map(layers_of, caches), strict=True):
        layer.count_waiting()
        ranks, expected = layer.ranks(), twin.ranks()
        assert not torch.equal(ranks, expected)
        torch.testing.assert_close(ranks, expected, atol=0.0, rtol=0.05)
        torch.testing.assert_close(ranks.sum(2), expected.sum(2), atol=0.0, rtol=1e-5)


@BOTH
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "deepseek_v3", "gpt2", "qwen3"])
def test_families(options: dict[str, Any], family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With soft caps, sink logits, latents, learnt positions; in an attention function that needs no mask."""
    caches = pair(monkeypatch, read, options, family, "kvcache_plugins")
    check_same(*caches)


def test_they_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    observe = H2OLayer.observe

    def noted(layer: Any, query: Tensor, tokens: StreamView, options: AttentionOptions) -> None:
        looks.append(query.shape[2])
        observe(layer, query, tokens, options)

    monkeypatch.setattr(H2OLayer, "observe", noted)
    model = model_of(num_hidden_layers=1)
    cache = bound_cache(model, H2O, LENGTH)
    read(model, cache)
    assert looks == [30, 30, 30, 8, 8, 8, 8, 8]
    assert layers_of(cache)[0]._num_waiting == 1
    feed(model, cache, ids(5, 2, seed=3), [5])  # a second turn: they come before it
    assert looks[8:] == [1, 5]
    cache = bound_cache(model, H2O | {"evict_at_decode": True}, LENGTH)
    looks.clear()
    read(model, cache, 66)
    assert looks == [30, 30, 30, *[8] * 8, 1]  # at 60 + 64 + 1, room is made for the next
    assert cache.num_held() == BUDGET + 1


# ---- what happens to those that wait ----


def later(act: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A run in which something happens while some wait, and that goes on for as long again."""

    def run(model: Any, cache: Any) -> Any:
        read(model, cache, 29)
        cache = act(model, cache) or cache
        rows = len(layers_of(cache)[0].ledger.scores)
        feed(model, cache, ids(12, rows, seed=5), [1] * 12)
        return cache

    return run


def turn(model: Any, cache: Any, count: int) -> None:
    """Read a prompt of `count` tokens more."""
    cache.bind(model, prompt_length=cache.get_seq_length() + count)
    feed(model, cache, ids(count, 2, seed=7), [count])


def each(cache: Any, verb: str, *arguments: Any) -> None:
    """Call a verb of every layer."""
    for layer in cache.evicting_layers:
        getattr(layer, verb)(*arguments)


ACTS: dict[str, Callable[[Any, Any], Any]] = {
    "a second turn": lambda model, cache: turn(model, cache, 40),
    "a turn of one token": lambda model, cache: turn(model, cache, 1),
    "crop": lambda model, cache: cache.crop(-5),
    "reorder": lambda model, cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda model, cache: cache.batch_repeat_interleave(2),
    "select": lambda model, cache: cache.batch_select_indices(torch.tensor([1])),
    "select by a mask": lambda model, cache: each(cache, "batch_select_indices", torch.tensor([False, True])),
    "copy": lambda model, cache: copy.deepcopy(cache),
    "offload": lambda model, cache: each(cache, "offload"),
    "a prompt anew": lambda model, cache: cache.reset() or read(model, cache, 29),
}


@BOTH
@pytest.mark.parametrize("uneven", [False, True], ids=["even", "heads"])
@pytest.mark.parametrize("act", ACTS)
def test_acts(act: str, uneven: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    options = options | {"head_floor": 0.2 if uneven else None}
    caches = pair(monkeypatch, later(ACTS[act]), options)
    assert any(layer._num_waiting for layer in layers_of(caches[0]))
    check_same(*caches)


@BOTH
def test_saved(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def act(model: Any, cache: Any) -> Any:
        folder = tmp_path / str(accumulating.MOST_WAITING)
        held = cache.kv_bytes()
        cache.save_pretrained(folder)
        loaded = kvp.KVCache.from_pretrained(folder, model)
        assert loaded.kv_bytes() == cache.kv_bytes() == held
        return loaded

    check_same(*pair(monkeypatch, later(act), options))


def test_what_is_saved_does_not_depend_on_what_waited(tmp_path: Path) -> None:
    """Of the room for queries, which holds old ones, nothing is written."""
    model, cache = model_of(), bound_cache(model_of(), H2O, LENGTH)
    read(model, cache, 29)
    twin = copy.deepcopy(cache)
    for layer in layers_of(twin):
        layer.count_waiting()
        layer.companions["waiting"].normal_()
    for layer, other in zip(layers_of(cache), layers_of(twin), strict=True):
        ours, others = layer.state()[0], other.state()[0]
        assert ours.keys() == others.keys() and ours["companion_waiting"].numel() == 0
        assert all(torch.equal(ours[name], others[name]) for name in ours)


def test_interrupted_while_they_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some may have counted and others not, so the cache is refused."""
    model, cache = model_of(), bound_cache(model_of(), H2O, LENGTH)
    read(model, cache, 29)
    with monkeypatch.context() as patch:
        patch.setattr(H2OLayer, "observe", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            feed(model, cache, ids(5, 2), [5])
    with pytest.raises(ValueError, match="was interrupted"):
        feed(model, cache, ids(5, 2), [5])
    with pytest.raises(ValueError, match="was interrupted"):
        cache.bind(model)


def _interrupted(*args: Any) -> None:
    raise KeyboardInterrupt


# ---- those that cannot wait ----


@BOTH
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_that_comes_later(options: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait see what lies before them, the masked one what its mask says."""

    def run(model: Any, cache: Any) -> None:
        read(model, cache, 29)
        mask = torch.ones(2, 1, 1, cache.num_held() + 1, dtype=torch.bool)
        mask[0, :, :, 10:20] = False
        if kind == "float":
            mask = torch.zeros(mask.shape).masked_fill_(~mask, torch.finfo(torch.float32).min)
        with torch.no_grad():
            model(ids(1, 2, seed=3), attention_mask=mask, **as_argument(cache))
        assert not any(layer._num_waiting for layer in layers_of(cache))
        feed(model, cache, ids(5, 2, seed=4), [1] * 5)

    check_same(*pair(monkeypatch, run, options))


@BOTH
def test_another_dtype_that_comes_later(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Any, cache: Any) -> None:
        read(model, cache, 29)
        with torch.autocast("cpu", torch.bfloat16):
            feed(model, cache, ids(3, 2, seed=3), [1] * 3)
        feed(model, cache, ids(5, 2, seed=4), [1] * 5)

    check_same(*pair(monkeypatch, run, options))


@BOTH
@pytest.mark.parametrize("budget", [BUDGET, 500])
def test_padded_rows(options: dict[str, Any], budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as pads are held, which a mask hides; they are the first to go."""
    pads = [0, 11]
    tokens, mask = ids(LENGTH + 9, 2, pads=pads), mask_of(LENGTH + 9, pads)

    def run(model: Any, cache: Any) -> None:
        feed(model, cache, tokens, [*chunks_of(LENGTH, 30), *[1] * 9], mask)
        if accumulating.MOST_WAITING > 1:
            waiting = 1 if budget == BUDGET else 0
            assert [layer._num_waiting for layer in layers_of(cache)] == [waiting] * 2

    check_same(*pair(monkeypatch, run, options | {"budget": budget}, mask=mask))


def test_sink_logits_of_single_queries_count_at_once() -> None:
    model = model_of()
    layer = layers_of(bound_cache(model, H2O, 1))[0]
    states = torch.randn(2, 2, 1, 16)
    for sinks, waiting in ((None, 0), (torch.randn(4), 1), (torch.randn(2, 4, 1), 0)):
        handle, _ = layer.update(states, states)
        assert isinstance(handle, KVHandle)
        layer.attended(torch.randn(2, 4, 1, 16), handle.tokens, AttentionOptions(sink_logits=sinks))
        assert layer._num_waiting == waiting
    assert float(layer.ledger.scores.sum()) > 0


@BOTH
def test_bytes_are_predicted(options: dict[str, Any]) -> None:
    """Before a token is generated and after some, whatever waits."""
    model = model_of()
    cache = bound_cache(model, options, LENGTH)
    read(model, cache, 0)
    held = cache.kv_bytes()
    assert held == kvp.estimate(model, options, LENGTH, 2)
    room = sum(layer.companions["waiting"].nbytes for layer in layers_of(cache))
    assert room == 2 * 2 * MOST_WAITING * 4 * 16 * 4 and room < held
