"""The products with packed keys and values, of every instruction set, against the stream's own decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache_plugins.attention.description import describe, first_sinks
from kvcache_plugins.kernels.defaults import DEFAULTS
from kvcache_plugins.kernels.layout import Side
from kvcache_plugins.kernels.ops import multiply_keys, multiply_values
from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.testing.comparison import relative_rms
from tests.kernels.decode_cases import CASES, FP32_ERROR, WIDE, build_layer, isa, library, step

__all__ = ["isa", "library"]  # fixtures

BFLOAT16_ERROR = 6e-3
"""Kernels round queries, weights and what they are folded with to bf16 where these come in it."""


def arguments(handle: KVHandle) -> tuple[Tensor, Side]:
    side = describe(handle.tokens)
    assert side is not None
    return handle.tokens.stream.records.data, side


def where(handle: KVHandle, side: Side) -> dict[str, Any]:
    return {"start": handle.tokens.first, "sink_start": first_sinks(handle.tokens, side)}


def check_keys(query: Tensor, key: KVHandle, bound: float = FP32_ERROR) -> None:
    records, side = arguments(key)
    got = multiply_keys(query, records, side, **where(key, side))
    dense = key.tokens.dense(torch.float32).double()
    dense = dense.repeat_interleave(query.shape[1] // dense.shape[1], dim=1)
    expected = query.double() @ dense.transpose(2, 3)
    assert got.dtype == torch.float32 and got.shape == expected.shape
    assert relative_rms(expected, got) <= bound


def check_values(weights: Tensor, value: KVHandle, bound: float = FP32_ERROR) -> None:
    records, side = arguments(value)
    got = multiply_values(weights, records, side, **where(value, side))
    dense = value.tokens.dense(torch.float32).double()
    dense = dense.repeat_interleave(weights.shape[1] // dense.shape[1], dim=1)
    expected = weights.double() @ dense
    assert got.dtype == weights.dtype and got.shape == expected.shape
    assert relative_rms(expected, got) <= bound


def weights_for(query: Tensor, value: KVHandle) -> Tensor:
    """Weights of which some are zero and none adds up to one."""
    weights = torch.rand(*query.shape[:3], value.shape[2]) * 3
    return weights.masked_fill_(weights < 0.5, 0.0).to(query.dtype)


@pytest.mark.parametrize("rows", [(1, 1), (4, 1), (3, 5)], ids=lambda rows: f"group{rows[0]}-q{rows[1]}")
@pytest.mark.parametrize("name", CASES)
def test_every_backend(isa: str, name: str, rows: tuple[int, int]) -> None:
    group, count = rows
    query, key, value = step(build_layer(CASES[name], 330), count, group)
    assert key.tokens.packed_length > 128 or value.tokens.packed_length > 128
    check_keys(query, key)
    check_values(weights_for(query, value), value)


@pytest.mark.parametrize("name", CASES)
def test_half_precision(isa: str, name: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        layer = build_layer(CASES[name], 200, dtype=dtype)
        query, key, value = step(layer, 2, 4)
        check_keys(query, key, BFLOAT16_ERROR)
        check_values(weights_for(query, value), value, BFLOAT16_ERROR)


@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 112, 128, 256, 320])
@pytest.mark.parametrize("name", ["kivi-default", "kivi-3bit", "int8-default", "int4-default"])
def test_head_sizes(isa: str, name: str, head_dim: int) -> None:
    query, key, value = step(build_layer(CASES[name], 200, head_dim=head_dim), 1, 2)
    check_keys(query, key)
    check_values(weights_for(query, value), value)


def test_wide_heads_of_every_format(isa: str) -> None:
    for name in WIDE:
        query, key, value = step(build_layer(CASES[name], 260, head_dim=512, value_dim=496), 1, 2)
        check_keys(query, key)
        check_values(weights_for(query, value), value)


@pytest.mark.parametrize("name", ["int8-default", "int4-default", "kivi-2bit-block", "float8-default"])
def test_many_rows_and_threads(isa: str, name: str, request: pytest.FixtureRequest) -> None:
    threads = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    torch.set_num_threads(2)
    query, key, value = step(build_layer(CASES[name], 3000, batch_size=1), 33, 3)
    check_keys(query, key)
    check_values(weights_for(query, value), value)


@pytest.mark.parametrize("count", [1, 63, 64, 100])
@pytest.mark.parametrize("name", ["int8-default", "kivi-default", "int4-sinks"])
def test_without_the_oldest(isa: str, name: str, count: int) -> None:
    query, key, value = step(build_layer(CASES[name], 333), 2, 2)
    key.tokens, value.tokens = (handle.tokens.without_oldest(count) for handle in (key, value))
    assert key.tokens.first == count
    check_keys(query, key)
    weights = torch.rand(2, 4, 2, value.tokens.length)
    check_values(weights, value)


def test_sinks_with_padding(isa: str) -> None:
    padding = torch.tensor([66, 0])
    for name in ("int4-sinks", "kivi-sinks"):
        query, key, value = step(build_layer(CASES[name], 200, padding=padding), 1, 4)
        assert where(key, arguments(key)[1])["sink_start"] is not None
        check_keys(query, key)
        check_values(weights_for(query, value), value)


def test_what_has_no_weight_may_hold_anything(isa: str) -> None:
    for name in ("int8-default", "int4-default", "kivi-default", "float8-default"):
        query, _, value = step(build_layer(CASES[name], 200), 1, 2)
        value.tokens.segments[-1][:, :, -1] = torch.nan
        weights = weights_for(query, value)
        weights[..., -1] = 0.0
        records, side = arguments(value)
        assert torch.isfinite(multiply_values(weights, records, side)).all()


@pytest.mark.parametrize("name", ["kivi-default", "int4-sinks", "kvquant-default", "int8-default"])
def test_defaults_of_the_operators(name: str) -> None:
    query, key, value = step(build_layer(CASES[name], 200), 2, 3)
    weights = weights_for(query, value)
    for operator, rows, handle in (("keys", query, key), ("values", weights, value)):
        records, side = arguments(handle)
        plain = DEFAULTS[f"multiply_{operator}"][0](
            rows, records, side.segments, side.extras, None, side.layout.integers(), 0
        )
        native = (multiply_keys if operator == "keys" else multiply_values)(rows, records, side)
        assert plain.dtype == native.dtype and relative_rms(plain, native) <= FP32_ERROR


@pytest.mark.no_poison
def test_opcheck() -> None:
    query, key, value = step(build_layer(CASES["kivi-default"], 200), 1, 4)
    weights = weights_for(query, value)
    for name, rows, handle in (("multiply_keys", query, key), ("multiply_values", weights, value)):
        records, side = arguments(handle)
        tensors = (side.contiguous_rows(), side.extras, None, side.layout.integers())
        operator = getattr(torch.ops.kvcache_plugins, name).default
        torch.library.opcheck(operator, (rows, records, *tensors, 0))


def test_what_is_refused() -> None:
    query, key, value = step(build_layer(CASES["int8-default"], 200), 1, 4)
    records, side = arguments(key)
    with pytest.raises(ValueError, match="Invalid heads of query: expected a multiple of 2, got 3"):
        multiply_keys(query[:, :3], records, side)
    with pytest.raises(ValueError, match="Invalid tokens of query: expected 1 to 64, got 65"):
        multiply_keys(query.expand(-1, -1, 65, -1), records, side)
    with pytest.raises(ValueError, match="Invalid shape of query"):
        multiply_keys(query[..., :32], records, side)
    with pytest.raises(ValueError, match="Invalid start of query: expected a slot before 201, got 201"):
        multiply_keys(query, records, side, start=201)
    with pytest.raises(ValueError, match="Invalid shape of weights"):
        multiply_values(torch.rand(2, 8, 1, 200), *arguments(value))
    with pytest.raises(ValueError, match="Invalid dtype of query"):
        multiply_keys(query.double(), records, side)
