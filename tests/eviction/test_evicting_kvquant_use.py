"""Evicting over KVQuant's storage, used: attention, what is done to a filled cache, generation, Locret."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import kvcache_plugins
from kvcache_plugins.backends import kvquant
from kvcache_plugins.eviction.cache import EvictingCache
from kvcache_plugins.kernels import loader
from kvcache_plugins.layers.base import PackedLayer
from kvcache_plugins.layers.view import StreamView
from kvcache_plugins.models.cache_argument import cache_of
from kvcache_plugins.testing.generation import run_scenario
from tests.eviction.feeding import bound_cache, chunks_of, feed, ids, mask_of, model_of
from tests.reference.eviction import Policy, run_compactly

MODELS = Path(__file__).parents[2] / "examples" / "models"
PADS, PROMPT, STEPS = [0, 41, 130], 330, 80
STORAGE = {"backend": "kvquant", "calibration": "normal_float", "residual_length": 3}


def _config(backend: str = "knorm", **options: Any) -> dict[str, Any]:
    return {
        "backend": backend, "budget": 200, "sink_length": 2, "storage": STORAGE, "positions": "compact",
        "chunk_size": 70, "evict_at_decode": True,
    } | options  # fmt: skip


def _tokens() -> Tensor:
    return ids(PROMPT + STEPS, len(PADS), pads=PADS)


def _started(config: dict[str, Any], length: int = PROMPT) -> EvictingCache:
    cache = bound_cache(model_of(), config, PROMPT, mask_of(PROMPT, PADS))
    feed(model_of(), cache, _tokens()[:, :length], chunks_of(length, 70), mask_of(length, PADS))
    return cache


def _continued(cache: EvictingCache, rows: list[int] | None = None) -> Tensor:
    rows = list(range(len(PADS))) if rows is None else rows
    mask = mask_of(PROMPT + STEPS, [PADS[row] for row in rows])
    seen = cache.get_seq_length()
    counts = [*chunks_of(PROMPT - seen, 70), *[1] * STEPS] if seen < PROMPT else [1] * STEPS
    return feed(model_of(), cache, _tokens()[rows, seen:], counts, mask)


def _decoded(layer: PackedLayer) -> list[Tensor]:
    return [
        StreamView(stream, stream.packed_length, (stream.tail.view(),)).dense(torch.float32)
        for stream in layer.streams
    ]


def _state(cache: EvictingCache) -> list[Tensor]:
    return [t for layer in cache.evicting_layers for t in layer.state()[0].values()]


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize(
    "backend", ["expected_attention", "h2o", "keydiff", "knorm", "lagkv", "snapkv", "streaming_llm", "tova"]
)
def test_attention_reads_what_is_stored(backend: str, kernel: str) -> None:
    # The same model fed with what the layers decode to, as dense keys and values, gives the same logits.
    model, mask = model_of(), mask_of(PROMPT + 3, PADS)
    cache = _started(_config(backend, kernel=kernel))
    held = cache.num_held()
    assert 200 - 64 < held <= 200
    exact = _config(backend, storage=None, budget=held, chunk_size=None)
    dense = bound_cache(model, exact, PROMPT, mask[:, :PROMPT])
    feed(model, dense, _tokens()[:, :PROMPT], [PROMPT], mask[:, :PROMPT])
    for layer, other in zip(cache.evicting_layers, dense.evicting_layers, strict=True):
        assert layer.stored_keys.packed_length > 0
        for stream, states in zip(other.streams, _decoded(layer), strict=True):
            stream.tail.view().copy_(states)
    got, expected = (feed(model, c, _tokens()[:, PROMPT : PROMPT + 3], [1, 2], mask) for c in (cache, dense))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0.0)
    if kernel == "torch" or loader.try_load():
        wanted = "torch" if kernel == "torch" else "cpu"
        assert {layer.kernel for layer in cache.evicting_layers} == {wanted}


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("pads", [None, [0, 41]], ids=["plain", "padded"])
def test_logits_are_those_of_a_model_that_rotates_anew(
    pads: list[int] | None, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every number is an outlier, so that the storage rounds to half precision and does nothing else.
    monkeypatch.setattr(kvquant, "outliers_per_side", lambda fraction, values: values // 2)
    storage = {**STORAGE, "residual_length": 0}
    config = _config(
        "streaming_llm", kernel=kernel, storage=storage, budget=192, evict_at_decode=False, local_length=4,
        stabilizer_length=4,
    )  # fmt: skip
    counts = [64] * 6 + [1] * 12  # of whole blocks, as many as the budget are kept
    total = sum(counts)
    tokens = ids(total, 1 if pads is None else 2, pads=pads)
    mask = None if pads is None else mask_of(total, pads)
    cache = bound_cache(model_of(), config, 384, mask)
    got = feed(model_of(), cache, tokens, counts, mask)
    calls = [(64, "chunk")] * 5 + [(64, "prompt")] + [(1, "decode")] * 12
    policy = Policy("streaming_llm", 192, sinks=2, stabilizers=4, local=4)
    expected, _ = run_compactly(model_of(), tokens, calls, policy, pads)
    absolute = bound_cache(model_of(), {**config, "positions": "absolute", "storage": None}, 384, mask)
    other = feed(model_of(), absolute, tokens, counts, mask)
    late = slice(256, None)
    error, distance = (
        (logits - expected)[:, late].norm() / expected[:, late].norm() for logits in (got, other)
    )
    assert error < 2e-3 < 0.1 < distance


@pytest.mark.parametrize(
    ("verb", "rows"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0])), [2, 2, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ],
    ids=["reorder", "select", "repeat"],
)
def test_rows_go_together(verb: Callable[[EvictingCache], None], rows: list[int]) -> None:
    cache, untouched = _started(_config()), _started(_config())
    before = [_decoded(layer) for layer in cache.evicting_layers]
    verb(cache)
    for layer, states in zip(cache.evicting_layers, before, strict=True):
        for got, expected in zip(_decoded(layer), states, strict=True):
            assert torch.equal(got, expected[rows])
    if len(rows) != len(PADS):
        return  # products of other shapes round differently, which may flip a code
    expected = _continued(untouched)[rows]
    torch.testing.assert_close(_continued(cache, rows), expected, atol=1e-4, rtol=0.0)
    for layer, other in zip(cache.evicting_layers, untouched.evicting_layers, strict=True):
        assert torch.equal(layer.ledger.positions, other.ledger.positions[rows])


@pytest.mark.parametrize("length", [PROMPT, 210, 70], ids=["after-the-prompt", "in-the-prompt", "unpacked"])
def test_save_load_continue(length: int, tmp_path: Path) -> None:
    cache, model = _started(_config(), length), model_of()
    cache.save_pretrained(tmp_path)
    loaded = kvcache_plugins.KVCache.from_pretrained(tmp_path, model)
    assert isinstance(loaded, EvictingCache) and loaded.config == cache.config
    assert all(torch.equal(*pair) for pair in zip(_state(loaded), _state(cache), strict=True))
    loaded.bind(model, mask_of(PROMPT, PADS), prompt_length=PROMPT)
    assert torch.equal(_continued(loaded), _continued(cache))
    assert all(torch.equal(*pair) for pair in zip(_state(loaded), _state(cache), strict=True))


def test_copies_go_their_own_ways() -> None:
    cache = _started(_config())
    before = [t.clone() for t in _state(cache)]
    answers = [_continued(copy.deepcopy(cache)) for _ in range(2)]
    assert torch.equal(*answers)
    assert all(torch.equal(*pair) for pair in zip(_state(cache), before, strict=True))
    assert torch.equal(_continued(cache), answers[0])


def test_reset_and_moving() -> None:
    cache = _started(_config())
    expected = _continued(copy.deepcopy(cache))
    for layer in cache.evicting_layers:
        layer.offload()
        layer.prefetch()
    assert torch.equal(_continued(cache), expected)
    cache.reset()
    assert cache.kv_bytes() == 0
    cache.bind(model_of(), mask_of(PROMPT, PADS), prompt_length=PROMPT)
    feed(model_of(), cache, _tokens()[:, :PROMPT], chunks_of(PROMPT, 70), mask_of(PROMPT, PADS))
    assert torch.equal(_continued(cache), expected)


def test_crop_takes_back_what_is_still_held() -> None:
    cache = _started(_config(evict_at_decode=False))
    held = [layer.ledger.positions.clone() for layer in cache.evicting_layers]
    feed(model_of(), cache, _tokens()[:, PROMPT : PROMPT + 70], [1] * 70, mask_of(PROMPT + 70, PADS))
    cache.crop(-70)
    assert cache.get_seq_length() == PROMPT
    for layer, positions in zip(cache.evicting_layers, held, strict=True):
        assert torch.equal(layer.ledger.positions, positions)
        assert layer.stored_keys.packed_length % 64 == 0
    assert _continued(cache).isfinite().all()


@pytest.mark.parametrize(
    "scenario", ["greedy", "beams", "sample_return_three", "prompt_lookup", "second_turn", "chunked_prefill"]
)
def test_generation(scenario: str) -> None:
    lengths = (300, 170)
    config = _config(chunk_size=64)
    got = run_scenario(model_of(), scenario, cache_config=config, lengths=lengths, max_new_tokens=90)
    again = run_scenario(model_of(), scenario, cache_config=config, lengths=lengths, max_new_tokens=90)
    assert torch.equal(got, again) and got.shape[1] > 300
    if scenario == "chunked_prefill":  # values wait for the keys of 128 real tokens, and are exact meanwhile
        return
    # a budget that holds everything is the storage itself
    roomy = run_scenario(
        model_of(), scenario, cache_config=_config(budget=2000, chunk_size=None), lengths=lengths
    )
    stored = run_scenario(model_of(), scenario, cache_config={**STORAGE, "sink_length": 2}, lengths=lengths)
    assert roomy.tolist() == stored.tolist()


@pytest.fixture(scope="module")
def books() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODELS / "tiny-llama-books", dtype=torch.float32).eval()


def _locret(**options: Any) -> dict[str, Any]:
    return {
        "backend": "locret", "heads": str(MODELS / "tiny-llama-books-locret"), "budget": 192,
        "chunk_size": 64, "sink_length": 1, "positions": "compact",
        "storage": {
            "backend": "kvquant", "calibration": str(MODELS / "tiny-llama-books-kvquant3"), "nbits": 3,
            "residual_length": 0,
        },
    } | options  # fmt: skip


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_locret_over_kvquant(kernel: str, books: Any) -> None:
    tokens = torch.randint(3, books.config.vocab_size, (2, 700), generator=torch.Generator().manual_seed(0))
    mask = mask_of(700, [0, 100])
    logits, bytes_held = [], []
    for config in (_locret(kernel=kernel), _locret(storage=None)):
        output = books.generate(
            tokens, attention_mask=mask, max_new_tokens=4, do_sample=False, return_dict_in_generate=True,
            output_logits=True, cache_implementation="quantized", cache_config=config, pad_token_id=0,
        )  # fmt: skip
        cache = cache_of(output)
        assert cache.num_held() <= 192 + 4
        logits.append(output.logits[0])
        bytes_held.append(cache.kv_bytes())
    assert bytes_held[0] < 0.55 * bytes_held[1]  # most of it is the fp32 window
    assert (logits[0] - logits[1]).norm() < 0.5 * logits[1].norm()
