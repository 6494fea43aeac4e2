"""Models that pass through layers several times: every pass has its own cache layer, packed as any other."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, DynamicCache

import kvcache_plugins as kvp
from kvcache_plugins.calibration.recording import RecordingCache, calibrated_layers
from kvcache_plugins.models.cache_argument import as_argument, cache_of
from kvcache_plugins.models.decoder import decoder_config
from kvcache_plugins.models.facts import describe_layers
from kvcache_plugins.models.layer_plan import plan_layers
from kvcache_plugins.models.loops import repeated_layers
from kvcache_plugins.testing.generation import padded_prompt
from kvcache_plugins.testing.models import tiny_model
from tests.models.families import small_model

pytestmark = pytest.mark.skipif("dory" not in CONFIG_MAPPING, reason="this release has no model that loops")

# Four layers, of which the second and the third are passed through three times.
REPEATED = {"dory": [1, 2, 1, 2], "inkling2_loop_text": [2, 3, 2, 3]}
CONFIGS: dict[str, dict[str, Any]] = {
    "int8": {"backend": "int8"},
    "kivi": {"backend": "kivi", "nbits": 4, "residual_length": 32},
    "kvquant": {"backend": "kvquant", "nbits": 3, "calibration": "normal_float", "residual_length": 0},
    "snapkv": {"backend": "snapkv", "budget": 24, "chunk_size": 16},
    "packed": {"backend": "snapkv", "budget": 24, "chunk_size": 16, "storage": {"backend": "int8"}},
    "kvzip": {"backend": "kvzip", "budget": 24, "chunk_size": 16},
    "sirllm": {"backend": "sirllm", "budget": 24, "chunk_size": 16},
}


def generated(model: Any, cache_config: dict[str, Any] | None, **options: Any) -> Any:
    if cache_config is not None:
        options |= {"cache_implementation": "quantized", "cache_config": cache_config}
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    return model.generate(**padded_prompt((44, 31)), **settings, output_logits=True, **options)


@pytest.mark.parametrize("name", REPEATED)
def test_every_pass_has_a_layer(name: str) -> None:
    model = small_model(name)
    assert repeated_layers(model.config) == REPEATED[name]
    dense, never = (generated(model, c) for c in (None, {"backend": "int4", "residual_length": 1024}))
    theirs, ours = cache_of(dense).layers, cache_of(never).layers
    assert len(theirs) == len(ours) == 4 + len(REPEATED[name])
    assert torch.equal(dense.sequences, never.sequences)
    for one, other in zip(theirs, ours, strict=True):
        torch.testing.assert_close(one.keys, other.keys, rtol=1e-5, atol=1e-5)


def test_a_pass_is_told_what_is_known_of_its_layer() -> None:
    model = small_model("dory", attention_bias=True)
    plans = plan_layers(model.config)
    assert [plan.repeats for plan in plans] == [None] * 4 + REPEATED["dory"]
    facts = describe_layers(model, model.config, plans)
    assert all(fact.rotary is not None and fact.has_key_bias for fact in facts)
    assert facts[1].rotary != facts[2].rotary  # a window's frequencies are others
    assert facts[4:] == [facts[index] for index in REPEATED["dory"]]


@pytest.mark.parametrize("name", CONFIGS)
def test_verbs_reach_every_pass(name: str, tmp_path: Path) -> None:
    model, config = small_model("dory"), CONFIGS[name]
    cache = cache_of(generated(model, config))
    report = cache.report()
    assert len(report.kernel) == 8 and len(report.dense_layers) == 4 and report.fallback_reads == 0
    assert sorted(layer.layer_idx for layer in cache.packed_layers) == [1, 3, 4, 6]
    assert {layer.get_seq_length() for layer in cache.packed_layers} == {49}
    cache.save_pretrained(tmp_path / "cache")
    loaded = kvp.KVCache.from_pretrained(tmp_path / "cache", model)
    copied = copy.deepcopy(cache)
    expected = _step(model, cache)
    for other in (loaded, copied):
        assert torch.equal(_step(model, other), expected)
    copied.reorder_cache(torch.tensor([1, 0]))
    cache.bind(model)
    turned = _step(model, copied).flip(0)
    torch.testing.assert_close(turned, _step(model, cache), rtol=1e-4, atol=1e-4)


def _step(model: Any, cache: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.full((2, 1), 7), **as_argument(cache)).logits
    return logits


@pytest.mark.parametrize("name", ["int8", "kivi", "kvquant"])
def test_estimates_count_every_pass(name: str) -> None:
    model, config = small_model("dory"), CONFIGS[name]
    cache = kvp.build_cache(model, config)
    model.generate(torch.randint(3, 120, (2, 44)), max_new_tokens=6, **as_argument(cache))
    assert cache.kv_bytes() == kvp.estimate(model, config, tokens=49, batch_size=2)


@pytest.mark.parametrize("mode", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=["beams", "drafts"])
def test_modes(mode: dict[str, int]) -> None:
    model = small_model("dory")
    prompt = padded_prompt((44,))
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, **mode}
    asked = {"cache_implementation": "quantized", "cache_config": {"backend": "int4", "residual_length": 99}}
    dense = model.generate(**prompt, **settings)
    assert torch.equal(model.generate(**prompt, **settings, **asked), dense)


def test_a_second_turn_goes_on_with_every_pass() -> None:
    model = small_model("dory")
    text = torch.randint(3, 120, (1, 50), generator=torch.Generator().manual_seed(1))
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    packed = kvp.build_cache(model, {"backend": "int4", "residual_length": 99})
    answers = []
    for cache in (DynamicCache(config=model.config), packed):
        first = model.generate(text[:, :30], **settings, **as_argument(cache))
        turn = torch.cat([first, text[:, 30:]], dim=1)
        answers.append(model.generate(turn, **settings, **as_argument(cache)))
    assert torch.equal(*answers)


def test_passes_are_numbered_after_the_layers_of_the_model() -> None:
    model = small_model("dory")
    config = {"backend": "int8", "skip_layers": [6], "layer_overrides": {"4": {"granularity": "token"}}}
    cache: Any = kvp.build_cache(model, config)
    assert cache.report().dense_layers[6] == "skip_layers"
    assert [layer.config.granularity for layer in cache.packed_layers] == ["head", "head", "token"]
    with pytest.raises(ValueError, match=r"skip_layers must name layers from -8 to 7"):
        kvp.build_cache(model, {"backend": "int8", "skip_layers": [8]})


def test_a_calibration_sees_every_pass() -> None:
    model = small_model("dory")
    assert sorted(calibrated_layers(model)) == [1, 3, 4, 6]
    seen: list[int] = []

    def observe(layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(layer_idx)
        return keys, values

    with torch.no_grad():
        model(torch.randint(3, 120, (1, 20)), **as_argument(RecordingCache(model.config, observe)))
    assert seen == [0, 1, 2, 4, 5, 6, 7, 3]


def test_what_reads_past_its_cache_is_refused() -> None:
    config = small_model("dory", recurrent_kv_cache_mode="last_loop").config
    with pytest.raises(ValueError, match=r"last_loop.*past their cache.*Allowed is 'per_loop'"):
        kvp.build_cache(config, {"backend": "int8"})


def test_retaining_heads_are_refused(tmp_path: Path) -> None:
    heads = kvp.RetainingHeads(kvp.RetainingHeadsConfig.from_model(tiny_model("llama").config))
    heads.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"every layer once, and DoryConfig .* several times.*'kvzip'"):
        kvp.build_cache(small_model("dory"), {"backend": "locret", "heads": str(tmp_path), "budget": 24})
    with pytest.raises(ValueError, match="every layer once"):
        kvp.RetainingHeadsConfig.from_model(small_model("dory").config)


def test_other_models_pass_once() -> None:
    for name in ("llama", "gemma3_text", "qwen3_next"):
        assert repeated_layers(decoder_config(tiny_model(name).config)) == []
