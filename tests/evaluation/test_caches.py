"""Caches of every origin: the bytes they take, and which can be had here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, DynamicCache, QuantizedCache, cache_utils

import kvcache_plugins as kvp
from kvcache_plugins.estimation import estimate
from kvcache_plugins.evaluation.caches import cache_bytes, new_cache, prefill, why_unavailable
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
