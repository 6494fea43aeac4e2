"""What tokens receive of attention, by kernels of every instruction set, against weights computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache_plugins.attention import measured
from kvcache_plugins.attention.description import describe, first_sinks
from kvcache_plugins.attention.received import received_attention
from kvcache_plugins.attention.reference import AttentionOptions, four_dimensional
from kvcache_plugins.attention.strongest import strongest_attention
from kvcache_plugins.kernels.defaults import DEFAULTS
from kvcache_plugins.kernels.layout import Side
from kvcache_plugins.kernels.ops import measure_attention
from kvcache_plugins.layers.view import StreamView
from kvcache_plugins.testing.comparison import relative_rms
from tests.kernels.decode_cases import (
    CASES,
    FP32_ERROR,
    LOGIT_OPTIONS,
    attention_options,
    build_layer,
    isa,
    library,
    masks,
    step,
)

__all__ = ["isa", "library"]  # fixtures

WEIGHT_ERROR = 3 * FP32_ERROR
"""Of weights, whose relative error is the absolute one of logits, some of which are larger than 10."""
BFLOAT16_ERROR = 1e-2
"""The same of logits that are sums of bf16 products."""


def weights_by_hand(query: Tensor, keys: Tensor, options: AttentionOptions) -> Tensor:
    """Attention weights `(B, Hq, q, T)` of fp64 queries and keys, and zeros where nothing is seen."""
    count, length = query.shape[2], keys.shape[2]
    keys = keys.repeat_interleave(query.shape[1] // keys.shape[1], dim=1)
    logits = query @ keys.transpose(2, 3)
    logits = logits * (query.shape[3] ** -0.5 if options.scaling is None else options.scaling)
    if options.softcap is not None:
        logits = options.softcap * (logits / options.softcap).tanh()
    behind = torch.arange(length - count, length)[:, None] - torch.arange(length)
    if options.alibi_slopes is not None:
        logits = logits - options.alibi_slopes.double()[:, None, None] * behind
    for added in (options.position_bias, options.mask):
        if added is not None and added.dtype == torch.bool:
            logits = logits.masked_fill(~four_dimensional(added, length), -torch.inf)
        elif added is not None:
            logits = logits + four_dimensional(added, length)
    if options.is_causal or options.sliding_window is not None:
        logits = logits.masked_fill(behind < 0, -torch.inf)
    if options.sliding_window is not None:
        logits = logits.masked_fill(behind >= options.sliding_window, -torch.inf)
    if options.sink_logits is not None:
        sinks = options.sink_logits.double()
        sinks = (
            sinks[..., None] if sinks.dim() == 3 else sinks[None, :, None, None].expand(*logits.shape[:3], 1)
        )
        logits = torch.cat([logits, sinks], dim=-1)
    return logits.softmax(-1).nan_to_num(0.0)[..., :length]


def received_by_hand(
    query: Tensor, tokens: StreamView, options: AttentionOptions, counted: Tensor | None = None
) -> Tensor:
    keys = tokens.dense(torch.float32).double()
    weights = weights_by_hand(query.double(), keys, options)
    if counted is not None:
        weights = weights * counted[:, None, :, None]
    return weights.unflatten(1, (keys.shape[1], -1)).sum((2, 3))


def check(
    query: Tensor,
    tokens: StreamView,
    options: AttentionOptions,
    counted: Tensor | None = None,
    bound: float = WEIGHT_ERROR,
) -> None:
    got = measured.measure_received(query, tokens, options, counted, "auto")
    assert got is not None and got.dtype == torch.float32
    expected = received_by_hand(query, tokens, options, counted)
    assert got.shape == expected.shape
    assert relative_rms(expected, got) <= bound


@pytest.mark.parametrize(
    "rows", [(1, 1), (4, 1), (3, 5), (2, 8)], ids=lambda rows: f"group{rows[0]}-q{rows[1]}"
)
@pytest.mark.parametrize("name", CASES)
def test_every_backend(isa: str, name: str, rows: tuple[int, int]) -> None:
    group, count = rows
    query, key, _ = step(build_layer(CASES[name], 330), count, group)
    counted = torch.rand(2, count) < 0.7
    check(query, key.tokens, AttentionOptions(is_causal=count > 1))
    check(query, key.tokens, AttentionOptions(is_causal=count > 1), counted)


@pytest.mark.parametrize("name", ["int8-default", "int4-default", "kivi-default", "float8-default"])
def test_half_precision(isa: str, name: str) -> None:
    for dtype, bound in ((torch.bfloat16, BFLOAT16_ERROR), (torch.float16, WEIGHT_ERROR)):
        query, key, _ = step(build_layer(CASES[name], 200, dtype=dtype), 7, 4)
        check(query, key.tokens, AttentionOptions(is_causal=True), bound=bound)


@pytest.mark.parametrize("options", LOGIT_OPTIONS, ids=str)
@pytest.mark.parametrize("count", [1, 6])
def test_what_changes_logits(isa: str, count: int, options: dict[str, Any]) -> None:
    for name in ("int4-sinks", "kivi-default"):
        query, key, _ = step(build_layer(CASES[name], 330), count, 4)
        check(query, key.tokens, attention_options(options, count, key.tokens.length))


@pytest.mark.parametrize("count", [1, 6])
def test_masks(isa: str, count: int) -> None:
    query, key, _ = step(build_layer(CASES["int4-default"], 330), count, 4)
    for mask in masks(2, 8, count, key.tokens.length).values():
        check(query, key.tokens, AttentionOptions(mask=mask))
        check(query, key.tokens, AttentionOptions(mask=mask, sink_logits=torch.randn(8)))


@pytest.mark.parametrize("head_dim", [16, 40, 80, 96, 256, 320])
def test_head_sizes(isa: str, head_dim: int) -> None:
    for name in ("int8-default", "kivi-3bit"):
        query, key, _ = step(build_layer(CASES[name], 200, head_dim=head_dim), 3, 2)
        check(query, key.tokens, AttentionOptions(is_causal=True))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["int4-default", "kivi-2bit-block", "kvquant-default"])
def test_many_queries_and_threads(isa: str, name: str, threads: int, request: pytest.FixtureRequest) -> None:
    if isa == "portable":
        pytest.skip("many queries are left to torch")
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))
    torch.set_num_threads(threads)
    for batch_size, kv_heads in ((1, 1), (2, 3)):  # ranges of slots, or heads, for threads
        layer = build_layer(CASES[name], 900, batch_size=batch_size, kv_heads=kv_heads)
        query, key, _ = step(layer, 150, 4)
        counted = torch.rand(batch_size, 150) < 0.8
        padding = (torch.arange(key.tokens.length) >= 70)[None, None, None]
        for options in (
            AttentionOptions(is_causal=True),
            AttentionOptions(is_causal=True, sliding_window=200),
            AttentionOptions(
                is_causal=True, mask=padding, sink_logits=torch.randn(batch_size, 4 * kv_heads, 150)
            ),
        ):
            check(query, key.tokens, options, counted)


@pytest.mark.parametrize("sinks", [True, "of queries"])
def test_slopes_and_sinks_of_many_queries_that_see_later_ones(isa: str, sinks: bool | str) -> None:
    if isa == "portable":
        pytest.skip("many queries are left to torch")
    query, key, _ = step(build_layer(CASES["int4-default"], 330), 150, 4)
    options = attention_options({"sink_logits": sinks, "alibi_slopes": True}, 150, key.tokens.length)
    check(query, key.tokens, replace(options, is_causal=False))


def test_what_is_exact(isa: str) -> None:
    """Nothing is packed yet: many rows of exact tokens, which kernels read otherwise than a few."""
    for dtype, bound in ((torch.float32, WEIGHT_ERROR), (torch.bfloat16, BFLOAT16_ERROR)):
        for count in (1, 8):
            layer = build_layer(CASES["int8-default"], 1, dtype=dtype)
            query, key, _ = step(layer, count, 6)
            new = torch.randn(2, 2, 300, 64).to(dtype)
            tokens = replace(key.tokens, packed_length=0, segments=(new, *key.tokens.segments))
            check(query, tokens, AttentionOptions(is_causal=True), bound=bound)


@pytest.mark.parametrize("count", [1, 63, 64, 100])
@pytest.mark.parametrize("name", ["int8-default", "kivi-default", "int4-sinks"])
def test_without_the_oldest(isa: str, name: str, count: int) -> None:
    query, key, _ = step(build_layer(CASES[name], 333), 3, 2)
    tokens = key.tokens.without_oldest(count)
    assert tokens.first == count
    for options in ({}, {"sliding_window": 250}, {"sliding_window": 40}):
        check(query, tokens, AttentionOptions(is_causal=True, **options))


def test_sinks_with_padding(isa: str) -> None:
    for name in ("int4-sinks", "kivi-sinks"):
        query, key, _ = step(build_layer(CASES[name], 200, padding=torch.tensor([66, 0])), 2, 4)
        side = describe(key.tokens)
        assert side is not None and first_sinks(key.tokens, side) is not None
        real = torch.arange(202) >= torch.tensor([66, 0])[:, None]
        check(query, key.tokens, AttentionOptions(is_causal=True, mask=real[:, None, None]))


def test_logits_of_long_texts_are_few(isa: str) -> None:
    """Tasks have fewer rows, and queries come in more calls, the longer a text is."""
    query, key, _ = step(
        build_layer(CASES["int8-default"], 70_000, batch_size=1, kv_heads=1, head_dim=16), 9, 10
    )
    assert measured._pass_length(70_000) == 59 and measured._pass_length(1 << 20) == 8
    if isa != "portable":
        check(query, key.tokens, AttentionOptions(is_causal=True))


def test_queries_that_see_nothing_or_are_no_numbers_give_nothing(isa: str) -> None:
    query, key, _ = step(build_layer(CASES["int4-default"], 200), 3, 2)
    mask = torch.ones(2, 1, 3, 203, dtype=torch.bool)
    mask[0, :, 1] = False
    query[1, 2, 0] = torch.nan  # of the second kv head
    got = measured.measure_received(query, key.tokens, AttentionOptions(mask=mask), None, "auto")
    assert got is not None
    torch.testing.assert_close(got.sum(-1), torch.tensor([[4.0, 4.0], [6.0, 5.0]]))
    hidden = AttentionOptions(mask=torch.zeros(2, 1, 3, 203, dtype=torch.bool), sink_logits=torch.zeros(4))
    nothing = measured.measure_received(query, key.tokens, hidden, None, "auto")
    assert nothing is not None and bool((nothing == 0).all())


def test_hidden_slots_may_hold_anything(isa: str) -> None:
    for bad in (torch.nan, torch.inf):
        query, key, _ = step(build_layer(CASES["int4-default"], 200), 3, 2)
        key.tokens.segments[-1][:, :, -1] = bad
        mask = torch.ones(1, 1, 3, 203, dtype=torch.bool)
        mask[..., -1] = False
        got = measured.measure_received(query, key.tokens, AttentionOptions(mask=mask), None, "auto")
        assert got is not None and bool((got[..., -1] == 0).all())
        torch.testing.assert_close(got.sum(-1), torch.full((2, 2), 6.0))


# --- the strongest


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("count", [7, 150])
def test_strongest(isa: str, count: int, has_sinks: bool, softcap: float | None) -> None:
    if isa == "portable" and count > 8:
        pytest.skip("many queries are left to torch")
    query, keys = 3 * torch.randn(2, 6, count, 24), torch.randn(2, 2, count + 90, 24)
    visible = torch.rand(2, count + 90) < 0.8
    visible[:, 90:] = True
    counted = torch.rand(2, count) < 0.7
    sinks = torch.linspace(-1, 2, 6) if has_sinks else None
    options = AttentionOptions(scaling=0.3, softcap=softcap, sink_logits=sinks, mask=torch.zeros(1).bool())
    got = measured.measure_strongest(query, keys, visible, options, counted, "auto")
    shown = replace(options, is_causal=True, mask=visible[:, None, None])
    weights = weights_by_hand(query.double(), keys.double(), shown) * counted[:, None, :, None]
    expected = weights.unflatten(1, (2, 3)).amax((2, 3))
    assert got is not None and expected.max() > 0.1
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        got, strongest_attention(query, keys, visible, options, counted, kernel="torch")
    )


# --- the operator


def arguments(tokens: StreamView) -> tuple[Tensor, Side]:
    side = describe(tokens)
    assert side is not None
    return tokens.stream.records.data, side


@pytest.mark.parametrize("is_strongest", [False, True])
@pytest.mark.parametrize("name", ["kivi-default", "int4-sinks", "kvquant-default", "int8-default"])
def test_default_of_the_operator(name: str, is_strongest: bool) -> None:
    query, key, _ = step(build_layer(CASES[name], 200), 5, 3)
    records, side = arguments(key.tokens)
    counted = torch.rand(2, 5) < 0.7
    bias = torch.randn(2, 1, 1, 205).masked_fill(torch.rand(205) < 0.2, -torch.inf)
    for start, added, slopes in ((0, None, torch.rand(6)), (70, bias, None)):
        changing = (0.2, added, True, 150, 3.0, torch.randn(2, 6, 5), slopes, counted)
        plain = DEFAULTS["measure_attention"][0](
            query,
            records,
            side.segments,
            side.extras,
            None,
            side.layout.integers(),
            start,
            *changing,
            is_strongest,
        )
        names = (
            "scaling",
            "bias",
            "is_causal",
            "window",
            "softcap",
            "sink_logits",
            "alibi_slopes",
            "counted",
        )
        native = measure_attention(
            query,
            records,
            side,
            start=start,
            is_strongest=is_strongest,
            **dict(zip(names, changing, strict=True)),
        )
        assert plain.dtype == native.dtype and relative_rms(plain, native) <= WEIGHT_ERROR


@pytest.mark.no_poison
def test_opcheck() -> None:
    query, key, _ = step(build_layer(CASES["kivi-default"], 200), 2, 4)
    records, side = arguments(key.tokens)
    where = (records, side.contiguous_rows(), side.extras, None, side.layout.integers(), 0)
    operator = torch.ops.kvcache_plugins.measure_attention.default
    torch.library.opcheck(operator, (query, *where, 0.1, None, True, 0, 0.0, None, None, None, False))


def test_what_is_refused() -> None:
    query, key, _ = step(build_layer(CASES["int8-default"], 200), 1, 4)
    records, side = arguments(key.tokens)
    for message, given, options in (
        ("heads of query: expected a multiple of 2, got 3", query[:, :3], {}),
        ("tokens of query: expected 1 to 64, got 65", query.expand(-1, -1, 65, -1), {}),
        ("shape of query", query[..., :32], {}),
        ("start of query: expected a slot before 201, got 201", query, {"start": 201}),
        ("start of query: expected a slot from 0 on, got -1", query, {"start": -1, "window": 5}),
        ("dtype of query", query.double(), {}),
        ("shape of counted", query, {"counted": torch.ones(2, 2, dtype=torch.bool)}),
        ("dtype of counted: expected contiguous bool", query, {"counted": torch.ones(2, 1)}),
        ("shape of bias", query, {"bias": torch.zeros(2, 1, 1, 200)}),
        ("shape of sink_logits", query, {"sink_logits": torch.zeros(7)}),
    ):
        with pytest.raises(ValueError, match=f"Invalid {message}"):
            measure_attention(given, records, side, scaling=1.0, **options)


# --- who is asked


def test_what_kernels_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, _ = step(build_layer(CASES["int4-default"], 200), 9, 2)
    causal = AttentionOptions(is_causal=True)
    assert measured.measure_received(query, key.tokens, causal, None, "torch") is None
    assert measured.measure_received(query.double(), key.tokens, causal, None, "auto") is None
    with monkeypatch.context() as changed:
        changed.setattr(measured.loader, "try_load", lambda: False)
        assert measured.measure_received(query, key.tokens, causal, None, "auto") is None
    with monkeypatch.context() as changed:
        changed.setenv("KVCACHE_CPU_ISA", "portable")
        assert measured.measure_received(query, key.tokens, causal, None, "auto") is None
        few = measured.measure_received(query[:, :, :8], key.tokens, causal, None, "auto")
        assert few is not None


def test_many_queries_with_a_mask_of_their_own_are_left_to_torch(isa: str) -> None:
    query, key, _ = step(build_layer(CASES["int4-default"], 200), 80, 2)
    mask = torch.rand(2, 1, 80, 280) < 0.7
    options = AttentionOptions(mask=mask)
    assert measured.measure_received(query, key.tokens, options, None, "auto") is None
    got = received_attention(query, key.tokens, options)
    assert relative_rms(received_by_hand(query, key.tokens, options), got) <= WEIGHT_ERROR


def test_kernels_and_torch_agree(isa: str) -> None:
    query, key, _ = step(build_layer(CASES["int4-default"], 200), 8, 2)
    options = AttentionOptions(is_causal=True)
    found = [received_attention(query, key.tokens, options, kernel=kernel) for kernel in ("auto", "torch")]
    assert not torch.equal(*found)
    assert relative_rms(found[1], found[0]) <= WEIGHT_ERROR
