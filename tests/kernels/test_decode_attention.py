"""The native decode kernels against the torch reference, on the same codes, for every instruction set."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvcache_plugins.artifacts.scales import Scales, save_scales
from kvcache_plugins.attention.description import describe
from kvcache_plugins.attention.native import attend_handles
from kvcache_plugins.attention.reference import AttentionOptions, attend
from kvcache_plugins.backends.kvquant import NORMAL_FLOAT
from kvcache_plugins.eviction.layer import EvictingLayer
from kvcache_plugins.kernels import loader
from kvcache_plugins.kernels.ops import decode_attention
from kvcache_plugins.layers.base import PackedLayer
from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.models.facts import LayerFacts
from kvcache_plugins.models.rotary import Rotary
from kvcache_plugins.registry import get_backend
from kvcache_plugins.testing.comparison import relative_rms
from tests.backends.test_conformance import VARIANTS

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


# -- every codec


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


# -- shapes


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


@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize(
    "name", ["kivi-default", "kivi-2bit-g32", "kivi-3bit-block", "int8-default", "int4-default"]
)
def test_head_sizes(isa: str, name: str, head_dim: int) -> None:
    layer = build_layer(CASES[name], 300, head_dim=head_dim)
    check(*step(layer, 1, 4), AttentionOptions())


@pytest.mark.parametrize(("key_dim", "value_dim"), [(192, 128), (64, 96)])
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


# -- what changes a logit


def _masks(batch_size: int, heads: int, query_length: int, length: int) -> dict[str, Tensor]:
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


@pytest.mark.parametrize("query_length", [1, 3])
@pytest.mark.parametrize("mask", _masks(2, 4, 1, 80))
def test_masks(isa: str, mask: str, query_length: int) -> None:
    padding = torch.tensor([70, 3])
    layer = build_layer({"backend": "kivi", "residual_length": 32}, 200, padding=padding)
    query, key, value = step(layer, query_length, 4)
    given = _masks(2, 8, query_length, key.shape[2])[mask]
    check(query, key, value, AttentionOptions(mask=given))


@pytest.mark.parametrize("query_length", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1},
        {"sliding_window": 64},
        {"sliding_window": 150},
        {"sliding_window": 1000},
        {"softcap": 5.0},
        {"scaling": 0.5},
        {"sink_logits": True},
        {"alibi_slopes": True},
        {"position_bias": True},
        {"sink_logits": True, "alibi_slopes": True, "softcap": 20.0, "sliding_window": 100},
    ],
    ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items()),
)
def test_options(isa: str, options: dict[str, Any], query_length: int) -> None:
    layer = build_layer(CASES["kivi-default"], 333)
    query, key, value = step(layer, query_length, 4)
    options = dict(options)
    if options.get("sink_logits"):
        options["sink_logits"] = torch.randn(8) + 2
    if options.get("alibi_slopes"):
        options["alibi_slopes"] = 2.0 ** -torch.arange(1.0, 9.0)
    if options.get("position_bias"):
        options["position_bias"] = torch.randn(1, 8, query_length, key.shape[2])
    check(query, key, value, AttentionOptions(is_causal=query_length > 1, **options))


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


# -- precision and threads


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_half_precision_queries(isa: str, name: str, dtype: torch.dtype) -> None:
    layer = build_layer(CASES[name], 1000, dtype=dtype, head_dim=128)
    query, key, value = step(layer, 1, 4)
    expected = attend(query.double(), key.tokens, value.tokens, AttentionOptions())
    dense = key.tokens.dense(torch.bfloat16), value.tokens.dense(torch.bfloat16)
    plain = F.scaled_dot_product_attention(query.bfloat16(), *dense, enable_gqa=True)
    check(query, key, value, AttentionOptions(), 2 * relative_rms(expected, plain))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_threads_change_nothing_but_rounding(isa: str, batch_size: int) -> None:
    layer = build_layer(CASES["kivi-default"], 5000, batch_size=batch_size)
    query, key, value = step(layer, 1, 4)
    torch.set_num_threads(2)
    check(query, key, value, AttentionOptions())
    check(query, key, value, AttentionOptions(sliding_window=2000))


# -- memory that holds nothing


@pytest.mark.parametrize(
    "name", ["kivi-default", "kivi-no-window", "int8-default", "int4-default", "float8-default"]
)
@pytest.mark.parametrize("length", [65, 200, 300])
def test_unused_memory_is_not_read(isa: str, name: str, length: int) -> None:
    """Records beyond the packed tokens, and metadata of unused slots in the last one, are NaN."""
    layer = build_layer(CASES[name], length)
    layer.records.ensure(1000)
    query, key, value = step(layer, 1, 4)
    expected = attend(query, key.tokens, value.tokens, AttentionOptions())
    for handle in (key, value):
        stream, packed = handle.tokens.stream, handle.tokens.packed_length
        first = -(-packed // 64)
        layer.records.codes(stream.side, first, layer.records.num_blocks).fill_(0xFF)
        for field in stream.codec.metadata_names:
            rows = layer.records.metadata(stream.side, field, 0, layer.records.num_blocks)
            used = -(-packed // stream.codec.stored_granularity.tokens)
            per_block = rows.shape[3]
            rows[:, :, used // per_block + (used % per_block > 0) :] = torch.nan
            if used % per_block:
                rows[:, :, used // per_block, used % per_block :] = torch.nan
    got = attend_handles(query, key, value, AttentionOptions())
    assert layer.kernel == "cpu"
    assert relative_rms(expected, got) <= FP32_ERROR


def test_what_is_hidden_does_not_count(isa: str) -> None:
    layer = build_layer({"backend": "kivi", "residual_length": 32}, 85)
    query, key, value = step(layer, 3, 4)
    length = key.shape[2]
    mask = torch.ones(2, 1, 3, length, dtype=torch.bool)
    mask[:, :, :, length - 9] = False
    mask[:, :, 0, length - 5] = False
    expected = attend(query, key.tokens, value.tokens, AttentionOptions(mask=mask))
    for handle in (key, value):
        handle.tokens.segments[-1][:, :, -9] = torch.nan
    value.tokens.segments[-1][:, :, -5] = torch.nan
    got = attend_handles(query, key, value, AttentionOptions(mask=mask))
    assert relative_rms(expected[:, :, 0], got[:, :, 0]) <= FP32_ERROR
    assert torch.isnan(got[:, :, 1:]).all()


# -- the op itself


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
    from kvcache_plugins.kernels import ops

    plain = ops._decode_attention(
        query, records, keys.segments, values.segments, keys.extras, values.extras, None,
        keys.layout.integers(), values.layout.integers(), options["scaling"], None, False, 0, 0.0, None, None,
    )  # fmt: skip
    assert relative_rms(plain, native) <= FP32_ERROR


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
        (lambda a: {"query": a[0].double()}, "Invalid dtype of query"),
        (lambda a: {"query": a[0][..., :32]}, "Invalid shape of query"),
        (lambda a: {"records": a[1].to(torch.int32)}, "Invalid dtype of records: expected uint8, got Int"),
        (lambda a: {"records": a[1][:, :, :1]}, "Invalid packed_length of key_layout"),
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
    monkeypatch.setenv("KVCACHE_CPU_ISA", "sse9")
    layer = build_layer(CASES["kivi-default"], 200)
    with pytest.raises(ValueError, match="KVCACHE_CPU_ISA must be one of avx512, avx2, portable, got sse9"):
        attend_handles(*step(layer, 1, 4), AttentionOptions())


# -- who serves


def test_cases_left_to_the_reference() -> None:
    layer = build_layer(CASES["kivi-default"], 200)
    query, key, value = step(layer, 1, 4)
    attend_handles(query, key, value, AttentionOptions())
    assert layer.kernel == "cpu"
    attend_handles(query.double(), key, value, AttentionOptions())
    assert layer.kernel == "torch"
    layer = build_layer(CASES["int8-default"], 200, head_dim=272)
    attend_handles(*step(layer, 1, 4), AttentionOptions())
    assert layer.kernel == "torch"


@pytest.mark.parametrize("case", ["kivi-default", "int8-default", "float8-default", "kivi-3bit-block"])
def test_what_is_not_a_number_spoils_the_rows_that_see_it(isa: str, case: str) -> None:
    layer = build_layer(CASES[case], 300)
    query, key, value = step(layer, 2, 3)
    exact = attend_handles(query, key, value, AttentionOptions(is_causal=True))
    query[0, 4, 1, 7] = torch.nan  # one query head and token
    got = attend_handles(query, key, value, AttentionOptions(is_causal=True))
    assert got[0, 4, 1].isnan().all()
    spoilt = torch.zeros(got.shape[:3], dtype=torch.bool)
    spoilt[0, 4, 1] = True
    assert torch.equal(got[~spoilt], exact[~spoilt])
    key.tokens.segments[-1][1, 1, -1, 3] = torch.nan  # the newest key: only its own query sees it
    got = attend_handles(query, key, value, AttentionOptions(is_causal=True))
    assert got[1, 3:, 1].isnan().all() and torch.equal(got[1, :, 0], exact[1, :, 0])


def test_kernel_torch_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "try_load", lambda: pytest.fail("kernel='torch' loads nothing"))
    layer = build_layer(CASES["kivi-default"] | {"kernel": "torch"}, 200)
    query, key, value = step(layer, 1, 4)
    got = attend_handles(query, key, value, AttentionOptions())
    assert torch.equal(got, attend(query, key.tokens, value.tokens, AttentionOptions()))
    assert layer.kernel == "torch"


def test_many_threads_at_once(isa: str) -> None:
    """Callers share nothing but the library; torch's threads serve whoever comes first."""
    torch.set_num_threads(2)
    cases = [step(build_layer(CASES["kivi-default"], 600 + 64 * i), 1, 4) for i in range(4)]
    expected = [attend_handles(*case, AttentionOptions()) for case in cases]

    def work(i: int) -> bool:
        return all(
            torch.allclose(attend_handles(*cases[i % 4], AttentionOptions()), expected[i % 4], atol=1e-5)
            for _ in range(20)
        )

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(16)))
