"""Native decoding of slots against what the streams decode in torch, for every instruction set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache_plugins.attention.description import describe
from kvcache_plugins.kernels.defaults import DEFAULTS
from kvcache_plugins.kernels.layout import Side, SideLayout
from kvcache_plugins.kernels.ops import decode_tokens
from kvcache_plugins.layers.codec import Float8Codec
from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.layers.stream import StreamSpec
from kvcache_plugins.quantizers.granularity import per_token_head
from kvcache_plugins.quantizers.half_range import kept_finite
from tests.kernels.decode_cases import CASES, WIDE, build_layer, isa, library, states, step

__all__ = ["isa", "library"]  # fixtures

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def side_of(handle: KVHandle) -> tuple[Tensor, Side, bool, Tensor | None]:
    """Arguments of the op for a handle: records, side, whether it is the keys, first sinks."""
    stream = handle.tokens.stream
    side = describe(handle.tokens)
    assert side is not None
    return stream.records.data, side, stream.side == "key", stream.padding.lengths


def check(handle: KVHandle, start: int, stop: int) -> None:
    """Compare slots `[start, stop)` in every dtype with the torch decode of the stream."""
    records, side, is_key, sink_start = side_of(handle)

    def decoded(dtype: torch.dtype) -> Tensor:
        return decode_tokens(
            records, side, is_key=is_key, start=start, stop=stop, dtype=dtype, sink_start=sink_start
        )

    # one run over everything: every tile of `dense` is the decode of the stream, or an exact segment
    expected = handle.tokens.dense(torch.float32)[:, :, start:stop]
    exact = decoded(torch.float32)
    assert exact.shape == expected.shape and exact.is_contiguous() and exact.dtype == torch.float32
    # fused against separate rounding of `code * scale + minimum`, and of a rotation: a few units of the
    # largest term, which the largest value bounds from below
    torch.testing.assert_close(exact, expected, rtol=1e-6, atol=2e-6 * float(expected.abs().max()))
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(decoded(dtype), exact.to(dtype))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("start", "stop"), [(0, 333), (64, 192), (7, 8), (100, 301)])
def test_every_backend(isa: str, name: str, start: int, stop: int) -> None:
    _, key, value = step(build_layer(CASES[name], 330), 3, 1)
    assert key.tokens.packed_length > 128 or value.tokens.packed_length > 128
    check(key, start, stop)
    check(value, start, stop)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("nbits", [2, 3, 4, 8])
@pytest.mark.parametrize("rotary_dim", [32, 96])
def test_rotation_inside_blocks(isa: str, nbits: int, interleaved: bool, rotary_dim: int) -> None:
    options = {"backend": "kivi", "nbits": nbits, "rope_mode": "block", "residual_length": 128}
    layer = build_layer(options, 700, head_dim=96, interleaved=interleaved, rotary_dim=rotary_dim)
    _, key, value = step(layer, 1, 1)
    assert side_of(key)[1].cos is not None
    check(key, 0, 701)
    check(key, 191, 450)
    check(value, 0, 701)


@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 112, 128, 256, 320])
@pytest.mark.parametrize("name", ["kivi-default", "kivi-3bit", "int8-default", "int4-default"])
def test_head_sizes(isa: str, name: str, head_dim: int) -> None:
    _, key, value = step(build_layer(CASES[name], 200, head_dim=head_dim), 1, 1)
    check(key, 0, 201)
    check(value, 5, 150)


def test_wide_heads_of_every_format(isa: str) -> None:
    for name in WIDE:
        _, key, value = step(build_layer(CASES[name], 260, head_dim=512, value_dim=496), 1, 1)
        check(key, 0, 261)
        check(value, 5, 200)


def test_metadata_in_fp32(isa: str) -> None:
    for name in ("kivi-default", "int8-default"):
        layer = build_layer(CASES[name], 300)
        layer.records.widen_metadata()
        _, key, value = step(layer, 1, 1)
        check(key, 0, 301)
        check(value, 0, 301)


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_static_scales(isa: str, format: str) -> None:
    static = torch.tensor([0.02, 0.05])[None, :, None, None]
    layer = build_layer({"backend": "float8", "format": format}, 0)
    spec = StreamSpec(Float8Codec(format, per_token_head(), static), keep_recent=8)
    layer._prepared = ((2, 64, 64), spec, spec)
    layer._forget()
    layer.update(*states(2, 2, 200, 64, None, torch.float32))
    _, key, value = step(layer, 1, 1)
    assert side_of(key)[1].static_scale is not None
    check(key, 0, 201)
    check(value, 0, 201)


def test_sinks_with_padding(isa: str) -> None:
    padding = torch.tensor([66, 0])
    for name in ("int4-sinks", "kivi-sinks"):
        _, key, value = step(build_layer(CASES[name], 200, padding=padding), 1, 1)
        assert side_of(key)[1].sinks is not None
        for start, stop in ((0, 201), (67, 69)):
            check(key, start, stop)
            check(value, start, stop)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_exact_tokens_of_another_dtype(isa: str, dtype: torch.dtype) -> None:
    _, key, value = step(build_layer(CASES["kivi-sinks"], 300, dtype=dtype), 2, 1)
    check(key, 0, 302)
    check(value, 0, 302)


def test_exact_tokens_of_two_dtypes_are_none_of_a_kernels() -> None:
    layer = build_layer(CASES["kivi-sinks"], 300)
    _, key, _ = step(layer, 2, 1)
    exact = key.tokens.segments[0]
    assert describe(key.tokens) is not None
    assert describe(replace(key.tokens, segments=(exact, exact.half()))) is None
    layer.update(*(states.half() for states in (exact, exact)))
    assert describe(key.tokens) is None, "its sinks were cast with the model, since it was returned"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_to_nearest_even(isa: str, dtype: torch.dtype) -> None:
    """Exact tokens that cover every exponent, ties, subnormal results, overflow and what is not a number."""
    halves = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    halves = halves[torch.isfinite(halves)]
    between = (halves[1:].double() + halves[:-1].double()) / 2
    special = torch.tensor([torch.inf, torch.nan, 65519.9, 65520.0, 1e30, 3.4e38, 0.0])
    numbers = torch.cat(
        [halves, between.float(), (between * 1.0001).float(), (between * 0.9999).float(), special]
    )
    numbers = torch.cat([numbers, -numbers])
    tokens = torch.nn.functional.pad(numbers, (0, -len(numbers) % 64)).view(1, 1, -1, 64)
    records = torch.zeros(1, 1, 0, 64, dtype=torch.uint8)
    for is_key in (True, False):
        side = Side(SideLayout(0, 8, 1, 64, 1, 1, 2, 0, 0, 0), [tokens])
        got = decode_tokens(records, side, is_key=is_key, start=0, stop=tokens.shape[2], dtype=dtype)
        expected = kept_finite(tokens, dtype).to(dtype)
        assert torch.equal(got.isnan(), expected.isnan())
        kept = ~expected.isnan()
        assert torch.equal(got[kept].view(torch.int16), expected[kept].view(torch.int16))


def handles_of_large_numbers(name: str) -> tuple[KVHandle, KVHandle]:
    """Keys and values in fp16 of 301 tokens, of which some are its largest numbers throughout."""
    layer = build_layer(CASES[name], 0, dtype=torch.float16)
    keys, values = states(2, 2, 300, 64, None, torch.float16)
    for given in (keys, values):
        given[:, :, 20::50, ::2], given[:, :, 20::50, 1::2] = 65504.0, -65504.0
    layer.update(keys, values)
    return step(layer, 1, 1)[1:]


@pytest.mark.parametrize("name", CASES)
def test_the_largest_numbers_of_fp16_stay_finite(isa: str, name: str) -> None:
    for handle in handles_of_large_numbers(name):
        records, side, is_key, sink_start = side_of(handle)
        got = decode_tokens(
            records, side, is_key=is_key, start=0, stop=301, dtype=torch.float16, sink_start=sink_start
        )
        expected = handle.tokens.dense(torch.float32).clamp(-65504, 65504)
        assert got.isfinite().all()
        torch.testing.assert_close(got.float(), expected, rtol=1e-3, atol=65504 * 2e-6)
        assert torch.equal(handle.tokens.dense(torch.float16), expected.half())


def test_codes_stand_for_more_than_fp16_holds() -> None:
    """Without which the test before would show nothing."""
    for name in ("int8-default", "float8-default", "float8-e5m2", "kivi-default", "kvquant-default"):
        most = max(float(each.tokens.dense(torch.float32).max()) for each in handles_of_large_numbers(name))
        assert most >= 65520


def test_threads_change_nothing(isa: str) -> None:
    _, key, value = step(build_layer(CASES["kivi-2bit-block"], 5000), 1, 1)
    for handle in (key, value):
        records, side, is_key, _ = side_of(handle)
        one = decode_tokens(records, side, is_key=is_key, start=30, stop=4990, dtype=torch.float32)
        torch.set_num_threads(2)
        two = decode_tokens(records, side, is_key=is_key, start=30, stop=4990, dtype=torch.float32)
        torch.set_num_threads(1)
        assert torch.equal(one, two)


def test_an_empty_range(isa: str) -> None:
    records, side, is_key, _ = side_of(step(build_layer(CASES["int8-default"], 100), 1, 1)[1])
    assert decode_tokens(
        records, side, is_key=is_key, start=9, stop=9, dtype=torch.float16
    ).shape == (2, 2, 0, 64)  # fmt: skip


# -- the op itself


def _arguments(name: str, start: int, stop: int, dtype: torch.dtype) -> tuple[Any, ...]:
    records, side, is_key, sink_start = side_of(step(build_layer(CASES[name], 200), 1, 1)[1])
    return (
        records, side.segments, side.extras, sink_start, side.layout.integers(), is_key, start, stop, dtype
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_default_of_the_op(name: str) -> None:
    """The plain-torch default says the same as the kernels."""
    for dtype in DTYPES:
        arguments = _arguments(name, 50, 190, dtype)
        native = torch.ops.kvcache_plugins.decode_tokens(*arguments)
        plain = DEFAULTS["decode_tokens"][0](*arguments)
        assert plain.is_contiguous() and plain.dtype == dtype
        bits = torch.finfo(dtype).eps
        torch.testing.assert_close(native, plain, rtol=bits, atol=2e-6 * float(plain.abs().max()))


@pytest.mark.no_poison
def test_opcheck() -> None:
    torch.library.opcheck(
        torch.ops.kvcache_plugins.decode_tokens.default,
        _arguments("kivi-default", 3, 100, torch.bfloat16),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stop": 202}, r"expected a range inside \[0, 201\), got 3 to 202"),
        ({"start": -1}, "got -1 to 100"),
        ({"start": 101}, "got 101 to 100"),
        ({"dtype": torch.float64}, "Invalid dtype of the output: expected float32, bfloat16 or float16"),
        ({"records": torch.zeros(2, 2, 1, 64, dtype=torch.uint8)}, "Invalid packed_length of key_layout"),
        ({"sink_start": torch.zeros(3, dtype=torch.int64)}, "Invalid shape of sink_start"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], said: str) -> None:
    names = (
        "records", "segments", "extras", "sink_start", "layout", "is_key", "start", "stop", "dtype"
    )  # fmt: skip
    given = dict(zip(names, _arguments("kivi-default", 3, 100, torch.float32), strict=True)) | change
    with pytest.raises(ValueError, match=said):
        torch.ops.kvcache_plugins.decode_tokens(*given.values())


def test_heads_of_more_channels_are_refused() -> None:
    arguments = list(_arguments("kivi-default", 3, 100, torch.float32))
    arguments[4] = [*arguments[4][:3], 513, *arguments[4][4:]]
    with pytest.raises(ValueError, match="Invalid head_dim of key_layout: expected 1 to 512, got 513"):
        torch.ops.kvcache_plugins.decode_tokens(*arguments)


def test_unknown_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = _arguments("kivi-default", 3, 100, torch.float32)
    monkeypatch.setenv("KVCACHE_CPU_ISA", "sse9")
    with pytest.raises(ValueError, match="KVCACHE_CPU_ISA must be one of avx512, avx2, portable, got sse9"):
        torch.ops.kvcache_plugins.decode_tokens(*arguments)
