"""Rows are chosen as with transformers' own cache, and checked before any layer follows them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvcache_plugins import build_cache
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing import tiny_model

MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1]])


def started(backend: str) -> tuple[Any, Any]:
    model = tiny_model("llama")
    tokens = torch.arange(3, 15).reshape(3, 4)
    exact = {"residual_length": 64} if backend == "kivi" else {}
    ours = build_cache(model, {"backend": backend, "kernel": "torch", **exact})  # bit by bit
    ours.bind(model, MASK)
    theirs = DynamicCache(config=model.config)
    for cache in (ours, theirs):
        with torch.no_grad():
            model(tokens, attention_mask=MASK, **as_argument(cache))
    return ours, theirs


@pytest.mark.parametrize(
    "indices",
    [
        torch.tensor([2, 0]), torch.tensor([-1]), torch.tensor([0, 0, 1, 2]), [1], np.array([2, 1]),
        torch.tensor([True, False, True]), torch.tensor([2], dtype=torch.int32),
    ],
    ids=str,
)  # fmt: skip
def test_rows_are_those_of_transformers_own_cache(indices: Any) -> None:
    ours, theirs = started("kivi")
    ours.batch_select_indices(indices)
    theirs.batch_select_indices(indices.long() if getattr(indices, "dtype", None) == torch.int32 else indices)
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values)


@pytest.mark.parametrize(
    ("indices", "said"),
    [
        (torch.tensor([True, False]), r"mask of rows must be for 3, got one of shape \(2,\)"),
        (torch.tensor([3]), r"from -3 to 2, got \[3\]"),
        (torch.tensor([0, -4]), r"from -3 to 2, got \[0, -4\]"),
        (torch.tensor([0.5]), "must be a list of integers, got tensor"),
        (1, "must be a list of integers, got 1"),
    ],
    ids=str,
)
def test_rows_that_are_not_there_change_nothing(indices: Any, said: str) -> None:
    ours, _ = started("int8")
    before = [tensor.clone() for layer in ours.layers for tensor in layer.tensors().values()]
    with pytest.raises(IndexError, match=said):
        ours.batch_select_indices(indices)
    after = [tensor for layer in ours.layers for tensor in layer.tensors().values()]
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    assert all(len(layer.padding) == 3 for layer in ours.layers)


def test_a_cache_without_tokens_has_no_rows_to_check() -> None:
    cache = build_cache(tiny_model("llama"), {"backend": "int8"})
    cache.batch_select_indices(torch.tensor([5, 7]))
    assert cache.get_seq_length() == 0
