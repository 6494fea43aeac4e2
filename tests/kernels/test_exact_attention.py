"""Attention over exact tokens, of which nothing is packed, by the CPU kernels against the torch reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvcache_plugins.attention import native
from kvcache_plugins.attention.limits import MOST_QUERIES
from kvcache_plugins.attention.native import attend_handles, has_fast_passes
from kvcache_plugins.attention.query_blocks import attend_query_blocks
from kvcache_plugins.attention.reference import AttentionOptions, attend
from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.testing.comparison import relative_rms
from tests.kernels.decode_cases import (
    LOGIT_OPTIONS,
    attention_options,
    build_layer,
    isa,
    library,
    masks,
    states,
)

__all__ = ["isa", "library"]

EXACT = {"backend": "int8", "residual_length": 4096}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def step(
    length: int, queries: int, group: int = 4, dtype: torch.dtype = torch.bfloat16, **shape: Any
) -> tuple[Tensor, KVHandle, KVHandle]:
    """Queries of the newest of `length` tokens, none of which is packed, and handles of all."""
    layer = build_layer(EXACT, length - queries, dtype=dtype, **shape)
    dims = [stream.head_dim for stream in layer.streams]
    batch_size, kv_heads = layer.records.shape[:2]
    new = states(batch_size, kv_heads, queries, *dims, dtype)
    views = layer._append(*new, defer=False)
    assert all(view.packed_length == 0 and view.length == length for view in views)
    key, value = (KVHandle(layer, view, source) for view, source in zip(views, new, strict=True))
    return torch.randn(batch_size, kv_heads * group, queries, dims[0]).to(dtype), key, value


def needs_fast_passes(isa: str, queries: int) -> None:
    if queries > MOST_QUERIES and not has_fast_passes(torch.bfloat16):
        pytest.skip(f"of {queries} queries, torch multiplies tiles where instructions are {isa}")


def check(
    query: Tensor, key: KVHandle, value: KVHandle, options: AttentionOptions, bound: float | None = None
) -> None:
    """As near to attention in float64 as torch's own in that dtype is, and a tenth."""
    dense = key.tokens.dense(query.dtype), value.tokens.dense(query.dtype)
    expected = attend(query.double(), key.tokens, value.tokens, options)
    if bound is None:
        queries, length = query.shape[2], key.tokens.length
        seen = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
        plain = F.scaled_dot_product_attention(query, *dense, attn_mask=seen, enable_gqa=True)
        bound = 1.1 * relative_rms(expected, plain) + (1e-6 if query.dtype == torch.float32 else 0.0)
    got = attend_handles(query, key, value, options)
    assert key.layer.kernel == "cpu", key.layer.kernel_reason
    assert got.dtype == query.dtype and torch.isfinite(got).all()
    assert relative_rms(expected, got) <= bound


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("queries", [1, 2, 8])
@pytest.mark.parametrize("length", [9, 63, 64, 65, 130, 1000])
def test_lengths(isa: str, length: int, queries: int, dtype: torch.dtype) -> None:
    check(*step(length, queries, dtype=dtype, head_dim=128), AttentionOptions(is_causal=queries > 1))


@pytest.mark.parametrize("queries", [63, 64, 65, 200])
def test_many_queries(isa: str, queries: int) -> None:
    needs_fast_passes(isa, queries)
    for length in (queries + 1, 300):
        check(*step(length, queries, head_dim=96), AttentionOptions(is_causal=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 16])
def test_group_ratios(isa: str, group: int, dtype: torch.dtype) -> None:
    for queries in (1, 3):
        check(*step(200, queries, group, dtype=dtype), AttentionOptions(is_causal=True))


@pytest.mark.parametrize(
    ("key_dim", "value_dim"),
    [
        (16, 16),
        (40, 40),
        (64, 64),
        (72, 34),
        (80, 80),
        (112, 112),
        (192, 128),
        (64, 96),
        (256, 256),
        (512, 512),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda dtype: str(dtype)[6:])
def test_head_sizes(isa: str, key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    """Also those that are no whole vector of pairs."""
    for queries, group in ((1, 4), (5, 4), (1, 1), (3, 1)):
        given = step(210, queries, group, dtype=dtype, head_dim=key_dim, value_dim=value_dim)
        check(*given, AttentionOptions(is_causal=True))


@pytest.mark.parametrize("options", LOGIT_OPTIONS, ids=str)
@pytest.mark.parametrize("queries", [1, 3, 70])
def test_what_changes_a_logit(isa: str, queries: int, options: dict[str, Any]) -> None:
    needs_fast_passes(isa, queries)
    if queries > 64 and options.get("position_bias"):
        pytest.skip("rows of a bias each, which tiles serve")
    query, key, value = step(330, queries, head_dim=64)
    check(query, key, value, attention_options(options, queries, 330), bound=6e-3)


@pytest.mark.parametrize("name", ["padding", "padding-causal", "random", "per head", "additive", "all"])
def test_masks(isa: str, name: str) -> None:
    query, key, value = step(330, 3, head_dim=64)
    check(query, key, value, AttentionOptions(mask=masks(2, 8, 3, 330)[name]), bound=6e-3)


def test_queries_that_a_mask_tells_apart_are_read_in_blocks(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_fast_passes(isa, 70)
    query, key, value = step(330, 70, head_dim=64)
    mask = torch.ones(70, 330, dtype=torch.bool).tril(260)[None, None].clone()
    mask[..., 5:20, 30:90] = False
    read = []
    monkeypatch.setattr(
        native, "attend_query_blocks", lambda *given: read.append(given) or attend_query_blocks(*given)
    )
    check(query, key, value, AttentionOptions(mask=mask), bound=6e-3)
    assert len(read) == 1


@pytest.mark.parametrize("scaling", [1.0, 0.3, -0.2, 1e-30, 1e-42, 0.0])
def test_scaling(isa: str, scaling: float) -> None:
    """Which is taken out of the query again, where it is a number to divide by."""
    check(*step(150, 2), AttentionOptions(scaling=scaling, is_causal=True), bound=6e-3)


@pytest.mark.parametrize("filled", [float("nan"), float("inf")])
@pytest.mark.parametrize("queries", [1, 66])
def test_hidden_tokens_may_hold_anything(isa: str, queries: int, filled: float) -> None:
    """Of a block of which some are seen, and of one of which none is."""
    needs_fast_passes(isa, queries)
    query, key, value = step(200, queries, head_dim=64)
    mask = torch.ones(2, 1, 1, 200, dtype=torch.bool)
    mask[0, ..., :70] = mask[1, ..., :3] = False
    causal = torch.ones(queries, 200, dtype=torch.bool).tril(200 - queries)
    expected = attend(query.double(), key.tokens, value.tokens, AttentionOptions(mask=mask & causal))
    for handle in (key, value):
        tail = handle.tokens.segments[0]
        tail.masked_fill_(~mask[:, :, 0, : tail.shape[2], None], filled)
    got = attend_handles(query, key, value, AttentionOptions(mask=mask, is_causal=queries > 1))
    assert key.layer.kernel == "cpu"
    assert torch.isfinite(got).all() and relative_rms(expected, got) <= 6e-3


def test_tokens_that_lie_apart(isa: str) -> None:
    """Heads side by side, as models make them, and two pieces that meet inside a block."""
    query, key, value = step(300, 1, head_dim=64)
    expected = attend(query.double(), key.tokens, value.tokens, AttentionOptions())
    for handle in (key, value):
        whole = torch.cat(handle.tokens.segments, dim=2)
        apart = whole.transpose(1, 2).contiguous().transpose(1, 2)
        handle.tokens.segments = (apart[:, :, :170], apart[:, :, 170:])
    got = attend_handles(query, key, value, AttentionOptions())
    assert key.layer.kernel == "cpu" and relative_rms(expected, got) <= 4e-3
