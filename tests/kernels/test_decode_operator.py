"""The operator that the native decode kernels implement: its default, its schema, and what it refuses."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from kvcache_plugins.attention.description import describe
from kvcache_plugins.attention.native import attend_handles
from kvcache_plugins.attention.reference import AttentionOptions
from kvcache_plugins.kernels.defaults import DEFAULTS
from kvcache_plugins.kernels.layout import Side, SideLayout
from kvcache_plugins.kernels.ops import decode_attention
from kvcache_plugins.layers.base import PackedLayer
from kvcache_plugins.testing.comparison import relative_rms
from tests.kernels.decode_cases import CASES, FP32_ERROR, build_layer, library, step

__all__ = ["library"]  # a fixture


def _arguments(layer: PackedLayer) -> tuple[tuple[Any, ...], dict[str, Any]]:
    query, key, value = step(layer, 1, 4)
    sides = describe(key.tokens), describe(value.tokens)
    return (query, layer.records.data, *sides), {"scaling": 64**-0.5}


@pytest.mark.parametrize("name", CASES)
def test_default_of_the_op(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain-torch default says the same as the kernels."""
    layer = build_layer(CASES[name], 200)
    arguments, options = _arguments(layer)
    native = decode_attention(*arguments, **options)
    query, records, keys, values = arguments
    plain = DEFAULTS["decode_attention"][0](
        query, records, keys.segments, values.segments, keys.extras, values.extras, None,
        keys.layout.integers(), values.layout.integers(), options["scaling"], None, False, 0, 0.0, None, None,
    )  # fmt: skip
    assert relative_rms(plain, native) <= FP32_ERROR


def test_a_side_is_given_to_operators_whole() -> None:
    segments = [torch.zeros(1, 1, 4, 64)]
    names = [field.name for field in fields(Side) if field.name not in ("layout", "segments")]
    optional = {name: torch.tensor(number) for number, name in enumerate(names)}
    side = Side(SideLayout(64, 4, 0, 64, 1, 1, 2, 0, 0), segments, **optional)
    again = Side.from_op(side.layout.integers(), segments, side.extras)
    assert again.layout == side.layout
    assert all(getattr(again, name) is tensor for name, tensor in optional.items())


@pytest.mark.no_poison
def test_opcheck() -> None:
    arguments, options = _arguments(build_layer(CASES["kivi-default"], 200))
    query, records, keys, values = arguments
    torch.library.opcheck(
        torch.ops.kvcache_plugins.decode_attention.default,
        (
            query, records, keys.segments, values.segments, keys.extras, values.extras, None,
            keys.layout.integers(), values.layout.integers(), options["scaling"], None, False, 0, 0.0,
            None, None,
        ),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: {"query": a[0][:, :3]}, "Invalid heads of query: expected a multiple of 2, got 3"),
        (lambda a: {"query": a[0][:, :0]}, "Invalid heads of query: expected a multiple of 2, got 0"),
        (lambda a: {"query": a[0].double()}, "Invalid dtype of query"),
        (lambda a: {"query": a[0][..., :32]}, "Invalid shape of query"),
        (lambda a: {"records": a[1].to(torch.int32)}, "Invalid dtype of records: expected uint8, got Int"),
        (lambda a: {"records": a[1][:, :, :1]}, "Invalid packed_length of key_layout"),
        (
            lambda a: {"values": replace(a[3], layout=a[3].layout._replace(head_dim=513))},
            "Invalid head_dim of value_layout: expected 1 to 512, got 513",
        ),
        (lambda a: {"bias": torch.zeros(2, 1, 1, 7)}, "Invalid shape of bias"),
    ],
)
def test_wrong_arguments(change: Any, said: str) -> None:
    arguments, options = _arguments(build_layer(CASES["kivi-default"], 200))
    names = ("query", "records", "keys", "values")
    given = dict(zip(names, arguments, strict=True)) | options | change(arguments)
    with pytest.raises((ValueError, RuntimeError), match=said):
        decode_attention(**given)


def test_unknown_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = build_layer(CASES["kivi-default"], 200)
    given = step(layer, 1, 4)
    monkeypatch.setenv("KVCACHE_CPU_ISA", "sse9")
    said = "KVCACHE_CPU_ISA must be one of avx512, avx2, portable, got sse9"
    with pytest.raises(ValueError, match=said):
        attend_handles(*given, AttentionOptions())
    with pytest.raises(ValueError, match=said):
        build_layer(CASES["kivi-default"], 200)
