"""Left-padded batches: every row keeps what it would keep alone, and pads are the first to go."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.eviction.feeding import (
    EVICTING,
    bound_cache,
    chunks_of,
    feed,
    ids,
    mask_of,
    model_of,
    real_positions,
)

LENGTH, NEW = 77, 3
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"backend": name} for name in EVICTING},
    "h2o-normalized": {"backend": "h2o", "normalize": True, "stabilizer_length": 2, "local_length": 2},
    "snapkv-wide": {"backend": "snapkv", "kernel_size": 9, "window_length": 8},
    "knorm-int8": {"backend": "knorm", "storage": {"backend": "int8"}},
    "keydiff-int4": {
        "backend": "keydiff",
        "storage": {"backend": "int4", "key_bits": 8, "residual_length": 4},
    },
    "lagkv-int8": {"backend": "lagkv", "lag_size": 7, "storage": {"backend": "int8"}},
    "lagkv-compact": {"backend": "lagkv", "lag_size": 5, "positions": "compact"},
    "h2o-float8": {"backend": "h2o", "sink_length": 2, "storage": {"backend": "float8"}},
    "streaming_llm-compact": {"backend": "streaming_llm", "positions": "compact"},
    "knorm-compact": {"backend": "knorm", "positions": "compact"},
    "expected-compact": {"backend": "expected_attention", "positions": "compact", "sink_length": 2},
    "expected-int8": {"backend": "expected_attention", "storage": {"backend": "int8"}, "epsilon": 0.01},
}
CASES = [
    pytest.param(name, attention, id=f"{name}-{attention}")
    for name in OPTIONS
    for attention in ("sdpa", "eager", "kvcache_plugins")
]


def _compare_with_rows_alone(name: str, attention: str, pads: list[int], chunk: int) -> None:
    # A row of a batch differs from the row alone in its last bits: in fp32 enough for a storage to round to
    # the next code or fp16 scale, on some processors. In fp64 it is not; but there transformers' eager
    # attention is no number for pads, which see nothing: over a storage, only what is kept is compared.
    is_eager = attention == "eager"
    model = model_of("llama", attention, dtype=torch.float32 if is_eager else torch.float64)
    config = {"budget": 24, "chunk_size": chunk, **OPTIONS[name]}
    total = LENGTH + NEW
    tokens, mask = ids(total, len(pads), pads=pads), mask_of(total, pads)
    cache = bound_cache(model, config, LENGTH, mask[:, :LENGTH])
    together = feed(model, cache, tokens, [*chunks_of(LENGTH, chunk), *[1] * NEW], mask)
    for row, pad in enumerate(pads):
        own_length = LENGTH - pad
        by_itself = bound_cache(model, config, own_length)
        alone = feed(
            model, by_itself, tokens[row : row + 1, pad:], [*chunks_of(own_length, chunk), *[1] * NEW]
        )
        for layer, own in zip(cache.evicting_layers, by_itself.evicting_layers, strict=True):
            positions = [[p - pad for p in head] for head in real_positions(layer)[row]]
            assert positions == real_positions(own)[0]
        if not is_eager or "storage" not in config:
            torch.testing.assert_close(together[row, pad:], alone[0], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_rows_read_whole(name: str, attention: str) -> None:
    # The last row is shorter than the budget.
    _compare_with_rows_alone(name, attention, [0, 9, 31, 60], chunk=LENGTH)


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_rows_read_in_chunks_that_end_where_theirs_do(name: str, attention: str) -> None:
    # The chunk boundaries of a row alone are those of the batch if its pads fill whole chunks.
    _compare_with_rows_alone(name, attention, [0, 16, 64], chunk=16)


@pytest.mark.parametrize("name", OPTIONS)
def test_pads_go_first(name: str) -> None:
    model = model_of()
    pads = [0, 21, 70]
    tokens, mask = ids(LENGTH, 3, pads=pads), mask_of(LENGTH, pads)
    cache = bound_cache(model, {"budget": 24, **OPTIONS[name]}, LENGTH, mask)
    for count in chunks_of(LENGTH, 11):
        seen = cache.get_seq_length() + count
        feed(model, cache, tokens[:, seen - count : seen], [count], mask)
        for layer in cache.evicting_layers:
            held = layer.ledger.positions
            assert held.shape[2] == min(seen, 24)
            for row, pad in enumerate(pads):
                pads_held = (held[row] < pad).sum(-1)
                assert pads_held.tolist() == [max(0, min(seen, pad) - max(0, seen - 24))] * 2
                # in the order of time, hence at the left edge
                assert (held[row].diff(dim=-1) > 0).all()


@pytest.mark.parametrize("backend", ["keydiff", "knorm", "lagkv", "streaming_llm"])
def test_pads_that_look_important_go_first_all_the_same(backend: str) -> None:
    # Keys of length zero, and opposite to all others: what knorm and keydiff want most.
    model = model_of()
    mask = mask_of(30, [0, 10])
    layer = bound_cache(model, {"backend": backend, "budget": 16}, 30, mask).evicting_layers[0]
    keys, values = torch.randn(2, 2, 30, 16) + 1, torch.randn(2, 2, 30, 16)
    for pad_keys in (0.0, -5.0):
        keys[1, :, :10] = pad_keys
        layer.reset()
        layer.bind(layer.facts, torch.tensor([0, 10]), None)
        layer.set_prompt_length(30)
        for start in range(0, 30, 6):
            layer.update(keys[:, :, start : start + 6], values[:, :, start : start + 6])
        assert layer.ledger.positions[1].min() >= 10
        assert layer.held_length == 16


def test_a_row_may_be_all_pads_for_several_chunks() -> None:
    # Its queries see nothing then, which must not make anything of it NaN.
    model = model_of()
    for backend in EVICTING:
        mask = mask_of(LENGTH, [0, 60])
        cache = bound_cache(model, {"backend": backend, "budget": 24}, LENGTH, mask)
        logits = feed(model, cache, ids(LENGTH, 2, pads=[0, 60]), chunks_of(LENGTH, 16), mask)
        assert torch.isfinite(logits).all()
        for layer in cache.evicting_layers:
            assert torch.isfinite(layer.ledger.scores).all()
