"""Models that run `eager`: packed layers are attended to by our function where it computes the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvcache_plugins as kvp
from kvcache_plugins.attention.eager import wrap_eager_function
from kvcache_plugins.errors import KernelUnavailableError
from kvcache_plugins.kernels import loader
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing import assert_close, tiny_model

CONFIG: dict[str, Any] = {"backend": "int4", "residual_length": 16}
ASKED = "attention weights are asked for"
FAMILIES = [
    "cohere",
    "exaone4",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "gpt_oss",
    "llama",
    "phi",
    "qwen2",
]


def eager_model(name: str, **options: Any) -> Any:
    return tiny_model(name, attn_implementation="eager", **options)


def filled(model: Any, config: dict[str, Any] = CONFIG, tokens: int = 100) -> kvp.KVCache:
    cache = kvp.build_cache(model, config)
    with torch.no_grad():
        model(prompt(tokens), **as_argument(cache), attention_mask=mask(tokens))
    return cache


def prompt(tokens: int) -> Tensor:
    return torch.randint(3, 120, (2, tokens), generator=torch.Generator().manual_seed(tokens))


def mask(tokens: int) -> Tensor:
    return torch.ones(2, tokens, dtype=torch.long).index_fill_(1, torch.arange(5), 0)


def step(model: Any, cache: kvp.KVCache, count: int = 1, **options: Any) -> Any:
    seen = cache.get_seq_length()
    with torch.no_grad():
        return model(prompt(count), **as_argument(cache), attention_mask=mask(seen + count), **options)


def reasons(cache: kvp.KVCache) -> set[str]:
    return set(cache.report().kernel_reasons.values())


def test_the_default_dtype_does_not_matter() -> None:
    model = eager_model("gpt_oss", seed=3).bfloat16()
    cache = filled(model)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        step(model, cache)
    finally:
        torch.set_default_dtype(before)
    assert cache.report().fallback_reads == 0 and reasons(cache) == set()


@pytest.mark.parametrize("count", [1, 5, 70])
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_layers_are_not_decoded(name: str, count: int, request: pytest.FixtureRequest) -> None:
    model = eager_model(name)
    cache = filled(model)
    decoded = copy.deepcopy(cache)
    got = step(model, cache, count).logits
    report = cache.report()
    assert report.fallback_reads == 0 and reasons(cache) == set()
    packed = [report.kernel[layer.layer_idx] for layer in cache.packed_layers]
    assert set(packed) == {"cpu" if loader.try_load() else "torch"}
    request.getfixturevalue("eager_decodes")
    expected = step(model, decoded, count).logits
    assert decoded.report().fallback_reads == 2 * len(packed)
    assert_close(name, expected, got, 3e-5)


def test_weights_are_given_to_whoever_asks() -> None:
    model = eager_model("gemma2")
    cache = filled(model)
    plain = copy.deepcopy(cache)
    found = step(model, cache, output_attentions=True)
    assert [tuple(weights.shape[2:]) for weights in found.attentions] == [(1, 16), (1, 101)]
    assert all(torch.allclose(weights.sum(-1), torch.ones(())) for weights in found.attentions)
    assert reasons(cache) == {f"multiplied apart for attn_implementation='eager': {ASKED}"}
    assert cache.report().fallback_reads == 0
    assert_close("logits", found.logits, step(model, plain).logits, 3e-5)
    assert plain.report().fallback_reads == 0, "asked for once, not for ever"
    step(model, plain, output_hidden_states=True)
    assert plain.report().fallback_reads == 0
    out = model.generate(
        prompt(90), max_new_tokens=4, cache_implementation="quantized", cache_config=CONFIG,
        return_dict_in_generate=True, output_attentions=True,
    )  # fmt: skip
    assert len(out.attentions) == 4 and out.attentions[3][1].shape[2:] == (1, 93)


def test_what_is_collected_is_asked_for() -> None:
    from transformers.utils import output_capturing

    key, value, layer = handles()
    query = torch.randn(2, 4, 1, 16)
    for names, is_asked in ((["hidden_states"], False), (["hidden_states", "attentions"], True)):
        token = output_capturing._active_collector.set({name: [] for name in names})
        try:
            _, weights = wrap_eager_function(plain_eager)(Module(), query, key, value, None)
        finally:
            output_capturing._active_collector.reset(token)
        assert (weights is not None) is is_asked
    assert layer.fallback_reads == 0
    assert layer.kernel_reason.endswith(ASKED)


def test_a_configuration_may_ask() -> None:
    model = eager_model("llama")
    model.config.output_attentions = True
    assert len(step(model, cache := filled(model)).attentions) == 2
    assert reasons(cache) == {f"multiplied apart for attn_implementation='eager': {ASKED}"}


def test_hooks_see_what_they_always_saw() -> None:
    model = eager_model("llama")
    cache, seen = filled(model), []
    attention = model.model.layers[0].self_attn
    hook = attention.register_forward_hook(lambda module, args, output: seen.append(output[1].shape))
    step(model, cache)
    assert seen == [(2, 4, 1, 101)] and cache.report().fallback_reads == 0
    assert "a hook is shown" in cache.report().kernel_reasons[0]
    assert 1 not in cache.report().kernel_reasons
    hook.remove()
    step(model, cache)
    assert reasons(cache) == set() and seen == [(2, 4, 1, 101)]


def test_a_model_that_does_not_say_what_is_asked_for_multiplies_itself() -> None:
    model = eager_model("gpt2")
    cache = filled(model)
    step(model, cache)
    assert cache.report().fallback_reads == 0 and len(reasons(cache)) == 1
    assert "does not tell its attention function" in reasons(cache).pop()


class Module(nn.Module):
    """What transformers' attention functions ask of an attention module."""

    is_causal = True

    def forward(self, states: Tensor) -> Tensor:
        return states


def plain_eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> Any:
    """Attention as a modelling file has it, and what may be different in one."""
    key, value = (states.repeat_interleave(query.shape[1] // states.shape[1], 1) for states in (key, value))
    logits = query @ key.transpose(2, 3) * (kwargs.get("scaling") or query.shape[3] ** -0.5)
    logits = logits * getattr(module, "factor", 1.0)
    if (softcap := getattr(module, "softcap", kwargs.get("softcap"))) is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None:
        logits = logits + mask
    if (bias := kwargs.get("position_bias")) is not None:
        logits = logits + bias
    if (sinks := getattr(module, "sinks", kwargs.get("s_aux"))) is not None:
        sinks = sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sinks], dim=-1)
    elif (sinks := kwargs.get("sinks")) is not None:
        logits = torch.cat([logits, getattr(module, "more", 1) * sinks], dim=-1)
    weights = logits.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2), weights


def handles(kernel: str = "auto") -> tuple[Tensor, Tensor, Any]:
    cache = filled(tiny_model("llama"), {**CONFIG, "kernel": kernel})
    layer = cache.packed_layers[0]
    return (*layer.update(torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 16)), layer)


@pytest.mark.parametrize(
    ("attributes", "arguments", "is_known"),
    [
        ({}, {}, True),
        ({}, {"scaling": 0.3, "softcap": 20.0, "s_aux": torch.tensor([0.5, 3.0, -2.0, 1.0])}, True),
        (
            {"sinks": torch.tensor([0.5, 3.0, -2.0, 1.0])},
            {"s_aux": torch.tensor([0.5, 3.0, -2.0, 1.0])},
            True,
        ),
        ({"sinks": torch.tensor([0.5, 3.0, -2.0, 1.0])}, {}, False),
        ({}, {"position_bias": torch.randn(2, 4, 1, 101), "sinks": torch.randn(2, 4, 1, 1)}, True),
        ({"more": 2}, {"sinks": torch.randn(2, 4, 1, 1)}, False),
        ({"factor": 1.01}, {}, False),
        ({"softcap": 50.0}, {}, False),
        ({"softcap": 50.0}, {"softcap": 50.0}, True),
    ],
)
def test_a_function_is_replaced_where_ours_does_the_same(
    attributes: dict[str, Any], arguments: dict[str, Any], is_known: bool
) -> None:
    module = Module().eval()
    for name, value in attributes.items():
        setattr(module, name, value)
    key, value, layer = handles()
    query = torch.randn(2, 4, 1, 16) * 5
    added = torch.zeros(2, 1, 1, 101).masked_fill_(torch.arange(101) < 20, torch.finfo(torch.float32).min)
    expected, _ = plain_eager(
        module, query, key.tokens.dense(torch.float32), value.tokens.dense(torch.float32), added, **arguments
    )
    got, weights = wrap_eager_function(plain_eager)(
        module, query, key, value, added, dropout=0.0, **arguments
    )
    assert_close("output", expected, got, 3e-5)
    assert (weights is None) is is_known and layer.fallback_reads == 0
    if not is_known:
        assert layer.kernel_reason.endswith("Module computes something else than is known")


def test_a_window_is_what_the_mask_says() -> None:
    key, value, layer = handles()
    query, nothing = torch.randn(2, 4, 1, 16), torch.zeros(2, 1, 1, 101)
    wrapped = wrap_eager_function(plain_eager)
    with_window, _ = wrapped(Module(), query, key, value, nothing, sliding_window=5, is_causal=True)
    assert torch.equal(with_window, wrapped(Module(), query, key, value, nothing)[0])
    assert layer.fallback_reads == 0


def test_what_is_not_understood_is_left_alone() -> None:
    def strict(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *rest: Any) -> Any:
        return plain_eager(module, query, key, value, mask)

    key, value, layer = handles()
    query = torch.randn(2, 4, 1, 16)
    _, weights = wrap_eager_function(strict)(Module(), query, key, value, None, 0.25)
    assert weights is not None

    def picky(module: Any, query: Tensor, *rest: Any, **kwargs: Any) -> Any:
        if query.shape[0] == 1:
            raise TypeError
        return plain_eager(module, query, *rest, **kwargs)

    key, value, layer = handles()
    wrap_eager_function(picky)(Module(), query, key, value, None)
    assert layer.kernel_reason.endswith("it cannot be compared with ours (TypeError)")


def adding_up(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    """Attention of which no product is one of matrices."""
    key, value = (states.repeat_interleave(query.shape[1] // states.shape[1], 1) for states in (key, value))
    weights = (query[:, :, :, None] * key[:, :, None]).sum(-1).softmax(-1)
    return (weights[..., None] * value[:, :, None]).sum(3).transpose(1, 2), weights


def test_what_is_no_product_is_decoded() -> None:
    key, value, layer = handles()
    query = torch.randn(2, 4, 1, 16)
    wrap_eager_function(adding_up)(Module(), query, key, value, None, scaling=0.5)
    assert layer.fallback_reads == 2 and layer.kernel == "torch"
    assert layer.kernel_reason.startswith("decoded whole for attn_implementation='eager': Module computes")


def test_native_says_why_not() -> None:
    if not loader.try_load():
        pytest.skip("there are no CPU kernels")
    module = Module()
    module.factor = 2.0
    query, (key, value, layer) = torch.randn(2, 4, 1, 16), handles("native")
    wrap_eager_function(plain_eager)(module, query, key, value, None)
    assert layer.kernel == "cpu" and layer.kernel_reason.endswith("something else than is known")
    with pytest.raises(KernelUnavailableError, match=r"layer 0.*'eager'.*something else than is known"):
        wrap_eager_function(adding_up)(module, query, key, value, None, scaling=0.5)


def test_dropout_in_training_is_the_models() -> None:
    key, value, _ = handles()
    seen = []

    def eager(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        seen.append(kwargs.get("dropout"))
        return plain_eager(module, query, key, value, mask)

    wrap_eager_function(eager)(Module().train(), torch.randn(2, 4, 1, 16), key, value, None, dropout=0.5)
    assert seen[-1] == 0.5


def test_the_seam_is_reversible() -> None:
    assert ALL_ATTENTION_FUNCTIONS.get_interface("eager", plain_eager).__wrapped__ is plain_eager
    kvp.uninstall()
    try:
        assert ALL_ATTENTION_FUNCTIONS.get_interface("eager", plain_eager) is plain_eager
    finally:
        kvp.install()
    assert ALL_ATTENTION_FUNCTIONS.get_interface("eager", plain_eager) is wrap_eager_function(plain_eager)
    with pytest.raises(KeyError):
        ALL_ATTENTION_FUNCTIONS.get_interface("no such", plain_eager)


def test_a_compiled_model_runs_eager_as_before() -> None:
    model = eager_model("gemma2", num_hidden_layers=2)
    kvp.build_cache(model, CONFIG)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        found = compiled(prompt(20), use_cache=False).logits
        assert torch.equal(found, model(prompt(20), use_cache=False).logits)
