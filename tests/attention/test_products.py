"""Products with handles, as models write their attention out, against those with the decoded tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvcache_plugins.errors import KernelUnavailableError, UnsupportedOperationError
from kvcache_plugins.kernels import loader
from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.testing import assert_close
from tests.kernels.decode_cases import build_layer, step

B, H, T, D = 2, 2, 301, 64
KERNEL = "cpu" if loader.try_load() else "torch"
OPTIONS: dict[str, dict[str, Any]] = {
    "int8": {"backend": "int8"},
    "kivi": {"backend": "kivi", "nbits": 2, "residual_length": 32},
    "int4-sinks": {"backend": "int4", "sink_length": 4},
}


def handles(
    name: str = "int8", kernel: str = "auto", count: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[KVHandle, KVHandle, Tensor, Tensor]:
    """Two handles, and what they stand for."""
    layer = build_layer({**OPTIONS[name], "kernel": kernel}, T - count, dtype=dtype)
    _, key, value = step(layer, count, 1)
    return key, value, key.tokens.dense(dtype), value.tokens.dense(dtype)


def matmul(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """As in GPT-J, MPT and BERT's relatives."""
    weights = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(D) + mask
    return torch.matmul(F.softmax(weights, dim=-1).to(value.dtype), value)


def operators(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return (query @ key.mT * D**-0.5 + mask).softmax(-1) @ value


def cast(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """As in GPT-Neo, which multiplies in fp32 whatever it is given."""
    logits = torch.matmul(query.float(), key.float().transpose(2, 3)) / math.sqrt(D)
    return torch.matmul(F.softmax(logits + mask, dim=-1).to(value.dtype), value)


def bmm(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """As in XGLM and TrOCR."""
    count = query.shape[2]
    query, key, value = (x.reshape(B * H, -1, D) for x in (query, key, value))
    logits = torch.bmm(query, key.transpose(1, 2)).view(B, H, count, T) / math.sqrt(D) + mask
    return torch.bmm(logits.softmax(-1).view(B * H, count, T), value).view(B, H, count, D)


def baddbmm(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """As in BLOOM."""
    count = query.shape[2]
    query, key, value = (x.reshape(B * H, -1, D) for x in (query, key, value))
    added = mask.expand(B, H, count, T).reshape(B * H, count, T)
    logits = added.baddbmm(batch1=query, batch2=key.transpose(-1, -2), beta=0.5, alpha=D**-0.5)
    return torch.bmm(logits.softmax(-1), value).view(B, H, count, D)


def empty_baddbmm(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """As in Megatron's relatives, where what is added has never been written."""
    count = query.shape[2]
    query, key, value = (x.reshape(B * H, -1, D) for x in (query, key, value))
    nothing = torch.full((B * H, count, T), torch.nan, dtype=query.dtype)
    logits = torch.baddbmm(nothing, query, key.transpose(1, 2), beta=0.0, alpha=D**-0.5)
    return torch.bmm((logits.view(B, H, count, T) + mask).softmax(-1).flatten(0, 1), value).view(
        B, H, count, D
    )


WRITTEN: dict[str, Callable[..., Tensor]] = {
    function.__name__: function for function in (matmul, operators, cast, bmm, baddbmm, empty_baddbmm)
}


@pytest.mark.parametrize("count", [1, 7, 100], ids=lambda count: f"q{count}")
@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("cache", OPTIONS)
@pytest.mark.parametrize("written", WRITTEN)
def test_attention_as_models_write_it(written: str, cache: str, kernel: str, count: int) -> None:
    key, value, *dense = handles(cache, kernel, count)
    query = torch.randn(B, H, count, D)
    mask = torch.zeros(B, 1, count, T).masked_fill_(torch.rand(B, 1, count, T) < 0.3, -1e30)
    got = WRITTEN[written](query, key, value, mask)
    assert_close(written, WRITTEN[written](query, *dense, mask), got, 3e-5)
    layer = key.layer
    assert layer.fallback_reads == 0
    assert layer.kernel == ("torch" if kernel == "torch" else KERNEL)
    if layer.kernel == "cpu":
        assert layer.kernel_reason is None
    else:
        assert "decoded tile by tile; " in layer.kernel_reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("written", ["matmul", "cast", "bmm", "baddbmm"])
def test_half_precision(written: str, dtype: torch.dtype) -> None:
    """At most twice as far from exact attention as the same lines over dense tensors of that dtype."""
    key, value, *dense = handles("int8", dtype=dtype)
    query = torch.randn(B, H, 1, D).to(dtype)
    mask = torch.zeros(B, 1, 1, T, dtype=dtype)
    got = WRITTEN[written](query, key, value, mask)
    assert got.dtype == dtype and key.layer.fallback_reads == 0
    exact = matmul(
        query.double(), *(states.tokens.dense(torch.float64) for states in (key, value)), mask.double()
    )
    plain = WRITTEN[written](query, *dense, mask)
    assert (got - exact).norm() <= 2 * (plain - exact).norm()


@pytest.mark.parametrize("repeat", ["interleave", "expand", "tile", "broadcast"])
def test_heads_that_serve_several_query_heads(repeat: str) -> None:
    key, value, *dense = handles("kivi", count=2)
    query = torch.randn(B, 3 * H, 2, D)

    def attend(key: Tensor, value: Tensor) -> Tensor:
        if repeat == "broadcast":
            grouped = query.view(B, H, 3, 2, D)
            logits = torch.matmul(grouped, key.unsqueeze(2).transpose(-1, -2))
            return torch.matmul(logits.softmax(-1), value.unsqueeze(2)).view(B, 3 * H, 2, D)
        key, value = (
            {
                "interleave": lambda x: x.repeat_interleave(3, dim=1),
                "expand": lambda x: x[:, :, None, :, :].expand(B, H, 3, T, D).reshape(B, 3 * H, T, D),
                "tile": lambda x: x.repeat(1, 3, 1, 1),
            }[repeat](states)
            for states in (key, value)
        )
        return torch.matmul(torch.matmul(query, key.transpose(2, 3)).softmax(-1), value)

    got = attend(key, value)
    assert_close(repeat, attend(*dense), got, 3e-5)
    assert key.layer.fallback_reads == 0


def test_heads_that_are_tiled_before_an_attention_function_sees_them() -> None:
    key, value, *dense = handles("kivi", count=2)
    query, mask = torch.randn(B, 3 * H, 2, D), torch.randn(B, 3 * H, 2, T)
    got, expected = (
        F.scaled_dot_product_attention(query, *(x.repeat(1, 3, 1, 1) for x in states), attn_mask=mask)
        for states in ((key, value), dense)
    )
    assert_close("sdpa", expected, got, 3e-5)
    assert key.layer.fallback_reads == 0


@pytest.mark.parametrize("weights", ["negative", "infinite", "undefined"])
def test_weights_of_no_softmax(weights: str) -> None:
    _, value, _, dense = handles("int8")
    rows = torch.rand(B, H, 1, T)
    rows[0, 0, 0, 7] = {"negative": -2.0, "infinite": torch.inf, "undefined": torch.nan}[weights]
    got = rows @ value
    torch.testing.assert_close(got, rows @ dense, rtol=1e-4, atol=1e-3, equal_nan=True)
    assert value.layer.fallback_reads == 0


def test_products_the_other_way_round() -> None:
    key, value, key_states, value_states = handles("int4-sinks")
    rows, weights = torch.randn(B, H, 1, D), torch.rand(B, H, 1, T)
    assert_close("queries and values", rows @ value_states.mT, rows @ value.mT, 1e-5)
    assert_close("weights and keys", weights @ key_states, weights @ key, 1e-5)
    assert key.layer.fallback_reads == 0


def test_double_precision_is_kept() -> None:
    key, _, key_states, _ = handles()
    rows = torch.randn(B, H, 1, D, dtype=torch.float64)
    got = rows @ key.double().mT
    assert got.dtype == torch.float64
    assert_close("logits", rows @ key_states.double().mT, got, 1e-12)
    assert key.layer.kernel == "torch" and "torch.float64" in key.layer.kernel_reason


def test_what_torch_refuses_is_refused() -> None:
    key, *_ = handles()
    with pytest.raises(RuntimeError, match="expected"):
        torch.matmul(torch.randn(B, H, 1, D, dtype=torch.float64), key.transpose(2, 3))
    with pytest.raises(RuntimeError, match="size"):
        torch.matmul(torch.randn(B, H, 1, D + 1), key.transpose(2, 3))


def test_broadcast_rows_are_multiplied_with_the_numbers() -> None:
    key, _, key_states, _ = handles()
    rows = torch.randn(D)
    assert torch.equal(torch.matmul(rows, key.mT), torch.matmul(rows, key_states.mT.contiguous()))
    assert key.layer.fallback_reads == 1


def test_under_autocast_torch_chooses_the_dtype() -> None:
    key, _, key_states, _ = handles()
    rows = torch.randn(B, H, 1, D)
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = rows @ key.mT, rows @ key_states.mT.contiguous()
    assert got.dtype == expected.dtype == torch.bfloat16 and torch.equal(got, expected)


def test_native_is_met_or_refused() -> None:
    if KERNEL == "torch":
        pytest.skip("there are no CPU kernels")
    key, value, *dense = handles(kernel="native")
    query, mask = torch.randn(B, H, 1, D), torch.zeros(1)
    assert_close("native", matmul(query, *dense, mask), matmul(query, key, value, mask), 3e-5)
    with pytest.raises(KernelUnavailableError, match=r"layer 0.*torch\.float64"):
        _ = query.double() @ key.double().mT


def test_a_gradient_is_refused() -> None:
    key, value, *_ = handles()
    query = torch.randn(B, H, 1, D, requires_grad=True)
    output = matmul(query, key, value, torch.zeros(1))
    with pytest.raises(UnsupportedOperationError, match="A gradient was asked for"):
        output.sum().backward()
    with torch.no_grad():
        assert not matmul(query, key, value, torch.zeros(1)).requires_grad
