"""SirLLM against brute force. What goes depends on logits, so the whole text is run once per call."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcache_plugins.testing.models import tiny_model
from tests.eviction.feeding import bound_cache, feed, ids, mask_of, real_positions
from tests.reference.eviction import Call, Policy, Survivors, run_with_evictions

DECODE: list[Call] = [(1, "decode")] * 4
PROMPT: list[Call] = [(17, "chunk"), (1, "chunk"), (20, "chunk"), (30, "chunk"), (9, "prompt")]
POLICY = Policy("given", 24, sinks=4, stabilizers=3, local=3)


def _brute_force(
    model: Any, tokens: Tensor, calls: list[Call], pads: list[int] | None, policy: Policy, decay: float
) -> tuple[Tensor, Survivors]:
    worth, stop, before = torch.zeros(tokens.shape), 0, ""
    for count, phase in calls:
        if before == "decode" and phase != "decode":  # all that was said so far, before the next turn is read
            worth *= decay
        before = phase
        logits, _ = run_with_evictions(model, tokens, calls, policy, pads, worth)
        start, stop = stop, stop + count
        surprise = (
            -logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
        )  # of tokens 1, 2, ...
        worth[:, max(start, 1) : stop] = surprise[:, max(start, 1) - 1 : stop - 1]
        for row, pad in enumerate(pads or [0] * len(tokens)):
            if start <= pad < stop:  # nothing predicted it
                worth[row, pad] = worth[row, pad + 1 : stop].amax() if pad + 1 < stop else 0.0
    return run_with_evictions(model, tokens, calls, policy, pads, worth)


# Gemma 2 caps its logits, Cohere and Granite scale them.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {
        "layer_types": ["full_attention"],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": 3.0,
    },
    "cohere": {},
    "granite": {"logits_scaling": 4.0},
}


@functools.cache
def _model(family: str) -> PreTrainedModel:
    return tiny_model(family, vocab_size=512, **FAMILIES[family])


def _compare(
    calls: list[Call],
    pads: list[int] | None = None,
    family: str = "llama",
    policy: Policy = POLICY,
    **options: Any,
) -> None:
    model, counts = _model(family), [count for count, _ in calls]
    total = sum(counts)
    tokens = ids(total, 2 if pads is None else len(pads), pads=pads)
    mask = None if pads is None else mask_of(total, pads)
    cache, parts, start = None, [], 0
    for end in [i + 1 for i, (_, phase) in enumerate(calls) if phase == "decode"]:
        if end < len(calls) and calls[end][1] == "decode":
            continue  # one turn: a prompt and its answer
        prompt = max(i + 1 for i, (_, phase) in enumerate(calls[:end]) if phase == "prompt")
        if cache is None:
            cache = bound_cache(
                model, {"backend": "sirllm", "budget": 24, **options}, sum(counts[:prompt]), mask
            )
        cache.bind(model, mask, prompt_length=sum(counts[:prompt]))
        turn = slice(sum(counts[:start]), sum(counts[:end]))
        parts.append(feed(model, cache, tokens[:, turn], counts[start:end], mask))
        start = end
    assert cache is not None
    logits, survivors = _brute_force(model, tokens, calls, pads, policy, options.get("decay", 1.0))
    assert [real_positions(layer) for layer in cache.evicting_layers] == survivors
    is_real = torch.ones_like(tokens).bool() if mask is None else mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[is_real], logits[is_real], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("pads", [None, [0, 19, 44]], ids=["plain", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_surprising_tokens_stay(family: str, pads: list[int] | None) -> None:
    _compare([*PROMPT, *DECODE], pads, family)


@pytest.mark.parametrize("pads", [None, [0, 19, 44]], ids=["plain", "padded"])
@pytest.mark.parametrize("decay", [1.0, 0.3])
def test_a_second_turn(decay: float, pads: list[int] | None) -> None:
    _compare([*PROMPT, *DECODE, (20, "chunk"), (9, "prompt"), *DECODE], pads, decay=decay, local_length=3)


@pytest.mark.parametrize("pads", [None, [0, 19, 44]], ids=["plain", "padded"])
def test_the_first_token_counts_as_the_most_surprising_of_its_call(pads: list[int] | None) -> None:
    # Nothing protects it here; in a padded row it is the first after the pads.
    _compare([*PROMPT, *DECODE], pads, policy=replace(POLICY, sinks=0), sink_length=0)


def test_drafts_change_nothing_of_what_decays() -> None:
    # Four come with the end of either prompt, and all of them are right.
    model, tokens, found = _model("llama"), ids(96), []
    for has_drafts in (False, True):
        config = {"backend": "sirllm", "budget": 60, "decay": 0.3, "chunk_size": None}
        cache = bound_cache(model, config, 50)
        for prompt, calls in ((50, [50, 1, 1, 1, 1] if not has_drafts else [54]), (92, [42])):
            seen = cache.get_seq_length()
            cache.bind(model, prompt_length=prompt)
            if has_drafts:
                cache.activate_past_recording()
            feed(model, cache, tokens[:, seen : seen + sum(calls)], calls)
            if has_drafts:
                cache.crop(0)
        assert cache.num_held() == 60
        found.append(cache.evicting_layers)
    for layer, drafted in zip(*found, strict=True):
        assert torch.equal(layer.ledger.positions, drafted.ledger.positions)
        torch.testing.assert_close(layer.ledger.scores, drafted.ledger.scores, atol=1e-4, rtol=0.0)
