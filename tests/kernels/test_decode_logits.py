"""What changes a logit: masks, windows, caps, slopes, sinks and padding, in every native decode kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvcache_plugins.attention.reference import AttentionOptions
from tests.kernels.decode_cases import (
    CASES,
    LOGIT_OPTIONS,
    attention_options,
    build_layer,
    check,
    isa,
    library,
    masks,
    step,
)

__all__ = ["isa", "library"]  # fixtures


@pytest.mark.parametrize("query_length", [1, 3])
@pytest.mark.parametrize("mask", masks(2, 4, 1, 80))
def test_masks(isa: str, mask: str, query_length: int) -> None:
    padding = torch.tensor([70, 3])
    layer = build_layer({"backend": "kivi", "residual_length": 32}, 200, padding=padding)
    query, key, value = step(layer, query_length, 4)
    given = masks(2, 8, query_length, key.shape[2])[mask]
    check(query, key, value, AttentionOptions(mask=given))


@pytest.mark.parametrize("query_length", [1, 3])
@pytest.mark.parametrize("options", LOGIT_OPTIONS, ids=str)
def test_options(isa: str, options: dict[str, Any], query_length: int) -> None:
    layer = build_layer(CASES["kivi-default"], 333)
    query, key, value = step(layer, query_length, 4)
    check(query, key, value, attention_options(options, query_length, key.shape[2]))


@pytest.mark.parametrize("sinks", [True, "of queries"])
@pytest.mark.parametrize("has_mask", [False, True])
def test_slopes_and_sinks_of_many_queries_that_see_later_ones(
    isa: str, has_mask: bool, sinks: bool | str
) -> None:
    """Read in passes, whose queries are not the newest tokens: sinks know how far away a token is."""
    if isa == "portable":
        pytest.skip("many queries are left to torch")
    query, key, value = step(build_layer(CASES["int8-default"], 100), 200, 4)
    options = attention_options({"sink_logits": sinks, "alibi_slopes": True}, 200, 300)
    mask = torch.arange(300) >= torch.tensor([5, 0])[:, None]
    mask = mask[:, None, None] if has_mask else None
    check(query, key, value, replace(options, is_causal=False, mask=mask))


def test_a_query_that_sees_nothing_gets_zeros(isa: str) -> None:
    layer = build_layer(CASES["int8-default"], 200)
    query, key, value = step(layer, 1, 4)
    mask = torch.ones(2, 1, 1, 201, dtype=torch.bool)
    mask[0] = False
    got = check(query, key, value, AttentionOptions(mask=mask))
    assert torch.equal(got[0], torch.zeros_like(got[0]))


def test_sinks_with_padding(isa: str) -> None:
    padding = torch.tensor([66, 0])
    for name in ("int4-sinks", "kivi-sinks"):
        layer = build_layer(CASES[name], 200, padding=padding)
        query, key, value = step(layer, 1, 4)
        mask = (torch.arange(201) >= padding[:, None])[:, None, None]
        check(query, key, value, AttentionOptions(mask=mask))
