"""A model on two GPUs: the tokens of the CPU, with every layer of a cache on the GPU of its attention.

Token ids and what the model returns lie on one of the GPUs, and so elsewhere than half of the layers.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvcache_plugins.building import build_cache
from kvcache_plugins.cache import KVCache
from kvcache_plugins.layers.moving import move_layer
from kvcache_plugins.layers.recurrent import recurrent_state
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing.generation import padded_prompt, run_scenario
from kvcache_plugins.testing.models import tiny_model
from tests.models.encoders import decoded, encoder_decoder, source, target

pytestmark = pytest.mark.cuda(devices=2)

DEVICES = ("cuda:0", "cuda:1")
CACHES: dict[str, dict[str, Any]] = {
    "int8": {"backend": "int8"},
    "kivi-2bit-block": {
        "backend": "kivi",
        "nbits": 2,
        "q_group_size": 32,
        "residual_length": 32,
        "rope_mode": "block",
    },
    "kvquant": {"backend": "kvquant", "nbits": 3, "calibration": "normal_float"},
    "int8-offloaded": {"backend": "int8", "offload": True},
    "int8-and-dense": {"backend": "int8", "skip_layers": [-1]},
    "keydiff-int8": {
        "backend": "keydiff",
        "budget": 96,
        "storage": {"backend": "int8"},
        "residual_length": 16,
    },
    "snapkv-uneven": {"backend": "snapkv", "budget": 96, "head_floor": 0.2, "storage": {"backend": "int8"}},
    "sirllm": {"backend": "sirllm", "budget": 96, "evict_at_decode": True},
    # the layer that remembers token ids is on the other GPU
    "kvzip": {"backend": "kvzip", "budget": 96, "evict_at_decode": True, "skip_layers": [0]},
}
LENGTHS = (180, 140)
BUNDLED_MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama-books"


@pytest.fixture(scope="module", autouse=True)
def kernels(cuda_kernels: None) -> None:
    pass


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    """Two layers of the bundled model, on the CPU."""
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32)
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    return model


@pytest.fixture(scope="module")
def spread(plain: PreTrainedModel) -> PreTrainedModel:
    """The same, a layer on either GPU."""
    accelerate = pytest.importorskip("accelerate")
    first, last = DEVICES
    device_map = {
        "model.embed_tokens": first,
        "model.rotary_emb": first,
        "model.layers.0": first,
        "model.layers.1": last,
        "model.norm": last,
        "lm_head": first,  # whose weights are those of the embedding
    }
    return accelerate.dispatch_model(copy.deepcopy(plain), device_map)  # type: ignore[no-any-return]


def devices(cache: KVCache) -> list[str]:
    return [str(layer.device) for layer in cache.layers]


def prompt(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.to(model.device) for name, tensor in padded_prompt(LENGTHS).items()}


def generated(model: PreTrainedModel, cache: KVCache, tokens: int = 24) -> torch.Tensor:
    return model.generate(**prompt(model), **as_argument(cache), do_sample=False, max_new_tokens=tokens)  # type: ignore[operator, no-any-return]


def next_turn(model: PreTrainedModel, cache: KVCache, tokens: torch.Tensor) -> torch.Tensor:
    rows = torch.cat([tokens, tokens[:, :70]], dim=1).to(model.device)
    mask = torch.ones_like(rows)
    mask[:, : LENGTHS[0]] = prompt(model)["attention_mask"]
    return model.generate(  # type: ignore[operator, no-any-return]
        rows, attention_mask=mask, **as_argument(cache), do_sample=False, max_new_tokens=12
    )


@pytest.mark.parametrize("name", CACHES)
def test_tokens_are_those_of_the_cpu(name: str, plain: PreTrainedModel, spread: PreTrainedModel) -> None:
    cache = build_cache(spread, CACHES[name])
    tokens = generated(spread, cache)
    assert devices(cache) == list(DEVICES)
    assert set(cache.report().kernel) <= {"cuda", "dense"}
    options = CACHES[name] | ({"offload": False} if "offload" in CACHES[name] else {})
    assert torch.equal(tokens.cpu(), generated(plain, build_cache(plain, options)))


@pytest.mark.parametrize("name", ["int8", "int8-offloaded", "keydiff-int8", "kvzip", "sirllm"])
def test_beams(name: str, plain: PreTrainedModel, spread: PreTrainedModel) -> None:
    options = CACHES[name] | ({"offload": False} if "offload" in CACHES[name] else {})
    got = run_scenario(spread, "beams", cache_config=CACHES[name], lengths=LENGTHS)
    assert torch.equal(got.cpu(), run_scenario(plain, "beams", cache_config=options, lengths=LENGTHS))


@pytest.mark.parametrize("name", ["int8-and-dense", "int8", "snapkv-uneven", "kvzip", "sirllm"])
def test_rows_are_chosen_by_indices_that_lie_anywhere(name: str, spread: PreTrainedModel) -> None:
    cache = build_cache(spread, CACHES[name])
    tokens = generated(spread, cache)
    continued = []
    for where in ("cpu", *DEVICES):
        chosen = copy.deepcopy(cache)
        rows = torch.tensor([1, 0], device=where)
        chosen.batch_select_indices(rows)
        chosen.reorder_cache(rows)
        continued.append(next_turn(spread, chosen, tokens))
    assert torch.equal(continued[0], continued[1]) and torch.equal(continued[0], continued[2])
    assert torch.equal(continued[0], next_turn(spread, cache, tokens))


@pytest.mark.parametrize("loaded_for", ["model", "elsewhere", "configuration"])
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.filterwarnings("ignore:offload=True moves nothing")
def test_a_loaded_cache_goes_on_where_its_model_is(
    name: str, loaded_for: str, plain: PreTrainedModel, spread: PreTrainedModel, tmp_path: Path
) -> None:
    cache = build_cache(spread, CACHES[name])
    tokens = generated(spread, cache)
    cache.save_pretrained(tmp_path)
    given = {
        "model": spread,
        "configuration": spread.config,
        "elsewhere": copy.deepcopy(plain).to(DEVICES[1]),
    }
    loaded = KVCache.from_pretrained(tmp_path, given[loaded_for])
    lies_at = {"model": DEVICES, "configuration": ("cpu", "cpu"), "elsewhere": DEVICES[1:] * 2}
    assert devices(loaded) == list(lies_at[loaded_for])
    before = loaded.report()
    assert torch.equal(next_turn(spread, loaded, tokens), next_turn(spread, cache, tokens))
    assert devices(loaded) == list(DEVICES)
    report = loaded.report()
    assert set(report.kernel) <= {"cuda", "dense"} and report.fallback_reads == 0
    assert before.tokens_seen == LENGTHS[0] + 23
    assert (report.host_bytes is None) == (name != "int8-offloaded")


@pytest.mark.parametrize("name", ["int8-and-dense", "int8", "snapkv-uneven"])
def test_a_loop_of_ones_own_moves_a_loaded_cache(name: str, spread: PreTrainedModel, tmp_path: Path) -> None:
    """Which tells the cache of no model: layers follow the first keys that come."""
    cache = build_cache(spread, CACHES[name])
    ids = padded_prompt(LENGTHS[:1])["input_ids"].to(spread.device)
    found = []
    with torch.no_grad():
        spread(ids, **as_argument(cache.bind(spread)))
        cache.save_pretrained(tmp_path)
        loaded = KVCache.from_pretrained(tmp_path, spread.config)
        for one in (cache, loaded):
            found.append(spread(ids[:, :3], **as_argument(one)).logits)
    assert torch.equal(*found)
    assert devices(loaded) == list(DEVICES)


@pytest.mark.parametrize("name", ["int8", "kivi-2bit-block", "kvquant", "snapkv-uneven"])
def test_a_layer_that_is_moved_stays_what_it_was(name: str, spread: PreTrainedModel) -> None:
    cache = build_cache(spread, CACHES[name])
    generated(spread, cache)
    for layer in cache.packed_layers:
        tensors, facts = copy.deepcopy(layer).state()
        for where in ("cpu", *DEVICES):
            move_layer(layer, torch.device(where))
            moved, moved_facts = layer.state()
            assert {str(tensor.device) for tensor in moved.values()} == {where}
            assert moved_facts == facts and list(moved) == list(tensors)
            assert all(torch.equal(moved[part].cpu(), tensors[part].cpu()) for part in tensors)


def test_recurrent_states_move_with_their_layers() -> None:
    """Of a layer of their own, and beside keys and values."""
    for name in ("qwen3_next", "falcon_h1"):
        cache = build_cache(tiny_model(name).config, CACHES["int8"])
        is_recurrent = [hasattr(layer, "update_conv_state") for layer in cache.layers]
        layer: Any = cache.layers[is_recurrent.index(True)]
        layer.update_conv_state(torch.randn(2, 8, 4, device=DEVICES[0]))
        layer.update_recurrent_state(torch.randn(2, 4, 8, device=DEVICES[0]))
        if layer in cache.packed_layers:
            states = torch.randn(2, layer.num_heads, 90, layer.key_dim, device=DEVICES[0])
            layer.update(states, states)
        held = layer.state if layer in cache.packed_layers else partial(recurrent_state, layer)
        before, facts = copy.deepcopy(held())
        move_layer(layer, torch.device(DEVICES[1]))
        after, facts_after = held()
        assert len(after) >= 2 and {str(tensor.device) for tensor in after.values()} == {DEVICES[1]}
        assert facts_after == facts and list(after) == list(before)
        assert all(torch.equal(after[part].cpu(), before[part].cpu()) for part in before)


def test_what_an_encoder_has_read_goes_where_the_decoder_is(tmp_path: Path) -> None:
    """When a cache that was loaded for a configuration is bound, for it is not told of new keys again."""
    model: Any = encoder_decoder("bart").to(DEVICES[1])
    given = {name: tensor.to(DEVICES[1]) for name, tensor in source("bart").items()}
    cache = build_cache(model, CACHES["int8"])
    cache.bind(model, encoder_attention_mask=given["attention_mask"])
    tokens = target(90).to(DEVICES[1])
    decoded(model, given, cache, tokens, [70, 20])
    cache.save_pretrained(tmp_path)
    loaded = KVCache.from_pretrained(tmp_path, model.config).bind(model)
    expected = decoded(model, given, cache, tokens[:, :5], [1, 4])
    assert torch.equal(decoded(model, given, loaded, tokens[:, :5], [1, 4]), expected)
