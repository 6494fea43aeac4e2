"""The native decode kernels against the torch reference, on the same codes, for every instruction set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvcache_plugins.artifacts.scales import Scales, save_scales
from kvcache_plugins.attention import native
from kvcache_plugins.attention.native import attend_handles
from kvcache_plugins.attention.reference import AttentionOptions, attend
from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.testing.comparison import relative_rms
from tests.kernels.decode_cases import CASES, WIDE, build_layer, check, isa, library, step

__all__ = ["isa", "library"]  # fixtures


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", [65, 333])
def test_every_backend(isa: str, name: str, length: int) -> None:
    layer = build_layer(CASES[name], length)
    check(*step(layer, 1, 4), AttentionOptions())
    check(*step(layer, 3, 4), AttentionOptions(is_causal=True))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("nbits", [2, 3, 4, 8])
@pytest.mark.parametrize("rotary_dim", [32, 96])
def test_rotation_inside_blocks(isa: str, nbits: int, interleaved: bool, rotary_dim: int) -> None:
    options = {"backend": "kivi", "nbits": nbits, "rope_mode": "block", "residual_length": 32}
    layer = build_layer(options, 300, head_dim=96, interleaved=interleaved, rotary_dim=rotary_dim)
    check(*step(layer, 1, 2), AttentionOptions())


def test_metadata_in_fp32(isa: str) -> None:
    layer = build_layer(CASES["kivi-default"], 300)
    layer.records.widen_metadata()
    check(*step(layer, 1, 4), AttentionOptions())


@pytest.mark.parametrize("scheme", ["head", "tensor"])
@pytest.mark.parametrize(
    "options",
    [{"backend": "float8"}, {"backend": "float8", "format": "e5m2"}, {"backend": "int8"}],
    ids=["e4m3", "e5m2", "int8"],
)
def test_static_scales(isa: str, options: dict[str, Any], scheme: str, tmp_path: Path) -> None:
    absmax = {0: torch.tensor([3.0, 8.0])}  # less than the largest, so some saturate
    save_scales(tmp_path, Scales(absmax, {0: 2 * absmax[0]}))
    option = "granularity" if options["backend"] == "int8" else "scale"
    options = {**options, option: scheme, "calibration": str(tmp_path)}
    layer = build_layer(options, 200)
    assert all(stream.codec.metadata_names == () for stream in layer.streams)
    check(*step(layer, 1, 4), AttentionOptions())
    check(*step(layer, 3, 4), AttentionOptions(is_causal=True))


@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.03, 0.1])
@pytest.mark.parametrize("group", [1, 4, 5])
def test_lists_of_outliers(isa: str, group: int, fraction: float) -> None:
    """Of a few entries to some hundreds, taken in vectors and batches; for one row and for two passes."""
    options = CASES["kvquant-default"] | {"outlier_fraction": fraction, "residual_length": 0}
    for interleaved in (False, True):
        layer = build_layer(options, 260, head_dim=112, interleaved=interleaved)
        lists = layer.stored_keys.outliers, layer.stored_values.outliers
        longest = [int(each.starts.diff(dim=-1).max()) for each in lists if each is not None]
        assert len(longest) == 2 and min(longest) > fraction * 64 * 112 / 2
        check(*step(layer, 1, group), AttentionOptions())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_half_precision_queries(isa: str, name: str, dtype: torch.dtype) -> None:
    layer = build_layer(CASES[name], 1000, dtype=dtype, head_dim=128)
    check_half_precision(*step(layer, 1, 4))


def check_half_precision(query: Tensor, key: KVHandle, value: KVHandle) -> None:
    expected = attend(query.double(), key.tokens, value.tokens, AttentionOptions())
    dense = key.tokens.dense(torch.bfloat16), value.tokens.dense(torch.bfloat16)
    plain = F.scaled_dot_product_attention(query.bfloat16(), *dense, enable_gqa=True)
    check(query, key, value, AttentionOptions(), 2 * relative_rms(expected, plain))


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 200, 333, 1000])
@pytest.mark.parametrize("name", ["int8-default", "int4-default", "kivi-no-window", "kivi-2bit-g32"])
def test_lengths(isa: str, name: str, length: int) -> None:
    layer = build_layer(CASES[name], length)
    check(*step(layer, 1, 4), AttentionOptions())


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 7, 8, 16])
@pytest.mark.parametrize("query_length", [1, 3, 8])
def test_group_ratios(isa: str, group: int, query_length: int) -> None:
    for name in ("kivi-default", "int8-default"):
        layer = build_layer(CASES[name], 200)
        check(*step(layer, query_length, group), AttentionOptions(is_causal=query_length > 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("query_length", [2, 20])
def test_queries_whose_channels_lie_apart(
    isa: str, query_length: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "has_fast_passes", lambda dtype: True)
    for group in (1, 3):
        query, *handles = step(build_layer(CASES["int8-default"], 200, dtype=dtype), query_length, group)
        apart, options = query.mT.contiguous().mT, AttentionOptions(is_causal=True)
        assert apart.stride(3) == query_length
        expected = attend_handles(query, *handles, options)
        assert torch.equal(attend_handles(apart, *handles, options), expected)


@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 96, 112, 128, 192, 256, 320, 512])
@pytest.mark.parametrize(
    "name", ["kivi-default", "kivi-2bit-g32", "kivi-3bit-block", "int8-default", "int4-default"]
)
def test_head_sizes(isa: str, name: str, head_dim: int) -> None:
    layer = build_layer(CASES[name], 300, head_dim=head_dim)
    check(*step(layer, 1, 4), AttentionOptions())


@pytest.mark.parametrize(("key_dim", "value_dim"), [(512, 512), (384, 384), (512, 64)])
def test_wide_heads_of_every_format(isa: str, key_dim: int, value_dim: int) -> None:
    for name in WIDE:
        layer = build_layer(CASES[name], 260, head_dim=key_dim, value_dim=value_dim)
        check(*step(layer, 3, 2), AttentionOptions(is_causal=True))


def test_half_precision_queries_of_wide_heads(isa: str) -> None:
    for name in WIDE:
        layer = build_layer(CASES[name], 400, head_dim=512, dtype=torch.bfloat16)
        check_half_precision(*step(layer, 1, 4))


@pytest.mark.parametrize(("key_dim", "value_dim"), [(192, 128), (64, 96), (512, 64)])
def test_head_sizes_of_keys_and_values_differ(isa: str, key_dim: int, value_dim: int) -> None:
    for name in ("kivi-default", "int8-default", "int4-default"):
        layer = build_layer(CASES[name], 300, head_dim=key_dim, value_dim=value_dim)
        check(*step(layer, 1, 4), AttentionOptions())


def test_heads_of_a_group_as_query_tokens(isa: str) -> None:
    layer = build_layer(CASES["kivi-default"], 300)
    query, key, value = step(layer, 1, 12)
    packed = query.view(2, 2, 12, 64)
    mask = torch.rand(2, 1, 1, 301) > 0.3
    check(packed, key, value, AttentionOptions(mask=mask))
