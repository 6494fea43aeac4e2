"""Prompts in bf16, which a native kernel reads where that is faster than torch's attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvcache_plugins as kvp
from kvcache_plugins.attention import exact
from kvcache_plugins.kernels import loader
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing import tiny_model
from tests.models.families import small_model

LENGTH = 150
BACKENDS: list[dict[str, Any]] = [
    {"backend": "int8"},
    {"backend": "kivi", "nbits": 2},
    {"backend": "kvquant", "calibration": "normal_float"},
    {"backend": "float8", "sink_length": 4},
    {"backend": "snapkv", "budget": 500},
    {"backend": "streaming_llm", "budget": 500},
    {"backend": "knorm", "budget": 500, "storage": {"backend": "int4"}},
]


@pytest.fixture(autouse=True)
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bf16 is multiplied by the kernels of this processor, also where torch's are better."""
    if not loader.try_load():
        pytest.skip("there are no CPU kernels")
    monkeypatch.setattr(exact, "_multiplies_pairs", lambda dtype: dtype == torch.bfloat16)


def ids(rows: int = 2, count: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randint(5, 100, (rows, count), generator=torch.Generator().manual_seed(seed))


def model_of(family: str = "llama", **options: Any) -> Any:
    return tiny_model(family, dtype=torch.bfloat16, **options)


def check(model: Any, backend: dict[str, Any], mask: Tensor | None = None) -> Any:
    """The logits of a prompt are as near to those in fp32 as without a cache, and half."""
    cache = kvp.build_cache(model, backend).bind(model, mask, prompt_length=LENGTH)
    assert all(layer.reads_prompt for layer in cache.packed_layers)
    with torch.no_grad():
        got = model(ids(), attention_mask=mask, **as_argument(cache)).logits.float()
        plain = model(ids(), attention_mask=mask, use_cache=False).logits.float()
        expected = model.float()(ids(), attention_mask=mask, use_cache=False).logits
        model.bfloat16()
    real = slice(None) if mask is None else mask.bool()
    found, bound = ((logits - expected)[real].norm() / expected[real].norm() for logits in (got, plain))
    assert found <= 1.5 * bound
    return cache


@pytest.mark.parametrize("pads", [0, 20])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b["backend"])
def test_prompts_are_read_by_the_kernel(backend: dict[str, Any], pads: int) -> None:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :pads] = 0
    cache = check(model_of(), backend, mask)
    assert set(cache.report().kernel) == {"cpu"} and cache.report().fallback_reads == 0


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mistral", "gemma3_text", "falcon_h1"])
def test_families(family: str) -> None:
    """With soft caps, sink logits, windows, recurrent branches."""
    model = small_model(family).bfloat16()
    model.set_attn_implementation("kvcache_plugins")
    check(model, {"backend": "int8"})


def test_what_is_stored_does_not_depend_on_who_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(num_hidden_layers=1)
    caches = []
    for is_faster in (True, False):
        monkeypatch.setattr(exact, "_multiplies_pairs", lambda dtype, faster=is_faster: faster)
        cache = kvp.build_cache(model, {"backend": "kivi"}).bind(model)
        with torch.no_grad():
            model(ids(), **as_argument(cache))
        caches.append(cache.packed_layers[0].state()[0])
    assert caches[0].keys() == caches[1].keys()
    assert all(torch.equal(caches[0][name], caches[1][name]) for name in caches[0])


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": False},
        {"num_beams": 3},
        {"do_sample": True, "num_return_sequences": 3},
        {"prompt_lookup_num_tokens": 3},
        {"prefill_chunk_size": 40},
    ],
    ids=lambda s: next(iter(s)),
)
def test_generate(settings: dict[str, Any]) -> None:
    model = model_of()
    arguments = {"cache_implementation": "quantized", "cache_config": {"backend": "int8"}}
    out = model.generate(
        ids(1), **arguments, **settings, max_new_tokens=12, min_new_tokens=12, return_dict_in_generate=True
    )
    assert out.sequences.shape[1] == LENGTH + 12
    name = "cache" if "cache" in out else "past_key_values"
    assert all(layer.reads_prompt for layer in out[name].packed_layers)
    assert out[name].report().fallback_reads == 0


def test_a_prompt_with_gradients_has_them() -> None:
    model = model_of()
    cache = kvp.build_cache(model, {"backend": "int8"}).bind(model)
    model(ids(), labels=ids(), **as_argument(cache)).loss.backward()
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0
    assert cache.get_seq_length() == LENGTH


def test_no_kernels_are_built_for_models_that_lie_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "try_load", lambda: pytest.fail("asked for"))
    assert not exact.reads_prompts_faster(model_of().to("meta"), "auto")
    assert not exact.reads_prompts_faster(tiny_model("llama"), "auto")


class _Handles:
    """Notes which handles layers made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        from kvcache_plugins.layers import base

        def noted(*args: Any) -> Any:
            self.count += 1
            return made(*args)

        made = base.KVHandle
        monkeypatch.setattr(base, "KVHandle", noted)


@pytest.mark.parametrize(
    "case", ["fp32", "torch", "eager", "latents", "unbound", "gradients", "written into the model"]
)
def test_who_else_is_left_to_torch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    families = {"latents": "deepseek_v3", "written into the model": "bloom"}
    family = families.get(case, "llama")
    model = small_model(family) if family == "deepseek_v3" else tiny_model(family)
    model = model.to(torch.float32 if case == "fp32" else torch.bfloat16)
    if case == "eager":
        model.set_attn_implementation("eager")
    kernel = "torch" if case == "torch" else "auto"
    cache = kvp.build_cache(model, {"backend": "int8", "kernel": kernel})
    if case != "unbound":
        cache.bind(model)
    handles = _Handles(monkeypatch)
    with torch.set_grad_enabled(case == "gradients"):
        model(ids(), **as_argument(cache))
    assert handles.count == 0
    if case == "unbound":  # nothing is lost by it
        cache.reset()
        cache.bind(model)
        with torch.no_grad():
            model(ids(), **as_argument(cache))
        assert handles.count == 2 * len(cache.packed_layers)
