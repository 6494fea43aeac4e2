"""Handles in other shapes and dtypes: what models do to keys and values before they multiply them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.layers.handle_view import HandleView, as_view
from tests.kernels.decode_cases import build_layer, step

B, H, T, D = 2, 2, 201, 64
Step = Callable[[Tensor], Tensor]


def handle() -> tuple[KVHandle, Tensor]:
    _, key, _ = step(build_layer({"backend": "int8", "kernel": "torch"}, T - 1), 1, 1)
    return key, key.tokens.dense(torch.float32)


SINGLE: dict[str, Step] = {
    "transpose": lambda x: x.transpose(-1, -2),
    "torch.transpose": lambda x: torch.transpose(x, 2, 3),
    "mT": lambda x: x.mT,
    "permute": lambda x: x.permute(0, 1, 3, 2),
    "merged": lambda x: x.reshape(B * H, -1, D),
    "viewed": lambda x: x.view(B * H, T, D),
    "of a size": lambda x: x.view(torch.Size([B * H, T, D])),
    "and back": lambda x: x.reshape(-1, T, D).transpose(1, 2).reshape(B, H, D, T),
    "fp64": lambda x: x.to(torch.float64),
    "bf16": lambda x: x.to(dtype=torch.bfloat16),
    "half": lambda x: x.half(),
    "there and back": lambda x: x.double().float(),
    "repeated": lambda x: x[:, :, None].expand(B, H, 3, T, D).reshape(B, H * 3, T, D),
    "repeated, written out": lambda x: x[:, :, None, :, :].expand(-1, -1, 3, -1, -1).reshape(B, -1, T, D),
    "unsqueezed": lambda x: x.unsqueeze(2).transpose(3, 4),
    "interleaved": lambda x: x.repeat_interleave(3, dim=1),
    "torch.repeat_interleave": lambda x: torch.repeat_interleave(x, 2, 1),
    "tiled": lambda x: x.repeat(1, 3, 1, 1),
    "tiled and merged": lambda x: x.repeat((1, 3, 1, 1)).reshape(-1, T, D),
    "contiguous": lambda x: x.transpose(2, 3).contiguous(),
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_view_is_what_the_tensor_would_be(name: str) -> None:
    states, dense = handle()
    got, expected = SINGLE[name](states), SINGLE[name](dense)
    assert isinstance(got, HandleView)
    assert (got.shape, got.dtype, got.device) == (expected.shape, expected.dtype, expected.device)
    assert states.layer.fallback_reads == 0
    assert torch.equal(got.dense(), expected)
    assert states.layer.fallback_reads == 1


OTHERS: dict[str, Step] = {
    "heads and tokens": lambda x: x.transpose(1, 2),
    "rows": lambda x: x.permute(1, 0, 2, 3),
    "a slice": lambda x: x[:, :, :100],
    "one head": lambda x: x[:, 0],
    "repeated tokens": lambda x: x.repeat(1, 1, 2, 1),
    "repeated rows": lambda x: x.repeat_interleave(2, dim=0),
    "flat": lambda x: x.reshape(B, -1),
    "half the channels": lambda x: x.reshape(B, H, T, 2, D // 2),
    "integers": lambda x: x.to(torch.int32),
    "as bytes": lambda x: x.view(torch.uint8),
    "amax": lambda x: x.amax(-1),
    "rounded": lambda x: x.bfloat16().double(),
    "laid out anew": lambda x: x.mT.contiguous().view(B * H, T, D),
    "tiled twice": lambda x: x.repeat(1, 2, 1, 1).repeat(1, 2, 1, 1),
    "tiled, spread": lambda x: x.repeat(1, 3, 1, 1).reshape(B, H, 3, T, D),
}


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_is_done_to_the_numbers(name: str) -> None:
    states, dense = handle()
    got = OTHERS[name](states)
    assert type(got) is Tensor and torch.equal(got, OTHERS[name](dense))


def test_errors_are_those_of_torch() -> None:
    states, dense = handle()
    for wrong in (
        lambda x: x.transpose(2, 7),
        lambda x: x.repeat_interleave(2, dim=5),
        lambda x: x.reshape(7, -1),
        lambda x: x[:, :, None].expand(B, H, 3, T, D + 1),
    ):
        with pytest.raises((RuntimeError, IndexError)) as expected:
            wrong(dense)
        with pytest.raises(type(expected.value)):
            wrong(states)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted({**SINGLE, **OTHERS}.keys() - {"as bytes"})), min_size=2, max_size=4))
def test_chains(names: list[str]) -> None:
    """Whatever is done one after the other, shapes and numbers are those of tensors, and so are refusals."""
    states, dense = handle()
    got, expected = states, dense
    for name in names:
        change = {**SINGLE, **OTHERS}[name]
        try:
            expected = change(expected)
        except (RuntimeError, IndexError, ValueError) as error:
            if "stride" not in str(error):  # a view lies in memory as if it had been made anew
                with pytest.raises(type(error)):
                    change(got)
            return
        got = change(got)
    assert got.shape == expected.shape and got.dtype == expected.dtype
    assert torch.equal(numbers(got), numbers(expected))


def numbers(states: Any) -> Tensor:
    view = as_view(states)
    plain: Tensor = states if view is None else view.dense()
    return plain


@pytest.mark.parametrize("name", ["transpose", "merged", "bf16", "repeated", "tiled"])
def test_numbers_that_were_changed_in_place_are_what_it_is(name: str) -> None:
    states, dense = handle()
    got, expected = SINGLE[name](states), SINGLE[name](dense)
    for view in (got, expected):
        view.mul_(2)
    rows = torch.ones(*expected.shape[:-2], 1, expected.shape[-2], dtype=expected.dtype)
    assert torch.equal(got, expected)
    assert torch.equal(got.transpose(-1, -2), expected.transpose(-1, -2))
    torch.testing.assert_close(rows @ got, rows @ expected)  # sums of another order


def test_a_handle_that_was_changed_in_place_is_read_no_more() -> None:
    states, dense = handle()
    before = states.transpose(-1, -2)
    for tensor in (states, dense):
        tensor.add_(1)
    rows = torch.ones(B, H, 1, D)
    torch.testing.assert_close(rows @ before, rows @ dense.mT)
    torch.testing.assert_close(rows @ states.mT, rows @ dense.mT)


@pytest.mark.parametrize("repeats", [1, 3])
def test_query_heads_of_a_stored_head_are_neighbours_in_the_order(repeats: int) -> None:
    states, _ = handle()
    tiled, natural = states.repeat(1, repeats, 1, 1), states.repeat_interleave(repeats, 1)
    assert isinstance(tiled, HandleView) and isinstance(natural, HandleView)
    assert natural.query_order(2 * H * repeats) is None
    order = tiled.query_order(2 * H * repeats)
    if repeats == 1:
        assert order is None
    else:
        assert order is not None
        stored = (
            torch.arange(H).repeat(repeats).repeat_interleave(2)
        )  # two query heads of each, in the model's order
        assert stored[order].tolist() == sorted(stored.tolist())


def test_it_says_what_it_is() -> None:
    states, _ = handle()
    assert "merged" in repr(states.reshape(B * H, T, D)) and "KVHandle" in repr(states.float().half())
