"""Our own attention function over plain tensors, against attention written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache_plugins.attention import unpacked
from kvcache_plugins.attention.reference import AttentionOptions
from kvcache_plugins.attention.unpacked import attend_unpacked

HEADS, KV_HEADS, DIM, VALUE_DIM = 6, 2, 32, 24
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 2e-3}
KINDS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "sliding_window": 50},
    "all see all": {},
    "softcap": {"is_causal": True, "softcap": 3.0},
    "pads": {"mask": "boolean"},
    "pads that are added": {"mask": "additive"},
    "window and pads": {"sliding_window": 50, "mask": "boolean"},
}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def case(kind: str, queries: int, length: int) -> tuple[Tensor, Tensor, Tensor, AttentionOptions]:
    query, keys = numbers(2, HEADS, queries, DIM), numbers(2, KV_HEADS, length, DIM, seed=1)
    options = dict(KINDS[kind])
    if "mask" in options:
        mask = torch.ones(queries, length, dtype=torch.bool).tril(length - queries).repeat(2, 1, 1, 1)
        mask[0, :, :, :7] = False
        if options["mask"] == "additive":
            mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
        options["mask"] = mask
    sinks = numbers(HEADS, seed=3)
    values = numbers(2, KV_HEADS, length, VALUE_DIM, seed=2)
    return query, keys, values, AttentionOptions(scaling=0.3, sink_logits=sinks, **options)


def written_out(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """In fp64, all logits at once."""
    count, length = query.shape[2], keys.shape[2]
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
    logits = query @ keys.transpose(2, 3) * 0.3
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    own, slots = torch.arange(length - count, length)[:, None], torch.arange(length)
    if options.is_causal:
        logits = logits.masked_fill(slots > own, -torch.inf)
    if options.sliding_window is not None:
        logits = logits.masked_fill(slots <= own - options.sliding_window, -torch.inf)
    if options.mask is not None:
        hidden = ~options.mask if options.mask.dtype == torch.bool else options.mask == -torch.inf
        logits = logits.masked_fill(hidden, -torch.inf)
    assert options.sink_logits is not None
    sinks = options.sink_logits[None, :, None, None].expand(2, HEADS, count, 1)
    return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1] @ values


@pytest.mark.parametrize("dtype", BOUNDS, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(("queries", "length"), [(3, 90), (40, 700), (700, 700)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_out(kind: str, queries: int, length: int, dtype: torch.dtype) -> None:
    *states, options = case(kind, queries, length)
    rounded = [x.to(dtype).double() for x in states]
    mask = options.mask  # which models make in the dtype of their states
    own = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
    with torch.no_grad():
        found = attend_unpacked(*(x.to(dtype) for x in states), replace(options, mask=own))
    assert found.dtype == dtype
    expected = written_out(*rounded, options)
    assert (found.double() - expected).norm() <= BOUNDS[dtype] * expected.norm()


@pytest.mark.parametrize(
    ("kind", "queries", "dtype", "grad", "in_blocks"),
    [
        ("causal", 700, torch.float32, False, True),
        ("window and pads", 40, torch.bfloat16, False, True),
        ("all see all", 9, torch.float16, False, True),
        ("softcap", 700, torch.float32, False, False),
        ("causal", 8, torch.float32, False, False),
        ("causal", 700, torch.float64, False, False),
        ("causal", 700, torch.float32, True, False),
    ],
)
def test_what_is_attended_to_in_blocks(
    kind: str,
    queries: int,
    dtype: torch.dtype,
    grad: bool,
    in_blocks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[str] = []

    def noted(name: str) -> Callable[..., Tensor]:
        made = getattr(unpacked, name)
        return lambda *args: used.append(name) or made(*args)

    for name in ("attend", "attend_query_blocks"):
        monkeypatch.setattr(unpacked, name, noted(name))
    *states, options = case(kind, queries, 700)
    with torch.set_grad_enabled(grad):
        attend_unpacked(*(x.to(dtype) for x in states), options)
    assert used == ["attend_query_blocks" if in_blocks else "attend"]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "softcap"])
def test_on_a_gpu(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacked, "attend", lambda *args: pytest.fail("read by the reference, in fp32"))
    *states, options = case(kind, 700, 700)
    there = {
        name: part.cuda() if part.dtype == torch.bool else part.to("cuda", dtype)
        for name in ("mask", "sink_logits")
        if (part := getattr(options, name)) is not None
    }
    with torch.no_grad():
        found = attend_unpacked(*(x.to("cuda", dtype) for x in states), replace(options, **there))
    expected = written_out(*(x.to(dtype).double() for x in states), options)
    assert found.is_cuda and found.dtype == dtype
    assert (found.cpu().double() - expected).norm() <= BOUNDS[dtype] * expected.norm()


def test_gradients_are_those_of_attention_written_out() -> None:
    query, keys, values, options = case("window", 100, 100)
    gradients = []
    for attend in (attend_unpacked, written_out):
        states = [x.clone().requires_grad_() for x in (query, keys, values)]
        attend(*states, options).square().sum().backward()
        gradients.append([x.grad for x in states])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-8)


def test_states_whose_channels_are_not_neighbours() -> None:
    query, keys, values, options = case("causal", 40, 90)
    query, keys, values = (x.float() for x in (query, keys, values))
    with torch.no_grad():
        expected = attend_unpacked(query, keys, values, options)
        turned = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (query, keys, values)]
        torch.testing.assert_close(attend_unpacked(*turned, options), expected, atol=1e-6, rtol=1e-5)
