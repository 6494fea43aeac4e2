"""Prompts that are read by ours where that is faster than by the model's own attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import kvcache_plugins as kvp
from kvcache_plugins.attention import dispatch, exact
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
    monkeypatch.setattr(exact, "_multiplies_faster", lambda dtype: dtype == torch.bfloat16)


def ids(rows: int = 2, count: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randint(5, 100, (rows, count), generator=torch.Generator().manual_seed(seed))


def padded(pads: int = 20) -> Tensor:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :pads] = 0
    return mask


def model_of(family: str = "llama", **options: Any) -> Any:
    return tiny_model(family, dtype=torch.bfloat16, **options)


def check(model: Any, backend: dict[str, Any], mask: Tensor | None = None) -> Any:
    """The logits of a prompt are as near to those in fp32 as without a cache, and half."""
    cache = kvp.build_cache(model, backend).bind(model, mask, prompt_length=LENGTH)
    assert {layer.prompt_dtype for layer in cache.packed_layers} == {model.dtype}
    with torch.no_grad():
        got = model(ids(), attention_mask=mask, **as_argument(cache)).logits.float()
        plain = model(ids(), attention_mask=mask, use_cache=False).logits.float()
        expected = model.float()(ids(), attention_mask=mask, use_cache=False).logits
        model.bfloat16()
    real = slice(None) if mask is None else mask.bool()
    found, bound = ((logits - expected)[real].norm() / expected[real].norm() for logits in (got, plain))
    assert found <= 1.5 * bound + 1e-5
    return cache


@pytest.mark.parametrize("pads", [0, 20])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b["backend"])
def test_prompts_are_read_by_the_kernel(backend: dict[str, Any], pads: int) -> None:
    cache = check(model_of(), backend, padded(pads))
    assert set(cache.report().kernel) == {"cpu"} and cache.report().fallback_reads == 0


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mistral", "gemma3_text", "falcon_h1"])
def test_families(family: str) -> None:
    """With soft caps, sink logits, windows, recurrent branches."""
    model = small_model(family).bfloat16()
    model.set_attn_implementation("kvcache_plugins")
    check(model, {"backend": "int8"})


@pytest.mark.parametrize("pads", [0, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_our_own_function_reads_what_torch_cannot(
    family: str, dtype: torch.dtype, pads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Softcaps and sink logits; in any dtype, and where torch multiplies pairs as fast."""
    monkeypatch.setattr(exact, "_multiplies_faster", lambda dtype: False)
    dense, attend = [], dispatch.attend_unpacked
    monkeypatch.setattr(dispatch, "attend_unpacked", lambda *args: dense.append(attend(*args)) or dense[-1])
    # all of its experts, of which rounding chooses others
    others = {"num_local_experts": 2, "num_experts_per_tok": 2} if family == "gpt_oss" else {}
    model = small_model(family, layer_types=["full_attention"] * 2, **others).to(dtype)
    model.set_attn_implementation("kvcache_plugins")
    report = check(model, {"backend": "int8"}, padded(pads)).report()
    assert len(dense) == 2 * 2, "of two layers, of the two runs without a cache"
    assert report.fallback_reads == 0
    if (family, dtype) != ("gemma2", torch.float16):  # softcaps have no kernel for it
        assert set(report.kernel) == {"cpu"}


def test_our_own_function_leaves_to_torch_what_it_reads_as_fast() -> None:
    logits = []
    for attention in ("sdpa", "kvcache_plugins"):
        model = tiny_model("llama")
        model.set_attn_implementation(attention)
        cache = kvp.build_cache(model, {"backend": "snapkv", "budget": 100}).bind(model)
        with torch.no_grad():
            logits.append(model(ids(), **as_argument(cache)).logits)
            logits.append(model(ids(count=1), **as_argument(cache)).logits)  # of what the queries have chosen
    assert torch.equal(logits[0], logits[2])
    torch.testing.assert_close(logits[1], logits[3], atol=1e-5, rtol=1e-5)


def test_dropout_is_never_left_out() -> None:
    # of one layer, whose keys no dropout has reached: only a step's own makes its logits differ
    options = {"attn_implementation": "kvcache_plugins", "attention_dropout": 0.5, "num_hidden_layers": 1}
    model = tiny_model("llama", **options).train()
    found = []
    for _ in range(2):
        cache = kvp.build_cache(model, {"backend": "int8"}).bind(model)
        torch.manual_seed(len(found))
        with torch.no_grad():
            found.append([model(x, **as_argument(cache)).logits for x in (ids(), ids(count=1))])
    assert all(not torch.allclose(a, b) for a, b in zip(*found, strict=True))


def test_what_is_stored_does_not_depend_on_who_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(num_hidden_layers=1)
    caches = []
    for is_faster in (True, False):
        monkeypatch.setattr(exact, "_multiplies_faster", lambda dtype, faster=is_faster: faster)
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
    assert {layer.prompt_dtype for layer in out[name].packed_layers} == {torch.bfloat16}
    assert out[name].report().fallback_reads == 0


def test_a_prompt_with_gradients_has_them() -> None:
    model = model_of()
    cache = kvp.build_cache(model, {"backend": "int8"}).bind(model)
    model(ids(), labels=ids(), **as_argument(cache)).loss.backward()
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0
    assert cache.get_seq_length() == LENGTH


def test_no_kernels_are_built_for_models_that_lie_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "try_load", lambda: pytest.fail("asked for"))
    assert exact.prompt_dtype(model_of().to("meta"), "auto") is None
    assert exact.prompt_dtype(tiny_model("llama").double(), "auto") is None


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
    "case", ["fp32", "fp64", "torch", "eager by torch", "unbound", "gradients", "written into the model"]
)
def test_who_else_is_left_to_torch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    families = {"written into the model": "bloom", "eager by torch": "gemma2"}
    model = tiny_model(families.get(case, "llama"))
    model = model.to({"fp32": torch.float32, "fp64": torch.float64}.get(case, torch.bfloat16))
    kernel = "torch" if "torch" in case else "auto"
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


# ---- models that would make all logits at once


class _Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that anything makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(made)[0]:
            if isinstance(tensor, Tensor) and not func.is_view:
                self.numbers = max(self.numbers, tensor.numel())
        return made


WHOLE = [("gemma2", "eager"), ("gpt_oss", "eager"), ("llama", "eager"), ("deepseek_v3", "sdpa"),
         ("deepseek_v3", "eager"), ("minicpm3", "sdpa")]  # fmt: skip


@pytest.fixture
def without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


def served(attention: str, dtype: torch.dtype) -> None:
    """Skip what the model's own attention does faster on this processor."""
    if loader.instruction_set() == "portable" and (attention, dtype) == ("eager", torch.bfloat16):
        pytest.skip("the model's own attention is faster")


@pytest.mark.usefixtures("without_amx")
@pytest.mark.parametrize("pads", [0, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(("family", "attention"), WHOLE)
def test_models_that_make_all_logits(family: str, attention: str, dtype: torch.dtype, pads: int) -> None:
    served(attention, dtype)
    # without experts, of which rounding chooses others
    others = {"first_k_dense_replace": 4} if family == "deepseek_v3" else {}
    model = small_model(family, **others).to(dtype)
    model.set_attn_implementation(attention)
    cache = check(model, {"backend": "int8"}, padded(pads))
    assert cache.report().fallback_reads == 0
    if attention == "eager" and family != "deepseek_v3" and dtype != torch.float16:
        assert "cpu" in cache.report().kernel  # of latents, and in fp16, torch reads what is exact


@pytest.mark.usefixtures("without_amx")
@pytest.mark.parametrize("pads", [0, 20])
@pytest.mark.parametrize(("family", "attention"), WHOLE)
def test_all_logits_are_never_there_at_once(family: str, attention: str, pads: int) -> None:
    full = {"layer_types": ["full_attention"] * 2} if family == "gemma2" else {}  # softcaps of short windows
    model = small_model(family, **full)
    model.set_attn_implementation(attention)
    prompt, mask = ids(count=700), torch.ones(2, 700, dtype=torch.long)
    mask[0, :pads] = 0
    largest = {}
    for name in ("int8", "torch"):
        cache = kvp.build_cache(model, {"backend": "int8", "kernel": "torch" if name == "torch" else "auto"})
        cache.bind(model, mask)
        with torch.no_grad(), _Largest() as seen:
            model(prompt, attention_mask=mask, logits_to_keep=1, **as_argument(cache))
        largest[name] = seen.numbers
    heads = model.config.num_attention_heads
    assert largest["torch"] >= 2 * heads * 700 * 700, "the model's own attention"
    assert largest["int8"] <= 2 * 700 * 700, "a mask has so many numbers"


def test_attention_weights_are_the_models_own() -> None:
    model = small_model("gemma2")
    found = []
    for kernel in ("auto", "torch"):
        cache = kvp.build_cache(model, {"backend": "int8", "kernel": kernel}).bind(model, padded())
        with torch.no_grad():
            found.append(model(ids(), attention_mask=padded(), output_attentions=True, **as_argument(cache)))
    assert torch.equal(found[0].logits, found[1].logits)
    assert all(torch.equal(a, b) for a, b in zip(found[0].attentions, found[1].attentions, strict=True))
    assert cache.report().fallback_reads == 0


def test_an_attention_that_computes_something_else_reads_tensors() -> None:
    """That of GPT-2 is in the modelling file, and its modules may scale by their layer's number."""
    model = tiny_model("gpt2", attn_implementation="eager", scale_attn_by_inverse_layer_idx=True)
    found = []
    for kernel in ("auto", "torch"):
        cache = kvp.build_cache(model, {"backend": "int8", "kernel": kernel}).bind(model)
        with torch.no_grad():
            found.append(model(ids(), **as_argument(cache)).logits)
        assert cache.report().fallback_reads == 0
    assert torch.equal(found[0], found[1])


def test_a_mask_that_hides_all_from_a_real_token_is_heeded() -> None:
    """Such a query sees all slots alike; only of pads is that nobody's concern."""
    model = small_model("llama", num_hidden_layers=1)
    model.set_attn_implementation("eager")
    least = torch.finfo(torch.float32).min
    mask = torch.full((2, 1, LENGTH, LENGTH), least).triu(1)
    mask[:, :, 90] = least
    logits = []
    for kernel in ("auto", "torch"):
        cache = kvp.build_cache(model, {"backend": "int8", "kernel": kernel}).bind(model, padded())
        with torch.no_grad():
            logits.append(model(ids(), attention_mask=mask, **as_argument(cache)).logits)
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)
