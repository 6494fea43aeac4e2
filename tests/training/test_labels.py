"""Labels are the maxima of the very logits that the model's own attention puts into its softmax."""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.diffllama import modeling_diffllama

from kvcache_plugins.models.cache_argument import cache_of
from kvcache_plugins.retaining.configuration import RetainingHeadsConfig
from kvcache_plugins.retaining.heads import RetainingHeads
from kvcache_plugins.testing import tiny_model
from kvcache_plugins.training import labels, observing
from kvcache_plugins.training.arguments import LocretTrainingArguments
from kvcache_plugins.training.examples import Collator, Example
from kvcache_plugins.training.labels import max_logits
from kvcache_plugins.training.observing import LayerView, observe_layers
from kvcache_plugins.training.targets import Targets
from kvcache_plugins.training.trainer import LocretTrainer

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "olmo2", "gpt_neox", "gemma2", "granite", "glm4",
    "cohere",
)  # fmt: skip


def softmax_inputs(model: Any, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What eager attention gives to its softmax, layer by layer: `(1, Hq, T, T)`."""
    seen: list[Tensor] = []
    original = torch.nn.functional.softmax

    def softmax(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(logits.detach().clone())
        return original(logits, *args, **kwargs)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "softmax", softmax)
        model(ids)
    return seen


def trainer_for(model: Any, tmp_path: Any, **config: Any) -> LocretTrainer:
    heads = RetainingHeads(RetainingHeadsConfig.from_model(model, hidden_dim=8, **config))
    args = LocretTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    return LocretTrainer(heads, model, args, data_collator=Collator())


def targets(trainer: LocretTrainer, *examples: Example) -> list[Targets]:
    found: dict[int, Targets] = {}
    trainer.observe(Collator()(examples), found.__setitem__)
    return [found[index] for index in sorted(found)]


def has_hooks(model: Any) -> bool:
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def example(length: int, answer: int, seed: int = 0) -> Example:
    ids = torch.randint(3, 120, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Example(ids[: length - answer], ids[length - answer :])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_labels_are_the_eager_logits(
    family: str, implementation: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"layer_types": ["full_attention"] * 2} if family == "gemma2" else {}
    if (family, implementation) == ("gemma2", "sdpa"):
        pytest.skip("transformers gives this family no sdpa: its logits are capped")
    text = example(23, 6)
    eager = tiny_model(family, attn_implementation="eager", **options)
    logits = softmax_inputs(eager, torch.tensor([[*text.prompt_ids, *text.answer_ids]]), monkeypatch)
    model = tiny_model(family, attn_implementation=implementation, **options)
    found = targets(trainer_for(model, tmp_path), text)
    assert len(found) == len(logits) == 2
    kv_heads = found[0].labels.shape[1]
    for layer, wanted in zip(found, logits, strict=True):
        answers = wanted[0, :, 17:, :17].unflatten(0, (kv_heads, -1))
        torch.testing.assert_close(layer.labels[0], answers.amax((1, 2)), rtol=1e-5, atol=1e-5)
    assert model.config._attn_implementation == implementation
    assert not has_hooks(model)


def test_blocks_of_queries_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = torch.randn(8, 13, 16), torch.randn(2, 40, 16)
    whole = (query.view(2, 4, 13, 16) @ key[:, None].transpose(2, 3) / 4).amax((1, 2))
    for largest in (1, 700, 1 << 24):
        monkeypatch.setattr(labels, "_LARGEST_BLOCK", largest)
        torch.testing.assert_close(max_logits(query, key, 0.25), whole)
    capped = max_logits(query, key, 0.25, softcap=2.0)
    torch.testing.assert_close(capped, 2 * torch.tanh(whole / 2))
    bf16 = max_logits(query.bfloat16(), key.bfloat16(), 0.25)
    assert bf16.dtype == torch.float32 and bf16.unique().numel() == 80
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(max_logits(query, key, 0.25), max_logits(query, key, 0.25))
        torch.testing.assert_close(max_logits(query, key, 0.25), whole)


def test_wrong_shapes() -> None:
    with pytest.raises(ValueError, match="at least one query"):
        max_logits(torch.randn(4, 0, 8), torch.randn(2, 5, 8), 1.0)
    with pytest.raises(ValueError, match="whole number"):
        max_logits(torch.randn(3, 1, 8), torch.randn(2, 5, 8), 1.0)


def test_a_padded_batch_gives_what_its_rows_give(tmp_path: Any) -> None:
    trainer = trainer_for(tiny_model("llama"), tmp_path)
    texts = [example(31, 5, 1), example(18, 9, 2)]
    batch = targets(trainer, *texts)
    for row, text in enumerate(texts):
        for layer, alone in zip(batch, targets(trainer, text), strict=True):
            length = len(text.prompt_ids)
            assert layer.mask[row].sum() == length
            torch.testing.assert_close(layer.labels[row, :, :length], alone.labels[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(layer.features[row, :length], alone.features[0], rtol=1e-5, atol=1e-5)


def test_autocast_leaves_labels_alone(tmp_path: Any) -> None:
    trainer, text = trainer_for(tiny_model("llama"), tmp_path), example(31, 5)
    with torch.autocast("cpu", torch.bfloat16):
        inside = targets(trainer, text)
    for layer, same in zip(inside, targets(trainer, text), strict=True):
        assert torch.equal(layer.labels, same.labels) and torch.equal(layer.features, same.features)


def test_norms_are_those_of_the_cached_keys(tmp_path: Any) -> None:
    model, text = tiny_model("llama"), example(31, 5)
    cache = cache_of(model(torch.tensor([[*text.prompt_ids, *text.answer_ids]]), use_cache=True))
    for layer, cached in zip(targets(trainer_for(model, tmp_path), text), cache.layers, strict=True):
        torch.testing.assert_close(layer.key_norms, cached.keys[:, :, :26].norm(dim=-1))


def test_the_first_tokens_alone_with_labels_of_the_whole(tmp_path: Any) -> None:
    model, text = tiny_model("llama"), example(31, 5)
    whole = targets(trainer_for(model, tmp_path), text)
    cut = targets(trainer_for(model, tmp_path, max_train_length=10), text)
    for layer, all_of_it in zip(cut, whole, strict=True):
        assert layer.features.shape[1] == layer.labels.shape[2] == layer.mask.shape[1] == 10
        torch.testing.assert_close(layer.labels, all_of_it.labels[..., :10], rtol=1e-6, atol=1e-6)


def test_attention_of_its_own_cannot_be_observed() -> None:
    model = tiny_model("bloom")
    with pytest.raises(ValueError, match="BloomAttention does not call transformers' attention functions"):
        observe_layers(model, {"input_ids": torch.tensor([[3, 4, 5]])}, lambda index, view: None)
    assert not has_hooks(model)


def test_a_layer_that_attends_twice_is_seen_once() -> None:
    """DiffLlama reads two halves of its values with the same queries and keys."""
    if "attention_interface(" not in inspect.getsource(modeling_diffllama):
        pytest.skip("this release of transformers has attention of DiffLlama's own")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = modeling_diffllama.DiffLlamaConfig(vocab_size=9, num_hidden_layers=2, **sizes)
    seen: list[int] = []
    observe_layers(
        modeling_diffllama.DiffLlamaForCausalLM(config).eval(),
        {"input_ids": torch.tensor([[3, 4, 5]])},
        lambda index, view: seen.append(index),
    )
    assert seen == [0, 1]


def test_views_hold_what_attention_multiplies() -> None:
    model, seen = tiny_model("granite", attention_multiplier=0.75), []
    observe_layers(
        model, {"input_ids": torch.tensor([[3, 4, 5]])}, lambda index, view: seen.append((index, view))
    )
    assert [index for index, _ in seen] == [0, 1]
    view = seen[0][1]
    assert view.query.shape == (1, 4, 3, 16) and view.key.shape == (1, 2, 3, 16)
    assert view.scaling == 0.75 and view.softcap is None and math.isfinite(view.features.sum().item())


def test_a_call_without_a_factor_has_that_of_its_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of attention functions, on which a model that is not of transformers may rely."""
    seen: list[LayerView] = []
    module: Any = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"), is_causal=True)
    told = (0, SimpleNamespace(take=lambda index: None), lambda index, view: seen.append(view))
    monkeypatch.setattr(observing._current, "seen", {id(module): told}, raising=False)
    states = torch.randn(1, 2, 3, 16)
    observing._showing("sdpa")(module, states, states, states, None)
    assert [view.scaling for view in seen] == [0.25]


def test_an_observer_may_observe_the_model_anew() -> None:
    model, inputs = tiny_model("llama"), {"input_ids": torch.tensor([[3, 4, 5]])}
    seen: list[tuple[int, int]] = []
    observe_layers(
        model,
        inputs,
        lambda outer, _: observe_layers(model, inputs, lambda inner, _: seen.append((outer, inner))),
    )
    assert seen == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert model.config._attn_implementation == "sdpa" and not has_hooks(model)
