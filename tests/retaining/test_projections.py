"""The tap: exactly what the projections of every family gave, for the forwards that are wanted."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, GPTBigCodeConfig, GPTBigCodeForCausalLM

from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.retaining.configuration import RetainingHeadsConfig
from kvcache_plugins.retaining.projections import ProjectionTap
from kvcache_plugins.testing import tiny_model

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma",
    "olmo2",
    "gpt_neox",
    "gpt2",
    "bloom",
    "mpt",
)
IDS = torch.arange(3, 17).view(2, 7)


class TakingCache(DynamicCache):
    """Takes the features where a cache of ours would: inside `update`."""

    def __init__(self, model: Any) -> None:
        super().__init__(config=model.config)
        self.tap = ProjectionTap.of(model)
        self.features: dict[int, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        self.features[layer_idx] = self.tap.take(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def is_taking(cache: Any) -> bool:
    return isinstance(cache, TakingCache)


def attention_modules(model: nn.Module) -> dict[int, nn.Module]:
    return {
        module.layer_idx: module
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int) and "Attention" in type(module).__name__
    }


def expected(family: str, module: Any, hidden: Tensor) -> Tensor:
    """Queries, keys and values as the family's own modelling code splits them."""
    if family == "gpt_neox":
        fused = module.query_key_value(hidden).view(2, 7, -1, 3 * module.head_size)
        return torch.cat([part.flatten(2) for part in fused.chunk(3, dim=-1)], dim=-1)
    if family == "bloom":
        query, key, value = module._reshape(module.query_key_value(hidden))
        return torch.cat([x.transpose(1, 2).flatten(2) for x in (query, key, value)], dim=-1)
    if family == "phi3":
        return module.qkv_proj(hidden)
    if family == "mpt":
        return module.Wqkv(hidden)
    if family == "gpt2":
        return module.c_attn(hidden)
    return torch.cat([module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)], dim=-1)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_features_are_the_projections(family: str) -> None:
    model = tiny_model(family)
    inputs: dict[int, Tensor] = {}
    for index, module in attention_modules(model).items():
        module.register_forward_pre_hook(
            lambda _, args, kwargs, index=index: (
                inputs.__setitem__(index, [*args, *kwargs.values()][0]) or None
            ),
            with_kwargs=True,
        )
    ProjectionTap.of(model).attach(is_taking)
    cache = TakingCache(model)
    model(IDS, **as_argument(cache))
    ProjectionTap.of(model).detach()
    assert sorted(cache.features) == [0, 1]
    width = RetainingHeadsConfig.from_model(model).input_dim
    for index, features in cache.features.items():
        assert features.shape == (2, 7, width)
        torch.testing.assert_close(
            features, expected(family, attention_modules(model)[index], inputs[index]), rtol=0, atol=0
        )


@pytest.mark.parametrize("multi_query", [False, True])
@torch.no_grad()
def test_features_of_one_name_in_two_orders(multi_query: bool) -> None:
    """GPT-BigCode fuses by head, unless all heads share one key."""
    sizes = {"vocab_size": 64, "n_embd": 32, "n_head": 4, "n_layer": 1, "n_positions": 32}
    model = GPTBigCodeForCausalLM(GPTBigCodeConfig(**sizes, multi_query=multi_query)).eval()
    attention = model.transformer.h[0].attn
    outputs: list[Tensor] = []
    attention.c_attn.register_forward_hook(lambda module, args, output: outputs.append(output))
    ProjectionTap.of(model).attach(is_taking)
    cache = TakingCache(model)
    model(IDS, **as_argument(cache))
    (fused,) = outputs
    if not multi_query:
        parts = fused.view(2, 7, 4, 24).split(8, dim=-1)
        fused = torch.cat([part.flatten(2) for part in parts], dim=-1)
    assert torch.equal(cache.features[0], fused)
    keys = fused[..., 32:40] if multi_query else fused[..., 32:64]
    assert torch.equal(cache.layers[0].keys, keys.unflatten(-1, (-1, 8)).transpose(1, 2))


def test_only_wanted_forwards_and_once() -> None:
    model = tiny_model("llama")
    tap = ProjectionTap.of(model)
    assert tap is ProjectionTap.of(model) and tap.attach(is_taking) is tap.attach(is_taking)
    hooks = len(model.model.layers[0].self_attn.q_proj._forward_hooks)
    assert hooks == 1
    model(IDS, **as_argument(DynamicCache(config=model.config)))
    model(IDS)
    with pytest.raises(RuntimeError, match="layer 0 were not caught"):
        tap.take(0)
    model(IDS, **as_argument(TakingCache(model)))
    with pytest.raises(RuntimeError, match="layer 1 were not caught"):  # taken already
        tap.take(1)
    with pytest.raises(RuntimeError, match="known layers are"):
        tap.take(7)


def test_what_is_not_taken_is_forgotten_also_after_a_failure() -> None:
    from kvcache_plugins.retaining import projections

    class Failing(TakingCache):
        def update(self, *args: Any, **kwargs: Any) -> Any:
            raise ZeroDivisionError

    model = tiny_model("llama")
    ProjectionTap.of(model).attach(is_taking)
    with pytest.raises(ZeroDivisionError):
        model(IDS, **as_argument(Failing(model)))
    assert projections._open_slots() == {}


def test_detaching_leaves_no_hook_and_several_may_want() -> None:
    model = tiny_model("llama")
    tap = ProjectionTap.of(model)

    def never(cache: Any) -> bool:
        return False

    tap.attach(never).attach(is_taking)
    tap.detach(never)
    cache = TakingCache(model)
    model(IDS, **as_argument(cache))
    assert len(cache.features) == 2
    tap.detach(is_taking)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert "projection_tap" not in str(list(model.state_dict())) and len(list(model.modules())) > 1


def test_a_copy_of_the_model_has_a_tap_of_its_own() -> None:
    model = tiny_model("llama")
    ProjectionTap.of(model).attach(is_taking)
    other = copy.deepcopy(model)
    assert ProjectionTap.of(other) is not ProjectionTap.of(model)
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight.zero_()
    caches = [TakingCache(model), TakingCache(other)]
    for each, cache in zip((model, other), caches, strict=True):
        each(IDS, **as_argument(cache))
    assert caches[1].features[0][..., :64].abs().max() == 0 < caches[0].features[0][..., :64].abs().max()


def test_threads_do_not_see_each_other() -> None:
    model = tiny_model("llama")
    ProjectionTap.of(model).attach(is_taking)
    caches = [TakingCache(model) for _ in range(4)]
    texts = [torch.randint(3, 100, (1, 40)) for _ in caches]
    threads = [
        threading.Thread(target=lambda i=i: model(texts[i], **as_argument(caches[i]))) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for text, cache in zip(texts, caches, strict=True):
        alone = TakingCache(model)
        model(text, **as_argument(alone))
        torch.testing.assert_close(cache.features, alone.features)


class Adapted(nn.Module):
    """What PEFT makes of a projection: the projection, and something beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * self.base(hidden)


@pytest.mark.parametrize("is_attached_before", [False, True])
def test_wrapped_projections_give_the_output_of_the_wrapper(is_attached_before: bool) -> None:
    model = tiny_model("llama")
    plain = TakingCache(model)
    tap = ProjectionTap.of(model).attach(is_taking)
    model(IDS, **as_argument(plain))
    if not is_attached_before:
        tap.detach()
    attention = model.model.layers[0].self_attn
    attention.q_proj = Adapted(attention.q_proj)
    tap.attach(is_taking)
    adapted = TakingCache(model)
    model(IDS, **as_argument(adapted))
    torch.testing.assert_close(adapted.features[0][..., :64], 2 * plain.features[0][..., :64])
    torch.testing.assert_close(adapted.features[0][..., 64:], plain.features[0][..., 64:])


def test_a_model_without_known_projections() -> None:
    with pytest.raises(ValueError, match=r"was found in MambaForCausalLM|was found in DeepseekV3ForCausalLM"):
        ProjectionTap.of(tiny_model("deepseek_v3"))
