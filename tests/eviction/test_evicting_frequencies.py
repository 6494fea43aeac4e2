"""Rotary frequencies that follow the length of a text: what is turned must have been rotated by one set."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcache_plugins import build_cache, estimate
from kvcache_plugins.models.cache_argument import cache_of
from kvcache_plugins.models.frequencies import Change, frequency_change
from kvcache_plugins.testing.models import tiny_model
from tests.eviction.feeding import bound_cache, feed, ids
from tests.models.test_longrope import SWITCH, phi3

LIMIT = 64
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 8.0, "short_factor": [1.0] * 8,
    "long_factor": [1.0 + i for i in range(8)], "original_max_position_embeddings": LIMIT,
}  # fmt: skip
ONE_SET: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "default", "rope_theta": 10000.0},
    "longrope": {**LONGROPE, "long_factor": [1.0] * 8},
}
"""As `FOLLOWING`, but with the frequencies of short texts for all."""
FOLLOWING: dict[str, dict[str, Any]] = {"dynamic": DYNAMIC, "longrope": LONGROPE}
COMPACT = {"backend": "streaming_llm", "budget": 40, "chunk_size": 16, "positions": "compact"}


@functools.cache
def model_of(kind: str, *, follows: bool = True) -> PreTrainedModel:
    rope = (FOLLOWING if follows else ONE_SET)[kind]
    longest = LIMIT if kind == "dynamic" else 8 * LIMIT
    return tiny_model(
        "llama", attn_implementation="sdpa", vocab_size=512, max_position_embeddings=longest,
        rope_parameters=dict(rope),
    )  # fmt: skip


def generated(model: Any, config: dict[str, Any], length: int = 200, new: int = 12) -> tuple[Tensor, Any]:
    """Logits of a generation, and its cache."""
    output = model.generate(
        ids(length), max_new_tokens=new, do_sample=False, return_dict_in_generate=True, output_logits=True,
        cache_implementation="quantized", cache_config=config,
    )  # fmt: skip
    return torch.stack(output.logits), cache_of(output)


@pytest.mark.parametrize("backend", ["streaming_llm", "h2o", "kvzip", "expected_attention"])
@pytest.mark.parametrize("kind", FOLLOWING)
def test_a_long_text_of_which_little_is_held_is_one_of_short_texts(kind: str, backend: str) -> None:
    config = {**COMPACT, "backend": backend}
    got, cache = generated(model_of(kind), config)
    expected, _ = generated(model_of(kind, follows=False), config)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0.0)
    assert cache.whole_prompt_reason is None and cache.get_seq_length() == 211


@pytest.mark.parametrize(
    "config",
    [
        {"chunk_size": None},
        {"chunk_size": 40},
        {"budget": 100},
        {"backend": "h2o", "chunk_size": 40},
        {"backend": "kvzip", "chunk_size": 40},
        {
            "budget": 150,
            "storage": {"backend": "kvquant", "calibration": "normal_float", "residual_length": 4},
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", FOLLOWING)
def test_too_much_for_one_set_is_refused(kind: str, config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"positions='compact'.*rope_type='{kind}'.*'absolute'"):
        generated(model_of(kind), {**COMPACT, **config})


@pytest.mark.parametrize("kind", FOLLOWING)
def test_a_loop_goes_on_with_smaller_chunks(kind: str) -> None:
    tokens, found = ids(120), []
    for follows in (True, False):
        model = model_of(kind, follows=follows)
        cache = bound_cache(model, COMPACT, 120)
        logits = [feed(model, cache, tokens[:, :60], [30, 30])]
        if follows:
            with pytest.raises(ValueError, match="70 tokens are held when something is evicted"):
                feed(model, cache, tokens[:, 60:90], [30])
        cache.check_in_step()
        logits.append(feed(model, cache, tokens[:, 60:], [20] * 3))
        found.append(torch.cat(logits, dim=1))
    torch.testing.assert_close(*found, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("kind", FOLLOWING)
def test_a_cache_that_was_told_nothing_refuses_too(kind: str) -> None:
    for source in (model_of(kind), model_of(kind).config):
        cache = build_cache(source, COMPACT)
        with pytest.raises(ValueError, match="100 tokens are held"):
            feed(model_of(kind), cache, ids(100), [100])
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("kind", FOLLOWING)
def test_what_is_to_be_generated_is_refused_before(kind: str) -> None:
    config = {**COMPACT, "evict_at_decode": True}
    model = model_of(kind)
    for act in (
        lambda: build_cache(model, config).bind(model, max_cache_length=200, prompt_length=50),
        lambda: estimate(model.config, config, 50, new_tokens=151),
        lambda: generated(model, config, 50, 151),
    ):
        with pytest.raises(ValueError, match="105 tokens are held when something is evicted"):
            act()
    build_cache(model, config).bind(model, max_cache_length=104, prompt_length=50)
    build_cache(model, config).bind(model, prompt_length=50)  # of a length that nobody knows
    assert estimate(model.config, COMPACT, 50, new_tokens=151) > 0


@pytest.mark.parametrize("kind", FOLLOWING)
def test_where_nothing_goes_nothing_is_turned(kind: str) -> None:
    # new models, because one keeps the frequencies of a longer text as long as texts are long
    got, expected = (
        generated(model_of.__wrapped__(kind), {**COMPACT, "budget": 300, "positions": positions})[0]
        for positions in ("compact", "absolute")
    )
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0.0)


def test_phi3_is_told_by_the_length_of_the_prompt() -> None:
    model, tokens = phi3(), ids(90) % 128
    with pytest.raises(
        ValueError, match=r"rope_type='longrope'.*'absolute'.*`bind` with the `prompt_length`"
    ):
        feed(model, bound_cache(model, COMPACT, None), tokens, [90])
    feed(model, bound_cache(model, COMPACT, 90), tokens, [SWITCH, SWITCH, 90 - 2 * SWITCH])
    assert estimate(model.config, COMPACT, 90) > 0


EXPECTED = {"backend": "expected_attention", "budget": 40, "chunk_size": 16}


@pytest.mark.parametrize("floor", [None, 0.2])
@pytest.mark.parametrize("kind", FOLLOWING)
def test_queries_are_turned_back_by_what_the_model_turned_them(kind: str, floor: float | None) -> None:
    """Up to the length at which its frequencies change; of a longer text nothing can be evicted."""
    config = {**EXPECTED, "head_floor": floor}
    got, _ = generated(model_of(kind), config, 60, 3)
    expected, _ = generated(model_of(kind, follows=False), config, 60, 3)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0.0)
    message = rf"turns queries back.*rope_type='{kind}'.*{{}} tokens have been read.*shorter texts"
    for act in (
        lambda: generated(model_of(kind), config),
        lambda: estimate(model_of(kind).config, config, 200),
        lambda: bound_cache(model_of(kind), config, 200),
    ):
        with pytest.raises(ValueError, match=message.format(200)):
            act()
    evicting = {**config, "evict_at_decode": True}
    with pytest.raises(ValueError, match=message.format(125)):
        generated(model_of(kind), evicting, 60, 100)
    cache = bound_cache(model_of(kind), evicting, 60)
    feed(model_of(kind), cache, ids(124), [30, 30, *[1] * 64])
    with pytest.raises(ValueError, match=message.format(125)):
        feed(model_of(kind), cache, ids(1), [1])
    cache.check_in_step()
    generated(model_of.__wrapped__(kind), {**config, "budget": 300})  # of which nothing goes


def test_when_frequencies_change() -> None:
    assert frequency_change(model_of("dynamic").config) == Change("dynamic", LIMIT - 1)
    assert frequency_change(model_of("longrope").config) == Change("longrope", LIMIT)
    assert frequency_change(phi3().config) == Change("longrope", SWITCH, can_be_told=True)
    assert frequency_change(model_of("dynamic", follows=False).config) is None
    config = tiny_model("gemma3_text", num_hidden_layers=2).config
    config.rope_parameters["full_attention"] |= {"rope_type": "dynamic", "factor": 2.0}
    assert frequency_change(config, "sliding_attention") is None
    assert frequency_change(config, "full_attention") == Change("dynamic", config.max_position_embeddings - 1)
