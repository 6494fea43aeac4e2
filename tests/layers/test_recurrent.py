"""Layers with a recurrent branch beside their keys and values: every verb acts on both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

import kvcache_plugins as kvp
from kvcache_plugins.layers.recurrent import BranchedLayer
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing import tiny_model
from tests.models.families import small_model

NEVER_PACKED = {"backend": "int4", "residual_length": 1024}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("falcon_h1")


def filled(model: Any, cache: Any, length: int = 80, rows: int = 2) -> Any:
    tokens = torch.randint(3, 120, (rows, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(tokens, **as_argument(cache))
        model(tokens[:, :1], **as_argument(cache))
    return cache


def step(model: Any, cache: Any, rows: int = 2) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.full((rows, 1), 9), **as_argument(cache)).logits


def test_keys_are_packed_and_the_state_is_kept(model: Any) -> None:
    cache = filled(model, kvp.build_cache(model, {"backend": "int8"}))
    own = filled(model, DynamicCache(config=model.config))
    report = cache.report()
    assert report.dense_layers == {} and cache.is_linear == own.is_linear == [False, False]
    for layer, other in zip(cache.layers, own.layers, strict=True):
        assert isinstance(layer, BranchedLayer) and isinstance(layer, LinearAttentionCacheLayerMixin)
        assert layer.stored_keys.packed_length == 81
        assert layer.get_seq_length() == other.get_seq_length() == 81
    # the first layer's state does not depend on any cache; what a state weighs counts on both sides
    assert torch.equal(cache.layers[0].recurrent_states[0], own.layers[0].recurrent_states[0])
    assert cache.has_previous_state() and cache.has_previous_state(0)
    state_bytes = sum(
        t.nbytes for layer in own.layers for t in (layer.conv_states[0], layer.recurrent_states[0])
    )
    dense_bytes = state_bytes + sum(layer.keys.nbytes + layer.values.nbytes for layer in own.layers)
    assert report.dense_bytes == dense_bytes
    assert state_bytes < cache.kv_bytes() < dense_bytes


VERBS: dict[str, Callable[[Any], Any]] = {
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "select": lambda cache: [layer.batch_select_indices(torch.tensor([1, 0])) for layer in cache.layers],
    "offload": lambda cache: [layer.offload() for layer in cache.layers],
    "prefetch": lambda cache: [layer.prefetch() for layer in cache.layers],
    "copy": copy.deepcopy,
}


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_act_on_both(model: Any, verb: str) -> None:
    rows = {"reorder": [1, 1], "select": [1, 0]}.get(verb, [0, 1])
    cache, untouched = (filled(model, kvp.build_cache(model, NEVER_PACKED)) for _ in range(2))
    made = VERBS[verb](cache)
    got = step(model, made if verb == "copy" else cache)
    torch.testing.assert_close(got, step(model, untouched)[rows], atol=1e-5, rtol=1e-5)


def test_rows_are_repeated(model: Any) -> None:
    cache, untouched = (filled(model, kvp.build_cache(model, NEVER_PACKED)) for _ in range(2))
    cache.batch_repeat_interleave(2)
    expected = step(model, untouched)[[0, 0, 1, 1]]
    torch.testing.assert_close(step(model, cache, rows=4), expected, atol=1e-5, rtol=1e-5)


def test_a_state_without_tokens_is_repeated() -> None:
    layer = kvp.build_cache(tiny_model("falcon_h1"), NEVER_PACKED).layers[0]
    layer.batch_repeat_interleave(2)
    layer.update_conv_state(torch.randn(2, 8, 4))
    layer.batch_repeat_interleave(3)
    assert layer.conv_states[0].shape == (6, 8, 4)


def test_after_a_reset_it_is_as_new(model: Any) -> None:
    cache = filled(model, kvp.build_cache(model, NEVER_PACKED))
    expected = step(model, cache)
    cache.reset()
    assert cache.get_seq_length() == 0 and not cache.has_previous_state()
    assert torch.equal(step(model, filled(model, cache)), expected)


@pytest.mark.parametrize("rows", [1, 3])
def test_after_a_reset_there_may_be_other_rows(model: Any, rows: int) -> None:
    cache = filled(model, kvp.build_cache(model, {"backend": "int8"}))
    cache.reset()
    assert cache.kv_bytes() == 0
    expected = step(model, filled(model, kvp.build_cache(model, {"backend": "int8"}), rows=rows), rows)
    assert torch.equal(step(model, filled(model, cache, rows=rows), rows), expected)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next"])
@pytest.mark.parametrize("options", [NEVER_PACKED, {"backend": "streaming_llm", "budget": 1000}])
def test_a_recurrent_state_cannot_be_cropped(family: str, options: dict[str, Any], recorded: bool) -> None:
    """Beside keys and values, or of a layer of its own; nothing is changed then."""
    model = tiny_model(family)
    cache = kvp.build_cache(model, options)
    if recorded:
        cache.activate_past_recording()
    filled(model, cache)
    assert not cache.is_croppable
    untouched = copy.deepcopy(cache)
    with pytest.raises(kvp.UnsupportedOperationError, match=r"crop\(-2\): .* Allowed is a copy of the cache"):
        cache.crop(-2)
    assert cache.get_seq_length() == 81
    cache.crop(0)
    assert torch.equal(step(model, cache), step(model, untouched))


@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next"])
def test_a_cache_that_holds_nothing_can_be_cropped(family: str) -> None:
    model = tiny_model(family)
    cache = kvp.build_cache(model, NEVER_PACKED)
    for recorded in (False, True):
        if recorded:
            cache.activate_past_recording()
        cache.crop(-3)
    assert cache.get_seq_length() == 0


def test_convolution_states_that_were_not_recorded_cannot_be_cropped() -> None:
    layer = kvp.build_cache(tiny_model("falcon_h1"), NEVER_PACKED).layers[0]
    states, keys = torch.randn(1, 8, 10), torch.randn(1, 2, 10, 16)
    layer.update_conv_state(states, conv_kernel_size=4)
    layer.update(keys, keys)
    with pytest.raises(kvp.UnsupportedOperationError, match="Call `activate_past_recording` before"):
        layer.crop(-3)
    assert layer.get_seq_length() == 10 and torch.equal(layer.conv_states[0], states[..., 6:])


def test_convolution_states_alone_can_be_cropped() -> None:
    layer = kvp.build_cache(tiny_model("falcon_h1"), NEVER_PACKED).layers[0]
    states, keys = torch.randn(1, 8, 10), torch.randn(1, 2, 10, 16)
    layer.activate_past_recording()
    layer.update_conv_state(states, conv_kernel_size=4)
    layer.update(keys, keys)
    assert layer.is_croppable
    layer.crop(-3)
    assert torch.equal(layer.conv_states[0], states[..., 3:7])
    assert layer.get_seq_length() == 7


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("length", [1, 3, 8])
def test_a_text_may_be_shorter_than_a_kernel(length: int, saved: bool, tmp_path: Path) -> None:
    """Drafts, whose convolution states are recorded, and a turn without."""
    model: Any = small_model("lfm2", conv_L_cache=7)
    tokens = torch.randint(3, 100, (1, length), generator=torch.Generator().manual_seed(length))
    told = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    answers = []
    for cache in (DynamicCache(config=model.config), kvp.build_cache(model, NEVER_PACKED)):
        first = model.generate(tokens, **as_argument(cache), **told, prompt_lookup_num_tokens=3)
        if saved and isinstance(cache, kvp.KVCache):
            cache.save_pretrained(tmp_path)
            cache = kvp.KVCache.from_pretrained(tmp_path, model)
        more = torch.cat([first, torch.tensor([[7, 8]])], dim=1)
        answers.append(model.generate(more, **as_argument(cache), **told | {"max_new_tokens": 5}))
    assert torch.equal(*answers)


@pytest.mark.parametrize("length", [2, 9])
def test_what_was_recorded_is_put_in_the_form_of_a_state(model: Any, length: int) -> None:
    cache = kvp.build_cache(model, NEVER_PACKED)
    layer: Any = cache.layers[0]
    states = torch.randn(1, 8, length)
    cache.activate_past_recording()
    layer.update_conv_state(states, conv_kernel_size=4)
    saved, _ = layer.state()
    expected = torch.cat([torch.zeros(1, 8, 4), states], dim=-1)[..., -4:]
    assert torch.equal(layer.conv_states[0], states)
    assert torch.equal(saved["branch.conv_states.0"], expected)
    cache.bind(model)
    assert torch.equal(layer.conv_states[0], expected)
    following = torch.randn(1, 8, 1)
    layer.update_conv_state(following, conv_kernel_size=4)
    assert torch.equal(layer.conv_states[0], torch.cat([expected[..., 1:], following], dim=-1))


@pytest.mark.parametrize("options", [{"positions": "compact"}, {"storage": {"backend": "int8"}}])
def test_evicting_layers_have_a_branch_too(model: Any, options: dict[str, Any]) -> None:
    config = {"backend": "streaming_llm", "budget": 40, **options}
    cache = filled(model, kvp.build_cache(model, config))
    assert cache.report().tokens_held < 81
    assert all(isinstance(layer.branch, LinearAttentionLayer) for layer in cache.layers)
    assert torch.isfinite(step(model, cache)).all()


def test_unknown_attributes_are_named() -> None:
    layer = kvp.build_cache(tiny_model("falcon_h1"), NEVER_PACKED).layers[0]
    with pytest.raises(AttributeError, match="'BranchedInt4Layer' object has no attribute 'conv_state'"):
        _ = layer.conv_state
