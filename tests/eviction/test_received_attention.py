"""Received attention against column sums of a softmax written out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache_plugins.attention import limits, received, reference
from kvcache_plugins.attention.received import received_attention
from kvcache_plugins.attention.reference import AttentionOptions, DenseView

ROWS, QUERY_HEADS, HEADS, DIM = 2, 6, 3, 8


def _by_hand(query: Tensor, keys: Tensor, options: AttentionOptions, counted: Tensor | None) -> Tensor:
    """One query after the other, in float64."""
    length, queries = keys.shape[2], query.shape[2]
    found = torch.zeros(ROWS, HEADS, length, dtype=torch.float64)
    scaling = DIM**-0.5 if options.scaling is None else options.scaling
    for row in range(ROWS):
        for head in range(QUERY_HEADS):
            for i in range(queries):
                if counted is not None and not counted[row, i]:
                    continue
                kv_head, place = head * HEADS // QUERY_HEADS, length - queries + i
                logits = keys[row, kv_head].double() @ query[row, head, i].double() * scaling
                if options.softcap is not None:
                    logits = options.softcap * (logits / options.softcap).tanh()
                for slot in range(length):
                    if options.alibi_slopes is not None:
                        logits[slot] += float(options.alibi_slopes[head]) * (slot - place)
                    if options.is_causal and slot > place:
                        logits[slot] = -torch.inf
                    if options.sliding_window is not None and slot <= place - options.sliding_window:
                        logits[slot] = -torch.inf
                    if options.mask is not None:
                        mask = options.mask.expand(ROWS, QUERY_HEADS, queries, length)[row, head, i, slot]
                        if mask.dtype == torch.bool:
                            logits[slot] = logits[slot] if mask else -torch.inf
                        else:
                            logits[slot] += float(mask)
                if options.sink_logits is not None:
                    logits = torch.cat([logits, options.sink_logits[head : head + 1].double()])
                if bool((logits > -torch.inf).any()):
                    found[row, kv_head] += logits.softmax(0)[:length]
    return found


def _states(queries: int, length: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(queries * 100 + length)
    query = torch.randn(ROWS, QUERY_HEADS, queries, DIM, generator=generator) * scale
    return query, torch.randn(ROWS, HEADS, length, DIM, generator=generator) * scale


def _padding_mask(queries: int, length: int, pads: list[int]) -> Tensor:
    slots = torch.arange(length)
    causal = slots <= torch.arange(length - queries, length)[:, None]
    return causal & (slots >= torch.tensor(pads)[:, None])[:, None, None, :]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaling": {"is_causal": True, "scaling": 1.7},
    "softcap": {"is_causal": True, "softcap": 2.0},
    "sink-logits": {"is_causal": True, "sink_logits": torch.linspace(-2, 3, QUERY_HEADS)},
    "window": {"is_causal": True, "sliding_window": 5},
    "alibi": {"is_causal": True, "alibi_slopes": torch.linspace(0.1, 0.6, QUERY_HEADS)},
    "padding": {"mask": "padding"},
    "additive": {"mask": "additive"},
    "everything": {
        "mask": "padding", "softcap": 3.0, "sink_logits": torch.zeros(QUERY_HEADS), "scaling": 0.9,
    },
}  # fmt: skip


def _options(name: str, queries: int, length: int) -> AttentionOptions:
    given = dict(OPTIONS[name])
    padding = _padding_mask(queries, length, [0, min(4, length - 1)])
    if given.get("mask") == "padding":
        given["mask"] = padding
    elif given.get("mask") == "additive":
        given["mask"] = torch.zeros(padding.shape).masked_fill(~padding, -torch.inf)
    return AttentionOptions(**given)


@pytest.mark.parametrize(("queries", "length"), [(1, 1), (1, 30), (7, 30), (30, 30)])
@pytest.mark.parametrize("name", OPTIONS)
def test_against_softmax(name: str, queries: int, length: int) -> None:
    options = _options(name, queries, length)
    query, keys = _states(queries, length, 2.0)
    counted = torch.ones(ROWS, queries, dtype=torch.bool)
    counted[1, : queries // 3] = False
    for counts in (None, counted):
        got = received_attention(query, DenseView(keys), options, counts)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), _by_hand(query, keys, options, counts), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("are_kept", [True, False])
@pytest.mark.parametrize(("queries", "length"), [(40, 52), (37, 37)])
@pytest.mark.parametrize("name", [*OPTIONS, "not-causal-window", "sinks-of-queries", "columns"])
def test_runs_of_queries(
    name: str, queries: int, length: int, are_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with its own rows of masks; where keys are many, of another length and reading them twice."""
    query, keys = _states(queries, length, 2.0)
    counted = torch.ones(ROWS, queries, dtype=torch.bool)
    counted[1, : queries // 3] = False
    if name == "not-causal-window":  # whose queries can only be taken together
        options = AttentionOptions(mask=_padding_mask(queries, length, [0, 4]), sliding_window=9)
    elif name == "sinks-of-queries":
        options = AttentionOptions(
            is_causal=True, sink_logits=torch.randn(ROWS, QUERY_HEADS, queries), mask=None
        )
    elif name == "columns":  # what flash functions are given
        mask = torch.arange(length) >= torch.tensor([0, 4])[:, None]
        options = AttentionOptions(is_causal=True, mask=mask[:, None, None])
    else:
        options = _options(name, queries, length)
    whole = received_attention(query, DenseView(keys), options, counted)
    if name != "sinks-of-queries":
        expected = _by_hand(query, keys, options, counted)
        torch.testing.assert_close(whole.double(), expected, atol=1e-5, rtol=1e-5)
    taken, of_run = [], received._of_run

    def noted(query: Tensor, *others: Any) -> Tensor:
        taken.append(query.shape[2])
        return of_run(query, *others)

    monkeypatch.setattr(received, "_of_run", noted)
    monkeypatch.setattr(limits, "TILE_SCORES", 17 * ROWS * QUERY_HEADS * length if are_kept else 1)
    monkeypatch.setattr(received, "_RUN", 27)
    got = received_attention(query, DenseView(keys), options, counted)
    torch.testing.assert_close(got, whole, atol=1e-5, rtol=1e-5)
    step = 17 if are_kept else 27
    runs = [min(step, queries - start) for start in range(0, queries, step)]
    assert taken == ([queries] if name == "not-causal-window" else runs)


def test_causal_runs_multiply_with_no_key_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    query, keys = _states(128, 128)
    computed = []

    def noted(logits: Tensor, *others: Any) -> Tensor:
        computed.append(logits.numel())
        return reference.adjust_logits(logits, *others)

    monkeypatch.setattr(received, "adjust_logits", noted)
    monkeypatch.setattr(limits, "TILE_SCORES", 16 * ROWS * QUERY_HEADS * 128)
    for is_causal, parts in ((True, (128 + 16) / 2 / 128), (False, 1)):
        computed.clear()
        received_attention(query, DenseView(keys), AttentionOptions(is_causal=is_causal))
        assert sum(computed) == parts * ROWS * QUERY_HEADS * 128 * 128


def test_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    query, keys = _states(9, 300)
    options = AttentionOptions(is_causal=True, sliding_window=100)
    whole = received_attention(query, DenseView(keys), options)
    monkeypatch.setattr(reference, "_TILE_VALUES", 1)  # 64 tokens each
    assert len(reference.cut_tiles(query, DenseView(keys), DenseView(keys), 0, HEADS)) == 5
    torch.testing.assert_close(
        received_attention(query, DenseView(keys), options), whole, atol=1e-6, rtol=1e-5
    )
    expected = _by_hand(query, keys, options, None)
    torch.testing.assert_close(whole.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("most", "reads"), [(ROWS * QUERY_HEADS * 9 * 300, 1), (1, 2)])
def test_keys_are_read_once_where_logits_are_few(
    most: int, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CountingView(DenseView):
        def read(self, start: int, stop: int) -> Tensor:
            seen[start:stop] += 1
            return super().read(start, stop)

    query, keys = _states(9, 300)
    monkeypatch.setattr(reference, "_TILE_VALUES", 1)  # 64 tokens each
    whole = received_attention(query, DenseView(keys), AttentionOptions(is_causal=True))
    seen = torch.zeros(300, dtype=torch.long)
    monkeypatch.setattr(limits, "TILE_SCORES", most)
    got = received_attention(query, CountingView(keys), AttentionOptions(is_causal=True))
    assert torch.equal(got, whole)
    assert bool((seen[:-1] == reads).all())  # the last one also tells how many heads there are


def test_every_query_gives_one_in_all() -> None:
    query, keys = _states(12, 40)
    received = received_attention(query, DenseView(keys), AttentionOptions(is_causal=True))
    torch.testing.assert_close(received.sum(-1), torch.full((ROWS, HEADS), 12.0 * QUERY_HEADS / HEADS))


def test_queries_that_see_nothing_give_nothing() -> None:
    query, keys = _states(4, 10)
    mask = torch.ones(ROWS, 1, 4, 10, dtype=torch.bool)
    mask[1, :, :3] = False
    received = received_attention(query, DenseView(keys), AttentionOptions(mask=mask))
    torch.testing.assert_close(received[1].sum(-1), torch.full((HEADS,), 1.0 * QUERY_HEADS / HEADS))
    no_sinks = replace(AttentionOptions(mask=mask), sink_logits=torch.full((QUERY_HEADS,), -torch.inf))
    assert torch.isfinite(received_attention(query, DenseView(keys), no_sinks)).all()


def test_large_logits_and_half_precision() -> None:
    query, keys = _states(5, 20, 30.0)
    received = received_attention(query, DenseView(keys), AttentionOptions(is_causal=True))
    expected = _by_hand(query, keys, AttentionOptions(is_causal=True), None)
    torch.testing.assert_close(received.double(), expected, atol=1e-3, rtol=0.0)
    low, low_keys = query.bfloat16() / 30, keys.bfloat16() / 30
    with torch.autocast("cpu", dtype=torch.bfloat16):
        received = received_attention(low, DenseView(low_keys), AttentionOptions(is_causal=True))
    expected = _by_hand(low.float(), low_keys.float(), AttentionOptions(is_causal=True), None)
    torch.testing.assert_close(received.double(), expected, atol=1e-5, rtol=1e-5)
