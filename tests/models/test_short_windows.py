"""Windows left to transformers' own layer hold no prompt beside them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

import kvcache_plugins as kvp
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.short_windows import ShortWindowLayer
from kvcache_plugins.testing import tiny_model

WINDOW = 32


def states(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, count, 4), torch.randn(2, 3, count, 5)


def rooms(layer: DynamicSlidingWindowLayer) -> list[int]:
    """Tokens that the memory of keys and of values would hold."""
    return [
        tensor.untyped_storage().nbytes() // tensor[..., :1, :].nbytes
        for tensor in (layer.keys, layer.values)
    ]


@pytest.mark.parametrize("window", [1, 2, WINDOW])
def test_it_holds_and_shows_what_transformers_layer_does(window: int) -> None:
    ours, own = ShortWindowLayer(sliding_window=window), DynamicSlidingWindowLayer(sliding_window=window)
    for count in (1, 10, 300, 1, 1, 40, 64, 63, 1):
        given = states(count)
        for got, expected in zip(ours.update(*given), own.update(*given), strict=True):
            assert torch.equal(got, expected)
        assert torch.equal(ours.keys, own.keys) and torch.equal(ours.values, own.values)
        assert ours.get_mask_sizes(3) == own.get_mask_sizes(3)


def test_its_memory_is_that_of_a_window() -> None:
    layer = ShortWindowLayer(sliding_window=WINDOW)
    for count, most in (
        (300, WINDOW),
        (1, WINDOW),
        (20, WINDOW + 19),
        (WINDOW, 2 * WINDOW - 1),
        (33, WINDOW),
    ):
        layer.update(*states(count))
        assert rooms(layer) == [most, most]


def test_drafts_are_held_until_they_are_judged() -> None:
    ours, own = ShortWindowLayer(sliding_window=WINDOW), DynamicSlidingWindowLayer(sliding_window=WINDOW)
    prompt, drafts = states(100), states(70)
    for layer in (ours, own):
        layer.update(*prompt)
        layer.activate_past_recording()
        layer.update(*drafts)
        layer.crop(-60)
    assert torch.equal(ours.keys, own.keys) and ours.keys.shape[-2] == WINDOW - 1


@pytest.mark.parametrize("backend", ["int8", "knorm"])
def test_a_prompt_takes_no_more_than_the_tokens_after_it(backend: str) -> None:
    model = tiny_model("gpt_oss", sliding_window=WINDOW)
    options = {"backend": backend} | ({"budget": 400} if backend == "knorm" else {})
    cache = kvp.build_cache(model, options)
    ids = torch.randint(3, 100, (1, 300), generator=torch.Generator().manual_seed(0))
    short = [layer for layer in cache.layers if isinstance(layer, ShortWindowLayer)]
    assert short and len(short) < len(cache.layers)
    with torch.no_grad():
        model(ids, **as_argument(cache))
        assert all(rooms(layer) == [WINDOW, WINDOW] for layer in short)
        after, before = copy.deepcopy(cache), cache.kv_bytes()
        model(ids[:, :1], **as_argument(after))
    assert [rooms(layer) for layer in after.layers if isinstance(layer, ShortWindowLayer)] == [
        [WINDOW, WINDOW]
    ] * len(short)
    assert before <= after.kv_bytes()
