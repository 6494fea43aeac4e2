"""The CUDA kernel of a decode step on an emulated GPU: the bytes are those of the CPU and of torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvcache_plugins.layers import stepping
from kvcache_plugins.testing.conformance import fed, state_bytes
from tests.kernels import test_append_tokens as appending
from tests.kernels.append_cases import CODES, Case, check, due_cases
from tests.kernels.test_append_tokens import LAYERS, refuse, rotated, scaled
from tests.kernels.test_encode_tokens import new_layer, states

pytestmark = pytest.mark.usefixtures("emulated", "library")
library = appending.library


def append(*args: Any) -> bool:
    return bool(torch.ops.kvcache_emulated.append_tokens(*args))


def encode_on_cpu(*args: Any) -> bool:
    return bool(torch.ops.kvcache_plugins.encode_tokens(*args))


@pytest.mark.parametrize("new", [1, 2, 5, 8])
@pytest.mark.parametrize("name", CODES)
def test_the_bytes_are_those_of_the_cpu(name: str, new: int) -> None:
    dtype = [torch.float32, torch.bfloat16, torch.float16][(new + len(name)) % 3]
    for place in due_cases(CODES[name], new):
        case = Case(CODES[name], new, *place, head_dim=24 if new % 2 else 64, dtype=dtype)
        assert check(case, append, encode_on_cpu)


@pytest.mark.parametrize("name", ["2bit-channel-g16", "3bit-channel-g128", "4bit-groups", "int8-groups"])
def test_the_bytes_of_wide_heads_are_those_of_the_cpu(name: str) -> None:
    for head_dim, place in zip((328, 512), due_cases(CODES[name], 3)[3:5], strict=True):
        assert check(Case(CODES[name], 3, *place, head_dim=head_dim), append, encode_on_cpu)


@pytest.mark.parametrize("low", [0, 1, 14, 31, 47, 62])
@pytest.mark.parametrize("name", [name for name in CODES if "channel" not in name])
def test_every_slot_of_a_block(name: str, low: int) -> None:
    """A token more or less: which words of a record are touched is worked out for each."""
    for due in (1, 2, 3, 15, 16, 17, 64 - low):
        case = Case(CODES[name], 1, due, 99, 7, low, head_dim=16 if due % 2 else 48)
        assert check(case, append, encode_on_cpu)


def test_a_token_joins_others() -> None:
    """The codes that share its words stay what they are, and so does everything beyond."""
    for name in ("2bit-token", "3bit-token", "4bit-groups", "int8"):
        case = Case(CODES[name], 1, 1, 90, 90, 20)
        for place, slot in ((30, 4), (50, 36), (51, 19), (52, 21)):
            for side, layout in enumerate(case.layouts):
                due = case.tails[side][:, :, place : place + 1]
                assert encode_on_cpu(case.records, due, side == 0, layout, slot)
        assert check(case, append, encode_on_cpu)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("name", ["2bit-channel-g32", "3bit-channel-g64", "8bit-token"])
def test_keys_are_turned_back(name: str, interleaved: bool) -> None:
    for place in due_cases(CODES[name], 3):
        assert check(rotated(Case(CODES[name], 3, *place), interleaved), append, encode_on_cpu)


@pytest.mark.parametrize("name", ["4bit-token", "2bit-groups"])
def test_keys_are_divided(name: str) -> None:
    for place in due_cases(CODES[name], 3):
        assert check(scaled(Case(CODES[name], 3, *place)), append, encode_on_cpu)


def test_other_strides_and_dtypes() -> None:
    case = Case(CODES["4bit-token"], 3, 4, 8, 7, 62)
    expected = case.run(append)
    case.states = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in case.states]
    got = case.run(append)
    assert got[0] and torch.equal(got[1], expected[1]) and torch.equal(got[2][1], expected[2][1])
    case = Case(CODES["int8"], 3, 3, 8, 8, 0, dtype=torch.float64)
    done, records, tails = case.run(append)
    assert not done and not records.any() and torch.equal(tails[0][:, :, 8:11], case.states[0])


def test_nothing_is_due() -> None:
    case = Case(CODES["int8"], 3, 0, 8, 8, 0)
    _, _, expected = case.expected(encode_on_cpu)
    tails = [tail.clone() for tail in case.tails]
    assert append(case.records[:, :, :0], *case.states, *tails, [8, 0, 0, 0], [8, 0, 0, 0])
    assert all(map(torch.equal, tails, expected))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_nobody_waits_for_the_numbers(number: float) -> None:
    """What is not finite takes no part in the statistics, and saturates; other bytes are what they were."""
    case = Case(CODES["int8"], 1, 1, 8, 8, 3, dtype=torch.float32)
    case.states[0][..., 3] = 0.0
    expected = case.run(append)[1]
    case.states[0][..., 3] = number
    done, got, _ = case.run(append)
    assert done and (got != expected).sum() == (6 if math.isinf(number) else 0)


def test_saturation_is_reported_by_the_next_call() -> None:
    case = Case(CODES["int8"], 1, 1, 8, 8, 3, dtype=torch.float32)
    plain = case.states[1]
    case.states[1] = plain * 1e8
    assert case.run(append)[0]
    case.states[1] = plain
    with pytest.raises(RuntimeError, match=r"beyond fp16.*kernel='torch'"):
        case.run(append)
    assert check(case, append, encode_on_cpu)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"write": 299}, "do not fit a tail of 300"),
        ({"first": 11}, "do not fit a tail"),
        ({"slot": 320}, "room for 323 tokens"),
        ({"plans": lambda plans: [plans[0][:13], plans[1]]}, "Invalid key_plan: expected 14 integers"),
        ({"layout": (2, 16)}, "Invalid states"),
        ({"layout": (3, 0)}, "Invalid states"),
        ({"layout": (7, 1 << 20)}, "outside of the"),
        ({"tail_dtype": torch.float16}, "Invalid key_tail"),
        ({"preparation": [torch.ones(4, 4), None, None]}, "Invalid rotation"),
        ({"preparation": [None, None, torch.ones(2, 3, 32)]}, "Invalid factors"),
    ],
    ids=["write", "first", "slot", "plans", "width", "group", "offset", "dtype", "rotation", "factors"],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    refuse(change, message, append)


@pytest.mark.parametrize(
    "name", ["int8", "int4-smooth", "kivi-block", "kivi-3bit-g64", "e4m3", "kvquant", "sinks"]
)
def test_layers_that_take_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = states(40, torch.bfloat16)
    split = [100, *[1] * 150, 3, 5, 8, *[1] * 67]
    expected = state_bytes(fed(new_layer({**LAYERS[name], "kernel": "torch"}, None, None), *given, split))
    monkeypatch.setattr(stepping, "append_tokens", append)
    found = state_bytes(fed(new_layer(LAYERS[name], None, None), *given, split))
    for part, tensor in expected.items():
        assert torch.equal(tensor, found[part]), part
