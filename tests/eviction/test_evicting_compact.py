"""Compact positions against a Llama of the tests' own that stores keys before their rotation."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvcache_plugins import build_cache
from kvcache_plugins.eviction.renumbering import turn_to_slots
from kvcache_plugins.layers.padding import Padding
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.rotary import Rotary
from kvcache_plugins.testing.comparison import assert_close
from kvcache_plugins.testing.generation import padded_prompt, run_scenario
from kvcache_plugins.testing.models import tiny_model
from tests.eviction.feeding import bound_cache, chunks_of, feed, ids, mask_of, model_of, real_positions
from tests.models.families import NAMES, greedy, small_model
from tests.reference.eviction import Call, Policy, run_compactly, run_with_evictions

METHODS: dict[str, tuple[dict[str, Any], Policy]] = {
    "knorm": ({"backend": "knorm"}, Policy("knorm", 24, sinks=4, stabilizers=3, local=3)),
    "streaming_llm": (
        {"backend": "streaming_llm", "sink_length": 2},
        Policy("streaming_llm", 24, sinks=2, stabilizers=3, local=3),
    ),
    "h2o": ({"backend": "h2o"}, Policy("h2o", 24, stabilizers=12, local=12)),
    "expected": (
        {"backend": "expected_attention", "future_length": 30},
        Policy("expected_attention", 24, sinks=4, stabilizers=3, local=3, future=30),
    ),
    "lagkv": (
        {"backend": "lagkv", "lag_size": 4},
        Policy("lagkv", 24, sinks=4, stabilizers=3, local=3, lag=4),
    ),
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "fast": {"rope_type": "default", "rope_theta": 100.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    },
}  # fmt: skip
PROMPT: list[Call] = [(17, "chunk"), (1, "chunk"), (20, "chunk"), (30, "chunk"), (9, "prompt")]
DECODE: list[Call] = [(1, "decode")] * 12
PADS = [0, 19, 44]


@functools.cache
def _model(rope: str) -> PreTrainedModel:
    parameters = dict(ROPES[rope])
    return tiny_model("llama", attn_implementation="sdpa", vocab_size=512, rope_parameters=parameters)


@pytest.mark.parametrize("pads", [None, PADS], ids=["plain", "padded"])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("method", METHODS)
def test_keys_rotated_anew(method: str, rope: str, pads: list[int] | None) -> None:
    options, policy = METHODS[method]
    model = _model(rope)
    calls = PROMPT + DECODE
    counts = [count for count, _ in calls]
    total = sum(counts)
    tokens = ids(total, 2 if pads is None else len(pads), pads=pads)
    mask = None if pads is None else mask_of(total, pads)
    cache = bound_cache(model, {**options, "budget": 24, "positions": "compact"}, 77, mask)
    got = feed(model, cache, tokens, counts, mask)
    expected, survivors = run_compactly(model, tokens, calls, policy, pads)
    assert [real_positions(layer) for layer in cache.evicting_layers] == survivors
    is_real = torch.ones_like(tokens).bool() if mask is None else mask.bool()
    assert_close("logits", expected[is_real], got[is_real], 1e-5)
    # The two numberings differ, or this would have shown nothing.
    absolute, _ = run_with_evictions(model, tokens, calls, policy, pads)
    assert (absolute[is_real] - expected[is_real]).abs().max() > 0.1


def test_pads_are_moved_and_not_turned() -> None:
    # four of six have gone, of a row whose tokens stay where they are: there is no angle for what is left
    keys = torch.randn(1, 2, 5, 8)
    index = torch.tensor([0, 1, 6, 7, 8]).expand(1, 2, -1)
    before, after = (Padding(lengths=torch.tensor([count])) for count in (6, 2))
    moved = keys.clone()
    turn_to_slots(moved, index, Rotary((1.0, 0.1, 0.01, 0.001)), before, after)
    assert torch.equal(moved, keys)


def test_no_position_exceeds_what_is_held() -> None:
    # 77 tokens are read and 70 written, and the model is never shown a position beyond 24 + 64 + 1.
    model, largest = model_of(), []
    handle = model.model.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: largest.append(
            int((args[1] if len(args) > 1 else kwargs["position_ids"]).max())
        ),
        with_kwargs=True,
    )
    config = {
        "backend": "knorm", "budget": 24, "chunk_size": 16, "positions": "compact", "evict_at_decode": True,
    }  # fmt: skip
    try:
        output = model.generate(
            ids(77), max_new_tokens=70, cache_implementation="quantized", cache_config=config,
            do_sample=False, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    finally:
        handle.remove()
    assert largest[:5] == [15, 31, 39, 39, 36]
    assert largest[5:] == [*range(24, 24 + 65), *range(24, 24 + 4)]
    by_hand = bound_cache(model, config, 77)
    logits = feed(model, by_hand, output.sequences[:, :-1], [*chunks_of(77, 16), *[1] * 69])
    torch.testing.assert_close(torch.stack(output.logits, 1), logits[:, 76:], atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("scenario", ["greedy", "beams", "prompt_lookup", "chunked_prefill", "second_turn"])
def test_a_huge_budget_is_the_ordinary_cache(scenario: str) -> None:
    config = {"backend": "streaming_llm", "budget": 1000, "positions": "compact"}
    expected = run_scenario(model_of(), scenario, lengths=(40, 29))
    got = run_scenario(model_of(), scenario, lengths=(40, 29), cache_config=config)
    assert got.tolist() == expected.tolist()


def test_a_loop_that_does_not_bind_is_numbered_too() -> None:
    tokens, logits = ids(72), []
    config = {"backend": "streaming_llm", "budget": 24, "positions": "compact"}
    for is_bound in (False, True):  # the model is a new one, which has been hooked by no other cache
        model = tiny_model("llama", attn_implementation="sdpa", vocab_size=512)
        cache = build_cache(model, config)
        logits.append(feed(model, cache.bind(model) if is_bound else cache, tokens, [60] + [1] * 12))
    assert torch.equal(*logits)


def test_other_caches_of_the_model_are_left_alone() -> None:
    model = model_of(num_hidden_layers=1, head_dim=8)
    expected = run_scenario(model, "greedy", lengths=(40, 29))
    run_scenario(model, "greedy", cache_config={"backend": "knorm", "budget": 24, "positions": "compact"})
    assert run_scenario(model, "greedy", lengths=(40, 29)).tolist() == expected.tolist()
    absolute = {"backend": "knorm", "budget": 24}
    fresh = model_of(num_hidden_layers=1, head_dim=8, seed=0)
    got = run_scenario(model, "greedy", cache_config=absolute)
    assert got.tolist() == run_scenario(fresh, "greedy", cache_config=absolute).tolist()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"storage": {"backend": "int8"}}, "storage must be None.*'absolute'"),
        ({"skip_layers": [0]}, "every layer must evict with the same budget.*'absolute'"),
        ({"layer_overrides": {"0": {"budget": 40}}}, "same budget.*'absolute'"),
    ],
)
def test_what_compact_positions_cannot_go_with(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=f"positions='compact'.*{match}"):
        bound_cache(model_of(), {"backend": "knorm", "budget": 24, "positions": "compact", **options}, 77)


@pytest.mark.parametrize("name", [n for n in ("codegen", "gptj", "llama4_text", "nanochat") if n in NAMES])
@torch.no_grad()
def test_rotations_written_in_other_ways(name: str) -> None:
    """Of one layer: its keys depend on a token and its place alone, so that of what is kept has the same."""
    own = {"no_rope_layers": [1], "layer_types": ["full_attention"]} if name == "llama4_text" else {}
    model = small_model(name, num_hidden_layers=1, **own)
    compact = {"backend": "streaming_llm", "budget": 40, "chunk_size": None, "positions": "compact"}
    generated, logits, _ = greedy(model, (120,), 3, compact)
    tokens = padded_prompt((120,))["input_ids"]
    kept = torch.cat([tokens[:, :4], tokens[:, -36:], generated], dim=1)
    expected = model(kept).logits[:, -3:-1]
    assert (expected - model(torch.cat([tokens, generated], dim=1)).logits[:, -3:-1]).abs().max() > 0.01
    torch.testing.assert_close(logits[:, 1:], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_compact_positions_need_rotary_ones(family: str) -> None:
    with pytest.raises(ValueError, match=r"positions='compact' needs rotary.*'absolute'"):
        bound_cache(model_of(family), {"backend": "knorm", "budget": 24, "positions": "compact"}, 77)


def test_positions_that_are_given_are_ignored() -> None:
    """Tokens are numbered after those that are held, as the README says, by whatever numbers they come."""
    model, tokens = _model("default"), ids(60)
    logits = {}
    for positions in ("absolute", "compact"):
        config = {"backend": "streaming_llm", "budget": 24, "positions": positions, "evict_at_decode": True}
        for step in (1, 3):
            cache = bound_cache(model, config, 60)
            with torch.no_grad():
                out = model(tokens, position_ids=step * torch.arange(60)[None], **as_argument(cache))
            logits[positions, step] = out.logits
    assert torch.equal(logits["compact", 1], logits["compact", 3])
    assert (logits["absolute", 1] - logits["absolute", 3]).norm() > 0.01 * logits["absolute", 1].norm()


def test_what_a_step_is_shown_is_as_it_was_before_its_eviction() -> None:
    # Exact tokens behind packed ones are turned in a copy: the step that evicts has yet to read them.
    model, states = model_of(), torch.randn(1, 2, 300, 16, generator=torch.Generator().manual_seed(0))
    layers = [
        bound_cache(
            model,
            {
                "backend": "knorm", "budget": budget, "positions": "compact", "evict_at_decode": True,
                "storage": {"backend": "kvquant", "calibration": "normal_float", "residual_length": 8},
            },
            200,
        ).evicting_layers[0]
        for budget in (200, 400)
    ]  # fmt: skip
    start, stop = 0, 200
    while layers[0].held_length == start:
        shown = [layer.update(*[states[:, :, start:stop]] * 2)[0] for layer in layers]
        start, stop = stop, stop + 1
    assert start > 200
    assert torch.equal(*(keys.tokens.dense(torch.float32) for keys in shown))
