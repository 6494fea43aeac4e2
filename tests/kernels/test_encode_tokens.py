"""Native encoding writes the bytes the torch codecs write, and leaves what it does not handle to them."""

from __future__ import annotations

import functools
import math
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcache_plugins import build_cache
from kvcache_plugins.attention.description import describe
from kvcache_plugins.kernels import loader
from kvcache_plugins.layers import native_encoding, stepping
from kvcache_plugins.layers.base import PackedLayer
from kvcache_plugins.layers.view import StreamView
from kvcache_plugins.models.rotary import Rotary
from kvcache_plugins.testing import tiny_model
from kvcache_plugins.testing.conformance import fed, state_bytes
from tests.kernels import fresh_process
from tests.kernels.decode_cases import isa

__all__ = ["isa"]  # a fixture

CASES: dict[str, dict[str, Any]] = {
    **{
        f"kivi-{nbits}bit-g{group}": {
            "backend": "kivi", "nbits": nbits, "q_group_size": group, "residual_length": 128,
        }
        for nbits in (2, 3, 4, 8)
        for group in (16, 32, 64, 128)
    },
    "int8": {"backend": "int8"},
    "int8-groups": {"backend": "int8", "granularity": "group", "q_group_size": 8},
    "int4": {"backend": "int4"},
    "int4-2bit": {"backend": "int4", "nbits": 2},
    "int4-8bit": {"backend": "int4", "nbits": 8},
    "int4-smooth": {"backend": "int4", "smooth": 0.5},
    "e4m3": {"backend": "float8"},
    "e5m2": {"backend": "float8", "format": "e5m2"},
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    if not loader.try_load():
        pytest.skip("no native library can be built here")


def states(head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys with channels of very different size, and values, `(2, 2, 333, head_dim)`."""
    generator = torch.Generator().manual_seed(head_dim)
    keys = torch.randn(2, 2, 333, head_dim, generator=generator) * torch.logspace(-2, 1, head_dim)
    return keys.to(dtype), torch.randn(2, 2, 333, head_dim, generator=generator).to(dtype)


def rotary(rotary_dim: int, interleaved: bool) -> Rotary:
    half = rotary_dim // 2
    return Rotary(tuple(10000.0 ** (-i / half) for i in range(half)), interleaved)


@functools.cache
def _model() -> PreTrainedModel:
    return tiny_model("llama")


def new_layer(options: dict[str, Any], mask: Tensor | None, turning: Rotary | None) -> PackedLayer:
    """A layer of a tiny model, whose keys are rotated by `turning` if that is given."""
    model = _model()
    layer = build_cache(model, options).bind(model, mask).packed_layers[0]
    if turning is not None:
        layer.bind(replace(layer.facts, rotary=turning), layer.padding.lengths, None)
    return layer


def check(
    options: dict[str, Any],
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    turning: Rotary | None = None,
) -> None:
    """Feed layers that encode natively, and one that encodes in torch, and compare their bytes."""
    layer = new_layer({**options, "kernel": "torch"}, mask, turning)
    reference = state_bytes(fed(layer, keys, values, [333]))
    for split in ([333], [100, *[1] * 50, 183]):
        native = state_bytes(fed(new_layer(options, mask, turning), keys, values, split))
        assert native.keys() == reference.keys()
        for name, tensor in reference.items():
            assert torch.equal(tensor, native[name]), name


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What the native ops that encode answered, call by call."""
    answers: list[bool] = []
    original, step = native_encoding.encode_tokens, stepping.append_tokens

    def record(*args: Any) -> bool:
        answers.append(original(*args))
        return answers[-1]

    def record_step(*args: Any) -> bool:
        done = step(*args)
        if args[5][2] or args[6][2]:
            answers.append(done)
        return done

    monkeypatch.setattr(native_encoding, "encode_tokens", record)
    monkeypatch.setattr(stepping, "append_tokens", record_step)
    return answers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [24, 64, 80, 128])
@pytest.mark.parametrize("name", CASES)
def test_the_bytes_are_the_same(name: str, head_dim: int, dtype: torch.dtype, encoded: list[bool]) -> None:
    check(CASES[name], *states(head_dim, dtype))
    assert encoded and all(encoded)


@pytest.mark.parametrize("head_dim", [24, 80])
@pytest.mark.parametrize("name", CASES)
def test_every_instruction_set(name: str, head_dim: int, isa: str, encoded: list[bool]) -> None:
    check(CASES[name], *states(head_dim, torch.bfloat16))
    assert encoded and all(encoded)


def zeros_of_either_sign(head_dim: int) -> tuple[Tensor, Tensor]:
    """States of which the least number of a group is zero, and whole groups are."""
    made = []
    for tensor in states(head_dim, torch.float32):
        signs = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(3)) < 0.5
        kept = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(4)) < 0.03
        made.append(torch.where(kept, tensor.abs(), torch.where(signs, 0.0, -0.0)))
    return made[0], made[1]


@pytest.mark.parametrize("name", ["kivi-4bit-g16", "kivi-2bit-g128", "int4", "int8-groups", "e4m3"])
def test_zeros_have_no_sign(name: str, isa: str, encoded: list[bool]) -> None:
    # which of two equal numbers is the least, the order of a comparison would decide
    check(CASES[name], *zeros_of_either_sign(80))
    assert encoded and all(encoded)


@pytest.mark.parametrize("head_dim", [328, 512])
def test_the_bytes_of_wide_heads_are_the_same(head_dim: int, encoded: list[bool]) -> None:
    for name in (
        "kivi-2bit-g16",
        "kivi-3bit-g128",
        "int8",
        "int8-groups",
        "int4",
        "int4-smooth",
        "e4m3",
        "e5m2",
    ):
        check(CASES[name], *states(head_dim, torch.bfloat16))
    assert encoded and all(encoded)


@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_a_gpu_encodes_no_more_groups_of_a_block_than_it_has_room_for(group: int) -> None:
    """Which no kernel for attention reads either; CPUs have the room."""
    layer = new_layer({"backend": "int8", "granularity": "group", "q_group_size": group}, None, None)
    layer.update(*states(256, torch.float32))
    stream, layout = layer.stored_keys, layer.records.layout
    assert stream.encoder.layout
    there: Any = SimpleNamespace(
        layout=layout, data=SimpleNamespace(device=torch.device("cuda", 0), is_cuda=True)
    )
    is_encoded = bool(native_encoding.NativeEncoder(stream.codec, "key", there).layout)
    is_read = describe(StreamView.of(stream)) is not None
    assert is_encoded == is_read == (64 * 256 // group <= 4096)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e5])
@pytest.mark.parametrize("name", ["kivi-4bit-g32", "int8", "e4m3"])
def test_what_is_rare_is_left_to_torch(name: str, number: float, encoded: list[bool]) -> None:
    keys, values = states(64, torch.float32)
    keys[1, 0, 40, 3] = values[0, 1, 70, 5] = number
    check(CASES[name], keys, values)
    assert not all(encoded) and any(encoded)


@pytest.mark.parametrize("name", ["kivi-2bit-g16", "int8", "int4", "int4-smooth"])
def test_pads_and_sinks(name: str) -> None:
    mask = (torch.arange(333) >= torch.tensor([[3], [70]])).long()
    check({**CASES[name], "sink_length": 2}, *states(64, torch.float32), mask)


def test_only_blocks_that_hold_pads_or_sinks_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[int, int]] = []
    original = native_encoding.encode_tokens

    def record(*args: Any) -> bool:
        runs.append((args[4], args[1].shape[2]))
        return original(*args)

    monkeypatch.setattr(native_encoding, "encode_tokens", record)
    mask = (torch.arange(333) >= torch.tensor([[3], [70]])).long()
    fed(new_layer({"backend": "int8", "sink_length": 2}, mask, None), *states(64, torch.float32), [333])
    assert runs == [(128, 333 - 128)] * 2  # of the keys and of the values


def test_states_that_are_not_contiguous(encoded: list[bool]) -> None:
    keys, values = states(64, torch.float32)
    check(
        CASES["int4"], keys.transpose(1, 2).contiguous().transpose(1, 2), values[..., ::2].repeat(1, 1, 1, 2)
    )
    check(CASES["int4"], *(t.transpose(2, 3).contiguous().transpose(2, 3) for t in (keys, values)))
    assert all(encoded)


def test_every_8_bit_float(encoded: list[bool]) -> None:
    """Numbers on, between and halfway between the codes of both formats, subnormal ones included."""
    exact = torch.arange(256, dtype=torch.uint8)
    for format, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        numbers = exact.view(dtype).float()
        numbers = numbers[torch.isfinite(numbers)].unique()
        between = (numbers[1:] + numbers[:-1]) / 2
        every = torch.cat([numbers, between, between * 1.001, between * 0.999])
        every = every.clamp(-6e4, 6e4)
        # the largest number in every token makes the scale 1, so that the codes meet the numbers themselves
        count = -(-len(every) // 31)
        tokens = torch.nn.functional.pad(every, (0, 31 * count - len(every))).view(1, 1, count, 31)
        tokens = torch.cat([tokens, torch.full((1, 1, count, 1), numbers.max())], dim=-1)
        padded = torch.zeros(2, 2, 333, 32)
        padded[:, :, :count] = tokens
        check({"backend": "float8", "format": format}, padded, padded)
    assert all(encoded)


def test_a_layout_that_does_not_fit_is_refused() -> None:
    from kvcache_plugins.kernels.writing_ops import encode_tokens

    records = torch.zeros(1, 1, 1, 64, dtype=torch.uint8)
    layout = [8, 1, 32, 1, 1, 2, 0, 0, 0, -1]
    with pytest.raises(ValueError, match="room for 65 tokens"):
        encode_tokens(records, torch.zeros(1, 1, 65, 32), True, layout, 0)
    with pytest.raises(ValueError, match="whole groups of 32 tokens"):
        encode_tokens(records, torch.zeros(1, 1, 33, 32), True, [4, 0, 32, 32, 32, 2, 0, 0, 0, 0], 0)


# ---- keys whose rotation inside a block is undone ----

BLOCK = {"backend": "kivi", "rope_mode": "block"}
# The last two pack at slots that are not multiples of the period, 32.
LENGTHS = {"g16": (16, 128), "g32": (32, 128), "g64": (64, 128), "g128": (128, 128)}
LENGTHS |= {"g16-r48": (16, 48), "g16-r16": (16, 16)}


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(64, 64), (128, 128), (80, 32), (24, 10)], ids=lambda n: str(n)
)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("nbits", [2, 3, 4, 8])
def test_rotated_keys(
    nbits: int, lengths: str, head_dim: int, rotary_dim: int, interleaved: bool, encoded: list[bool]
) -> None:
    group, residual = LENGTHS[lengths]
    options = {**BLOCK, "nbits": nbits, "q_group_size": group, "residual_length": residual}
    dtype = [torch.float32, torch.bfloat16, torch.float16][nbits % 3]
    check(options, *states(head_dim, dtype), turning=rotary(rotary_dim, interleaved))
    assert encoded and all(encoded)


def check_last_bits() -> None:
    """Encode keys that are constant but for the rounding of the rotation that is undone.

    The constant is an fp16 number, so that it is what the minimum of a group is rounded to, and the range of
    a group is a few units in the last place: every one of them is a code.
    """
    options = {**BLOCK, "nbits": 8, "q_group_size": 32, "residual_length": 32}
    for interleaved in (False, True):
        turning = rotary(64, interleaved)
        keys = turning.rotate(torch.full((2, 2, 333, 64), 1000.0), torch.arange(333) % 32)
        check(options, keys, torch.randn(2, 2, 333, 64), turning=turning)
        records = fed(new_layer(options, None, turning), keys, keys, [333]).records
        codes = records.codes("key", 0, 5)
        assert len(codes.unique()) > 3


def test_the_last_bit_of_a_rotation(encoded: list[bool]) -> None:
    check_last_bits()
    assert encoded and all(encoded)


def test_the_last_bit_where_torch_rounds_products() -> None:
    """Whether torch fuses a multiplication and an addition depends on the instructions it may use."""
    code = """
        import torch
        from tests.kernels.test_encode_tokens import check_last_bits
        assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
        check_last_bits()
    """
    done = fresh_process.run(code, os.environ | {"ATEN_CPU_CAPABILITY": "default"}, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e5, 6e4])
def test_rotated_keys_that_are_rare_are_left_to_torch(number: float, encoded: list[bool]) -> None:
    """The last is an fp16 number, but with its partner it makes one that is not."""
    keys, values = states(64, torch.float32)
    keys[1, 0, 40, [3, 35]] = number
    check({**BLOCK, "q_group_size": 32, "residual_length": 32}, keys, values, turning=rotary(64, False))
    assert not all(encoded) and any(encoded)


def test_rotated_keys_beside_pads_and_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of tokens that holds a pad or a sink of any row is left to torch."""
    starts: set[int] = set()
    original, step = native_encoding.encode_tokens, stepping.append_tokens

    def record(*args: Any) -> bool:
        if args[2]:
            starts.add(args[4])
            assert original(*args)
            return True
        return original(*args)

    def record_step(*args: Any) -> bool:
        if args[5][2]:
            starts.add(args[5][3])
        assert step(*args)
        return True

    monkeypatch.setattr(native_encoding, "encode_tokens", record)
    monkeypatch.setattr(stepping, "append_tokens", record_step)
    mask = (torch.arange(333) >= torch.tensor([[3], [70]])).long()
    options = {**BLOCK, "q_group_size": 16, "residual_length": 16, "sink_length": 2}
    check(options, *states(64, torch.float32), mask, turning=rotary(64, False))
    assert min(starts) == 96  # where the second call of the second split begins: the first holds pads


def test_heads_of_more_channels_are_refused() -> None:
    from kvcache_plugins.kernels.writing_ops import encode_tokens

    records, keys = torch.zeros(1, 1, 1, 70000, dtype=torch.uint8), torch.zeros(1, 1, 32, 513)
    with pytest.raises(ValueError, match="Invalid head_dim of states: expected 1 to 512, got 513"):
        encode_tokens(records, keys, True, [4, 0, 513, 1, 1, 2, 0, 0, 60000, 60200], 0)


def test_tables_that_do_not_fit_are_refused() -> None:
    from kvcache_plugins.kernels.writing_ops import encode_tokens

    records, keys = torch.zeros(1, 1, 1, 1024, dtype=torch.uint8), torch.zeros(1, 1, 32, 32)
    layout = [4, 0, 32, 32, 32, 2, 0, 0, 512, 640]
    table = torch.ones(32, 16)
    assert encode_tokens(records, keys, True, layout, 0, table, table)
    for cos, sin in (
        (table, None),
        (None, table),
        (table, table[:16]),
        (table.double(), table.double()),
        (torch.ones(32, 17), torch.ones(32, 17)),
        (table[:0], table[:0]),
        (table.T, table.T),
    ):
        with pytest.raises(ValueError, match="Invalid rotation"):
            encode_tokens(records, keys, True, layout, 0, cos, sin)
