"""Models whose indexer chooses what is attended to: its keys and positions go where the packed tokens go."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

import kvcache_plugins as kvp
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing.generation import padded_prompt
from tests.models.families import NAMES, greedy, small_model
from tests.models.rounded import Rounded

LENGTH, NEW = 150, 5
INT8, EXACT = {"backend": "int8"}, {"backend": "int4", "residual_length": 1024}
# Latents, and keys and values, of layers that are all alike; and what says how many tokens are chosen.
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "deepseek_v32": ({}, "index_topk"),
    "hy_v4": ({}, "index_topk"),
    "qwen4_exp_text": ({"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}, "block_topk"),
}
FAMILIES = [name for name in MODELS if name in NAMES and "indexed_attention" in DYNAMIC_LAYER_TYPE_MAPPING]
NAMED = pytest.mark.parametrize("name", [name for name in FAMILIES if name != "hy_v4"])


def build(name: str) -> PreTrainedModel:
    return small_model(name, **MODELS[name][0])


def owned(layer: Any) -> list[Tensor]:
    """What transformers' own layer keeps."""
    kept = [layer.keys, layer.values, layer.indexer_keys, getattr(layer, "indexer_position_ids", None)]
    return [tensor for tensor in kept if tensor is not None]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_our_attention_attends_to_what_an_indexer_chose(name: str) -> None:
    model, chosen = build(name), MODELS[name][1]
    lengths = (LENGTH, 131)
    model.set_attn_implementation("eager")
    expected, dense, _ = greedy(model, lengths, NEW)
    model.set_attn_implementation("kvcache_plugins")
    for config in (None, EXACT):
        got, logits, _ = greedy(model, lengths, NEW, config)
        assert got.tolist() == expected.tolist()
        torch.testing.assert_close(logits, dense, atol=1e-4, rtol=1e-4)
    _, near, cache = greedy(model, lengths, NEW, INT8)
    assert cache.packed_layers and cache.report().fallback_reads == 0
    layers = {layer.layer_idx for layer in cache.packed_layers}
    _, rounded, _ = greedy(model, lengths, NEW, **as_argument(Rounded(layers, config=model.config)))
    assert (near[:, 1] - rounded[:, 1]).norm() < 0.002 * dense[:, 1].norm()
    for module in model.modules():
        if hasattr(module, chosen):
            setattr(module, chosen, LENGTH + NEW)
            module.token_budget = (LENGTH + NEW) * getattr(module, "compress_ratio", 1)
    assert greedy(model, lengths, NEW)[0].tolist() != expected.tolist(), "the choice matters"


@NAMED
def test_it_is_saved_counted_and_predicted(name: str, tmp_path: Path) -> None:
    model = build(name)
    cache = kvp.build_cache(model, INT8)
    prompt = padded_prompt((90,))["input_ids"]
    with torch.no_grad():
        model(prompt[:, :-2], **as_argument(cache))
        model(prompt[:, -2:-1], **as_argument(cache))
        assert cache.kv_bytes() == kvp.estimate(model, INT8, 89)
        cache.save_pretrained(tmp_path)
        loaded = kvp.KVCache.from_pretrained(tmp_path, model)
        expected = model(prompt[:, -1:], **as_argument(cache)).logits
        torch.testing.assert_close(model(prompt[:, -1:], **as_argument(loaded)).logits, expected)
    report = cache.report()
    assert cache.layers[0].indexer_keys.shape[:2] == (1, 90)
    assert report.dense_layers == {}
    dense = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt, **as_argument(dense))
    kept = [tensor for layer in dense.layers for tensor in owned(layer)]
    assert report.dense_bytes == sum(tensor.nbytes for tensor in kept if tensor.is_floating_point())
    positions = sum(tensor.nbytes for tensor in kept if tensor.dtype == torch.int64)
    for tokens, new_tokens in ((90, 1), (80, 11)):
        found = kvp.estimate(model, {"backend": "dense"}, tokens, new_tokens=new_tokens)
        assert found == report.dense_bytes + positions


@NAMED
def test_every_verb(name: str) -> None:
    """Of transformers' own layer and of one that packs nothing, after the same verbs."""
    model = build(name)
    ids = padded_prompt((60, 60))["input_ids"]
    caches = [kvp.build_cache(model, EXACT), DynamicCache(config=model.config)]
    for cache in caches:
        with torch.no_grad():
            model(ids[:, :40], **as_argument(cache))
            model(ids[:, 40:], **as_argument(cache))
        cache.crop(-7)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 1, 2, 0]))
        cache.batch_select_indices(torch.tensor([0, 2, 1]))
    ours, theirs = (cache.layers[0] for cache in caches)
    assert ours.is_indexer_initialized and ours.keys.shape == theirs.keys.shape
    assert len(owned(ours)) == len(owned(theirs)) == (4 if name == "qwen4_exp_text" else 3)
    for mine, other in zip(owned(ours), owned(theirs), strict=True):
        torch.testing.assert_close(mine + 0, other)
    ours.offload()
    ours.prefetch()
    copied = copy.deepcopy(ours)
    with torch.no_grad():
        got, expected = (model(ids[[0, 1, 0], :1], **as_argument(cache)).logits for cache in caches)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert [layer.indexer_keys.shape[1] for layer in (copied, ours)] == [53, 54]
    if ours.indexer_position_ids is not None:
        assert [layer.indexer_position_ids.shape for layer in (copied, ours)] == [(3, 3, 53), (3, 3, 54)]
    ours.reset()
    assert owned(ours) == [] and not ours.is_indexer_initialized
    assert ours.tensors() == {}


@pytest.mark.parametrize("skipped", [[], [0]], ids=["packed", "dense"])
@NAMED
def test_a_forward_that_stops_at_an_indexer_is_noticed(name: str, skipped: list[int]) -> None:
    """Where memory runs out: all layers have seen as many keys, and not all of their indexers."""
    model = build(name)
    cache = kvp.build_cache(model, {**INT8, "skip_layers": skipped})
    ids = padded_prompt((60, 60))["input_ids"]
    indexers = [module for module in model.modules() if type(module).__name__.endswith("Indexer")]

    def stop(*_: Any) -> None:
        raise MemoryError

    with torch.no_grad():
        model(ids[:, :40], **as_argument(cache))
        cache.bind(model)
        if name == "qwen4_exp_text":  # whose indexer is asked before the layer takes its keys
            hook = indexers[0].register_forward_hook(stop)
        else:
            hook = indexers[-1].register_forward_pre_hook(stop)
        with pytest.raises(MemoryError):
            model(ids[:, 40:], **as_argument(cache))
    hook.remove()
    assert len({layer.get_seq_length() for layer in cache.layers}) == 1
    with pytest.raises(ValueError, match="interrupted"):
        cache.bind(model)


@pytest.mark.parametrize("name", [name for name in ("deepseek_v32",) if name in FAMILIES])
def test_indexer_keys_follow_a_model_that_is_cast(name: str) -> None:
    model = build(name)
    ids = padded_prompt((60, 60))["input_ids"]
    cache = kvp.build_cache(model, {"backend": "int4"})
    with torch.no_grad():
        model(ids[:, :40], **as_argument(cache))
        logits = model.to(torch.bfloat16)(ids[:, 40:], **as_argument(cache)).logits
    assert cache.layers[0].indexer_keys.dtype == torch.bfloat16 and logits.isfinite().all()
