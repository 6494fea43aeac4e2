"""Autograd modes, autocast, casts of the model: what a cache stores and computes does not depend on them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvcache_plugins as kvp
from kvcache_plugins.models.cache_argument import as_argument
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
            model(tokens, **as_argument(cache))
            model(tokens[:, :1], **as_argument(cache))
        cache.reorder_cache(torch.tensor([1, 0]))
        with second():
            for step in range(40):
                out = model(tokens[:, step : step + 1], **as_argument(cache)).logits
        cache.crop(-3)
        runs.append(out.clone())
    assert torch.equal(*runs)


def test_gradients_are_not_recorded_in_the_cache(model: Any) -> None:
    cache = kvp.build_cache(model, {"backend": "int8"})
    out = model(torch.randint(3, 120, (1, 40)), **as_argument(cache))
    model(torch.randint(3, 120, (1, 1)), **as_argument(cache))
    assert out.logits.requires_grad  # the prompt itself can be trained on
    assert not any(t.requires_grad for layer in cache.packed_layers for t in layer.tensors().values())


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "packed": ("llama", {"backend": "int8"}),
    "packed-torch": ("llama", {"backend": "int8", "kernel": "torch"}),
    "keys-packed": ("llama", {"backend": "kivi", "residual_length": 32}),
    "exact": ("llama", {"backend": "kivi", "residual_length": 128}),
    "evicted": ("llama", {"backend": "knorm", "budget": 30}),
    "evicted-by-attention": ("llama", {"backend": "tova", "budget": 30}),
    "latents": ("deepseek_v3", {"backend": "int8"}),
}


def loss_of(model: Any, embeddings: Tensor, cache: Any, **arguments: Any) -> Tensor:
    logits: Tensor = model(inputs_embeds=embeddings, **as_argument(cache), **arguments).logits
    return logits.logsumexp(-1).sum()


@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvcache_plugins"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_gradient_through_stored_tokens_is_refused(name: str, attention: str) -> None:
    family, config = REFUSED[name]
    model = tiny_model(family, attn_implementation=attention).requires_grad_(False)
    cache = kvp.build_cache(model, config)
    embeddings = torch.randn(1, 43, model.config.hidden_size, requires_grad=True)
    with torch.no_grad():
        loss_of(model, embeddings[:, :40], cache)
    loss = loss_of(model, embeddings[:, 40:], cache)
    with pytest.raises(kvp.UnsupportedOperationError, match=r"gradient .* through a cache .*DynamicCache"):
        loss.backward()


NEEDED = [(name, weight) for name in set(REFUSED) - {"latents"} for weight in ("k_proj", "v_proj")]
NEEDED += [("latents", weight) for weight in ("kv_a_proj_with_mqa", "kv_b_proj")]


@pytest.mark.parametrize("is_decoded", [False, True], ids=["", "decoded"])
@pytest.mark.parametrize(("name", "weight"), sorted(NEEDED))
def test_also_if_only_new_keys_or_values_need_it(name: str, weight: str, is_decoded: bool) -> None:
    family, config = REFUSED[name]
    model = tiny_model(family, attn_implementation="eager" if is_decoded else "sdpa").requires_grad_(False)
    cache = kvp.build_cache(model, config)
    embeddings = torch.randn(1, 43, model.config.hidden_size)
    loss_of(model, embeddings[:, :40], cache)
    getattr(model.model.layers[-1].self_attn, weight).weight.requires_grad_(True)
    # whoever wants attention weights has them from decoded tensors
    loss = loss_of(model, embeddings[:, 40:], cache, output_attentions=is_decoded)
    with pytest.raises(kvp.UnsupportedOperationError, match="gradient"):
        loss.backward()


def test_gradients_that_do_not_meet_stored_tokens_are_computed() -> None:
    model = tiny_model("llama").requires_grad_(False)
    embeddings = torch.randn(1, 43, model.config.hidden_size, requires_grad=True)
    cache = kvp.build_cache(model, {"backend": "int8"})
    caches = cache, DynamicCache(config=model.config)
    # the first call attends to what it was given
    first = [torch.autograd.grad(loss_of(model, embeddings[:, :40], each), embeddings)[0] for each in caches]
    assert torch.equal(*first) and first[0].abs().sum() > 0
    model.lm_head.weight.requires_grad_(True)
    loss = loss_of(model, embeddings[:, 40:].detach(), cache)
    assert torch.autograd.grad(loss, model.lm_head.weight)[0].abs().sum() > 0


def test_autocast_does_not_round_the_attention_over_codes(model: Any) -> None:
    cache = kvp.build_cache(model, {"backend": "int8"})
    with torch.no_grad():
        model(torch.randint(3, 120, (1, 100)), **as_argument(cache))
    keys, values = cache.layers[0].update(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16))
    query = torch.randn(1, 4, 1, 16)
    plain = torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(
            plain, torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
        )


# nothing of 120 tokens is packed, and nothing goes
EXACT: dict[str, dict[str, Any]] = {
    "kivi": {"backend": "kivi", "residual_length": 128},
    "knorm": {"backend": "knorm", "budget": 128, "kernel": "torch"},
    "tova": {"backend": "tova", "budget": 128, "kernel": "torch"},
}


@torch.no_grad()
def stepped(model: Any, cache: Any, *counts: int) -> Tensor:
    """Logits of the calls of so many tokens, all of which are the same with every cache."""
    tokens = torch.randint(3, 120, (2, 60), generator=torch.Generator().manual_seed(cache.get_seq_length()))
    return torch.cat([model(part, **as_argument(cache)).logits for part in tokens.split(counts, dim=1)], 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EXACT)
def test_exact_tokens_follow_a_model_that_is_cast(model: Any, name: str, dtype: torch.dtype) -> None:
    cast = copy.deepcopy(model).to(dtype)
    cache, dense = kvp.build_cache(model, EXACT[name]), DynamicCache(config=model.config)
    for each in (cache, dense):
        stepped(model, each, 38, 1, 21)
    for layer in dense.layers:  # transformers' own caches are not cast by themselves
        layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)
    assert torch.equal(stepped(cast, cache, 1, 1, 58), stepped(cast, dense, 1, 1, 58))
    assert {layer.dtype for layer in cache.packed_layers} == {dtype}


@pytest.mark.parametrize("name", EXACT)
def test_a_cache_filled_in_autocast_continues_outside(model: Any, name: str) -> None:
    logits = []
    for cache in (kvp.build_cache(model, EXACT[name]), DynamicCache(config=model.config)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            stepped(model, cache, 38, 1, 21)
        logits.append(stepped(model, cache, 1, 1, 58))
    assert torch.equal(*logits)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_exact_tokens_beside_packed_ones_follow_too(family: str) -> None:
    model = tiny_model(family)
    cache = kvp.build_cache(model, {"backend": "kivi", "residual_length": 32, "sink_length": 4})
    stepped(model, cache, 58, 1, 1)
    cast = model.to(torch.bfloat16)
    assert stepped(cast, cache, 1, 59).isfinite().all()
    exact = {
        name: tensor.dtype
        for layer in cache.packed_layers
        for name, tensor in layer.tensors().items()
        if name.endswith(("_tail", "_sinks"))
    }
    assert exact == dict.fromkeys(("key_tail", "key_sinks", "value_tail", "value_sinks"), torch.bfloat16)
