"""The doors through which attention reaches packed data, against attention over the decoded tensors.

A packed cache is prefilled once and copied, so that two attention functions read the same codes in the same
call, and what they return may differ by rounding only.
"""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DynamicCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvcache_plugins as kvp
from kvcache_plugins.backends.h2o import H2OConfig, H2OLayer
from kvcache_plugins.backends.kivi import KIVIConfig, KIVILayer
from kvcache_plugins.layers.base import PackedLayer
from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.models.cache_argument import as_argument, cache_of
from kvcache_plugins.models.facts import LayerFacts
from kvcache_plugins.testing import assert_close, tiny_model
from tests.reference.attention import naive_attention

OWN = "kvcache_plugins"
KIVI = {"backend": "kivi", "residual_length": 32, "q_group_size": 16, "kernel": "torch"}


class Attention(nn.Module):
    """What transformers' attention functions ask of an attention module."""

    num_key_value_groups = 3
    is_causal = True

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = config or types.SimpleNamespace(_attn_implementation="sdpa")
        self.layer_idx = 0
        self.eval()


@pytest.fixture
def layer() -> PackedLayer:
    layer = KIVILayer(KIVIConfig(q_group_size=16, residual_length=32, kernel="torch"), 0, LayerFacts())
    layer.update(torch.randn(2, 2, 100, 48), torch.randn(2, 2, 100, 48))
    return layer


def step(layer: PackedLayer, count: int) -> tuple[Tensor, KVHandle, KVHandle, tuple[Tensor, Tensor]]:
    """A query `(2, 6, count, 48)`, two handles, and what they stand for (read without being counted)."""
    key, value = layer.update(torch.randn(2, 2, count, 48), torch.randn(2, 2, count, 48))
    assert isinstance(key, KVHandle) and isinstance(value, KVHandle)
    dense = key.tokens.dense(torch.float32), value.tokens.dense(torch.float32)
    return torch.randn(2, 6, count, 48), key, value, dense


# -- the first door: scaled_dot_product_attention


@pytest.mark.parametrize("masked", [False, True])
def test_sdpa_as_models_call_it_at_decode(layer: PackedLayer, masked: bool) -> None:
    query, key, value, dense = step(layer, 1)
    mask = torch.rand(2, 1, 1, 101) > 0.3 if masked else None
    expected = naive_attention(query, *dense, mask=mask)
    grouped = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    # the packed form: query heads of a group as rows, one mask for all of them
    packed = F.scaled_dot_product_attention(query.view(2, 2, 3, 48), key, value, attn_mask=mask)
    assert_close("grouped", expected, grouped, 1e-5)
    assert_close("packed", expected.view(2, 2, 3, 48), packed, 1e-5)
    assert layer.fallback_reads == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("count", [4, 20])
def test_queries_whose_channels_lie_apart(count: int, masked: bool, dtype: torch.dtype) -> None:
    cache = kvp.build_cache(tiny_model("llama", num_key_value_heads=4), {"backend": "int8"})
    cache.update(*torch.randn(2, 1, 4, 100, 16).to(dtype), 0)
    handles = cache.update(*torch.randn(2, 1, 4, count, 16).to(dtype), 0)
    query = torch.randn(1, 4, count, 16).to(dtype)
    apart = query.mT.contiguous().mT
    mask = torch.rand(1, 1, count, 100 + count) > 0.5 if masked else None
    with torch.no_grad():
        found = F.scaled_dot_product_attention(apart, *handles, attn_mask=mask)
        expected = F.scaled_dot_product_attention(query, *handles, attn_mask=mask)
    assert apart.stride(3) == count and torch.equal(found, expected)


# -- handles that something else has had before


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("changed", ["key", "value"])
@pytest.mark.parametrize("door", ["torch", "sdpa", OWN])
def test_what_was_changed_in_place_is_attended_to_as_it_is(
    layer: PackedLayer, door: str, changed: str, mode: Any
) -> None:
    with mode():
        query, *handles, dense = step(layer, 1)
        for tensor in (handles[changed == "value"], dense[changed == "value"]):
            tensor[:, :, 50:].mul_(3)  # through a view, of which the handle hears nothing
        if door == "torch":
            got = F.scaled_dot_product_attention(query, *handles, enable_gqa=True)
        else:
            got, _ = ALL_ATTENTION_FUNCTIONS[door](Attention(), query, *handles, None)
            got = got.transpose(1, 2)
        assert_close(door, naive_attention(query, *dense), got, 1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_was_only_looked_at_stays_packed(layer: PackedLayer, mode: Any) -> None:
    # Doge makes its mask of all values, then attends.
    with mode():
        query, key, value, dense = step(layer, 1)
        assert torch.equal(value.amax(-1), dense[1].amax(-1))
        got, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](Attention(), query, key, value, None)
        assert_close("sdpa", naive_attention(query, *dense).transpose(1, 2), got, 1e-5)
    assert layer.fallback_reads == 1 and not key.is_changed and not value.is_changed


# -- the second door: transformers' attention functions


def _flash_names() -> list[str]:
    return sorted(name for name in ALL_ATTENTION_FUNCTIONS if name.startswith("flash_attention"))


def test_a_mask_that_is_the_same_for_all_tokens(layer: PackedLayer) -> None:
    query, key, value, dense = step(layer, 2)
    mask = torch.tensor([0.0, 1.5]).view(1, 1, 2, 1)  # one number for a query, broadcast as torch does
    expected = naive_attention(query, *dense, mask=mask.expand(1, 1, 2, 102))
    found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    assert_close("output", expected, found, 1e-5)


def test_the_functions_are_wrapped() -> None:
    assert {"flash_attention_2", "flash_attention_3"} <= set(_flash_names())
    for name in ("sdpa", "flex_attention", *_flash_names()):
        assert hasattr(ALL_ATTENTION_FUNCTIONS[name], "__wrapped__"), name


@pytest.mark.parametrize("count", [1, 5, 40], ids=lambda n: f"q{n}")
@pytest.mark.parametrize("window", [None, 30], ids=["full", "window30"])
@pytest.mark.parametrize("padded", [False, True], ids=["", "left-padded"])
@pytest.mark.parametrize("name", _flash_names())
def test_flash_names_with_the_mask_of_the_keys(
    layer: PackedLayer, name: str, padded: bool, window: int | None, count: int
) -> None:
    # (B, T), causal to the lower right, and a window counted from each query
    query, key, value, dense = step(layer, count)
    mask = None
    if padded:
        mask = (torch.arange(100 + count) >= torch.tensor([[0], [23]])).long()
    got, weights = ALL_ATTENTION_FUNCTIONS[name](
        Attention(), query, key, value, mask, dropout=0.0, scaling=0.2, sliding_window=window, softcap=None
    )
    visible = None if mask is None else mask.bool()[:, None, None]
    expected = naive_attention(
        query, *dense, scaling=0.2, mask=visible, is_causal=True, sliding_window=window
    )
    assert weights is None and got.shape == (2, count, 6, 48) and got.is_contiguous()
    assert_close(name, expected.transpose(1, 2), got, 1e-5)
    assert layer.fallback_reads == 0


@pytest.mark.parametrize("name", ["sdpa", "flash_attention_2", OWN])
def test_what_only_some_functions_know_is_honoured_for_handles(layer: PackedLayer, name: str) -> None:
    query, key, value, dense = step(layer, 3)
    sinks, slopes = torch.randn(6), torch.linspace(0.01, 0.3, 6)
    got, _ = ALL_ATTENTION_FUNCTIONS[name](
        Attention(), query, key, value, None, scaling=0.2, softcap=4.0, s_aux=sinks, alibi_slopes=slopes
    )
    expected = naive_attention(
        query, *dense, scaling=0.2, softcap=4.0, sinks=sinks, alibi_slopes=slopes, is_causal=True
    )
    assert_close(name, expected.transpose(1, 2), got, 1e-5)
    assert layer.fallback_reads == 0


@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize("name", ["sdpa", OWN])
def test_a_full_mask_says_it_all(layer: PackedLayer, name: str, kind: str) -> None:
    # A mask of four dimensions carries the causality itself.
    query, key, value, dense = step(layer, 7)
    mask = torch.rand(2, 1, 7, 107) > 0.4
    given = mask if kind == "boolean" else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    got, _ = ALL_ATTENTION_FUNCTIONS[name](Attention(), query, key, value, given, scaling=0.2, dropout=0.0)
    assert_close(name, naive_attention(query, *dense, scaling=0.2, mask=mask).transpose(1, 2), got, 1e-5)
    assert layer.fallback_reads == 0


@pytest.mark.parametrize("count", [1, 7])
def test_flex_attention_and_its_masks_that_are_functions(layer: PackedLayer, count: int) -> None:
    query, key, value, dense = step(layer, count)
    pads = torch.tensor([0, 19])

    def visible(row: Tensor, head: Tensor, query_slot: Tensor, slot: Tensor) -> Tensor:
        return (slot >= pads[row]) & (slot <= query_slot + 100)

    block_mask = create_block_mask(visible, 2, 1, count, 100 + count, device="cpu")
    got, _ = ALL_ATTENTION_FUNCTIONS["flex_attention"](
        Attention(), query, key, value, block_mask, scaling=0.2
    )
    mask = (torch.arange(100 + count) >= pads[:, None])[:, None, None]
    expected = naive_attention(query, *dense, scaling=0.2, mask=mask, is_causal=True)
    assert_close("flex_attention", expected.transpose(1, 2), got, 1e-5)
    assert layer.fallback_reads == 0


@pytest.mark.parametrize("length", [70, 120])
@pytest.mark.parametrize("packed", [False, True])
def test_a_block_mask_for_another_number_of_tokens(layer: PackedLayer, packed: bool, length: int) -> None:
    # All layers share the mask of one of them; those that hold fewer or more make their own.
    if not packed:
        layer = H2OLayer(H2OConfig(budget=500, kernel="torch"), 0, LayerFacts())
        layer.update(torch.randn(2, 2, 100, 48), torch.randn(2, 2, 100, 48))
    layer.is_ragged = True
    query, key, value, dense = step(layer, 3)
    block_mask = create_block_mask(lambda b, h, q, k: k <= q + length - 3, 2, 1, 3, length, device="cpu")
    got, _ = ALL_ATTENTION_FUNCTIONS["flex_attention"](
        Attention(), query, key, value, block_mask, scaling=0.2
    )
    expected = naive_attention(query, *dense, scaling=0.2, is_causal=True)
    assert_close("flex_attention", expected.transpose(1, 2), got, 1e-5)


@pytest.mark.parametrize("is_causal", [True, False, None])
def test_causality_is_asked_of_the_call_then_of_the_module(
    layer: PackedLayer, is_causal: bool | None
) -> None:
    query, key, value, dense = step(layer, 7)
    module = Attention()
    module.is_causal = is_causal is True  # the call prevails where it says something
    kwargs = {} if is_causal is None else {"is_causal": is_causal}
    got, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, None, scaling=0.2, **kwargs)
    expected = naive_attention(query, *dense, scaling=0.2, is_causal=is_causal is True)
    assert_close("is_causal", expected.transpose(1, 2), got, 1e-5)


def test_dense_tensors_pass_straight_through() -> None:
    query, key, value = torch.randn(2, 6, 9, 48), torch.randn(2, 2, 9, 48), torch.randn(2, 2, 9, 48)
    wrapped = ALL_ATTENTION_FUNCTIONS["sdpa"]
    got, _ = wrapped(Attention(), query, key, value, None, scaling=0.2)
    assert torch.equal(got, wrapped.__wrapped__(Attention(), query, key, value, None, scaling=0.2)[0])
    assert_close(
        "sdpa", naive_attention(query, key, value, scaling=0.2, is_causal=True).transpose(1, 2), got, 1e-5
    )


def test_dropout_in_training_decodes(layer: PackedLayer) -> None:
    query, key, value, dense = step(layer, 1)
    module = Attention().train()
    outputs = []
    for keys, values in ((key, value), dense):
        torch.manual_seed(0)
        outputs.append(
            ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, keys, values, None, dropout=0.5, scaling=0.2)[0]
        )
    assert torch.equal(*outputs)
    assert layer.fallback_reads == 2


@pytest.mark.parametrize("window", [None, 4], ids=["", "window"])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("count", [2, 7, 40])
def test_our_function_takes_queries_for_the_newest(count: int, is_causal: bool, window: int | None) -> None:
    query, key, value = torch.randn(2, 6, count, 48), torch.randn(2, 2, 50, 48), torch.randn(2, 2, 50, 48)
    call = query, key, value, None
    options = {"scaling": 0.2, "is_causal": is_causal}
    seen = {"sliding_window": window} if is_causal else {}
    expected = naive_attention(query, key, value, **options, **seen).transpose(1, 2)
    got, _ = ALL_ATTENTION_FUNCTIONS[OWN](Attention(), *call, sliding_window=window, **options)
    assert_close("no gradients", expected, got.detach(), 1e-5)
    query.requires_grad_()
    got, _ = ALL_ATTENTION_FUNCTIONS[OWN](Attention().train(), *call, sliding_window=window, **options)
    assert got.requires_grad
    assert_close("gradients", expected, got.detach(), 1e-5)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("name", ["sdpa", OWN])
def test_queries_of_exact_tokens_are_the_newest(name: str, is_causal: bool) -> None:
    layer = H2OLayer(H2OConfig(budget=500, kernel="torch"), 0, LayerFacts())
    layer.update(torch.randn(2, 2, 60, 48), torch.randn(2, 2, 60, 48))
    query, key, value, dense = step(layer, 40)
    assert key.tokens.packed_length == 0
    with torch.no_grad():
        got, _ = ALL_ATTENTION_FUNCTIONS[name](
            Attention(), query, key, value, None, scaling=0.2, is_causal=is_causal
        )
    expected = naive_attention(query, *dense, scaling=0.2, is_causal=is_causal)
    assert_close(name, expected.transpose(1, 2), got, 1e-5)


# -- whole models


def prompt(length: int = 90, pads: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens `(2, length)` and their mask, the second row with left padding."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, :pads] = 0
    return torch.randint(3, 120, (2, length)), mask


def extended(mask: Tensor, count: int) -> Tensor:
    return F.pad(mask, (0, count), value=1)


def run(model: Any, tokens: Tensor, mask: Tensor, cache: Any) -> Tensor:
    with torch.no_grad():
        return model(tokens, attention_mask=mask, **as_argument(cache)).logits


@pytest.mark.parametrize("pads", [0, 17])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "qwen3"])
def test_our_function_on_dense_caches_equals_eager(name: str, pads: int) -> None:
    # Softcap (gemma2), sink logits (gpt_oss), sliding layers (both), over prompts, single tokens and several.
    model = tiny_model(name)
    tokens, mask = prompt(60, pads)
    caches = {implementation: DynamicCache(config=model.config) for implementation in ("eager", OWN)}
    for count in (60, 1, 1, 9, 1):
        step_tokens = tokens if count == 60 else torch.randint(3, 120, (2, count))
        mask = mask if count == 60 else extended(mask, count)
        logits = {}
        for implementation, cache in caches.items():
            model.set_attn_implementation(implementation)
            logits[implementation] = run(model, step_tokens, mask, cache)
        real = mask[:, -count:].bool()
        assert_close(f"{name}, {count} tokens", logits["eager"][real], logits[OWN][real], 1e-5)


@pytest.mark.parametrize("pads", [0, 17])
def test_our_function_on_a_static_cache_of_which_a_prompt_fills_a_part(pads: int) -> None:
    model = tiny_model("llama")
    tokens, mask = prompt(60, pads)
    expected, real = run(model, tokens, mask, DynamicCache(config=model.config)), mask.bool()
    model.set_attn_implementation(OWN)
    cache = StaticCache(config=model.config, max_cache_len=100)
    got = run(model, tokens[:, :40], mask[:, :40], cache)
    assert_close("a prompt", expected[:, :40][real[:, :40]], got[real[:, :40]], 1e-5)
    got = run(model, tokens[:, 40:], mask, cache)
    assert_close("a turn", expected[:, 40:], got, 1e-5)


@pytest.mark.usefixtures("eager_decodes")
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_packed_caches_are_read_fused_and_give_what_decoded_ones_do(name: str) -> None:
    model = tiny_model(name)
    tokens, mask = prompt(90, pads=17)
    for count in (1, 9):
        logits, reads = {}, {}
        for implementation in (OWN, "eager"):
            model.set_attn_implementation(OWN)
            cache = kvp.build_cache(model, KIVI).bind(model, mask)
            run(model, tokens, mask, cache)
            assert cache.report().fallback_reads == 0
            model.set_attn_implementation(implementation)
            more = torch.arange(5, 5 + count).expand(2, count)
            logits[implementation] = run(model, more, extended(mask, count), cache)
            reads[implementation] = cache.report().fallback_reads
        assert reads[OWN] == 0
        assert reads["eager"] == 2 * len(cache.packed_layers) > 0
        assert_close(name, logits["eager"], logits[OWN], 2e-5)


@pytest.mark.usefixtures("eager_decodes")
@pytest.mark.parametrize("pads", [0, 33], ids=["", "left-padded"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral"])
def test_sdpa_models_never_decode(name: str, pads: int) -> None:
    model = tiny_model(name, attn_implementation="sdpa")
    reference = tiny_model(name, attn_implementation="eager")
    tokens, mask = prompt(70, pads)
    cache = kvp.build_cache(model, KIVI).bind(model, mask)
    run(model, tokens, mask, cache)
    for count in (1, 1, 16, 50, 1, 3):  # decode, the next chat turn, drafted tokens
        mask, more = extended(mask, count), torch.randint(3, 120, (2, count))
        expected = run(reference, more, mask, copy.deepcopy(cache))
        got = run(model, more, mask, cache)
        assert_close(f"{name}, {count} tokens", expected, got, 2e-5)
    assert cache.packed_layers[0].stored_keys.packed_length == 128
    assert cache.report().fallback_reads == 0


@pytest.mark.parametrize("scenario", ["plain", "chunked-prefill", "left-padded"])
def test_generate_never_decodes(scenario: str) -> None:
    model = tiny_model("llama", attn_implementation="sdpa")
    tokens, mask = prompt(80, pads=21 if scenario == "left-padded" else 0)
    output = model.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=40,
        do_sample=False,
        cache_implementation="quantized",
        cache_config=dict(KIVI),
        return_dict_in_generate=True,
        **({"prefill_chunk_size": 24} if scenario == "chunked-prefill" else {}),
    )
    report = cache_of(output).report()
    assert report.tokens_seen == 119 and report.fallback_reads == 0


def test_training_with_dropout_under_our_function_is_refused_where_it_would_be_wrong() -> None:
    query, key, value = torch.randn(2, 6, 9, 48), torch.randn(2, 2, 9, 48), torch.randn(2, 2, 9, 48)
    function = ALL_ATTENTION_FUNCTIONS[OWN]
    with pytest.raises(ValueError, match=r"serves inference; dropout must be 0, got 0.1"):
        function(Attention().train(), query, key, value, None, scaling=0.2, dropout=0.1, softcap=5.0)
    # outside training a dropout probability is without effect
    got, _ = function(Attention(), query, key, value, None, scaling=0.2, dropout=0.1, softcap=5.0)
    expected = naive_attention(query, key, value, scaling=0.2, softcap=5.0, is_causal=True)
    assert_close("softcap", expected.transpose(1, 2), got, 1e-5)
