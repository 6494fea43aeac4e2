"""Native encoding writes the bytes the torch codecs write, and leaves what it does not handle to them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache_plugins import build_cache
from kvcache_plugins.kernels import loader
from kvcache_plugins.layers import native_encoding
from kvcache_plugins.testing import tiny_model
from kvcache_plugins.testing.conformance import fed, state_bytes

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


def check(options: dict[str, Any], keys: Tensor, values: Tensor, mask: Tensor | None = None) -> None:
    """Feed two layers alike, one encoding natively and one in torch, and compare their bytes."""
    model = tiny_model("llama")
    for split in ([333], [100, *[1] * 50, 183]):
        layers = [
            fed(build_cache(model, more).bind(model, mask).packed_layers[0], keys, values, split)
            for more in (options, {**options, "kernel": "torch"})
        ]
        native, reference = map(state_bytes, layers)
        assert native.keys() == reference.keys()
        for name, tensor in reference.items():
            assert torch.equal(tensor, native[name]), name


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What the native op answered, call by call."""
    answers: list[bool] = []
    original = native_encoding.encode_tokens

    def record(*args: Any) -> bool:
        answers.append(original(*args))
        return answers[-1]

    monkeypatch.setattr(native_encoding, "encode_tokens", record)
    return answers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [24, 64, 80, 128])
@pytest.mark.parametrize("name", CASES)
def test_the_bytes_are_the_same(name: str, head_dim: int, dtype: torch.dtype, encoded: list[bool]) -> None:
    check(CASES[name], *states(head_dim, dtype))
    assert encoded and all(encoded)


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
    from kvcache_plugins.kernels.ops import encode_tokens

    records = torch.zeros(1, 1, 1, 64, dtype=torch.uint8)
    layout = [8, 1, 32, 1, 1, 2, 0, 0, 0, -1]
    with pytest.raises(ValueError, match="room for 65 tokens"):
        encode_tokens(records, torch.zeros(1, 1, 65, 32), True, layout, 0)
    with pytest.raises(ValueError, match="whole groups of 32 tokens"):
        encode_tokens(records, torch.zeros(1, 1, 33, 32), True, [4, 0, 32, 32, 32, 2, 0, 0, 0, 0], 0)
