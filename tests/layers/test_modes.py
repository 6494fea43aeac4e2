"""Autograd modes and autocast: what a cache stores and computes does not depend on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvcache_plugins as kvp
from kvcache_plugins.testing import tiny_model


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.mark.parametrize("backend", ["kivi", "int8", "int4"])
def test_a_cache_filled_in_inference_mode_continues_outside(model: Any, backend: str) -> None:
    tokens = torch.randint(3, 120, (2, 160))
    runs = []
    for first, second in ((torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)):
        cache = kvp.build_cache(model, {"backend": backend, "residual_length": 32})
        with first():
            model(tokens, past_key_values=cache)
            model(tokens[:, :1], past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        with second():
            for step in range(40):
                out = model(tokens[:, step : step + 1], past_key_values=cache).logits
        cache.crop(-3)
        runs.append(out.clone())
    assert torch.equal(*runs)


def test_gradients_are_not_recorded_in_the_cache(model: Any) -> None:
    cache = kvp.build_cache(model, {"backend": "int8"})
    out = model(torch.randint(3, 120, (1, 40)), past_key_values=cache)
    model(torch.randint(3, 120, (1, 1)), past_key_values=cache)
    assert out.logits.requires_grad  # the prompt itself can be trained on
    assert not any(t.requires_grad for layer in cache.packed_layers for t in layer.tensors().values())


def test_autocast_does_not_round_the_attention_over_codes(model: Any) -> None:
    cache = kvp.build_cache(model, {"backend": "int8"})
    with torch.no_grad():
        model(torch.randint(3, 120, (1, 100)), past_key_values=cache)
    keys, values = cache.layers[0].update(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16))
    query = torch.randn(1, 4, 1, 16)
    plain = torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(
            plain, torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
        )
