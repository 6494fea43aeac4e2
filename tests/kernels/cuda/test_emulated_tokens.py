"""Encoding, decoding and moving tokens by the CUDA kernels on an emulated GPU, against torch."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache_plugins.kernels import loader
from kvcache_plugins.kernels.gathering import gather_records
from kvcache_plugins.kernels.layout import Side, SideLayout
from kvcache_plugins.layers import native_encoding, stepping
from kvcache_plugins.layers.field_layout import side_layout
from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.quantizers.half_range import kept_finite
from tests.kernels import test_encode_tokens as encoding
from tests.kernels.append_cases import CODES, Case
from tests.kernels.decode_cases import CASES, WIDE, build_layer, step
from tests.kernels.test_decode_tokens import handles_of_large_numbers, side_of
from tests.kernels.test_encode_tokens import BLOCK, LENGTHS, rotary, states
from tests.kernels.test_gather_tokens import CASES as GATHERABLE
from tests.kernels.test_gather_tokens import LENGTH, blank, layouts, packed, some_slots

pytestmark = pytest.mark.usefixtures("emulated")


# -- encoding


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Layers encode by the emulated kernels; their answers, call by call."""
    answers: list[bool] = []

    def encode(records: Any, given: Any, is_key: bool, layout: Any, start: int, *tables: Any) -> bool:
        done = torch.ops.kvcache_emulated.encode_tokens(records, given, is_key, layout, start, *tables)
        answers.append(done)
        return bool(done)

    def append(*args: Any) -> bool:
        done = torch.ops.kvcache_emulated.append_tokens(*args)
        if args[5][2] or args[6][2]:
            answers.append(done)
        return bool(done)

    monkeypatch.setattr(native_encoding, "encode_tokens", encode)
    monkeypatch.setattr(stepping, "append_tokens", append)
    return answers


@pytest.mark.parametrize("head_dim", [24, 80])
@pytest.mark.parametrize("name", encoding.CASES)
def test_the_bytes_are_the_same(name: str, head_dim: int, encoded: list[bool]) -> None:
    dtype = [torch.float32, torch.bfloat16, torch.float16][(head_dim + len(name)) % 3]
    encoding.check(encoding.CASES[name], *states(head_dim, dtype))
    assert encoded and all(encoded)


@pytest.mark.parametrize("name", ["kivi-4bit-g16", "int4"])
def test_zeros_have_no_sign(name: str, encoded: list[bool]) -> None:
    encoding.check(encoding.CASES[name], *encoding.zeros_of_either_sign(80))
    assert encoded and all(encoded)


@pytest.mark.parametrize("name", ["2bit-channel-g16", "3bit-channel-g64", "4bit-groups", "int8", "e4m3"])
def test_the_bytes_of_wide_heads_are_the_same(name: str) -> None:
    if not loader.try_load():
        pytest.skip("no native library can be built here")
    case = Case(CODES[name], 1, 0, 0, 0, 0, head_dim=512)
    for tail, layout, is_key in zip(case.tails, case.layouts, (True, False), strict=True):
        got, expected = case.records.clone(), case.records.clone()
        given = tail[:, :, :128], is_key, layout, 64, None, None
        assert torch.ops.kvcache_emulated.encode_tokens(got, *given)
        assert torch.ops.kvcache_plugins.encode_tokens(expected, *given)
        assert torch.equal(got, expected) and got.any()


def test_a_batch_without_rows() -> None:
    case = Case(CODES["int8"], 1, 0, 0, 0, 0, head_dim=64)
    for tail, layout, is_key in zip(case.tails, case.layouts, (True, False), strict=True):
        given = tail[:0, :, :128], is_key, layout, 64, None, None
        assert torch.ops.kvcache_emulated.encode_tokens(case.records[:0].clone(), *given)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e5])
@pytest.mark.parametrize("name", ["kivi-4bit-g32", "int8", "e4m3"])
def test_what_is_rare_is_left_to_torch(name: str, number: float, encoded: list[bool]) -> None:
    keys, values = states(64, torch.float32)
    keys[1, 0, 40, 3] = values[0, 1, 70, 5] = number
    encoding.check(encoding.CASES[name], keys, values)
    assert not all(encoded) and any(encoded)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("name", "nbits"), [*product(("kivi", "int4"), (2, 4, 8)), ("int8", None), ("float8", None)]
)
def test_a_few_tokens_are_encoded_whatever_they_are(
    name: str, nbits: int | None, number: float, encoded: list[bool]
) -> None:
    """Nobody looks at them first: what is not finite takes no part in the statistics, and saturates."""
    keys, values = states(64, torch.float32)
    keys[1, 0, 140, 3] = values[0, 1, 170, 5] = number
    options: dict[str, Any] = {"backend": name} if nbits is None else {"backend": name, "nbits": nbits}
    options |= {"q_group_size": 16, "residual_length": 16} if name == "kivi" else {}
    native = encoding.fed(encoding.new_layer(options, None, None), keys, values, [1] * 333)
    reference = encoding.fed(
        encoding.new_layer({**options, "kernel": "torch"}, None, None), keys, values, [1] * 333
    )
    found, expected = encoding.state_bytes(native), encoding.state_bytes(reference)
    for part, tensor in expected.items():
        assert torch.equal(tensor, found[part]), part
    assert encoded and all(encoded)


def test_metadata_that_saturate_are_reported(encoded: list[bool]) -> None:
    records = torch.zeros(1, 1, 4, 4608, dtype=torch.uint8)
    layout = [8, 1, 32, 1, 1, 2, 0, 0, 2048, -1]
    tokens = torch.full((1, 1, 1, 32), 1e7 * 127)
    encode = native_encoding.encode_tokens
    assert encode(records, tokens, True, layout, 0)
    assert records[0, 0, 0, 2048:2050].view(torch.float16).item() == 65504
    for count in (1, 64):  # by the next call, whatever it does, and once
        with pytest.raises(RuntimeError, match=r"beyond fp16.*kernel='torch'"):
            encode(records, torch.zeros(1, 1, count, 32), True, layout, 64)
        assert encode(records, torch.zeros(1, 1, count, 32), True, layout, 64)
        assert encode(records, tokens, True, layout, 0)
    slots, sides = torch.zeros(1, 1, 1, dtype=torch.long), [1, 8, 1, 32, 1, 1, 2, 0, 0, 2048, -1, 0, 0]
    with pytest.raises(RuntimeError, match="beyond fp16"):
        torch.ops.kvcache_emulated.gather_tokens(records, records.clone(), slots, sides, sides)


def test_every_8_bit_float(encoded: list[bool]) -> None:
    encoding.test_every_8_bit_float(encoded)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 32), (24, 10)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("nbits", [2, 3, 4, 8])
def test_rotated_keys(
    nbits: int, lengths: str, head_dim: int, rotary_dim: int, interleaved: bool, encoded: list[bool]
) -> None:
    group, residual = LENGTHS[lengths]
    options = {**BLOCK, "nbits": nbits, "q_group_size": group, "residual_length": residual}
    dtype = [torch.float32, torch.bfloat16, torch.float16][nbits % 3]
    encoding.check(options, *states(head_dim, dtype), turning=rotary(rotary_dim, interleaved))
    assert encoded and all(encoded)


def test_the_last_bit_of_a_rotation(encoded: list[bool]) -> None:
    encoding.check_last_bits()
    assert encoded and all(encoded)


def test_pads_and_sinks(encoded: list[bool]) -> None:
    for name in ("kivi-2bit-g16", "int8", "int4-smooth"):
        encoding.test_pads_and_sinks(name)


# -- moving


@pytest.mark.parametrize("count", [1, 65, 500])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", GATHERABLE)
def test_gathered_bytes_are_the_same(name: str, interleaved: bool, count: int) -> None:
    for head_dim in (40, 64, 80, 128, 512):
        layer = packed(GATHERABLE[name], head_dim)
        index, expected, got = some_slots(count), blank(layer, count), blank(layer, count)
        keys, values = layouts(layer)
        keys = keys._replace(interleaved=int(interleaved))  # as codes they may be read in either order
        gather_records(layer.records.data, expected, index, keys, values)
        torch.ops.kvcache_emulated.gather_tokens(
            layer.records.data, got, index, keys.integers(), values.integers()
        )
        assert torch.equal(got, expected)


def test_three_bits_are_gathered() -> None:
    layer = packed({"backend": "int4", "residual_length": 0, "nbits": 8}, 64)
    index, expected, got = some_slots(70), blank(layer, 70), blank(layer, 70)
    keys, values = (layout._replace(nbits=3) for layout in layouts(layer))
    gather_records(layer.records.data, expected, index, keys, values)
    torch.ops.kvcache_emulated.gather_tokens(
        layer.records.data, got, index, keys.integers(), values.integers()
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("nbits", [2, 3, 4])
def test_metadata_that_is_not_stored(nbits: int) -> None:
    """Groups of KVQuant's keys are said to be of 64 tokens, and nothing is stored of them."""
    options = {"backend": "kvquant", "calibration": "normal_float", "nbits": nbits, "residual_length": 0}
    layer = build_layer(options, 320, head_dim=80)
    keys, values = (side_layout(stream, 320, 0) for stream in layer.streams)
    index, expected, got = some_slots(130).clamp_max(319), blank(layer, 130), blank(layer, 130)
    gather_records(layer.records.data, expected, index, keys, values)
    torch.ops.kvcache_emulated.gather_tokens(
        layer.records.data, got, index, keys.integers(), values.integers()
    )
    assert torch.equal(got, expected)


def test_slots_that_are_not_there_become_zeros() -> None:
    layer = packed(GATHERABLE["int8"], 64)
    keys, values = layouts(layer)
    index = torch.full((2, 2, 3), LENGTH)
    index[..., 1] = -5
    index[..., 2] = 7
    got, zeros = blank(layer, 3), torch.zeros_like(blank(layer, 3))
    torch.ops.kvcache_emulated.gather_tokens(
        layer.records.data, got, index, keys.integers(), values.integers()
    )
    gather_records(layer.records.data, zeros, torch.full((2, 2, 3), 7), keys, values)
    with pytest.raises(RuntimeError, match=r"no packed token.*kernel='torch'"):
        torch.ops.kvcache_emulated.gather_tokens(
            layer.records.data, zeros, index, keys.integers(), values.integers()
        )
    codes = got[..., : 64 * 64].view(2, 2, 1, 16, 64, 4)
    expected = zeros[..., : 64 * 64].view(2, 2, 1, 16, 64, 4)
    assert not codes[..., :2, :].any() and torch.equal(codes[..., 2, :], expected[..., 2, :])


# -- decoding


def decoded(handle: KVHandle, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    records, side, is_key, sink_start = side_of(handle)
    states: Tensor = torch.ops.kvcache_emulated.decode_tokens(
        records, side.segments, side.extras, sink_start, side.layout.integers(), is_key, start, stop, dtype
    )
    return states


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("start", "stop"), [(0, 333), (7, 8), (100, 301)])
def test_decoded_slots(name: str, start: int, stop: int) -> None:
    check_decoded(name, (40, 64, 96), start, stop)


@pytest.mark.parametrize(("start", "stop"), [(0, 333), (7, 8), (101, 292)])
def test_decoded_slots_of_wide_heads(start: int, stop: int) -> None:
    for name in WIDE:
        check_decoded(name, (512,), start, stop, batch_size=1)


def check_decoded(name: str, head_dims: tuple[int, ...], start: int, stop: int, batch_size: int = 2) -> None:
    for head_dim in head_dims:
        _, key, value = step(build_layer(CASES[name], 330, batch_size=batch_size, head_dim=head_dim), 3, 1)
        for handle in (key, value):
            side = side_of(handle)[1]
            expected = handle.tokens.dense(torch.float32)[:, :, start:stop]
            exact = decoded(handle, start, stop, torch.float32)
            if side.layout.rotary_dim:
                torch.testing.assert_close(
                    exact, expected, rtol=1e-6, atol=2e-6 * float(expected.abs().max())
                )
            else:
                assert torch.equal(exact, expected)
            for dtype in (torch.bfloat16, torch.float16):
                assert torch.equal(decoded(handle, start, stop, dtype), exact.to(dtype))


@pytest.mark.parametrize("name", CASES)
def test_the_largest_numbers_of_fp16_stay_finite(name: str) -> None:
    for handle in handles_of_large_numbers(name):
        exact, got = (decoded(handle, 0, 301, dtype) for dtype in (torch.float32, torch.float16))
        assert got.isfinite().all()
        assert torch.equal(got, exact.clamp(-65504, 65504).half())


def test_heads_of_more_channels_are_refused() -> None:
    emulated = torch.ops.kvcache_emulated
    layer = packed(GATHERABLE["int8"], 64)
    keys, values = (layout.integers() for layout in layouts(layer))
    records, wide = layer.records.data, [*keys[:3], 513, *keys[4:]]
    with pytest.raises(ValueError, match="Invalid head_dim of key_layout: expected 1 to 512, got 513"):
        emulated.gather_tokens(records, blank(layer, 64), some_slots(64), wide, values)
    with pytest.raises(ValueError, match="Invalid head_dim of value_layout: expected 1 to 512, got 513"):
        emulated.decode_tokens(records, [], [None] * 12, None, wide, False, 0, 64, torch.float32)
    layout = [8, 1, 513, 1, 1, 2, 0, 0, 64, -1]
    with pytest.raises(ValueError, match="Invalid head_dim of states: expected 1 to 512, got 513"):
        emulated.encode_tokens(records, torch.zeros(2, 2, 1, 513), True, layout, 0, None, None)


def shifted(tensor: Tensor, count: int) -> Tensor:
    """The same numbers, `count` of them further than memory is allocated."""
    room = torch.empty(tensor.numel() + count, dtype=tensor.dtype)
    return room[count:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name", ["int8-default", "kivi-default", "kivi-3bit", "float8-default", "kvquant-default"]
)
def test_data_that_are_not_aligned(name: str, dtype: torch.dtype) -> None:
    _, key, value = step(build_layer(CASES[name], 330, dtype=dtype), 3, 1)
    for handle in (key, value):
        records, side, is_key, sink_start = side_of(handle)
        expected = decoded(handle, 0, 333, dtype)
        segments = [shifted(segment, 1) for segment in side.segments]
        assert any(segment.numel() for segment in segments) and shifted(records, 4).data_ptr() % 16 == 4
        extras = (side.extras, sink_start, side.layout.integers(), is_key, 0, 333, dtype)
        got = torch.ops.kvcache_emulated.decode_tokens(shifted(records, 4), segments, *extras)
        with pytest.raises(ValueError, match=r"records.*multiples of 4 bytes"):
            torch.ops.kvcache_emulated.decode_tokens(shifted(records, 2), segments, *extras)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_to_nearest_even(dtype: torch.dtype) -> None:
    halves = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    halves = halves[torch.isfinite(halves)]
    between = (halves[1:].double() + halves[:-1].double()) / 2
    special = torch.tensor([torch.inf, torch.nan, 65519.9, 65520.0, 1e30, 3.4e38, 0.0])
    numbers = torch.cat([halves, between.float(), (between * 1.0001).float(), special])
    tokens = torch.nn.functional.pad(numbers, (0, -len(numbers) % 64)).view(1, 1, -1, 64)
    side = Side(SideLayout(0, 8, 1, 64, 1, 1, 2, 0, 0, 0), [tokens])
    got = torch.ops.kvcache_emulated.decode_tokens(
        torch.zeros(1, 1, 0, 64, dtype=torch.uint8), side.segments, side.extras, None,
        side.layout.integers(), True, 0, tokens.shape[2], dtype,
    )  # fmt: skip
    expected = kept_finite(tokens, dtype).to(dtype)
    kept = ~expected.isnan()
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got[kept].view(torch.int16), expected[kept].view(torch.int16))
