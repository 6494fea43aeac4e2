"""Eviction by brute force: everything is computed and kept, and masks hide what a policy would have dropped.

The whole text goes through the unmodified model in one call without a cache. For every layer, row and
key/value head the policy is played through, call by call, over lists of positions, and every query sees
exactly the tokens that were still held when it came: `run_with_evictions`. Positions are those of the text.

A policy keeps `budget` tokens per head. When a call has been answered and more are held (after a generated
token: more than `budget + slack`, and only if the policy evicts then), the pads go first, oldest first; of
the real tokens stay the first `sinks` of the row, the newest `recent`, and the best of the others.

`run_compactly` is a second model of its own, for Llama: it stores keys before their rotation and rotates them
anew in every call, at the places 0, 1, 2, ... where they then stand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from .lagkv import LagPartitions

__all__ = ["Call", "Policy", "Survivors", "own_calls", "run_compactly", "run_with_evictions"]

Call = tuple[int, str]
"""Tokens of a call, and what they are: a `"chunk"` of a prompt, its end (`"prompt"`) or `"decode"`; after
`"read"` nothing goes."""
Survivors = list[list[list[list[int]]]]
"""Positions of the real tokens held in the end: `[layer][row][head]`, ascending."""

_NAME = "eviction_by_brute_force"


@dataclass(frozen=True)
class Policy:
    """What a layer keeps.

    Args:
        method: `"knorm"`, `"streaming_llm"`, `"keydiff"`, `"lagkv"`, `"h2o"`, `"snapkv"`, `"tova"`,
            `"expected_attention"`, or `"given"` for a table of numbers.
        budget: Tokens kept; None for everything.
        sinks: First real tokens that stay.
        stabilizers: Newest tokens that stay between two chunks of a prompt.
        local: Newest tokens that stay at the end of a prompt and later.
        evicts_at_decode: Whether anything goes after the prompt.
        slack: Tokens above the budget that are tolerated meanwhile.
        window: Queries that SnapKV asks, and whose tokens it keeps at the end of a call; at most half of the
            budget.
        kernel: Tokens over which it averages.
        normalize: Whether H2O divides by the number of queries.
        future: Positions whose queries expected attention asks.
        epsilon: What it adds to the weights.
        covariance: Whether it knows the queries' covariance.
        value_norm: Whether it multiplies by the norms of values.
        lag: Tokens of a partition of LagKV.
        head_floor: Part of the budget that every head keeps, where the rest is shared.
    """

    method: str
    budget: int | None
    sinks: int = 0
    stabilizers: int = 0
    local: int = 0
    evicts_at_decode: bool = False
    slack: int = 64
    window: int = 64
    kernel: int = 5
    normalize: bool = False
    future: int = 512
    epsilon: float = 0.0
    covariance: bool = True
    value_norm: bool = True
    lag: int = 128
    head_floor: float | None = None

    def is_due(self, phase: str, held: float) -> bool:
        """Whether something goes, with `held` tokens per head."""
        if self.budget is None or phase == "read" or (phase == "decode" and not self.evicts_at_decode):
            return False
        return held > self.budget + (self.slack if phase == "decode" else 0)

    @property
    def observed(self) -> int:
        """Tokens of SnapKV's window."""
        return min(self.window, (self.budget or 0) // 2)

    def recent(self, phase: str) -> int:
        """Newest tokens that stay."""
        newest = self.stabilizers if phase == "chunk" else self.local
        return max(newest, self.observed) if self.method == "snapkv" and phase != "decode" else newest


def _turns(frequencies: Tensor | None, positions: range, channels: int) -> Tensor:
    """The rotation of every position as a matrix, `(len(positions), D, D)`, in float64.

    Of the first `2 n` channels, `n` frequencies turn the pairs `(i, i + n)`; the others stay.
    """
    matrices = torch.eye(channels, dtype=torch.float64).repeat(len(positions), 1, 1)
    if frequencies is None:
        return matrices
    half = len(frequencies)
    first = torch.arange(half)
    second = first + half
    angles = torch.arange(positions.start, positions.stop, dtype=torch.float64)[:, None] * frequencies
    matrices[:, first, first] = matrices[:, second, second] = angles.cos()
    matrices[:, first, second], matrices[:, second, first] = -angles.sin(), angles.sin()
    return matrices


def expected_weights(
    queries: Tensor, keys: Tensor, turn: Tensor, scaling: float, *, covariance: bool = True
) -> Tensor:
    """Expected attention of the paper: weights of `n` keys, averaged over the heads of a group.

    Args:
        queries: `(G, T, D)`, before their rotation.
        keys: `(n, D)`, rotated.
        turn: `(D, D)`, the average rotation of the positions to come.
        scaling: Factor of the logits.
        covariance: Whether the queries vary around their mean.
    """
    total = torch.zeros(len(keys), dtype=torch.float64)
    for head in queries.double():
        mean = head.mean(0)
        spread = (head - mean).T @ (head - mean) / len(head)
        spread = turn @ spread @ turn.T
        known = keys.double()
        logits = known @ (turn @ mean) * scaling
        if covariance:
            logits = logits + torch.einsum("ni,ij,nj->n", known, spread, known) * scaling**2 / 2
        total += logits.softmax(0)
    return total / len(queries)


def _expected_worth(
    policy: Policy, queries: Tensor, keys: Tensor, values: Tensor, turn: Tensor, scaling: float
) -> list[float]:
    """Worth of `n` keys `(n, D)` with values `(n, Dv)`; see `expected_weights` for the rest."""
    weights = expected_weights(queries, keys, turn, scaling, covariance=policy.covariance)
    if policy.value_norm:
        weights = (weights + policy.epsilon) * values.double().norm(dim=-1)
    return weights.tolist()


def _runs(order: Sequence[int], count: int) -> Iterator[list[list[int]]]:
    """All ways to cut a sequence into `count` runs."""
    for cuts in itertools.combinations(range(1, len(order)), count - 1):
        yield [list(order[a:b]) for a, b in itertools.pairwise([0, *cuts, len(order)])]


def _deviation(groups: list[list[int]], shares: Sequence[float]) -> float:
    """Sum of the squares by which heads differ from the mean of their group."""
    means = [sum(shares[h] for h in group) / len(group) for group in groups]
    return sum((shares[h] - mean) ** 2 for group, mean in zip(groups, means, strict=True) for h in group)


@dataclass
class _Row:
    """One row of the batch in one layer, in float64.

    Queries are `(G, T, D)` per head, keys and values `(H, T, D)`.
    """

    policy: Policy
    queries: list[Tensor]
    keys: Tensor
    values: Tensor
    pads: int
    scaling: float
    given: Tensor | None
    frequencies: Tensor | None

    def play(self, calls: Sequence[Call]) -> tuple[Tensor, list[list[int]]]:
        """Which key each query sees, bool `(H, T, T)`, and which real tokens each head holds in the end."""
        heads, length = self.keys.shape[:2]
        self.visible = torch.zeros(heads, length, length, dtype=torch.bool)
        self.received = torch.zeros(heads, length, dtype=torch.float64)
        first = self.pads + self.policy.sinks
        self.partitions = [LagPartitions(self.policy.lag, first) for _ in range(heads)]
        held: list[list[int]] = [[] for _ in range(heads)]
        seen = 0
        for count, phase in calls:
            new = range(seen, seen + count)
            seen += count
            self._see(held, new)
            for positions in held:
                positions += new
            # those to which earlier calls matter
            if self.policy.method == "h2o":
                self._receive(new)
            if self.policy.method == "lagkv":
                for h, partitions in enumerate(self.partitions):
                    partitions.judge(held[h], seen, [self.keys[h].__getitem__, self.values[h].__getitem__])
            if self.policy.is_due(phase, sum(map(len, held)) / heads):
                worth = self._worth(held, new)
                is_shared = self.policy.head_floor is not None
                same = [self.policy.budget or 0] * heads
                budgets = self._shares(held, worth, phase) if is_shared else same
                held = [self._kept(held[h], worth[h], phase, budgets[h]) for h in range(heads)]
        return self.visible, [[p for p in positions if p >= self.pads] for positions in held]

    def _see(self, held: list[list[int]], new: range) -> None:
        """Every new real query sees the real tokens held, and the new ones up to itself."""
        real = range(max(new.start, self.pads), new.stop)
        if real:
            for head, positions in enumerate(held):
                self.visible[head, real.start : real.stop, [p for p in positions if p >= self.pads]] = True
            causal = torch.ones(len(real), len(real), dtype=torch.bool).tril()
            self.visible[:, real.start : real.stop, real.start : real.stop] = causal

    def _kept(self, held: list[int], worth: dict[int, float], phase: str, budget: int) -> list[int]:
        real = [p for p in held if p >= self.pads]
        pads = [p for p in held if p < self.pads]
        if len(real) <= budget:
            return pads[len(pads) - (budget - len(real)) :] + real
        return sorted(self._by_worth(held, worth, phase)[:budget])

    def _by_worth(self, held: list[int], worth: dict[int, float], phase: str) -> list[int]:
        """The real tokens of a head, what stays in any case first, then the best."""
        real = [p for p in held if p >= self.pads]
        newest = held[len(held) - self.policy.recent(phase) :]
        stays = [p for p in real if p < self.pads + self.policy.sinks or p in newest]
        return stays + sorted((p for p in real if p not in stays), key=lambda p: worth[p], reverse=True)

    def _shares(self, held: list[list[int]], worth: list[dict[int, float]], phase: str) -> list[int]:
        """Tokens that heads keep: those of the floor, then the best of all heads, in up to four groups."""
        policy, heads = self.policy, range(len(held))
        assert policy.budget is not None and policy.head_floor is not None
        floor = max(math.ceil(policy.head_floor * policy.budget), policy.sinks + policy.recent(phase) + 1)
        floor = min(floor, policy.budget)
        ranked = [self._by_worth(held[h], worth[h], phase) for h in heads]
        own = [len(ranked[h][:floor]) for h in heads]
        others = sorted(((worth[h][p], h) for h in heads for p in ranked[h][floor:]), reverse=True)
        total = policy.budget * len(held)
        for _, h in others[: total - sum(own)]:
            own[h] += 1
        shares = [count * total / max(1, sum(own)) for count in own]
        order = sorted(heads, key=lambda h: -shares[h])
        best: tuple[float, list[list[int]]] | None = None
        for count in range(1, min(4, len(held)) + 1):
            found = min(  # of equal ones that with the longest first groups
                ((_deviation(groups, shares), groups) for groups in _runs(order, count)),
                key=lambda one: (round(one[0], 6), [-len(group) for group in one[1]]),
            )
            if best is not None and round(best[0] - found[0], 6) < 1.0:
                break
            best = found
        assert best is not None
        budgets = dict.fromkeys(heads, 0)
        for group in best[1]:
            mean = int(sum(shares[h] for h in group) / len(group) + 1e-6)
            for h in group:
                budgets[h] = min(max(floor, mean), *(len(held[other]) for other in group))
        return [budgets[h] for h in heads]

    def _worth(self, held: list[list[int]], new: range) -> list[dict[int, float]]:
        """Worth of the real tokens held, per head, after the call of the tokens `new`."""
        real = [[p for p in positions if p >= self.pads] for positions in held]
        heads = range(len(real))
        method = self.policy.method
        if method == "knorm":
            norms = self.keys.norm(dim=-1).tolist()
            return [{p: -norms[h][p] for p in real[h]} for h in heads]
        if method == "given":
            assert self.given is not None
            table = self.given.expand(len(real), -1)
            numbers = table.tolist()
            return [{p: numbers[h][p] for p in real[h]} for h in heads]
        if method == "streaming_llm":
            return [{p: float(p) for p in real[h]} for h in heads]
        if method == "keydiff":
            return [self._unlikeness(h, real[h]) for h in heads]
        if method == "lagkv":
            return [{p: self.partitions[h].worth(p) for p in real[h]} for h in heads]
        if method == "h2o":
            counts = {p: (new.stop - p if self.policy.normalize else 1) for h in heads for p in real[h]}
            received = self.received.tolist()
            return [{p: received[h][p] / counts[p] for p in real[h]} for h in heads]
        if method == "snapkv":
            window = range(max(new.start, new.stop - self.policy.observed), new.stop)
            return [self._pooled(self._attention(h, window).sum((0, 1)), real[h], window) for h in heads]
        if method == "tova":
            newest = range(new.stop - 1, new.stop)
            total = torch.stack([self._attention(h, newest).sum((0, 1)) for h in heads]).sum(0).tolist()
            return [{p: total[p] for p in real[h]} for h in heads]
        if method == "expected_attention":
            return [self._expected(h, real[h], new.stop) for h in heads]
        raise ValueError(f"unknown method {method!r}")

    def _expected(self, head: int, real: list[int], seen: int) -> dict[int, float]:
        """By the queries of all tokens `seen` but pads and sinks, which get no weight either."""
        asked = range(self.pads + self.policy.sinks, seen)
        given = [p for p in real if p in asked]
        worth = dict.fromkeys(real, 0.0)
        if given:
            channels = self.keys.shape[2]
            back = _turns(self.frequencies, range(self.policy.sinks, seen - self.pads), channels).mT
            plain = torch.einsum("tij,gtj->gti", back, self.queries[head][:, asked.start : seen])
            next_position = seen - self.pads
            ahead = _turns(
                self.frequencies, range(next_position, next_position + self.policy.future), channels
            )
            found = _expected_worth(
                self.policy, plain, self.keys[head, given], self.values[head, given], ahead.mean(0),
                self.scaling,
            )  # fmt: skip
            worth |= dict(zip(given, found, strict=True))
        return worth

    def _receive(self, new: range) -> None:
        for head, received in enumerate(self.received):
            received += self._attention(head, new).sum((0, 1))

    def _attention(self, head: int, queries: range) -> Tensor:
        """Attention weights `(G, len(queries), T)` of the real queries, with what is visible to them."""
        chosen = [query for query in queries if query >= self.pads]
        logits = self.queries[head][:, chosen] @ self.keys[head].T * self.scaling
        return logits.masked_fill(~self.visible[head, chosen], -torch.inf).softmax(-1)

    def _unlikeness(self, head: int, real: list[int]) -> dict[int, float]:
        if not real:
            return {}
        directions = self.keys[head, real] / self.keys[head, real].norm(dim=-1, keepdim=True)
        mean = directions.mean(0)
        return dict(zip(real, (-(directions @ mean) / mean.norm()).tolist(), strict=True))

    def _pooled(self, received: Tensor, real: list[int], window: range) -> dict[int, float]:
        """A 1D pooling with zeros on both sides, over what comes before the window, which stays."""
        reach = self.policy.kernel // 2
        prefix = [position for position in real if position < window.start]
        worth = dict.fromkeys(real, math.inf)
        for place, position in enumerate(prefix):
            neighbours = prefix[max(0, place - reach) : place + reach + 1]
            worth[position] = float(received[neighbours].sum()) / self.policy.kernel
        return worth


@dataclass
class _Run:
    policies: Sequence[Policy]
    calls: Sequence[Call]
    pads: Sequence[int]
    worth: Tensor | None
    survivors: Survivors
    frequencies: Tensor | None
    states: list[tuple[Tensor, Tensor]]


_active: list[_Run] = []


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """An attention function in transformers' sense; masks are made here, `attention_mask` is not used."""
    run = _active[-1]
    batch, heads = key.shape[:2]
    groups = query.shape[1] // heads
    by_head = query.unflatten(1, (heads, groups))
    visible, survivors = [], []
    for row in range(batch):
        policy = run.policies[module.layer_idx]
        given = None if run.worth is None else run.worth[..., row, :]
        if given is not None and given.dim() == 3:
            given = given[module.layer_idx]
        player = _Row(
            policy, list(by_head[row].double()), key[row].double(), value[row].double(), run.pads[row],
            scaling, given, run.frequencies,
        )  # fmt: skip
        seen, held = player.play(run.calls)
        visible.append(seen)
        survivors.append(held)
    run.survivors.append(survivors)
    run.states.append((query, key))
    mask = torch.stack(visible).repeat_interleave(groups, dim=1)
    keys, values = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    logits = (query @ keys.transpose(2, 3) * scaling).masked_fill(~mask, -torch.inf)
    weights = logits.softmax(-1).nan_to_num(0.0)  # a pad's query sees nothing
    return (weights @ values).transpose(1, 2).contiguous(), None


@contextmanager
def _attending_by(model: Any, run: _Run) -> Iterator[None]:
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    _active.append(run)
    try:
        yield
    finally:
        _active.pop()
        model.set_attn_implementation(before)


@torch.no_grad()
def run_with_evictions(
    model: Any,
    input_ids: Tensor,
    calls: Sequence[Call],
    policies: Policy | Sequence[Policy],
    pads: Sequence[int] | None = None,
    worth: Tensor | None = None,
    states: list[tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Survivors]:
    """Run a model as if its layers evicted.

    Args:
        model: A causal language model whose layers all use full attention.
        input_ids: `(B, T)`, left-padded.
        calls: How the text is split into calls; they add up to `T` tokens.
        policies: Of every layer, or of all.
        pads: Pads of every row.
        worth: `(B, T)`, of every token, for the method `"given"`; or `(layers, heads, B, T)`.
        states: Is given the queries `(B, Hq, T, D)` and keys `(B, H, T, D)` of every layer.

    Returns:
        Logits `(B, T, vocabulary)`, those of pads without meaning, and the positions held in the end.
    """
    batch, length = input_ids.shape
    assert sum(count for count, _ in calls) == length
    if isinstance(policies, Policy):
        policies = [policies] * model.config.num_hidden_layers
    pads = [0] * batch if pads is None else pads
    rotary = getattr(model.base_model, "rotary_emb", None)
    frequencies = None if rotary is None else rotary.inv_freq.double()
    run = _Run(policies, calls, pads, worth, [], frequencies, [] if states is None else states)
    positions = (torch.arange(length) - torch.tensor(pads)[:, None]).clamp_min(0)
    with _attending_by(model, run):
        logits = model(input_ids, position_ids=positions, use_cache=False).logits
    return logits, run.survivors


@torch.no_grad()
def run_compactly(
    model: Any,
    input_ids: Tensor,
    calls: Sequence[Call],
    policy: Policy,
    pads: Sequence[int] | None = None,
) -> tuple[Tensor, Survivors]:
    """Run a Llama as `run_with_evictions` does, with compact positions.

    What a head holds stands, at every call, at the places 0, 1, 2, ... in the order of the text, and the new
    tokens follow. Scores that depend on attention are accumulated in the same way as they were given.
    """
    batch, length = input_ids.shape
    pads = [0] * batch if pads is None else pads
    rows = [_compact_row(model, input_ids[row, pads[row] :], own_calls(calls, pads[row]), policy)
            for row in range(batch)]  # fmt: skip
    vocabulary = model.config.vocab_size
    logits = torch.stack(
        [torch.cat([torch.zeros(p, vocabulary), row[0]]) for row, p in zip(rows, pads, strict=True)]
    )
    layers = range(model.config.num_hidden_layers)
    survivors = [
        [[[p + pads[row] for p in head] for head in rows[row][1][layer]] for row in range(batch)]
        for layer in layers
    ]
    assert logits.shape[1] == length
    return logits, survivors


def own_calls(calls: Sequence[Call], pads: int) -> list[Call]:
    """What is left of `calls` for a row whose first `pads` tokens are pads."""
    own, seen = [], 0
    for count, phase in calls:
        seen += count
        own.append((min(count, max(0, seen - pads)), phase))
    return [call for call in own if call[0]]


def _compact_row(
    model: Any, input_ids: Tensor, calls: Sequence[Call], policy: Policy
) -> tuple[Tensor, list[list[list[int]]]]:
    decoder, config = model.model, model.config
    heads, groups = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    stores = [_CompactStore(heads, decoder.rotary_emb.inv_freq.double()) for _ in decoder.layers]
    logits, seen = [], 0
    for count, phase in calls:
        hidden = decoder.embed_tokens(input_ids[None, seen : seen + count])
        for block, store in zip(decoder.layers, stores, strict=True):
            attention, residual = block.self_attn, hidden
            inputs = block.input_layernorm(hidden)
            query, key, value = (
                projection(inputs)[0].unflatten(-1, (-1, config.head_dim)).transpose(0, 1)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            store.add(key, value, range(seen, seen + count))
            cos, sin = decoder.rotary_emb(key, torch.arange(store.length)[None])
            output = store.answer(query, count, groups, attention.scaling, _rotation(cos[0], sin[0]), policy)
            hidden = residual + attention.o_proj(output.transpose(0, 1).flatten(1)[None])
            hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
            store.evict(policy, phase)
        logits.append(model.lm_head(decoder.norm(hidden))[0])
        seen += count
    return torch.cat(logits), [store.positions for store in stores]


def _rotation(cos: Tensor, sin: Tensor) -> Callable[[Tensor, slice], Tensor]:
    def rotate(states: Tensor, places: slice) -> Tensor:
        first, second = states.chunk(2, dim=-1)
        return states * cos[places] + torch.cat([-second, first], dim=-1) * sin[places]

    return rotate


class _CompactStore:
    """Keys before rotation, values and positions of one layer of one row."""

    def __init__(self, heads: int, frequencies: Tensor) -> None:
        self.frequencies, self.scaling = frequencies, 1.0
        self.asked: list[list[Tensor]] = [[] for _ in range(heads)]
        self.keys: list[Tensor] = [torch.zeros(0)] * heads
        self.values: list[Tensor] = [torch.zeros(0)] * heads
        self.positions: list[list[int]] = [[] for _ in range(heads)]
        self.received = [torch.zeros(0, dtype=torch.float64)] * heads
        self.rotated = [torch.zeros(0)] * heads
        """Keys as they were read last."""
        self.partitions: list[LagPartitions] = []

    @property
    def length(self) -> int:
        return len(self.positions[0])

    def add(self, keys: Tensor, values: Tensor, positions: range) -> None:
        for h, held in enumerate(self.positions):
            self.keys[h] = torch.cat([self.keys[h], keys[h]]) if held else keys[h]
            self.values[h] = torch.cat([self.values[h], values[h]]) if held else values[h]
            self.received[h] = torch.cat([self.received[h], torch.zeros(len(positions), dtype=torch.float64)])
            held += positions

    def answer(
        self,
        query: Tensor,
        count: int,
        groups: int,
        scaling: float,
        rotate: Callable[..., Tensor],
        policy: Policy,
    ) -> Tensor:
        """Attend from `query` `(Hq, count, D)`, and add up what every token receives."""
        places = slice(self.length - count, self.length)
        causal = torch.arange(self.length) <= torch.arange(self.length)[places, None]
        outputs = []
        self.scaling = scaling
        for h, held in enumerate(self.positions):
            own = query[h * groups : (h + 1) * groups]
            is_asked = [p >= policy.sinks for p in held[self.length - count :]]
            self.asked[h].append(own[:, is_asked].double())
            keys = self.rotated[h] = rotate(self.keys[h], slice(0, self.length))
            queries = rotate(own, places)
            weights = (queries @ keys.T * scaling).masked_fill(~causal, -torch.inf).softmax(-1)
            self.received[h] = self.received[h] + weights.double().sum((0, 1))
            outputs.append(weights @ self.values[h])
        return torch.cat(outputs)

    def evict(self, policy: Policy, phase: str) -> None:
        if not policy.is_due(phase, self.length):
            return
        assert policy.budget is not None
        for h, held in enumerate(self.positions):
            if policy.method == "expected_attention":
                worth = self._expected(h, policy)
            else:
                worth = {
                    "knorm": -self.keys[h].norm(dim=-1),
                    "streaming_llm": torch.tensor(held),
                    "h2o": self.received[h],
                    "lagkv": self._lag_relative(h, policy),
                }[policy.method]
            places = range(len(held))
            stays = {i for i in places if held[i] < policy.sinks} | set(
                places[len(held) - policy.recent(phase) :]
            )
            others = sorted(set(places) - stays, key=lambda i: float(worth[i]), reverse=True)
            kept = sorted(stays | set(others[: policy.budget - len(stays)]))
            self.keys[h], self.values[h] = self.keys[h][kept], self.values[h][kept]
            self.received[h] = self.received[h][kept]
            self.positions[h] = [held[i] for i in kept]

    def _expected(self, head: int, policy: Policy) -> Tensor:
        """By the queries so far, as if they came at the places after what is held."""
        length, channels = self.keys[head].shape
        turns = _turns(self.frequencies, range(length + policy.future), channels)
        first = sum(p < policy.sinks for p in self.positions[head])
        keys = torch.einsum("tij,tj->ti", turns[:length], self.keys[head].double())[first:]
        ahead = turns[length:].mean(0)
        found = _expected_worth(
            policy, torch.cat(self.asked[head], 1), keys, self.values[head][first:], ahead, self.scaling
        )
        return torch.tensor([0.0] * first + found)

    def _lag_relative(self, h: int, policy: Policy) -> Tensor:
        if not self.partitions:
            self.partitions = [LagPartitions(policy.lag, policy.sinks) for _ in self.positions]
        held, partitions = self.positions[h], self.partitions[h]
        places = {position: place for place, position in enumerate(held)}
        states = [lambda ps, of=of: of[[places[p] for p in ps]] for of in (self.rotated[h], self.values[h])]
        partitions.judge(held, held[-1] + 1, states)
        return torch.tensor([partitions.worth(p) for p in held], dtype=torch.float64)
