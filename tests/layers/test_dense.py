"""Transformers' own layers among packed ones: verbs and checks of a cache are of all its layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from kvcache_plugins import KVCache, UnsupportedOperationError, build_cache
from kvcache_plugins.layers.base import PackedLayer
from kvcache_plugins.layers.dense import check_states_are_here, cropped, tokens_seen
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.short_windows import ShortWindowLayer
from kvcache_plugins.testing import tiny_model
from tests.models.encoders import encoder_decoder, source
from tests.models.families import small_model

SKIPPED = {"backend": "int8", "skip_layers": [-1]}
LENGTH = 200
WINDOW = 64
"""Of a layer that is not worth packing; both kinds of layers are there, full attention first."""


def ids(length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(3, 100, (2, length), generator=torch.Generator().manual_seed(seed))


def windowed_model() -> Any:
    kinds = ["full_attention", "full_attention", "sliding_attention"]
    window = {"use_sliding_window": True, "sliding_window": WINDOW}
    return tiny_model("qwen2", num_hidden_layers=3, layer_types=kinds, **window)


def read(model: Any, cache: KVCache, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(tokens, **as_argument(cache)).logits
    return logits


def lengths(cache: KVCache) -> list[int]:
    return [layer.get_seq_length() for layer in cache.layers]


@pytest.mark.parametrize("options", [SKIPPED, {"backend": "int8"}], ids=["skipped", "window"])
def test_a_cache_that_was_reset_is_a_new_one(options: dict[str, Any]) -> None:
    model = windowed_model()
    used, new = (build_cache(model, options) for _ in range(2))
    assert not isinstance(used.layers[-1], PackedLayer)
    read(model, used, ids())
    used.reset()
    assert lengths(used) == [0, 0, 0] and used.kv_bytes() == new.kv_bytes()
    for tokens in (ids(90, 1), ids(1, 2)):
        assert torch.equal(read(model, used, tokens), read(model, new, tokens))


def test_both_halves_are_reset() -> None:
    model, given = encoder_decoder("t5"), source("t5")
    told = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    cache = build_cache(model, {"backend": "int8", "skip_layers": [0]})
    first = model.generate(**given, **told, **as_argument(cache))
    cache.reset()
    assert torch.equal(model.generate(**given, **told, **as_argument(cache)), first)


def test_crop_is_of_all_layers_or_of_none() -> None:
    """The last layer, which refuses, comes behind two that would not."""
    model = windowed_model()
    cache = build_cache(model, {"backend": "int8", "skip_layers": [0]})
    assert [type(layer) for layer in cache.layers[::2]] == [DynamicLayer, ShortWindowLayer]
    read(model, cache, ids())
    same = copy.deepcopy(cache)
    with pytest.raises(UnsupportedOperationError, match=r"crop\(-3\): a ShortWindowLayer of this"):
        cache.crop(-3)
    assert lengths(cache) == [LENGTH] * 3
    assert torch.equal(read(model, cache, ids(1)), read(model, same, ids(1)))


def test_crop_takes_back_what_was_read() -> None:
    model = windowed_model()
    cache, expected = (build_cache(model, {"backend": "int8", "skip_layers": [0]}) for _ in range(2))
    for each in (cache, expected):
        read(model, each, ids())
    cache.layers[2].activate_past_recording()
    read(model, cache, ids(4, 1))
    cache.crop(-4)
    assert lengths(cache) == [LENGTH] * 3
    assert torch.equal(read(model, cache, ids(1)), read(model, expected, ids(1)))


def test_a_layer_is_not_changed_by_the_crop_that_is_tried() -> None:
    layer = LinearAttentionLayer()
    layer.activate_past_recording()
    states = torch.randn(1, 2, 9)
    layer.update_conv_state(states, conv_kernel_size=4)
    attributes = cropped(layer, -2)
    assert torch.equal(layer.conv_states[0], states)
    assert torch.equal(attributes["conv_states"][0], states[..., 3:7])
    assert tokens_seen([layer]) == set()  # it counts none


KEPT_ELSEWHERE: dict[str, Callable[[KVCache, Path], Any]] = {
    "copy.deepcopy": lambda cache, _: copy.deepcopy(cache),
    "save_pretrained": lambda cache, folder: cache.save_pretrained(folder),
    "crop(-1)": lambda cache, _: cache.crop(-1),
    "reorder_cache": lambda cache, _: cache.reorder_cache(torch.tensor([1, 0])),
    "batch_select_indices": lambda cache, _: cache.batch_select_indices(torch.tensor([1])),
    "batch_repeat_interleave": lambda cache, _: cache.batch_repeat_interleave(2),
}


@pytest.mark.parametrize("verb", KEPT_ELSEWHERE)
def test_states_that_a_model_keeps_itself_are_not_left_behind(verb: str, tmp_path: Path) -> None:
    model = small_model("recurrent_gemma", attention_window_size=512)
    cache = build_cache(model, {"backend": "int8"})
    assert isinstance(copy.deepcopy(cache), KVCache)  # which has read nothing
    cache.activate_past_recording()
    read(model, cache, ids(9))
    with pytest.raises(UnsupportedOperationError) as refused:
        KEPT_ELSEWHERE[verb](cache, tmp_path)
    assert str(refused.value).startswith(f"{verb}: layers [0, 1] of this cache are for states of linear")
    assert cache.layers[2].records.shape[0] == 2 and cache.get_seq_length() == 9
    assert not list(tmp_path.iterdir())


def test_a_layer_without_states_beside_others_that_have_them_leaves_none_behind() -> None:
    model = small_model("qwen3_next")
    cache = build_cache(model, {"backend": "int8"})
    read(model, cache, ids(9))
    check_states_are_here("copy.deepcopy", [*cache.layers, LinearAttentionLayer()])


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("options", [SKIPPED, {"backend": "int8"}], ids=["skipped", "window"])
def test_a_forward_that_was_interrupted_before_a_dense_layer(
    options: dict[str, Any], prompt: bool, tmp_path: Path
) -> None:
    model = windowed_model()
    cache = build_cache(model, options)
    if not prompt:
        read(model, cache, ids())
    cache.save_pretrained(tmp_path)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    last = model.model.layers[-1].self_attn
    with last.q_proj.register_forward_pre_hook(stop), suppress(KeyboardInterrupt):
        read(model, cache, ids() if prompt else ids(1, 1))
    assert lengths(cache)[-1] < lengths(cache)[0]
    for go_on in (
        lambda: cache.bind(model),
        lambda: cache.save_pretrained(tmp_path),
        lambda: model.generate(ids(LENGTH + 5), **as_argument(cache), max_new_tokens=1),
    ):
        with pytest.raises(ValueError, match="a forward was interrupted between them"):
            go_on()
    assert lengths(KVCache.from_pretrained(tmp_path, model)) == [0 if prompt else LENGTH] * 3
    cache.reset()
    cache.bind(model)


def test_layers_that_were_saved_out_of_step_are_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an earlier version."""
    model = windowed_model()
    cache = build_cache(model, {"backend": "int8", "skip_layers": [0]})
    read(model, cache, ids())
    cache.layers[0].crop(-1)
    with monkeypatch.context() as earlier:
        earlier.setattr(KVCache, "check_in_step", lambda self: None)
        cache.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="seen from 199 to 200 tokens"):
        KVCache.from_pretrained(tmp_path, model)


@pytest.mark.parametrize("layer", ["2", "-1", 2])
def test_options_of_a_layer_that_is_dense_are_refused(layer: Any) -> None:
    model = windowed_model()
    with pytest.raises(
        ValueError, match=r"layer_overrides.*left dense \(sliding_attention: holds at most 64"
    ):
        build_cache(model, {"backend": "kivi", "layer_overrides": {layer: {"nbits": 2}}})
    build_cache(model, {"backend": "kivi", "layer_overrides": {layer: {}, "0": {"nbits": 2}}})


def test_options_may_leave_a_layer_dense() -> None:
    """Where packing a window would not save anything then."""
    kinds = ["full_attention", "sliding_attention"]
    window = {"use_sliding_window": True, "sliding_window": 512, "layer_types": kinds}
    model = tiny_model("qwen2", num_hidden_layers=2, **window)
    assert build_cache(model, {"backend": "int8"}).report().dense_layers == {}
    exact = {"backend": "int8", "layer_overrides": {"1": {"residual_length": 512}}}
    assert list(build_cache(model, exact).report().dense_layers) == [1]


def test_a_class_of_no_backend_is_refused() -> None:
    with pytest.raises(TypeError, match=r"KVCache is of no backend\. Allowed are `build_cache`"):
        KVCache(tiny_model("llama"))


# ---- rows ----


@pytest.mark.parametrize("skip_layers", [[], [0]], ids=["packed", "dense"])
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "gemma2"])
def test_rows_of_all_layers_are_chosen(family: str, skip_layers: list[int]) -> None:
    """Those of recurrent layers too, which have a verb for beams alone."""
    model = tiny_model(family)
    caches = [build_cache(model, {"backend": "int8", "skip_layers": skip_layers}) for _ in range(4)]
    for each in caches:
        read(model, each, ids(40))
    chosen, repeated, reordered, whole = caches
    step = ids(1, 7)
    expected = read(model, whole, step)
    chosen.batch_select_indices(torch.tensor([1]))
    torch.testing.assert_close(read(model, chosen, step[1:]), expected[1:], atol=1e-5, rtol=1e-5)
    repeated.batch_repeat_interleave(2)
    rows = torch.tensor([0, 0, 1, 1])
    torch.testing.assert_close(read(model, repeated, step[rows]), expected[rows], atol=1e-5, rtol=1e-5)
    reordered.reorder_cache(torch.tensor([1, -1]))
    rows = torch.tensor([1, 1])
    torch.testing.assert_close(read(model, reordered, step[rows]), expected[rows], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("verb", "given", "said"),
    [
        ("reorder_cache", torch.tensor([0, 7]), r"must be from -2 to 1, got \[0, 7\]"),
        ("reorder_cache", torch.tensor([0.0, 1.0]), "must be a list of integers"),
        ("batch_select_indices", torch.tensor([2]), r"must be from -2 to 1, got \[2\]"),
        ("batch_repeat_interleave", 0, "repeats must be an integer >= 1, got 0"),
        ("batch_repeat_interleave", True, "repeats must be an integer >= 1, got True"),
        ("batch_repeat_interleave", 2.0, r"repeats must be an integer >= 1, got 2\.0"),
    ],
)
def test_rows_that_are_not_there(verb: str, given: Any, said: str) -> None:
    model = tiny_model("llama")
    cache, whole = (build_cache(model, {"backend": "int8"}) for _ in range(2))
    for each in (cache, whole):
        read(model, each, ids(40))
    with pytest.raises((IndexError, ValueError), match=said):
        getattr(cache, verb)(given)
    assert torch.equal(read(model, cache, ids(1)), read(model, whole, ids(1)))
