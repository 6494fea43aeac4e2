"""Caches of every origin: the bytes they take, and which can be had here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, DynamicCache, QuantizedCache, cache_utils

import kvcache_plugins as kvp
from kvcache_plugins.estimation import estimate
from kvcache_plugins.evaluation.caches import cache_bytes, new_cache, prefill, why_unavailable
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing import tiny_model
from tests.models.encoders import decoded, encoder_decoder, source, target

BUNDLED_MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama-books"


@pytest.fixture
def config() -> AutoConfig:
    return AutoConfig.from_pretrained(BUNDLED_MODEL)


def _fill(cache: object, tokens: int) -> None:
    for layer_idx in range(6):
        states = torch.randn(1, 2, tokens, 64, dtype=torch.bfloat16)
        cache.update(states, states.clone(), layer_idx)  # type: ignore[attr-defined]


def test_bytes_of_a_dense_cache(config: AutoConfig) -> None:
    cache = DynamicCache(config=config)
    _fill(cache, 100)
    assert cache_bytes(cache) == 6 * 2 * (2 * 100 * 64 * 2)


def test_bytes_of_quanto_are_those_of_its_packed_tensors(config: AutoConfig) -> None:
    pytest.importorskip("optimum.quanto")
    cache = QuantizedCache("quanto", config, nbits=4, q_group_size=64)
    _fill(cache, 128)
    values = 2 * 128 * 64
    codes, scale_and_shift = values // 2, 2 * 2 * values // 64
    # the first update packs everything, later ones stay exact until there are enough of them
    assert cache_bytes(cache) == 6 * 2 * (codes + scale_and_shift)
    _fill(cache, 3)
    assert cache_bytes(cache) == 6 * 2 * (codes + scale_and_shift + 2 * 3 * 64 * 2)


def test_bytes_of_hqq_include_scale_and_zero(config: AutoConfig) -> None:
    pytest.importorskip("hqq")
    cache = QuantizedCache("hqq", config, nbits=4, q_group_size=64, axis_key=1, axis_value=1)
    _fill(cache, 128)
    values = 2 * 128 * 64
    assert cache_bytes(cache) == 6 * 2 * (values // 2 + 2 * 2 * values // 64)


def test_bytes_of_ours_are_kv_bytes(config: AutoConfig) -> None:
    cache = kvp.build_cache(config, {"backend": "int8"})
    _fill(cache, 100)
    assert cache_bytes(cache) == cache.kv_bytes() > 0


@pytest.mark.parametrize("backend", ["dense", "int8"])
@pytest.mark.parametrize("lengths", [(60,), (16, 30, 14), (59, 1), (5, *[1] * 55)])
def test_bytes_of_windows_do_not_depend_on_the_last_call(backend: str, lengths: tuple[int, ...]) -> None:
    """Two windows of 16 tokens are views of the prompt that has just been read, until the next token."""
    model = tiny_model("gemma2", num_hidden_layers=4)
    cache = new_cache(model, {"backend": backend}, max_cache_length=60)
    for tokens in torch.arange(3, 63)[None].split(lengths, dim=1):
        model(tokens, **as_argument(cache))
    token = 2 * 32 * 4
    windows = 2 * 16 * token + 2 * 8  # each has its length in a tensor
    full = sum(layer.kv_bytes for layer in cache.packed_layers) if isinstance(cache, kvp.KVCache) else 0
    assert cache_bytes(cache) == windows + (full or 2 * 60 * token)
    assert cache_bytes(cache) == estimate(model, {"backend": backend}, 60, max_cache_length=60)


@pytest.mark.parametrize("length", [1, 14, 15, 16, 17])
def test_bytes_of_windows_that_are_hardly_full(length: int) -> None:
    model = tiny_model("gemma2", num_hidden_layers=2)
    cache = new_cache(model, {"backend": "dense"})
    model(torch.arange(3, 3 + length)[None], **as_argument(cache))
    assert cache_bytes(cache) == (min(length, 16) + length) * 2 * 32 * 4 + 8


@pytest.mark.parametrize("backend", ["dense", "int8"])
def test_bytes_of_both_halves(backend: str) -> None:
    model = encoder_decoder("bart")
    cache = new_cache(model, {"backend": backend})
    decoded(model, source("bart"), cache, target(70), [70])
    expected = 2 * 2 * (70 + 150) * 2 * 64 * 4
    assert cache_bytes(cache) == expected if backend == "dense" else 0 < cache_bytes(cache) < expected
    assert cache_bytes(cache) == estimate(model, {"backend": backend}, 70, 2, encoder_tokens=150)
    with pytest.raises(ValueError, match="serves decoder-only models; BartConfig"):
        prefill(model, target(9), new_cache(model, {"backend": backend}), 9)


def test_missing_package_is_a_row_and_no_failure(config: AutoConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_utils, "is_hqq_available", lambda: False)
    assert why_unavailable(config, {"backend": "hqq", "nbits": 4}) == "not installed"
    assert why_unavailable(config, {"backend": "kivi"}) is None


def test_what_layers_share_counts_once(config: AutoConfig) -> None:
    cache = DynamicCache(config=config)
    _fill(cache, 100)
    cache.layers[1].keys = cache.layers[0].keys[:, :, :50]
    assert cache_bytes(cache) == 11 * (2 * 100 * 64 * 2)
    assert cache_bytes(cache.layers[:1]) == 2 * (2 * 100 * 64 * 2)
