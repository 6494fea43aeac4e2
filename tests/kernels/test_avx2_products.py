"""The AVX2 kernel's products of packed blocks: integers rounded for bf16 queries, all else in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache_plugins.attention.native import attend_handles
from kvcache_plugins.attention.reference import AttentionOptions, attend
from kvcache_plugins.kernels import loader
from kvcache_plugins.layers.handle import KVHandle
from tests.kernels.decode_cases import build_layer, library, step

__all__ = ["library"]  # a fixture

ERROR = 2e-5
"""Of a result, beside its rounding to bf16; ten times less than with products in bf16."""
LENGTH = 450
KIVI = {"backend": "kivi", "residual_length": 64}
INT4 = {"backend": "int4", "residual_length": 0}
KVQUANT = {"backend": "kvquant", "calibration": "normal_float", "residual_length": 64}
CODES = {
    **{f"kivi {n} bits": {**KIVI, "nbits": n} for n in (2, 3, 4, 8)},
    "kivi g16": {**KIVI, "q_group_size": 16},
    "kivi g64": {**KIVI, "nbits": 2, "q_group_size": 64},
    "kivi block": {**KIVI, "rope_mode": "block"},
    "int4": INT4,
    "int4 8 bits": {**INT4, "nbits": 8},
    "int4 2-bit values": {**INT4, "value_bits": 2},
    "int4 smooth": {**INT4, "smooth": 0.5},
    "int4 sinks": {**INT4, "sink_length": 5},
    "int8": {"backend": "int8"},
    "int8 per token": {"backend": "int8", "granularity": "token"},
    "float8 e4m3": {"backend": "float8"},
    "float8 e5m2": {"backend": "float8", "format": "e5m2"},
    **{f"kvquant {n} bits": {**KVQUANT, "nbits": n} for n in (2, 3, 4)},
    "kvquant no outliers": {**KVQUANT, "outlier_fraction": 0.0},
    "kvquant many outliers": {**KVQUANT, "nbits": 3, "outlier_fraction": 0.05, "sink_length": 70},
}


@pytest.fixture(autouse=True)
def avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_CPU_ISA", "avx2")
    try:
        loader.instruction_set()
    except ValueError as error:
        pytest.skip(str(error))


def compare(query: Tensor, key: KVHandle, value: KVHandle, options: AttentionOptions) -> Tensor:
    """Attend, and compare with the reference what is off by more than rounding to bf16 may make it."""
    expected = attend(query.double(), key.tokens, value.tokens, options)
    got = attend_handles(query, key, value, options)
    half_unit = 2.0 ** (expected.abs().log2().floor() - 8)
    beyond = ((got.double() - expected).abs() - half_unit).clamp(min=0)
    assert beyond.norm() <= ERROR * expected.norm(), float(beyond.norm() / expected.norm())
    return got


def fitting(options: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Options whose groups of channels divide a head."""
    if options["backend"] == "kivi" and head_dim % options.get("q_group_size", 32):
        return options | {"q_group_size": 16}
    return options


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("name", CODES)
def test_codes(name: str, head_dim: int) -> None:
    options = fitting(CODES[name], head_dim)
    for group, interleaved in [(1, False), (4, True)]:
        torch.manual_seed(group)
        layer = build_layer(options, LENGTH, head_dim=head_dim, dtype=torch.bfloat16, interleaved=interleaved)
        compare(*step(layer, 1, group), AttentionOptions())


INTEGERS = [name for name, options in CODES.items() if options["backend"] not in ("float8", "kvquant")]


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_as_exact_as_fp32_where_queries_are(name: str, head_dim: int) -> None:
    """For every number of query rows that has code of its own, and for more than are read without tiles."""
    options = fitting(CODES[name], head_dim)
    for group in (1, 2, 3, 4, 6, 9, 17):
        torch.manual_seed(group)
        layer = build_layer(options, LENGTH, head_dim=head_dim)
        query, key, value = step(layer, 1, group)
        expected = attend(query.double(), key.tokens, value.tokens, AttentionOptions())
        got = attend_handles(query, key, value, AttentionOptions())
        assert (got.double() - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("q_group_size", [16, 32, 64, 128])
@pytest.mark.parametrize("nbits", [2, 3, 4])
def test_keys_of_a_block_are_turned_as_exactly_as_in_fp32(
    nbits: int, q_group_size: int, head_dim: int
) -> None:
    """In periods shorter than a block, as long, and longer; of every channel, and of some."""
    if head_dim % q_group_size:
        pytest.skip("values share scales within a head")
    options = {
        **KIVI,
        "nbits": nbits,
        "q_group_size": q_group_size,
        "rope_mode": "block",
        "residual_length": 128,
    }
    for group, interleaved in [(1, False), (2, True), (3, False), (4, True), (5, False), (17, False)]:
        torch.manual_seed(group)
        rotary_dim = head_dim // 2 if interleaved else None
        layer = build_layer(
            options, LENGTH, head_dim=head_dim, interleaved=interleaved, rotary_dim=rotary_dim
        )
        query, key, value = step(layer, 1, group)
        expected = attend(query.double(), key.tokens, value.tokens, AttentionOptions())
        got = attend_handles(query, key, value, AttentionOptions())
        assert (got.double() - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("head_dim", [64, 72, 256])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_float8_is_as_exact_as_fp32(format: str, head_dim: int) -> None:
    """So are its smallest numbers, which have no exponent."""
    for group, is_small in [(1, False), (2, True), (4, False), (6, True)]:
        layer = build_layer({"backend": "float8", "format": format}, LENGTH, head_dim=head_dim)
        query, key, value = step(layer, 1, group)
        for side in ("key", "value") if is_small else ():
            codes = layer.records.codes(side, 0, layer.records.num_blocks)
            codes &= 0x87 if format == "e4m3" else 0x83
            layer.records.metadata(side, "scale", 0, layer.records.num_blocks).fill_(
                4.0 if format == "e4m3" else 1000.0
            )
        expected = attend(query.double(), key.tokens, value.tokens, AttentionOptions())
        got = attend_handles(query, key, value, AttentionOptions())
        assert (got.double() - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("rotary_dim", [None, 32])
@pytest.mark.parametrize("nbits", [2, 3, 4])
def test_levels_are_as_exact_as_fp32(nbits: int, rotary_dim: int | None) -> None:
    """Far from the first position, where rows begin after padding, and for every number of query rows."""
    padding = torch.tensor([0, 37])
    for group in (1, 2, 3, 4, 5, 7, 8):
        layer = build_layer(
            {**KVQUANT, "nbits": nbits}, 3000, head_dim=128, padding=padding, interleaved=group % 2 == 0,
            rotary_dim=rotary_dim,
        )  # fmt: skip
        query, key, value = step(layer, 1, group)
        mask = torch.arange(3001) >= padding[:, None]
        options = AttentionOptions(mask=mask[:, None, None])
        expected = attend(query.double(), key.tokens, value.tokens, options)
        got = attend_handles(query, key, value, options)
        assert (got.double() - expected).norm() <= 2e-6 * expected.norm()


@pytest.mark.parametrize("group", [2, 3, 7])
@pytest.mark.parametrize(
    "name", ["kivi 2 bits", "int4 2-bit values", "int8", "float8 e4m3", "kvquant 4 bits"]
)
def test_several_query_tokens(name: str, group: int) -> None:
    layer = build_layer(CODES[name], LENGTH, dtype=torch.bfloat16)
    compare(*step(layer, 3, group), AttentionOptions(is_causal=True, sliding_window=300))


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "name", ["int4", "int8", "kivi 4 bits", "float8 e4m3", "float8 e5m2", "kvquant 4 bits"]
)
def test_values_that_are_not_finite_spoil_what_sees_them(name: str, number: float) -> None:
    layer = build_layer(CODES[name], LENGTH, dtype=torch.bfloat16)
    query, key, value = step(layer, 1, 4)
    mask = torch.ones(2, 1, 1, LENGTH + 1, dtype=torch.bool)
    mask[0, ..., 70] = False
    options = AttentionOptions(mask=mask)
    expected = compare(query, key, value, options)
    layer.records.metadata("value", "scale", 1, 2)[:, 0, 0, 70 - 64] = number
    got = attend_handles(query, key, value, options)
    hidden = torch.tensor([[True] * 8, [False] * 4 + [True] * 4])
    assert not torch.isfinite(got[~hidden]).any()
    torch.testing.assert_close(got[hidden], expected[hidden], rtol=2**-7, atol=1e-3)


def test_a_query_that_is_not_finite_spoils_its_row() -> None:
    layer = build_layer(CODES["kivi 4 bits"], LENGTH, dtype=torch.bfloat16)
    query, key, value = step(layer, 1, 4)
    expected = compare(query, key, value, AttentionOptions())
    query[1, 5, 0, 9] = torch.inf
    got = attend_handles(query, key, value, AttentionOptions())
    others = torch.ones(2, 8, dtype=torch.bool)
    others[1, 5] = False
    assert got[1, 5].isnan().all()
    torch.testing.assert_close(got[others], expected[others], rtol=2**-7, atol=1e-3)
