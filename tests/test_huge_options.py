"""An option that counts tokens may be as large as it likes: memory is that of the tokens there are."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from kvcache_plugins import build_cache, list_backends
from kvcache_plugins.eviction.options import EvictingConfig
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import get_backend
from kvcache_plugins.testing import tiny_model
from kvcache_plugins.testing.generation import padded_prompt

HUGE = 10**9
NEEDED: dict[str, dict[str, Any]] = {"kvquant": {"calibration": "normal_float"}}
PACKING = ("float8", "int4", "int8", "kivi", "kvquant")
EVICTING = [name for name in list_backends() if issubclass(get_backend(name).config_class, EvictingConfig)]


@functools.cache
def model() -> Any:
    return tiny_model("llama")


def generated(cache: Any, count: int = 60) -> torch.Tensor:
    """Logits of new tokens, of a batch whose second row has pads."""
    output = model().generate(
        **padded_prompt((40, 25)),
        **as_argument(cache),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.stack(output.logits)


@functools.cache
def dense(count: int) -> torch.Tensor:
    return generated(None, count)


def _options(name: str) -> list[str]:
    fields = dataclasses.fields(get_backend(name).config_class)
    return [field.name for field in fields if field.name != "block_tokens" and "int" in str(field.type)]


@pytest.mark.parametrize("residual_length", [0, 32])
@pytest.mark.parametrize("name", PACKING)
def test_where_all_tokens_are_sinks_nothing_is_lost(name: str, residual_length: int) -> None:
    config = {"backend": name, "residual_length": residual_length, **NEEDED.get(name, {})}
    cache = build_cache(model(), {**config, "sink_length": HUGE})
    found = generated(cache, 180)
    assert cache.kv_bytes() < 3 * cache.report().dense_bytes
    keys = cache.packed_layers[0].streams[0]
    if keys.codec.warmup_tokens:  # behind sinks
        assert keys.packed_length == 0
    else:
        assert keys.packed_length >= 64
    torch.testing.assert_close(found, dense(180), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [*PACKING, *(n for n in EVICTING if n != "locret")])
def test_memory_is_that_of_the_tokens(name: str) -> None:
    config = {"backend": name, **NEEDED.get(name, {})}
    tried = []
    for option in _options(name):
        needed = {"budget": HUGE} if name in EVICTING and option != "budget" else {}
        value = HUGE if option == "budget" else HUGE // 4
        try:
            cache = build_cache(model(), {**config, **needed, option: value})
        except ValueError as error:
            if option not in str(error):
                raise
            continue
        generated(cache)
        assert cache.kv_bytes() < 4 * cache.report().dense_bytes
        tried.append(option)
    assert "sink_length" in tried and len(tried) >= (5 if name in EVICTING else 2)


def test_sinks_are_counted_from_the_first_token_also_where_a_window_has_dropped_it() -> None:
    windowed = tiny_model("mistral", sliding_window=256)
    cache = build_cache(windowed, {"backend": "int8", "sink_length": 600})
    tokens = torch.randint(3, 120, (1, 200), generator=torch.Generator().manual_seed(0))
    options = {
        "max_new_tokens": 380,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    found, expected = (
        torch.stack(windowed.generate(tokens, **as_argument(used), **options).logits)
        for used in (cache, None)
    )
    assert cache.packed_layers[0].padding.dropped >= 256
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
