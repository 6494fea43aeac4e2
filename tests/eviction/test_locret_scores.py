"""The score of a token is what its head makes of its own projections, however the token came in."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcache_plugins.backends.locret import LocretCache
from kvcache_plugins.models.cache_argument import as_argument, cache_of
from tests.eviction.feeding import chunks_of, feed, ids, mask_of, model_of
from tests.eviction.locret_feeding import (
    bound_locret,
    heads_of,
    inputs_of_attention,
    locret,
    projections,
    worth,
    worth_of_all,
)

PROMPT, NEW = 77, 70
PADS = [0, 19, 44]
FAMILIES = ("llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3")


def _same_scores(cache: LocretCache, expected: list[Tensor], pads: list[int] | None = None) -> None:
    for layer, scores in zip(cache.evicting_layers, expected, strict=True):
        held = layer.ledger.positions.long()
        is_real = torch.ones_like(held).bool()
        if pads is not None:
            is_real = held >= torch.tensor(pads)[:, None, None]
        found = layer.ledger.scores
        assert found.dtype == torch.float32
        torch.testing.assert_close(found[is_real], scores.gather(2, held)[is_real], atol=1e-5, rtol=1e-5)


def _read(model: PreTrainedModel, pads: list[int] | None, **options: Any) -> tuple[LocretCache, list[Tensor]]:
    """A cache that has read a prompt in chunks and 70 tokens one by one, and what scores should be."""
    total = PROMPT + NEW
    tokens = ids(total, 2 if pads is None else len(pads), pads=pads)
    mask = None if pads is None else mask_of(total, pads)
    cache = bound_locret(model, PROMPT, None if mask is None else mask[:, :PROMPT], **options)
    with inputs_of_attention(model) as seen:
        feed(model, cache, tokens, [*chunks_of(PROMPT, 16), *[1] * NEW], mask)
    return cache, worth_of_all(model, heads_of(model), seen)


@pytest.mark.parametrize("pads", [None, PADS], ids=["plain", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_heads_of_the_projections(family: str, pads: list[int] | None) -> None:
    cache, expected = _read(model_of(family), pads, evict_at_decode=True)
    assert cache.num_held() == 24 + 5  # the 65th of 70 generated tokens was one too many
    _same_scores(cache, expected, pads)


@pytest.mark.parametrize(
    "options",
    [{}, {"positions": "compact"}, {"skip_layers": [0]}],
    ids=["at-decode", "compact", "skipped-layer"],
)
def test_generated_tokens_are_scored_too(options: dict[str, Any]) -> None:
    cache, expected = _read(model_of(num_hidden_layers=3), None, **options)
    if "skip_layers" in options:  # a layer that keeps everything scores nothing
        assert cache.evicting_layers[0].held_length == PROMPT + NEW
        expected[0] = torch.zeros_like(expected[0])
    else:
        assert cache.num_held() == 24 + NEW
    _same_scores(cache, expected)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "kvcache_plugins"])
def test_attention_functions_give_the_same_scores(attention: str) -> None:
    cache, expected = _read(model_of("llama", attention), PADS)
    _same_scores(cache, expected, PADS)


def test_under_inference_mode() -> None:
    model = model_of()
    with torch.inference_mode():
        cache, expected = _read(model, None)
    _same_scores(cache, expected)
    feed(model, cache, ids(3, 2), [1, 1, 1])  # and goes on outside of it


def test_under_autocast() -> None:
    # The model computes in bf16, its heads go on in their own precision.
    model: Any = model_of()
    cache, expected = bound_locret(model, PROMPT), []
    with inputs_of_attention(model) as seen, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        feed(model, cache, ids(PROMPT, 2), chunks_of(PROMPT, 16))
        features = [
            [
                torch.cat(parts, dim=1)
                for parts in zip(*(projections(block.self_attn, x) for x in calls), strict=True)
            ]
            for block, calls in zip(model.model.layers, seen, strict=True)
        ]
    for index, parts in enumerate(features):
        assert parts[0].dtype == torch.bfloat16
        expected.append(worth(heads_of(model), index, *parts))
    _same_scores(cache, expected)


def test_a_model_in_bf16() -> None:
    # What a bf16 projection gives is scored in fp32, so that ties stay rare.
    model = copy.deepcopy(model_of()).to(torch.bfloat16)
    cache, expected = _read(model, None)
    for layer, scores in zip(cache.evicting_layers, expected, strict=True):
        wanted = scores.float().gather(2, layer.ledger.positions.long())
        torch.testing.assert_close(layer.ledger.scores, wanted, atol=0.1, rtol=0.05)


def test_scores_have_no_gradient() -> None:
    model = model_of()
    cache = bound_locret(model, 40)
    logits = model(ids(40), **as_argument(cache)).logits
    assert logits.requires_grad
    assert not any(layer.ledger.scores.requires_grad for layer in cache.evicting_layers)


def test_scores_follow_the_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    # The rows of what the attention modules were called with are reordered beside the cache.
    model = model_of()
    seen: list[list[Tensor]]
    changes = 0
    reorder = LocretCache.reorder_cache

    def reorder_both(cache: LocretCache, beam_idx: Tensor) -> None:
        nonlocal changes
        before = cache.evicting_layers[1].ledger.scores.clone()
        reorder(cache, beam_idx)
        changes += not torch.equal(cache.evicting_layers[1].ledger.scores, before)
        for calls in seen:
            calls[:] = [states[beam_idx] for states in calls]

    monkeypatch.setattr(LocretCache, "reorder_cache", reorder_both)
    with inputs_of_attention(model) as seen:
        output = model.generate(  # type: ignore[operator]
            ids(45, 2), num_beams=3, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True,
            cache_implementation="quantized", cache_config=locret(model, evict_at_decode=True),
        )  # fmt: skip
    assert changes > 10
    cache = cache_of(output)
    assert cache.num_held() == 24 + 4
    _same_scores(cache, worth_of_all(model, heads_of(model), seen))


def test_chunks_do_not_change_scores_of_the_first_layer() -> None:
    # Its projections depend on the token alone, so every way of reading gives the same best tokens.
    model, tokens = model_of(), ids(PROMPT, 2)
    whole = bound_locret(model, PROMPT, budget=76, stabilizer_length=0, local_length=0)
    feed(model, whole, tokens, [PROMPT])
    everything = whole.evicting_layers[0]
    for size in (1, 7, 30):
        cache = bound_locret(model, PROMPT, stabilizer_length=0, local_length=0)
        feed(model, cache, tokens, chunks_of(PROMPT, size))
        layer = cache.evicting_layers[0]
        best = everything.ledger.scores.topk(24).values.sort().values
        torch.testing.assert_close(layer.ledger.scores.sort().values, best, atol=1e-5, rtol=1e-5)
