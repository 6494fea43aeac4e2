"""Heads that share a budget, against brute force: a model that forgets nothing, with masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.eviction.feeding import bound_cache, feed, ids, mask_of, model_of, real_positions
from tests.reference.eviction import Call, Policy, run_with_evictions

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8}
METHODS: dict[str, tuple[dict[str, Any], Policy]] = {
    "snapkv": ({"backend": "snapkv"}, Policy("snapkv", 24, stabilizers=3, local=3)),
    "snapkv-sinks": (
        {"backend": "snapkv", "window_length": 9, "sink_length": 2},
        Policy("snapkv", 24, sinks=2, stabilizers=3, local=3, window=9),
    ),
    "h2o": (
        {"backend": "h2o", "stabilizer_length": 2, "local_length": 4},
        Policy("h2o", 24, stabilizers=2, local=4),
    ),
    "expected": (
        {"backend": "expected_attention", "future_length": 9},
        Policy("expected_attention", 24, sinks=4, stabilizers=3, local=3, future=9),
    ),
}
PROMPT: list[Call] = [(17, "chunk"), (20, "chunk"), (30, "chunk"), (10, "prompt")]
DECODE: list[Call] = [(1, "decode")] * 5


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("floor", [0.2, 0.7])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvcache_plugins"])
def test_prompt_in_chunks(method: str, floor: float, attention: str) -> None:
    _compare(method, floor, PROMPT + DECODE, attention=attention)


@pytest.mark.parametrize("method", METHODS)
def test_eviction_while_generating(method: str) -> None:
    _compare(method, 0.2, PROMPT + DECODE * 27, evicts_at_decode=True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("pads", [8, 30, 60])
def test_padding(method: str, pads: int) -> None:
    _compare(method, 0.2, PROMPT + DECODE, pads=pads)


def _compare(
    method: str,
    floor: float,
    calls: list[Call],
    *,
    pads: int = 0,
    attention: str = "sdpa",
    evicts_at_decode: bool = False,
) -> None:
    options, policy = METHODS[method]
    model = model_of("llama", attention, **SIZES)
    counts = [count for count, _ in calls]
    tokens = ids(sum(counts), pads=[pads])
    mask = mask_of(sum(counts), [pads])
    config = {**options, "budget": 24, "head_floor": floor, "evict_at_decode": evicts_at_decode}
    cache = bound_cache(model, config, sum(n for n, phase in calls if phase != "decode"), mask)
    got = feed(model, cache, tokens, counts, mask)
    policy = replace(policy, head_floor=floor, evicts_at_decode=evicts_at_decode)
    logits, survivors = run_with_evictions(model, tokens, calls, policy, [pads])
    held = [real_positions(layer) for layer in cache.evicting_layers]
    assert held == survivors
    assert pads or len({len(head) for layer in held for head in layer[0]}) > 2
    torch.testing.assert_close(got[mask.bool()], logits[mask.bool()], atol=1e-4, rtol=0.0)
