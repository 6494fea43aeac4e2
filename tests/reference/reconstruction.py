"""KVzip (arXiv 2505.23416, section 3) by brute force, one row at a time.

When a call of a prompt has been answered, and before anything of it goes, its tokens are repeated passage by
passage, each as the continuation of the whole text. A token is worth the largest attention weight that it
gets of any query of the repetition, of any head of its group, in a softmax over the first tokens of the text,
the passage, and what has been repeated so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .eviction import Call, Policy, Survivors, run_with_evictions

__all__ = ["Repetition", "run_with_reconstruction"]

_LEAD = 8


@dataclass(frozen=True)
class Repetition:
    """How a text is repeated: tokens at once, and those that come first."""

    length: int = 2048
    prompt: Sequence[int] = ()


def run_with_reconstruction(
    model: Any, tokens: Tensor, calls: Sequence[Call], policy: Policy, repetition: Repetition
) -> tuple[Tensor, Survivors]:
    """Logits `(1, T, vocabulary)` and survivors of one row `(1, T)` without pads."""
    config, length = model.config, tokens.shape[1]
    worth = torch.zeros(config.num_hidden_layers, config.num_key_value_heads, 1, length)
    seen = judged = 0
    for i, (count, phase) in enumerate(calls):
        seen += count
        if phase == "decode" and not _goes(model, tokens[:, :seen], calls[: i + 1], policy, worth):
            continue
        for start in range(judged, seen, repetition.length):
            passage = range(start, min(start + repetition.length, seen))
            repeated = [*repetition.prompt, *tokens[0, max(0, start - _LEAD) : passage.stop].tolist()]
            text = torch.cat([tokens[:, :seen], torch.tensor([repeated])], dim=1)
            states: list[tuple[Tensor, Tensor]] = []
            read = [*calls[:i], (count, "read"), (len(repeated), "read")]
            table = torch.cat([worth[..., :seen], worth.new_zeros(*worth.shape[:3], len(repeated))], dim=-1)
            run_with_evictions(model, text, read, policy, worth=table, states=states)
            for layer, (query, key) in enumerate(states):
                groups = query.shape[1] // key.shape[1]
                for head in range(key.shape[1]):
                    own = query[0, head * groups : (head + 1) * groups, seen:].double()
                    worth[layer, head, 0, passage.start : passage.stop] = _most_attention(
                        own, key[0, head].double(), passage, seen, policy.sinks, config.head_dim**-0.5
                    )
        judged = seen
    return run_with_evictions(model, tokens, calls, policy, worth=worth)


def _goes(model: Any, text: Tensor, calls: Sequence[Call], policy: Policy, worth: Tensor) -> bool:
    """Whether something goes after the last of the calls: held before it are what the others left."""
    before = [*calls[:-1], (calls[-1][0], "read")]
    _, held = run_with_evictions(model, text, before, policy, worth=worth[..., : text.shape[1]])
    return policy.is_due(calls[-1][1], max(sum(map(len, rows[0])) / len(rows[0]) for rows in held))


def _most_attention(
    queries: Tensor, keys: Tensor, passage: range, seen: int, sinks: int, scaling: float
) -> Tensor:
    """Of queries `(G, q, D)` and keys `(seen + q, D)`: `(len(passage),)`."""
    most = torch.zeros(len(passage), dtype=torch.float64)
    first = [p for p in range(sinks) if p < passage.start]
    for query in queries:
        for step, asked in enumerate(query):
            shared = [*first, *passage, *range(seen, seen + step + 1)]
            weights = (keys[shared] @ asked * scaling).softmax(0)
            most = torch.maximum(most, weights[len(first) : len(first) + len(passage)])
    return most
