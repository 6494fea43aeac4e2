"""Locret against the loop that its authors published, written down anew for Llama and Phi-3.

```
cache = scores = nothing
for chunk in chunks of prompt[: P - loc]:
    forward(chunk)                                   keys are stored before their rotation
    scores += heads(q | k | v of the chunk)
    if another chunk follows: the last n_s scores count as the largest, for this choice only
    keep the best b of every layer and head, in the order of the text
forward(prompt[P - loc :]), then decode greedily: nothing is evicted any more
```

Every call rotates what is held anew, at the places 0, 1, 2, ... in which it then stands: compact positions.
With absolute ones it is rotated as where it stood in the text.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcache_plugins.backends.locret import LocretCache
from kvcache_plugins.testing.comparison import assert_close
from kvcache_plugins.testing.models import tiny_model
from tests.eviction.feeding import feed, ids
from tests.eviction.locret_feeding import bound_locret, heads_of, projections, worth

NEW = 12
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 8.0, "long_factor": [2.0, 1.5, *[3.0] * 6],
    "short_factor": [1.0] * 8, "original_max_position_embeddings": 40,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"name": "llama", "num_hidden_layers": 3},
    "llama-one-kv-head": {"name": "llama", "num_key_value_heads": 1},
    "llama-all-kv-heads": {"name": "llama", "num_key_value_heads": 4},
    "llama3-rope": {"name": "llama", "rope_parameters": LLAMA3},
    "phi3": {"name": "phi3", "num_hidden_layers": 3},
}


@dataclass(frozen=True)
class Case:
    prompt: int
    """Tokens of the prompt, `P`."""
    loc: int
    """Tokens at its end that are read apart."""
    budget: int
    stabilizers: int
    chunk: int


CASES = {
    "chunks-below-the-budget": Case(prompt=111, loc=10, budget=24, stabilizers=8, chunk=16),
    "chunks-above-the-budget": Case(prompt=150, loc=7, budget=24, stabilizers=10, chunk=40),
    "no-stabilizers": Case(prompt=90, loc=5, budget=20, stabilizers=0, chunk=17),
    "nearly-all-stabilizers": Case(prompt=98, loc=1, budget=20, stabilizers=19, chunk=32),
    "one-token-in-the-last-chunk": Case(prompt=75, loc=10, budget=24, stabilizers=8, chunk=16),
    "one-chunk": Case(prompt=60, loc=10, budget=24, stabilizers=8, chunk=64),
    "budget-of-all": Case(prompt=60, loc=10, budget=50, stabilizers=8, chunk=16),
}


@dataclass
class Layer:
    """What one layer holds, per key/value head and in the order of the text."""

    keys: Tensor
    """Before their rotation, `(H, m, D)`."""
    values: Tensor
    scores: Tensor
    """`(H, m)`."""
    positions: Tensor
    """Where the tokens stood in the text, `(H, m)`."""

    @classmethod
    def empty(cls, heads: int, width: int) -> Layer:
        states, scores = torch.zeros(heads, 0, width), torch.zeros(heads, 0)
        return cls(states, states, scores, scores.long())

    def keep(self, index: Tensor) -> None:
        wide = index[..., None].expand(-1, -1, self.keys.shape[-1])
        self.keys, self.values = self.keys.gather(1, wide), self.values.gather(1, wide)
        self.scores, self.positions = self.scores.gather(1, index), self.positions.gather(1, index)


@dataclass
class OfficialRun:
    """The authors' loop over one text."""

    model: Any
    heads: str
    positions: str
    seen: int = 0
    layers: list[Layer] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.model.config
        width = self.model.model.layers[0].self_attn.head_dim
        self.layers = [Layer.empty(config.num_key_value_heads, width) for _ in self.model.model.layers]

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `(n, vocabulary)` of the tokens `(n,)`."""
        decoder = self.model.model
        hidden = decoder.embed_tokens(tokens[None])
        for index, (block, layer) in enumerate(zip(decoder.layers, self.layers, strict=True)):
            inputs = block.input_layernorm(hidden)
            query, key, value = projections(block.self_attn, inputs)
            self._append(layer, key, value, worth(self.heads, index, query, key, value)[0])
            hidden = hidden + block.self_attn.o_proj(self._attend(block.self_attn, layer, query[0])[None])
            hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
        self.seen += len(tokens)
        logits: Tensor = self.model.lm_head(decoder.norm(hidden))[0]
        return logits

    def _append(self, layer: Layer, key: Tensor, value: Tensor, scores: Tensor) -> None:
        heads, count = scores.shape
        by_head = [states[0].unflatten(-1, (heads, -1)).transpose(0, 1) for states in (key, value)]
        new = torch.arange(self.seen, self.seen + count).expand(heads, -1)
        layer.keys = torch.cat([layer.keys, by_head[0]], dim=1)
        layer.values = torch.cat([layer.values, by_head[1]], dim=1)
        layer.scores = torch.cat([layer.scores, scores], dim=1)
        layer.positions = torch.cat([layer.positions, new], dim=1)

    def _attend(self, attention: Any, layer: Layer, query: Tensor) -> Tensor:
        heads, held, width = layer.keys.shape
        count = len(query)
        places = torch.arange(held).expand(heads, -1) if self.positions == "compact" else layer.positions
        cos, sin = _rotation(self.model, int(places.max()) + 1)
        outputs = []
        for head in range(heads):
            own = places[head]
            keys = _rotated(layer.keys[head], cos[own], sin[own])
            later = torch.arange(held)[None] > torch.arange(held - count, held)[:, None]
            groups = attention.num_key_value_groups
            for one in query.unflatten(-1, (heads, groups, width))[:, head].unbind(1):
                logits = _rotated(one, cos[own[-count:]], sin[own[-count:]]) @ keys.T * width**-0.5
                outputs.append(logits.masked_fill(later, -torch.inf).softmax(-1) @ layer.values[head])
        return torch.cat(outputs, dim=-1)

    def evict(self, case: Case, another_chunk_follows: bool) -> None:
        for layer in self.layers:
            scores = layer.scores.clone()
            if another_chunk_follows and case.stabilizers:
                scores[:, -case.stabilizers :] = torch.finfo(scores.dtype).max
            count = min(case.budget, scores.shape[1])
            layer.keep(scores.topk(count, dim=-1).indices.sort(dim=-1).values)


def _rotation(model: Any, count: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the first `count` places; of long texts, where a model has two sets."""
    places = torch.arange(count)
    if model.config.rope_parameters["rope_type"] != "longrope":
        cos, sin = model.model.rotary_emb(torch.zeros(1), places[None])
        return cos[0], sin[0]
    factors = torch.tensor(LONGROPE["long_factor"])
    angles = places[:, None] / (factors * 10000.0 ** (torch.arange(8) / 8))
    scale = (1 + math.log(8.0) / math.log(40)) ** 0.5
    return scale * torch.cat([angles, angles], -1).cos(), scale * torch.cat([angles, angles], -1).sin()


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


@functools.cache
def _model(name: str) -> PreTrainedModel:
    return tiny_model(attn_implementation="sdpa", vocab_size=512, **MODELS[name])


def _compare(model: PreTrainedModel, case: Case, positions: str) -> None:
    tokens, read = ids(case.prompt), case.prompt - case.loc
    official = OfficialRun(model, heads_of(model), positions)
    cache = bound_locret(
        model, read, budget=case.budget, chunk_size=case.chunk, stabilizer_length=case.stabilizers,
        local_length=0, positions=positions,
    )  # fmt: skip

    def both(new: Tensor) -> Tensor:
        expected, got = official.forward(new[0]), feed(model, cache, new, [new.shape[1]])[0]
        assert_close("logits", expected, got, 1e-5)
        return got[-1].argmax()[None, None]

    chunks = list(tokens[:, :read].split(case.chunk, dim=1))
    for number, chunk in enumerate(chunks, start=1):
        both(chunk)
        official.evict(case, another_chunk_follows=number < len(chunks))
        _same_holdings(cache, official, held=min(case.budget, official.seen))
    token = both(tokens[:, read:])
    for step in range(NEW):
        _same_holdings(cache, official, held=min(case.budget, read) + case.loc + step)
        token = both(token)


def _same_holdings(cache: LocretCache, official: OfficialRun, held: int) -> None:
    assert cache.num_held() == held and cache.get_seq_length() == official.seen
    for layer, expected in zip(cache.evicting_layers, official.layers, strict=True):
        assert layer.ledger.positions[0].tolist() == expected.positions.tolist()
        torch.testing.assert_close(layer.ledger.scores[0], expected.scores, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("positions", ["compact", "absolute"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", MODELS)
def test_the_published_loop(name: str, case: str, positions: str) -> None:
    _compare(_model(name), CASES[case], positions)


def _long_phi3() -> PreTrainedModel:
    return tiny_model(
        "phi3", attn_implementation="sdpa", vocab_size=512, max_position_embeddings=320,
        original_max_position_embeddings=40, rope_parameters=dict(LONGROPE), sliding_window=None,
    )  # fmt: skip


@pytest.mark.parametrize("positions", ["absolute", "compact"])
@pytest.mark.parametrize("case", ["chunks-below-the-budget", "chunks-above-the-budget"])
@pytest.mark.parametrize("is_new", [True, False], ids=["new-model", "after-a-short-text"])
def test_the_published_loop_with_two_sets_of_frequencies(is_new: bool, case: str, positions: str) -> None:
    # A long text is read with the frequencies of long ones from its first chunk on.
    model = _long_phi3()
    if not is_new:
        feed(model, bound_locret(model, 77), ids(77), [32, 45])
        model(ids(20))
    _compare(model, CASES[case], positions)


@pytest.mark.parametrize("positions", ["absolute", "compact"])
def test_a_long_text_does_not_change_a_short_one(positions: str) -> None:
    model, counts = _long_phi3(), [16, 16, 1, 1, 1]

    def read() -> Tensor:
        return feed(model, bound_locret(model, 32, positions=positions), ids(35), counts)

    before = read()
    feed(model, bound_locret(model, 77), ids(77), [32, 45])
    assert torch.equal(read(), before)


def test_the_loop_would_tell() -> None:
    # Positions, stabilizers and the part read apart each change what the loop gives.
    model, tokens = _model("llama"), ids(111)[0]
    base = CASES["chunks-below-the-budget"]

    def run(case: Case, positions: str = "compact") -> tuple[Tensor, Tensor]:
        official, read = OfficialRun(model, heads_of(model), positions), 111 - case.loc
        chunks = tokens[:read].split(case.chunk)
        for number, chunk in enumerate(chunks, start=1):
            official.forward(chunk)
            official.evict(case, another_chunk_follows=number < len(chunks))
        held = official.layers[-1].positions
        return official.forward(tokens[read:])[-1], held

    logits, held = run(base)
    assert (held[0] != held[1]).any()  # heads choose for themselves
    assert (run(base, "absolute")[0] - logits).abs().max() > 0.1
    assert (run(replace(base, stabilizers=0))[1] != held).any()
    assert (run(replace(base, loc=1))[0] - logits).abs().max() > 0.1
