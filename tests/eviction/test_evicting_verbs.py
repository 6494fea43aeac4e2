"""What is done to a filled cache: scores, positions and padding follow the keys and values."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcache_plugins
from kvcache_plugins.eviction.cache import EvictingCache
from kvcache_plugins.models.cache_argument import as_argument
from tests.eviction.feeding import EVICTING, bound_cache, chunks_of, feed, ids, mask_of, model_of

PADS = [0, 9, 30]
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: {"backend": name} for name in EVICTING},
    "h2o-k8v4": {
        "backend": "h2o", "sink_length": 2,
        "storage": {"backend": "int4", "key_bits": 8, "value_bits": 4, "residual_length": 6},
    },
    "lagkv-float8": {"backend": "lagkv", "storage": {"backend": "float8"}},
    "lagkv-compact": {"backend": "lagkv", "lag_size": 4, "positions": "compact"},
    "knorm-int8": {"backend": "knorm", "storage": {"backend": "int8"}},
    "streaming_llm-compact": {"backend": "streaming_llm", "positions": "compact"},
    "expected-compact": {"backend": "expected_attention", "positions": "compact", "future_length": 40},
    "snapkv-heads": {"backend": "snapkv", "head_floor": 0.2},
    "h2o-heads-k8v4": {
        "backend": "h2o", "head_floor": 0.2, "sink_length": 2, "local_length": 6,
        "storage": {"backend": "int4", "key_bits": 8, "value_bits": 4, "residual_length": 6},
    },
    "expected-heads": {"backend": "expected_attention", "head_floor": 0.2, "future_length": 40},
    "keydiff-ragged": {"backend": "keydiff", "layer_overrides": {"0": {"budget": 40}}, "skip_layers": [1]},
}  # fmt: skip
PROMPT, STEPS = 50, 70  # the generated tokens make room once


def _started(name: str, length: int = PROMPT, tokens: Tensor | None = None) -> EvictingCache:
    """A cache that has read `length` of a prompt of 50 tokens in chunks of 16."""
    model = model_of(num_hidden_layers=3)
    config = {"budget": 24, "evict_at_decode": True, **CONFIGS[name]}
    cache = bound_cache(model, config, PROMPT, mask_of(PROMPT, PADS))
    tokens = _tokens() if tokens is None else tokens
    feed(model, cache, tokens[:, :length], chunks_of(length, 16), mask_of(length, PADS))
    return cache


def _tokens(seed: int = 0) -> Tensor:
    return ids(PROMPT + STEPS, len(PADS), seed, PADS)


def _continued(cache: EvictingCache, tokens: Tensor, rows: list[int] | None = None) -> Tensor:
    """Logits of the rest of `tokens`, `rows` of the batch only."""
    model, seen = model_of(num_hidden_layers=3), cache.get_seq_length()
    pads = PADS if rows is None else [PADS[row] for row in rows]
    rest = tokens[:, seen:] if rows is None else tokens[rows, seen:]
    mask = mask_of(PROMPT + STEPS, pads)
    counts = [*chunks_of(PROMPT - seen, 16), *[1] * STEPS] if seen < PROMPT else [1] * rest.shape[1]
    return feed(model, cache, rest, counts, mask)


@functools.cache
def _undisturbed(name: str, length: int = PROMPT) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """What `_continued` returns of a cache to which nothing was done, and what it holds then."""
    cache = _started(name, length)
    return _continued(cache, _tokens()), _snapshot(cache)


def _positions(cache: EvictingCache) -> list[dict[str, Tensor]]:
    """Of every token held, layer by layer."""
    return [
        {name: tensor for name, tensor in state.items() if name.endswith("positions")}
        for state in _snapshot(cache)
    ]


def _snapshot(cache: EvictingCache) -> list[dict[str, Tensor]]:
    return [{name: t.clone() for name, t in layer.state()[0].items()} for layer in cache.evicting_layers]


def _same(left: list[dict[str, Tensor]], right: list[dict[str, Tensor]]) -> None:
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        assert {"scores", "positions", "pads"} <= {re.sub("^part[0-9]_", "", name) for name in one}
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), name


def _same_tensors(left: EvictingCache, right: EvictingCache) -> None:
    for one, other in zip(_snapshot(left), _snapshot(right), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def _reorder(cache: EvictingCache) -> None:
    cache.reorder_cache(torch.tensor([2, 2, 0]))


def _select(cache: EvictingCache) -> None:
    cache.batch_select_indices(torch.tensor([2, 0]))


def _select_by_mask(cache: EvictingCache) -> None:
    cache.batch_select_indices(torch.tensor([False, True, True]))


def _repeat(cache: EvictingCache) -> None:
    cache.batch_repeat_interleave(2)


@pytest.mark.parametrize(
    ("verb", "rows"),
    [(_reorder, [2, 2, 0]), (_select, [2, 0]), (_select_by_mask, [1, 2]), (_repeat, [0, 0, 1, 1, 2, 2])],
    ids=["reorder", "select", "select-by-mask", "repeat"],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_go_together(name: str, verb: Callable[[EvictingCache], None], rows: list[int]) -> None:
    cache = _started(name)
    before = _snapshot(cache)
    verb(cache)
    _same(_snapshot(cache), [{key: tensor[rows] for key, tensor in state.items()} for state in before])
    if "storage" in CONFIGS[name] and len(rows) != len(PADS):
        return  # products of other shapes round differently, which may flip a code
    if "head_floor" in CONFIGS[name]:
        return  # rows share out together, so that others would keep other tokens of every head
    expected, held = _undisturbed(name)
    torch.testing.assert_close(_continued(cache, _tokens(), rows), expected[rows], atol=1e-4, rtol=0.0)
    for layer, state in zip(cache.evicting_layers, held, strict=True):
        assert torch.equal(layer.ledger.positions, state["positions"][rows, :, :, 0])


@pytest.mark.parametrize("name", CONFIGS)
def test_moving_away_and_back(name: str) -> None:
    cache = _started(name)
    before = _snapshot(cache)
    for layer_idx in range(3):
        cache.layers[layer_idx].offload()
        cache.layers[layer_idx].prefetch()
    _same(_snapshot(cache), before)
    assert torch.equal(_continued(cache, _tokens()), _undisturbed(name)[0])


@pytest.mark.parametrize("name", CONFIGS)
def test_reset(name: str) -> None:
    model, cache = model_of(num_hidden_layers=3), _started(name)
    cache.reset()
    assert cache.get_seq_length() == cache.num_held() == 0
    assert all(layer.pads is None for layer in cache.evicting_layers)
    assert cache.kv_bytes() == 0
    # without the padding of the first text
    tokens = ids(PROMPT + 4, 2, seed=3)
    fresh = bound_cache(model, {"budget": 24, **CONFIGS[name], "evict_at_decode": True}, PROMPT)
    cache.bind(model, prompt_length=PROMPT)
    counts = [*chunks_of(PROMPT, 16), *[1] * 4]
    assert torch.equal(feed(model, cache, tokens, counts), feed(model, fresh, tokens, counts))


def test_reset_forgets_what_calls_have_told() -> None:
    model, config = model_of(num_hidden_layers=3), {"budget": 24, **CONFIGS["knorm"]}
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
    _same_tensors(cache, fresh)


def test_rows_go_together_while_they_are_away() -> None:
    cache = _started("h2o")
    before = _snapshot(cache)
    cache.evicting_layers[0].device = torch.device("meta")  # where it lives; it has been brought here
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    _same(_snapshot(cache), [{key: tensor[[2, 2, 0]] for key, tensor in state.items()} for state in before])


@pytest.mark.parametrize("name", CONFIGS)
def test_crop_takes_back_what_is_still_held(name: str) -> None:
    cache, tokens = _started(name), _tokens()
    model, mask = model_of(num_hidden_layers=3), mask_of(PROMPT + STEPS, PADS)
    before = _snapshot(cache)
    feed(model, cache, _tokens(7)[:, :3], [1, 1, 1], mask)
    cache.crop(-3)
    assert cache.get_seq_length() == PROMPT
    for now, state in zip(_positions(cache), before, strict=True):
        assert now and all(torch.equal(tensor, state[name]) for name, tensor in now.items())
    # As documented, H2O accumulates the votes of what was rejected, Expected Attention its queries where they
    # are no drafts, SirLLM no longer knows what predicted the next token, and a packed window has moved on.
    if not name.startswith(("expected", "h2o", "sirllm")) and "storage" not in CONFIGS[name]:
        _same(_snapshot(cache), before)
        # The same tokens as if the others had never been.
        assert torch.equal(_continued(cache, tokens), _undisturbed(name)[0])


@pytest.mark.parametrize("name", CONFIGS)
def test_crop_refuses_what_is_gone(name: str) -> None:
    cache = _started(name)
    before = _snapshot(cache)
    with pytest.raises(
        NotImplementedError, match=r"crop\(-30\): layer \d has evicted some of the newest 30 tokens"
    ):
        cache.crop(-30)
    assert cache.get_seq_length() == PROMPT
    _same(_snapshot(cache), before)
    cache.crop(-PROMPT)  # everything may go
    assert cache.get_seq_length() == cache.num_held() == 0


@pytest.mark.parametrize("storage", [None, {"backend": "int8"}], ids=["exact", "int8"])
def test_a_crop_that_one_layer_refuses_changes_none(storage: dict[str, Any] | None) -> None:
    model = model_of(num_hidden_layers=3)
    config = {"backend": "streaming_llm", "budget": 24, "sink_length": 0, "storage": storage}
    cache = bound_cache(model, {**config, "layer_overrides": {"0": {"budget": 46}}}, PROMPT)
    feed(model, cache, ids(PROMPT), [PROMPT])
    before = _snapshot(cache)
    with pytest.raises(NotImplementedError, match="layer 1 has evicted some of the newest 30 tokens"):
        cache.crop(-30)
    for now, state in zip(_snapshot(cache), before, strict=True):
        assert now.keys() == state.keys() and all(torch.equal(now[name], state[name]) for name in now)
    cache.crop(-20)
    assert {layer.get_seq_length() for layer in cache.layers} == {PROMPT - 20}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_text_that_follows_in_an_own_loop_is_evicted_from(name: str) -> None:
    """Although the last that was said of a prompt is where the one before it ended."""
    model = model_of(num_hidden_layers=3)
    cache = bound_cache(model, {"budget": 24, **CONFIGS[name]}, PROMPT)
    feed(model, cache, ids(PROMPT), [PROMPT])

    def held() -> list[int]:
        return [layer.mean_held for layer in cache.evicting_layers if layer.evicts]

    before = held()
    feed(model, cache, ids(12, seed=1), [12])  # as drafts are, which may be taken back
    assert held() == [count + 12 for count in before]
    feed(model, cache, ids(100, seed=2), [100])
    assert held() == before and cache.get_seq_length() == PROMPT + 112
    cache.bind(model, max_cache_length=cache.get_seq_length() + 100, prompt_length=cache.get_seq_length())
    feed(model, cache, ids(100, seed=2), [100])  # as was to come
    assert held() == [count + 100 for count in before]


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


@pytest.mark.parametrize("length", [PROMPT, 32], ids=["after-the-prompt", "in-the-prompt"])
@pytest.mark.parametrize("name", CONFIGS)
def test_save_load_continue(name: str, length: int, tmp_path: Path) -> None:
    cache, model = _started(name, length), model_of(num_hidden_layers=3)
    cache.save_pretrained(tmp_path)
    loaded = kvcache_plugins.KVCache.from_pretrained(tmp_path, model)
    assert isinstance(loaded, EvictingCache)
    assert loaded.backend == cache.backend
    assert loaded.config == cache.config
    _same(_snapshot(loaded), _snapshot(cache))
    assert [layer.prompt_length for layer in loaded.evicting_layers] == [PROMPT] * 3
    assert loaded.get_seq_length() == length
    assert loaded.num_held() == cache.num_held()
    loaded.bind(model, mask_of(PROMPT, PADS), prompt_length=PROMPT)  # what a restarted generate() does
    logits, held = _undisturbed(name, length)
    assert torch.equal(_continued(loaded, _tokens()), logits)
    _same(_snapshot(loaded), held)


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
    _same_tensors(loaded, cache)


@pytest.mark.parametrize("name", [name for name in CONFIGS if "compact" not in name])
def test_a_loaded_cache_needs_no_bind(name: str, tmp_path: Path) -> None:
    cache, model = _started(name, 32), model_of(num_hidden_layers=3)
    cache.save_pretrained(tmp_path)
    loaded = kvcache_plugins.KVCache.from_pretrained(tmp_path, model)
    assert torch.equal(_continued(loaded, _tokens()), _undisturbed(name, 32)[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CONFIGS)
def test_several_questions_to_one_text(name: str) -> None:
    # Each on a copy: as if the text had been read for it alone.
    model, document = model_of(num_hidden_layers=3), ids(60, 2)
    config = {"budget": 24, "chunk_size": 16, **CONFIGS[name]}

    def read() -> EvictingCache:
        cache = bound_cache(model, config, 60)
        feed(model, cache, document, chunks_of(60, 16))
        return cache

    def ask(cache: EvictingCache, question: int) -> Tensor:
        tokens = torch.cat([document, ids(11, 2, seed=50 + question)], dim=1)
        return model.generate(  # type: ignore[operator]
            tokens, attention_mask=torch.ones_like(tokens), **as_argument(cache), max_new_tokens=6,
            do_sample=False, return_dict_in_generate=True, output_logits=True,
        ).logits  # fmt: skip

    prefilled = read()
    before = [t.clone() for layer in prefilled.evicting_layers for t in layer.tensors().values()]
    answers = [ask(copy.deepcopy(prefilled), question) for question in range(3)]
    for question, answer in enumerate(answers):
        assert all(torch.equal(a, b) for a, b in zip(answer, ask(read(), question), strict=True))
    after = [t for layer in prefilled.evicting_layers for t in layer.tensors().values()]
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True))
