"""Evicting caches against brute force: a model that forgets nothing, with masks over what was dropped."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from kvcache_plugins.backends.snapkv import SnapKVConfig
from tests.eviction.feeding import bound_cache, feed, ids, mask_of, model_of, real_positions
from tests.reference.eviction import Call, Policy, run_with_evictions

# Backend options beside `budget`, and the policy in the words of the reference. The protected lengths and
# LagKV's partitions are the documented defaults for a budget of 24: an eighth of it; half of it for H2O.
METHODS: dict[str, tuple[dict[str, Any], Policy]] = {
    "knorm": ({"backend": "knorm"}, Policy("knorm", 24, sinks=4, stabilizers=3, local=3)),
    "streaming_llm": (
        {"backend": "streaming_llm"},
        Policy("streaming_llm", 24, sinks=4, stabilizers=3, local=3),
    ),
    "keydiff": ({"backend": "keydiff"}, Policy("keydiff", 24, stabilizers=3, local=3)),
    "keydiff-local": (
        {"backend": "keydiff", "stabilizer_length": 9, "local_length": 5, "sink_length": 2},
        Policy("keydiff", 24, sinks=2, stabilizers=9, local=5),
    ),
    "lagkv": ({"backend": "lagkv"}, Policy("lagkv", 24, sinks=4, stabilizers=3, local=3, lag=3)),
    "lagkv-wide": (  # two partitions exceed the budget
        {"backend": "lagkv", "lag_size": 13, "sink_length": 0, "local_length": 1},
        Policy("lagkv", 24, stabilizers=3, local=1, lag=13),
    ),
    "h2o": ({"backend": "h2o"}, Policy("h2o", 24, stabilizers=12, local=12)),
    "h2o-normalized": (
        {"backend": "h2o", "normalize": True, "stabilizer_length": 0, "local_length": 1},
        Policy("h2o", 24, stabilizers=0, local=1, normalize=True),
    ),
    "snapkv": ({"backend": "snapkv"}, Policy("snapkv", 24, stabilizers=3, local=3)),
    "snapkv-narrow": (
        {"backend": "snapkv", "window_length": 4, "kernel_size": 3, "sink_length": 1},
        Policy("snapkv", 24, sinks=1, stabilizers=3, local=3, window=4, kernel=3),
    ),
    "tova": ({"backend": "tova"}, Policy("tova", 24, stabilizers=3, local=3)),
    "expected": (
        {"backend": "expected_attention"},
        Policy("expected_attention", 24, sinks=4, stabilizers=3, local=3),
    ),
    "expected-near": (
        {
            "backend": "expected_attention", "future_length": 9, "epsilon": 0.02, "use_covariance": False,
            "sink_length": 1,
        },
        Policy(
            "expected_attention", 24, sinks=1, stabilizers=3, local=3, future=9, epsilon=0.02,
            covariance=False,
        ),
    ),
    "expected-weights": (
        {
            "backend": "expected_attention", "use_value_norm": False, "sink_length": 0,
            "stabilizer_length": 3, "local_length": 0,
        },
        Policy("expected_attention", 24, stabilizers=3, local=0, value_norm=False),
    ),
}  # fmt: skip
PROMPT: list[Call] = [(17, "chunk"), (1, "chunk"), (20, "chunk"), (30, "chunk"), (9, "prompt")]
DECODE: list[Call] = [(1, "decode")] * 12
ROUNDING = {"atol": 1e-4, "rtol": 0.0}


def _compare(
    config: dict[str, Any],
    policies: Policy | list[Policy],
    calls: list[Call],
    pads: list[int] | None = None,
    prompt_length: int | None = 77,
    attention: str = "sdpa",
    family: str = "llama",
    seed: int = 0,
) -> None:
    layers = len(policies) if isinstance(policies, list) else 2
    model = model_of(family, attention, num_hidden_layers=layers)
    counts = [count for count, _ in calls]
    batch = 2 if pads is None else len(pads)
    tokens = ids(sum(counts), batch, seed, pads)
    mask = None if pads is None else mask_of(sum(counts), pads)
    cache = bound_cache(model, config, prompt_length, mask)
    got = feed(model, cache, tokens, counts, mask)
    logits, survivors = run_with_evictions(model, tokens, calls, policies, pads)
    held = [real_positions(layer) for layer in cache.evicting_layers]
    assert held == survivors
    is_real = torch.ones_like(tokens).bool() if mask is None else mask.bool()
    torch.testing.assert_close(got[is_real], logits[is_real], **ROUNDING)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("pads", [None, [0, 19, 44]], ids=["plain", "padded"])
def test_prompt_in_chunks(method: str, pads: list[int] | None) -> None:
    options, policy = METHODS[method]
    _compare({**options, "budget": 24}, policy, PROMPT + DECODE, pads)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("pads", [None, [0, 19, 44]], ids=["plain", "padded"])
def test_eviction_while_generating(method: str, pads: list[int] | None) -> None:
    # 64 tokens above the budget are tolerated, so generated tokens make room at the 65th and the 130th.
    options, policy = METHODS[method]
    config = {**options, "budget": 24, "evict_at_decode": True}
    policy = replace(policy, evicts_at_decode=True)
    _compare(config, policy, [*PROMPT, *DECODE * 11], pads)


@pytest.mark.parametrize("method", METHODS)
def test_an_unknown_prompt(method: str) -> None:
    # Nobody told the cache where the prompt ends: every call of several tokens is the end of one.
    options, policy = METHODS[method]
    calls: list[Call] = [(33, "prompt"), (5, "prompt"), *DECODE[:3], (21, "prompt"), *DECODE[:3]]
    _compare({**options, "budget": 24}, policy, calls, prompt_length=None)


@pytest.mark.parametrize("method", METHODS)
def test_one_token_after_the_other(method: str) -> None:
    options, policy = METHODS[method]
    config = {**options, "budget": 24, "evict_at_decode": True}
    calls: list[Call] = [(1, "prompt"), *DECODE * 13]  # room is made twice, too
    _compare(config, replace(policy, evicts_at_decode=True), calls, prompt_length=1)


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_of_the_budget_and_one_more(method: str) -> None:
    options, policy = METHODS[method]
    for length in (23, 24, 25):
        calls: list[Call] = [(length - 8, "chunk"), (8, "prompt"), *DECODE]
        _compare({**options, "budget": 24}, policy, calls, prompt_length=length)


@pytest.mark.parametrize("family", ["gpt_neox", "mistral", "phi3", "qwen3"])
@pytest.mark.parametrize("method", ["expected", "keydiff", "lagkv", "h2o", "snapkv-narrow", "tova"])
def test_families(method: str, family: str) -> None:
    options, policy = METHODS[method]
    _compare({**options, "budget": 24}, policy, PROMPT + DECODE, [0, 31], family=family)


@pytest.mark.parametrize(
    ("method", "attention"),
    [(method, attention) for method in ("expected", "keydiff", "knorm", "lagkv", "h2o", "snapkv", "tova")
     for attention in ("eager", "kvcache_plugins")],
)  # fmt: skip
def test_attention_functions(method: str, attention: str) -> None:
    options, policy = METHODS[method]
    _compare({**options, "budget": 24}, policy, PROMPT + DECODE, attention=attention)
    if method != "snapkv":
        _compare({**options, "budget": 24}, policy, PROMPT + DECODE, [0, 31], attention=attention)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("pads", [None, [0, 19, 44]], ids=["plain", "padded"])
@pytest.mark.parametrize("attention", ["sdpa", "kvcache_plugins"])
def test_layers_with_budgets_of_their_own(method: str, pads: list[int] | None, attention: str) -> None:
    options, policy = METHODS[method]
    config = {**options, "budget": 24, "layer_overrides": {"0": {"budget": 40}}, "skip_layers": [1]}
    h2o = method.startswith("h2o")
    given = {"stabilizers": 20, "local": 20} if h2o else {"stabilizers": 5, "local": 5}
    if "stabilizer_length" in options:
        given = {}
    if method == "lagkv":
        given["lag"] = 5
    policies = [replace(policy, budget=40, **given), replace(policy, budget=None), policy]
    _compare(config, policies, PROMPT + DECODE, pads, attention=attention)


def test_a_second_turn_evicts_what_the_first_generated() -> None:
    model = model_of(num_hidden_layers=3)
    for method in ("expected", "h2o", "keydiff", "knorm", "lagkv", "snapkv", "tova"):
        options, policy = METHODS[method]
        calls: list[Call] = [(30, "chunk"), (11, "prompt"), *DECODE, (20, "chunk"), (9, "prompt"), *DECODE]
        counts = [count for count, _ in calls]
        tokens = ids(sum(counts), 2)
        config = {**options, "budget": 24, "local_length": policy.local}
        cache = bound_cache(model, config, 41)
        first = feed(model, cache, tokens[:, :53], counts[:14])
        cache.bind(model, prompt_length=82)
        second = feed(model, cache, tokens[:, 53:], counts[14:])
        logits, survivors = run_with_evictions(model, tokens, calls, policy)
        assert [real_positions(layer) for layer in cache.evicting_layers] == survivors
        torch.testing.assert_close(torch.cat([first, second], 1), logits, **ROUNDING)


def _oldest_first(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return -torch.arange(layer.cumulative_length, layer.cumulative_length + keys.shape[2]).expand(
        keys.shape[:3]
    )


@pytest.mark.parametrize(("question", "newest"), [(2, 3), (5, 5), (30, 6)])
def test_a_later_question_stays(question: int, newest: int) -> None:
    # An eighth of the budget at the end of the first prompt; then what is asked, up to a quarter of it.
    model, tokens = model_of(), ids(60 + question, 2)
    cache = bound_cache(model, {"backend": "knorm", "budget": 24, "sink_length": 0}, 60)
    for layer in cache.evicting_layers:
        layer.score = partial(_oldest_first, layer)  # type: ignore[method-assign]
    feed(model, cache, tokens[:, :60], [30, 30])
    assert real_positions(cache.evicting_layers[0])[0][0] == [*range(21), 57, 58, 59]
    cache.bind(model, prompt_length=60 + question)
    feed(model, cache, tokens[:, 60:], [question])
    held = real_positions(cache.evicting_layers[0])[0][0]
    end = 60 + question
    before = [p for p in [*range(21), 57, 58, 59, *range(60, end)] if p < end - newest]
    assert held == [*before[: 24 - newest], *range(end - newest, end)]


@pytest.mark.parametrize("obstacle", ["hook", "unknown"])
@pytest.mark.parametrize("method", ["expected", "h2o", "tova"])
def test_eager_attention_that_ours_does_not_replace(method: str, obstacle: str) -> None:
    # GPT-2 does not say whether weights are asked for, and a hook may want them: both show us the queries
    family = "gpt2" if obstacle == "unknown" else "qwen3"
    options, policy = METHODS[method]
    config = {**options, "budget": 24}
    model = model_of(family, "eager", num_hidden_layers=3)
    hooks = [
        module.register_forward_hook(lambda *_: None)
        for module in model.modules()
        if obstacle == "hook" and hasattr(module, "k_proj")
    ]
    try:
        _compare(config, policy, PROMPT + DECODE, [0, 31], attention="eager", family=family)
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def test_only_queries_of_the_layer_itself_count_where_others_read_its_keys() -> None:
    sharing: dict[str, Any] = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "vocab_size": 128}
    model, tokens = model_of("gemma4_text", **sharing), ids(40) % 128
    cache = bound_cache(model, {"backend": "h2o", "budget": 40}, None)
    feed(model, cache, tokens, [40])
    (layer,) = cache.evicting_layers
    eager = model_of("gemma4_text", "eager", **sharing)
    weights = eager(tokens, output_attentions=True).attentions[layer.layer_idx]  # (1, Hq, T, T)
    heads = layer.ledger.scores.shape[1]
    received = weights.unflatten(1, (heads, -1)).sum(dim=(2, 3))
    torch.testing.assert_close(layer.ledger.scores, received, atol=1e-4, rtol=0.0)
    feed(model, cache, tokens[:, :16], [16])
    assert layer.held_length == 40


@pytest.mark.parametrize(
    ("budget", "window", "kernel"), [(32, 16, 5), (48, 16, 7), (33, 16, 5), (60, 3, 3), (24, 12, 1)]
)
@torch.no_grad()
def test_snapkv_of_a_whole_prompt_is_the_published_rule(budget: int, window: int, kernel: int) -> None:
    # Of what lies before the window, the best by its pooled attention; and the window.
    model, tokens = model_of("llama", "eager"), ids(90, 2)
    options = {"window_length": window, "kernel_size": kernel, "local_length": 0, "chunk_size": None}
    cache = bound_cache(model, {"backend": "snapkv", "budget": budget, **options}, 90)
    feed(model, cache, tokens, [90])
    attentions = model(tokens, output_attentions=True, use_cache=False).attentions  # type: ignore[operator]
    for layer, weights in zip(cache.evicting_layers, attentions, strict=True):
        votes = weights[:, :, -window:, :-window].sum(2)
        votes = votes.unflatten(1, (layer.num_heads, -1)).sum(2)
        padded = torch.nn.functional.pad(votes, (kernel // 2, kernel // 2))
        best = padded.unfold(2, kernel, 1).sum(-1).topk(budget - window).indices.sort().values
        expected = torch.cat([best, torch.arange(90 - window, 90).expand(*best.shape[:2], -1)], dim=2)
        assert torch.equal(layer.ledger.positions.long(), expected)


@pytest.mark.parametrize(("budget", "window"), [(24, 12), (127, 63), (128, 64), (512, 64)])
def test_how_much_snapkv_protects(budget: int, window: int) -> None:
    config = SnapKVConfig(budget=budget)
    assert config.protected_at("chunk", budget) == max(window, budget // 8)
    assert config.protected_at("prompt", budget, turn_length=100) == max(window, min(100, budget // 4))
    assert config.protected_at("decode", budget) == budget // 8
    assert SnapKVConfig(budget=budget, local_length=13).protected_at("prompt", budget) == max(13, window)
