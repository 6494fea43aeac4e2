"""Many query rows over KVQuant's levels and KIVI's groups, which AVX-512 decodes once for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvcache_plugins.attention import native
from kvcache_plugins.attention.native import attend_handles
from kvcache_plugins.attention.reference import AttentionOptions, attend
from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.testing.comparison import relative_rms
from tests.kernels.decode_cases import (
    CASES,
    LOGIT_OPTIONS,
    attention_options,
    build_layer,
    check,
    isa,
    library,
    step,
)
from tests.kernels.test_multiply import BFLOAT16_ERROR, check_keys, check_values, weights_for

__all__ = ["isa", "library"]  # fixtures

KVQUANT = CASES["kvquant-default"] | {"residual_length": 64}
LENGTH = 450


@pytest.fixture(autouse=True)
def passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the kernels attend from any number of queries, also where they are not the fastest way."""
    monkeypatch.setattr(native, "has_fast_passes", lambda dtype: True)


def check_half_precision(
    query: Tensor, key: KVHandle, value: KVHandle, hidden: Tensor | None = None, *, most: float = 1.2
) -> None:
    """As near to the reference as dense attention over bf16 is, times `most`."""
    length, count = key.shape[2], query.shape[2]
    mask = torch.arange(length) <= torch.arange(length - count, length)[:, None]
    mask = mask[None, None] if hidden is None else mask & ~hidden
    options = AttentionOptions(mask=mask)
    expected = attend(query.double(), key.tokens, value.tokens, options)
    dense = key.tokens.dense(torch.bfloat16), value.tokens.dense(torch.bfloat16)
    plain = F.scaled_dot_product_attention(query, *dense, attn_mask=mask, enable_gqa=True)
    check(query, key, value, options, most * relative_rms(expected, plain))


@pytest.mark.parametrize(("group", "count"), [(1, 9), (4, 2), (4, 3), (5, 2), (3, 8), (1, 64), (4, 33)])
@pytest.mark.parametrize("nbits", [2, 3, 4])
def test_rows(isa: str, nbits: int, group: int, count: int) -> None:
    """On both sides of the number of rows from which blocks are decoded once."""
    for interleaved in (False, True):
        options = {**KVQUANT, "nbits": nbits}
        layer = build_layer(options, LENGTH, interleaved=interleaved)
        check(*step(layer, count, group), AttentionOptions(is_causal=True))
        layer = build_layer(options, LENGTH, interleaved=interleaved, dtype=torch.bfloat16)
        check_half_precision(*step(layer, count, group))


@pytest.mark.parametrize(("group", "count"), [(4, 4), (1, 17), (4, 8), (3, 11), (4, 33)])
@pytest.mark.parametrize("rope_mode", ["post", "block"])
@pytest.mark.parametrize("nbits", [2, 3, 4, 8])
def test_rows_over_groups(isa: str, nbits: int, rope_mode: str, group: int, count: int) -> None:
    """The same of KIVI, in fp32 as well, where nothing but levels is decoded once."""
    options = {"backend": "kivi", "nbits": nbits, "rope_mode": rope_mode, "residual_length": 64}
    for head_dim, interleaved in ((64, False), (96, True)):
        given = {"head_dim": head_dim, "interleaved": interleaved}
        check(*step(build_layer(options, LENGTH, **given), count, group), AttentionOptions(is_causal=True))
        layer = build_layer(options, LENGTH, dtype=torch.bfloat16, **given)
        check_half_precision(*step(layer, count, group), most=2.0)


@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(24, 24), (80, 80), (128, 128), (64, 96), (80, 24), (512, 256)]
)
def test_head_sizes(isa: str, key_dim: int, value_dim: int) -> None:
    for group in (1, 4):
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(group)
            layer = build_layer(KVQUANT, LENGTH, head_dim=key_dim, value_dim=value_dim, dtype=dtype)
            query, key, value = step(layer, 13, group)
            if dtype == torch.float32:
                check(query, key, value, AttentionOptions(is_causal=True))
            elif key_dim == value_dim:
                check_half_precision(query, key, value)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(33, 17), (47, 47)])
def test_heads_of_an_odd_number_of_channels(isa: str, key_dim: int, value_dim: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(key_dim)
        layer = build_layer(
            KVQUANT, LENGTH, head_dim=key_dim, value_dim=value_dim, rotary_dim=32, dtype=dtype
        )
        query, key, value = step(layer, 11, 4)
        if dtype == torch.float32:
            check(query, key, value, AttentionOptions(is_causal=True))
        elif key_dim == value_dim:
            check_half_precision(query, key, value)


@pytest.mark.parametrize("rotary_dim", [None, 32])
def test_rows_that_begin_after_padding(isa: str, rotary_dim: int | None) -> None:
    """Far from the first position, where a rotation would show what its tables have lost."""
    padding = torch.tensor([37, 0])
    hidden = (torch.arange(3012) < padding[:, None])[:, None, None]
    for group, interleaved in [(1, False), (4, True)]:
        layer = build_layer(
            KVQUANT, 3000, head_dim=128, padding=padding, interleaved=interleaved, rotary_dim=rotary_dim
        )
        options = AttentionOptions(mask=~hidden, is_causal=True)
        query, key, value = step(layer, 12, group)
        check(query, key, value, options, 2e-6)
        layer = build_layer(
            KVQUANT, 3000, head_dim=128, padding=padding, interleaved=interleaved, rotary_dim=rotary_dim,
            dtype=torch.bfloat16,
        )  # fmt: skip
        check_half_precision(*step(layer, 12, group), hidden)


@pytest.mark.parametrize("options", LOGIT_OPTIONS, ids=str)
def test_what_changes_logits(isa: str, options: dict[str, Any]) -> None:
    query, key, value = step(build_layer(KVQUANT, LENGTH), 7, 4)
    check(query, key, value, attention_options(options, 7, LENGTH + 7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("kvquant", "kivi"))])
def test_products_by_themselves(isa: str, name: str, dtype: torch.dtype) -> None:
    query, key, value = step(build_layer(CASES[name], 330, dtype=dtype), 13, 3)
    bound = {} if dtype == torch.float32 else {"bound": BFLOAT16_ERROR}
    check_keys(query, key, **bound)
    check_values(weights_for(query, value), value, **bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_hidden_does_not_count(isa: str, dtype: torch.dtype) -> None:
    """Nor what it leaves in a tile where values end, which are an odd number here."""
    query, key, value = step(build_layer(KVQUANT, LENGTH, dtype=dtype), 11, 4)
    mask = torch.ones(2, 1, 1, key.shape[2], dtype=torch.bool)
    mask[..., [-20, -5]] = False
    options = AttentionOptions(mask=mask, is_causal=True)
    expected = attend_handles(query, key, value, options)
    for handle in (key, value):
        handle.tokens.segments[-1][:, :, [-20, -5]] = torch.nan
    assert torch.equal(attend_handles(query, key, value, options), expected)
    key.tokens.segments[-1][1, 1, -1, 3] = torch.nan  # the newest key: only its own query sees it
    got = attend_handles(query, key, value, options)
    assert got[1, 4:, -1].isnan().all()
    assert torch.equal(got[:, :, :-1], expected[:, :, :-1])
    query[0, 2, 5, 7] = torch.nan
    got = attend_handles(query, key, value, options)
    assert got[0, 2, 5].isnan().all() and torch.equal(got[0, 3:, :-1], expected[0, 3:, :-1])
