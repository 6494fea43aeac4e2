"""Latents that some layers cache by themselves, or borrow of an earlier layer: those layers stay dense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, DynamicCache, PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

import kvcache_plugins as kvp
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.layer_plan import key_value_heads
from kvcache_plugins.testing.generation import padded_prompt
from tests.models.families import greedy
from tests.models.rounded import Rounded
from tests.models.showing import TEXT, make

INT8, EXACT = {"backend": "int8"}, {"backend": "int4", "residual_length": 1024}
LENGTHS, NEW = (150, 111), 4
ALONE = "indexed_attention: caches latents without rotated keys beside them"
BORROWED = "indexed_attention: attends to what an earlier layer has cached"
# How layers share latents, and which of them stay dense.
SHARING: dict[str, tuple[dict[str, Any], dict[int, str]]] = {
    "all-their-own": ({}, {3: ALONE}),
    "choices-shared": ({"indexer_types": ["full", "shared", "full", "shared"]}, {3: ALONE}),
    "latents-shared": (
        {"kv_source_layers": [0, 1, 0, 1], "indexer_types": ["full"] * 4, "no_rope_layers": [1] * 4},
        {2: BORROWED, 3: BORROWED},
    ),
    "both-shared": (
        {
            "kv_source_layers": [0, 1, 0, 1],
            "indexer_types": ["full", "full", "shared", "full"],
            "no_rope_layers": [1, 0, 1, 0],
        },
        {
            1: ALONE,
            2: "dummy: not a growing key/value cache of full attention",
            3: BORROWED,
        },
    ),
}
LARGE4 = pytest.mark.skipif(
    "mistral_large4" not in CONFIG_MAPPING, reason="this transformers has no such model"
)
SHARED = pytest.mark.parametrize("sharing", SHARING)


def latent_model(name: str, **text: Any) -> PreTrainedModel:
    sizes = {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
    }
    tower = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    whole = CONFIG_MAPPING[name]()
    config = type(whole)(
        text_config=type(whole.text_config)(**TEXT | sizes | text),
        vision_config=type(whole.vision_config)(**tower, head_dim=16) if name == "mistral_large4" else None,
    )
    return make(config)


def large4(sharing: str) -> PreTrainedModel:
    return latent_model("mistral_large4", qk_rope_head_dim=16, index_topk=24, **SHARING[sharing][0])


@LARGE4
@SHARED
def test_generation(sharing: str) -> None:
    model = large4(sharing)
    tokens, logits, _ = greedy(model, LENGTHS, NEW)
    same, exact, cache = greedy(model, LENGTHS, NEW, EXACT)
    assert same.tolist() == tokens.tolist()
    torch.testing.assert_close(exact, logits, atol=1e-4, rtol=1e-4)
    dense = SHARING[sharing][1]
    assert cache.report().dense_layers == dense

    _, near, cache = greedy(model, LENGTHS, NEW, INT8)
    report = cache.report()
    assert report.dense_layers == dense
    assert [index for index, kernel in enumerate(report.kernel) if kernel == "dense"] == sorted(dense)
    packed = set(range(4)) - set(dense)
    assert all(cache.layers[index].stored_keys.packed_length == cache.get_seq_length() for index in packed)
    rounded = Rounded(packed, config=model.config.get_text_config(decoder=True))
    _, expected, _ = greedy(model, LENGTHS, NEW, **as_argument(rounded))
    assert (near[:, 1] - expected[:, 1]).norm() < 0.002 * logits[:, 1].norm()


@LARGE4
@SHARED
def test_it_is_counted_predicted_and_saved(sharing: str, tmp_path: Path) -> None:
    model = large4(sharing)
    prompt = padded_prompt((90,))["input_ids"]
    cache, dense = kvp.build_cache(model, INT8), DynamicCache(config=model.config.text_config)
    with torch.no_grad():
        for each in (cache, dense):
            model(prompt[:, :-2], **as_argument(each))
            model(prompt[:, -2:-1], **as_argument(each))
    kept = [tensor for layer in dense.layers for tensor in owned(layer)]
    assert cache.report().dense_bytes == sum(tensor.nbytes for tensor in kept)
    assert kvp.estimate(model, {"backend": "dense"}, 89) == cache.report().dense_bytes
    assert kvp.estimate(model, INT8, 89) == cache.kv_bytes()
    for index, layer in enumerate(dense.layers):
        if (keys := getattr(layer, "keys", None)) is not None:
            shape = 1, keys.shape[3], layer.values.shape[3]
            assert key_value_heads(model.config.text_config, index) == shape
    cache.save_pretrained(tmp_path)
    loaded = kvp.KVCache.from_pretrained(tmp_path, model)
    with torch.no_grad():
        expected, got = (model(prompt[:, -1:], **as_argument(each)).logits for each in (cache, loaded))
    torch.testing.assert_close(got, expected)


@LARGE4
@SHARED
def test_every_verb(sharing: str) -> None:
    model = large4(sharing)
    ids = padded_prompt((60, 60))["input_ids"]
    ours, theirs = kvp.build_cache(model, EXACT), DynamicCache(config=model.config.text_config)
    for cache in (ours, theirs):
        with torch.no_grad():
            model(ids[:, :40], **as_argument(cache))
            model(ids[:, 40:], **as_argument(cache))
        cache.crop(-7)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 1, 2, 0]))
        cache.batch_select_indices(torch.tensor([0, 2, 1]))
    ours.bind(model)
    with torch.no_grad():
        got, expected = (model(ids[[0, 1, 0], :1], **as_argument(each)).logits for each in (ours, theirs))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    ours.reset()
    assert ours.get_seq_length() == 0


@pytest.mark.skipif(
    "glm5_next" not in CONFIG_MAPPING or "indexed_attention" not in DYNAMIC_LAYER_TYPE_MAPPING,
    reason="not in this transformers, or with layers of a kind that no other model has",
)
def test_a_model_without_any_rotated_keys_stays_dense() -> None:
    """GLM-5-Next also reads off its layers how many keys there are."""
    model = latent_model(
        "glm5_next", index_topk=32, index_kpool=4, linear_head_dim=16, linear_num_heads=4, hc_mult=2
    )
    _, logits, _ = greedy(model, LENGTHS, NEW)
    with pytest.warns(UserWarning, match=rf"'int8' packs none of the 4 layers of this model: .*'{ALONE}'"):
        _, found, cache = greedy(model, LENGTHS, NEW, INT8)
    torch.testing.assert_close(found, logits, atol=1e-4, rtol=1e-4)
    assert cache.report().dense_layers[3] == ALONE
    assert kvp.estimate(model, INT8, 100) == kvp.estimate(model, {"backend": "dense"}, 100)


def owned(layer: Any) -> list[Tensor]:
    """What transformers' own layer keeps."""
    names = ("keys", "values", "indexer_keys")
    return [tensor for name in names if (tensor := getattr(layer, name, None)) is not None]
