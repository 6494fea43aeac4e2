"""Layers whose packed tokens native kernels read, and attention to them against the torch reference.

The fixtures `library` (there is a native library) and `isa` (each instruction set in turn) are for modules
that import them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache_plugins.attention.native import attend_handles
from kvcache_plugins.attention.reference import AttentionOptions, attend
from kvcache_plugins.backends.kvquant import NORMAL_FLOAT
from kvcache_plugins.eviction.layer import EvictingLayer
from kvcache_plugins.kernels import loader
from kvcache_plugins.layers.base import PackedLayer
from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.models.facts import LayerFacts
from kvcache_plugins.models.rotary import Rotary
from kvcache_plugins.registry import get_backend
from kvcache_plugins.testing.comparison import relative_rms
from tests.backends.test_conformance import VARIANTS

__all__ = [
    "CASES", "FP32_ERROR", "LOGIT_OPTIONS", "WIDE", "attention_options", "build_layer", "check", "isa",
    "library", "masks", "states", "step",
]  # fmt: skip

ISAS = ("portable", "avx2", "avx512")
FP32_ERROR = 1e-5
NEEDED: dict[str, dict[str, Any]] = {"kvquant": {"calibration": NORMAL_FLOAT}}
# An evicting layer's records are those of its storage, so each codec is here without it.
CASES = {
    f"{name}-{label}": {"backend": name, **NEEDED.get(name, {}), **options}
    for name, variants in VARIANTS.items()
    if not issubclass(get_backend(name).layer_class, EvictingLayer)
    for label, options in {"default": {}, **variants}.items()
} | {
    "kivi-2bit-block": {"backend": "kivi", "nbits": 2, "rope_mode": "block"},
    "kivi-4bit-block-g128": {"backend": "kivi", "rope_mode": "block", "q_group_size": 128},
    "kivi-3bit": {"backend": "kivi", "nbits": 3},
    "int4-sinks": {"backend": "int4", "sink_length": 4, "residual_length": 16},
    "kivi-sinks": {"backend": "kivi", "sink_length": 5, "residual_length": 32},
}
# One of every way of storing numbers, for heads of up to 512 channels.
WIDE = (
    "kivi-2bit-block", "kivi-3bit", "kivi-8bit-g64", "kivi-sinks", "int8-default", "int8-group",
    "int4-default", "int4-smooth", "int4-k8v4", "float8-default", "float8-e5m2", "kvquant-default",
    "kvquant-2bit-window",
)  # fmt: skip
# Of `attention_options`.
LOGIT_OPTIONS: list[dict[str, Any]] = [
    {"sliding_window": 1},
    {"sliding_window": 64},
    {"sliding_window": 150},
    {"sliding_window": 1000},
    {"softcap": 5.0},
    {"scaling": 0.5},
    {"sink_logits": True},
    {"alibi_slopes": True},
    {"position_bias": True, "sink_logits": "of queries"},
    {"sink_logits": True, "alibi_slopes": True, "softcap": 20.0, "sliding_window": 100},
]


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    status = loader.status()
    if status.compiler is None and status.state not in ("cached", "loaded"):
        pytest.skip("no C++ compiler")
    loader.build()


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("KVCACHE_CPU_ISA", request.param)
    try:
        loader.instruction_set()
    except ValueError as error:
        pytest.skip(str(error))
    return str(request.param)


def build_layer(
    options: dict[str, Any],
    length: int,
    *,
    batch_size: int = 2,
    kv_heads: int = 2,
    head_dim: int = 64,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    padding: Tensor | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
) -> PackedLayer:
    options = dict(options)
    cache_class = get_backend(options.pop("backend"))
    inv_freq = 10000.0 ** -(torch.arange(0, rotary_dim or head_dim, 2) / head_dim)
    facts = LayerFacts(Rotary(tuple(inv_freq.tolist()), interleaved))
    layer = cache_class.layer_class(cache_class.config_class.from_dict(options), 0, facts)
    layer.padding.set(padding)
    layer.update(*states(batch_size, kv_heads, length, head_dim, value_dim, dtype))
    return layer


def states(
    batch_size: int, kv_heads: int, count: int, key_dim: int, value_dim: int | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    channels = torch.linspace(0.5, 2.0, key_dim)
    keys = torch.randn(batch_size, kv_heads, count, key_dim) * channels + channels.flip(0)
    values = torch.randn(batch_size, kv_heads, count, value_dim or key_dim) + 0.5
    return keys.to(dtype), values.to(dtype)


def step(layer: PackedLayer, query_length: int, group: int) -> tuple[Tensor, KVHandle, KVHandle]:
    batch_size, kv_heads = layer.records.data.shape[:2]
    dims = [stream.head_dim for stream in layer.streams]
    key, value = layer.update(*states(batch_size, kv_heads, query_length, *dims, layer.dtype))
    query = torch.randn(batch_size, kv_heads * group, query_length, dims[0]).to(layer.dtype)
    if not isinstance(key, KVHandle) or not isinstance(value, KVHandle):
        pytest.skip("nothing is packed yet")
    return query, key, value


def check(
    query: Tensor, key: KVHandle, value: KVHandle, options: AttentionOptions, bound: float = FP32_ERROR
) -> Tensor:
    expected = attend(query.double(), key.tokens, value.tokens, options)
    got = attend_handles(query, key, value, options)
    assert key.layer.kernel == "cpu"
    assert got.dtype == query.dtype and got.shape == expected.shape
    assert torch.isfinite(got).all()
    assert relative_rms(expected, got) <= bound
    return got


def masks(batch_size: int, heads: int, query_length: int, length: int) -> dict[str, Tensor]:
    pads = torch.tensor([70, 3][:batch_size])
    slots = torch.arange(length)
    padding = (slots >= pads[:, None])[:, None, None]
    causal = slots <= torch.arange(length - query_length, length)[:, None]
    return {
        "padding": padding,
        "padding-causal": padding & causal,
        "random": torch.rand(batch_size, 1, query_length, length) > 0.5,
        "per head": torch.rand(1, heads, 1, length) > 0.5,
        "full": torch.rand(batch_size, heads, query_length, length) > 0.5,
        "additive": torch.randn(batch_size, 1, query_length, length),
        "additive-minimum": torch.zeros(1).masked_fill(~(padding & causal), torch.finfo(torch.float32).min),
        "two-dimensional": torch.rand(query_length, length) > 0.5,
        "wide": torch.rand(batch_size, 1, 1, length + 9) > 0.5,
        "all": torch.ones(batch_size, 1, query_length, length, dtype=torch.bool),
        "column": torch.ones(batch_size, 1, 1, 1, dtype=torch.bool),
    }


def attention_options(options: dict[str, Any], query_length: int, length: int) -> AttentionOptions:
    """Options of two rows of eight heads, with tensors where `options` say that there are some."""
    options = dict(options)
    if options.get("sink_logits"):
        shape = (2, 8, query_length) if options["sink_logits"] == "of queries" else (8,)
        options["sink_logits"] = torch.randn(shape) + 2
    if options.get("alibi_slopes"):
        options["alibi_slopes"] = 2.0 ** -torch.arange(1.0, 9.0)
    if options.get("position_bias"):
        options["position_bias"] = torch.randn(1, 8, query_length, length)
    return AttentionOptions(is_causal=query_length > 1, **options)
