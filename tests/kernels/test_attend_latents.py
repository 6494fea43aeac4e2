"""Native attention over latents against fp64 attention over the decoded tokens, for every instruction set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kvcache_plugins.attention.description import describe
from kvcache_plugins.kernels.defaults import DEFAULTS
from kvcache_plugins.kernels.layout import Side
from kvcache_plugins.kernels.ops import attend_latents
from kvcache_plugins.layers.base import PackedLayer
from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.testing.comparison import relative_rms
from tests.kernels.decode_cases import CASES, FP32_ERROR, WIDE, build_layer, isa, library, step
from tests.reference.attention import naive_attention

__all__ = ["isa", "library"]  # fixtures

BF16_ERROR = 3e-3
SCALING = 0.05


class Held(NamedTuple):
    """What a layer holds, as the operator reads it, and decoded."""

    records: Tensor
    latents: Side
    rotated: Side
    sink_start: Tensor | None
    decoded: tuple[Tensor, Tensor]


def held_by(latents: KVHandle, rotated: KVHandle) -> Held:
    sides = describe(latents.tokens), describe(rotated.tokens)
    assert sides[0] is not None and sides[1] is not None
    stream = latents.tokens.stream
    has_sinks = sides[0].sinks is not None or sides[1].sinks is not None
    sink_start = stream.padding.lengths if has_sinks else None
    decoded = latents.tokens.dense(torch.float64), rotated.tokens.dense(torch.float64)
    return Held(stream.records.data, *sides, sink_start, decoded)


def layer_of(name: str, length: int, rank: int = 64, rotated_dim: int = 16, **options: Any) -> PackedLayer:
    return build_layer(CASES[name], length, kv_heads=1, head_dim=rank, value_dim=rotated_dim, **options)


def hold(name: str, length: int, query_length: int = 1, **options: Any) -> Held:
    """A layer after `query_length` more tokens."""
    return held_by(*step(layer_of(name, length, **options), query_length, 1)[1:])


def rows_for(held: Held, heads: int, query_length: int = 1) -> Tensor:
    width = held.latents.layout.head_dim + held.rotated.layout.head_dim
    return torch.randn(len(held.records), heads, query_length, width)


def truth(query: Tensor, held: Held, **options: Any) -> Tensor:
    latents, rotated = held.decoded
    renamed = {"bias": "mask", "window": "sliding_window", "sink_logits": "sinks"}
    options = {renamed.get(name, name): option for name, option in options.items()}
    keys = torch.cat((latents, rotated), dim=-1)
    return naive_attention(query, keys, latents, scaling=SCALING, **options)


def attend(query: Tensor, held: Held, is_bfloat16: bool = False, **options: Any) -> Tensor:
    return attend_latents(
        query,
        held.records,
        held.latents,
        held.rotated,
        scaling=SCALING,
        is_bfloat16=is_bfloat16,
        sink_start=held.sink_start,
        **options,
    )


def check(query: Tensor, held: Held, **options: Any) -> None:
    """Exactly, and as bf16 queries allow."""
    expected = truth(query, held, **options)
    for is_bfloat16, bound in ((False, FP32_ERROR), (True, BF16_ERROR)):
        got = attend(query, held, is_bfloat16, **options)
        assert got.dtype == torch.float32 and got.shape == expected.shape
        assert torch.isfinite(got).all()
        assert relative_rms(expected, got) <= bound


@pytest.mark.parametrize("name", CASES)
def test_every_backend(isa: str, name: str) -> None:
    held = hold(name, 330, 3)
    check(rows_for(held, 5, 3), held, is_causal=True)


@pytest.mark.parametrize("name", WIDE)
def test_as_many_channels_as_models_have(isa: str, name: str) -> None:
    held = hold(name, 200, rank=512, rotated_dim=64)
    check(rows_for(held, 16), held)


@pytest.mark.parametrize(("rank", "rotated_dim"), [(64, 80), (96, 16), (512, 80), (80, 512), (256, 32)])
@pytest.mark.parametrize("name", ["kivi-default", "int8-default", "int4-sinks"])
def test_channels(isa: str, name: str, rank: int, rotated_dim: int) -> None:
    held = hold(name, 150, 2, rank=rank, rotated_dim=rotated_dim)
    check(rows_for(held, 7, 2), held, is_causal=True)


@pytest.mark.parametrize(("rank", "rotated_dim"), [(33, 15), (40, 24), (1, 1), (511, 7)])
def test_channels_that_fill_no_vector(isa: str, rank: int, rotated_dim: int) -> None:
    held = hold("int8-default", 150, rank=rank, rotated_dim=rotated_dim)
    check(rows_for(held, 7), held)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 6, 7, 16, 31, 64, 127, 128, 129, 200])
def test_rows(isa: str, heads: int) -> None:
    held = hold("int8-default", 130)
    check(rows_for(held, heads), held)


@pytest.mark.parametrize(("heads", "query_length"), [(1, 64), (3, 64), (5, 33), (16, 9), (9, 15)])
def test_rows_of_several_tokens(isa: str, heads: int, query_length: int) -> None:
    held = hold("kivi-default", 200, query_length)
    check(rows_for(held, heads, query_length), held, is_causal=True)
    check(rows_for(held, heads, query_length), held, is_causal=True, window=40)


@pytest.mark.parametrize("length", [1, 2, 62, 63, 64, 126, 127, 128, 191, 193, 319, 320])
@pytest.mark.parametrize("name", ["int8-default", "kivi-no-window", "int4-sinks"])
def test_lengths_around_blocks(isa: str, name: str, length: int) -> None:
    held = hold(name, length)
    check(rows_for(held, 4), held)


def test_masks(isa: str) -> None:
    held = hold("kivi-default", 200, 3)
    query, length = rows_for(held, 5, 3), 203
    slots = torch.arange(length)
    padding = (slots >= torch.tensor([70, 3])[:, None])[:, None, None]
    hidden = {
        "padding": padding,
        "random": torch.rand(2, 1, 3, length) > 0.5,
        "per head": torch.rand(1, 5, 1, length) > 0.5,
        "per head and row": torch.rand(2, 5, 1, length) > 0.5,
        "full": torch.rand(2, 5, 3, length) > 0.5,
        "blocks": (slots // 64 % 2 == 1).expand(1, 1, 1, -1),
        "all but one head": (torch.arange(5) != 2)[None, :, None, None].expand(1, 5, 1, length),
        "everything": torch.zeros(1, 1, 1, length, dtype=torch.bool),
    }
    for visible in hidden.values():
        bias = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
        if bool(visible.any()):
            check(query, held, bias=bias)
            check(query, held, bias=bias + torch.randn(visible.shape), is_causal=True)
        else:
            assert not attend(query, held, bias=bias).any()
    lowest = torch.zeros(2, 1, 1, length).masked_fill(~padding, torch.finfo(torch.float32).min)
    check(query, held, bias=lowest)


def test_what_else_changes_logits(isa: str) -> None:
    held = hold("int8-default", 300, 4)
    query = rows_for(held, 6, 4)
    check(query, held, is_causal=True, softcap=3.0)
    check(query, held, is_causal=True, window=1)
    check(query, held, is_causal=True, window=100, softcap=20.0)
    check(query, held, is_causal=True, sink_logits=torch.randn(6))
    bias = torch.zeros(1, 1, 1, 304).fill_(-torch.inf)
    assert not attend(query, held, bias=bias, sink_logits=torch.randn(6)).any()


@pytest.mark.parametrize("name", ["int4-sinks", "kivi-sinks"])
def test_sinks_with_padding(isa: str, name: str) -> None:
    pads = torch.tensor([66, 0])
    held = hold(name, 200, 2, padding=pads)
    assert held.sink_start is not None
    visible = (torch.arange(202) >= pads[:, None])[:, None, None]
    bias = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    check(rows_for(held, 5, 2), held, bias=bias, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_exact_tokens_of_another_dtype(isa: str, dtype: torch.dtype) -> None:
    held = hold("kivi-sinks", 300, 2, dtype=dtype)
    check(rows_for(held, 5, 2), held, is_causal=True)


def test_nothing_is_packed(isa: str) -> None:
    latents, rotated = torch.randn(2, 1, 70, 64), torch.randn(2, 1, 70, 16)
    packed = hold("int8-default", 100)
    sides = [
        replace(side, layout=side.layout._replace(packed_length=0), segments=[exact])
        for side, exact in ((packed.latents, latents), (packed.rotated, rotated))
    ]
    held = Held(packed.records[:, :, :0], sides[0], sides[1], None, (latents.double(), rotated.double()))
    check(rows_for(held, 5), held)


@pytest.mark.parametrize("is_bfloat16", [False, True])
def test_threads_change_nothing_but_rounding(isa: str, is_bfloat16: bool) -> None:
    for heads, query_length in ((5, 2), (70, 3)):
        held = hold("kivi-default", 3000, query_length)
        query = rows_for(held, heads, query_length)
        for options in ({}, {"window": 1200}):
            one = attend(query, held, is_bfloat16, is_causal=True, **options)
            torch.set_num_threads(2)
            two = attend(query, held, is_bfloat16, is_causal=True, **options)
            torch.set_num_threads(1)
            assert relative_rms(one.double(), two) <= (BF16_ERROR if is_bfloat16 else FP32_ERROR)


# -- what is not a number


@pytest.mark.parametrize("is_bfloat16", [False, True])
@pytest.mark.parametrize("name", ["kivi-default", "kivi-no-window", "int8-default", "float8-default"])
@pytest.mark.parametrize("length", [65, 200, 300])
def test_unused_memory_is_not_read(isa: str, name: str, length: int, is_bfloat16: bool) -> None:
    """Records beyond the packed tokens, and metadata of unused slots in the last one, are NaN."""
    layer = layer_of(name, length)
    layer.records.ensure(1000)
    _, latents, rotated = step(layer, 1, 1)
    held = held_by(latents, rotated)
    for handle in (latents, rotated):
        stream, packed = handle.tokens.stream, handle.tokens.packed_length
        layer.records.codes(stream.side, -(-packed // 64), layer.records.num_blocks).fill_(0xFF)
        for field in stream.codec.metadata_names:
            rows = layer.records.metadata(stream.side, field, 0, layer.records.num_blocks)
            used, per_block = -(-packed // stream.codec.stored_granularity.tokens), rows.shape[3]
            rows[:, :, used // per_block + (used % per_block > 0) :] = torch.nan
            if used % per_block:
                rows[:, :, used // per_block, used % per_block :] = torch.nan
    query = rows_for(held, 7)
    bound = BF16_ERROR if is_bfloat16 else FP32_ERROR
    assert relative_rms(truth(query, held), attend(query, held, is_bfloat16)) <= bound


@pytest.mark.parametrize("is_bfloat16", [False, True])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_what_is_hidden_does_not_count(isa: str, number: float, is_bfloat16: bool) -> None:
    held = hold("kivi-default", 85, 3)
    query, length = rows_for(held, 4, 3), 88
    hidden = torch.zeros(2, 1, 3, length, dtype=torch.bool)
    hidden[:, :, :, length - 9] = True
    hidden[:, :, 0, length - 5] = True
    bias = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
    expected = truth(query, held, bias=bias)
    held.latents.segments[-1][:, :, -9] = number
    held.rotated.segments[-1][:, :, -9] = number
    held.latents.segments[-1][:, :, -5] = number
    got = attend(query, held, is_bfloat16, bias=bias)
    bound = BF16_ERROR if is_bfloat16 else FP32_ERROR
    assert relative_rms(expected[:, :, 0], got[:, :, 0]) <= bound
    assert not torch.isfinite(got[:, :, 1:]).any()


@pytest.mark.parametrize("is_bfloat16", [False, True])
def test_what_is_not_a_number_spoils_the_rows_that_see_it(isa: str, is_bfloat16: bool) -> None:
    held = hold("int8-default", 300, 2)
    query = rows_for(held, 9, 2)
    exact = attend(query, held, is_bfloat16, is_causal=True)
    query[0, 4, 1, 7] = torch.nan  # one query head and token
    got = attend(query, held, is_bfloat16, is_causal=True)
    spoilt = torch.zeros(got.shape[:3], dtype=torch.bool)
    spoilt[0, 4, 1] = True
    assert got[spoilt].isnan().all() and torch.equal(got[~spoilt], exact[~spoilt])
    held.rotated.segments[-1][1, 0, -1, 3] = torch.nan  # of the newest token, which only its own query sees
    got = attend(query, held, is_bfloat16, is_causal=True)
    assert got[1, :, 1].isnan().all() and torch.equal(got[1, :, 0], exact[1, :, 0])


# -- the op itself


def _arguments(name: str = "kivi-default", query_length: int = 2) -> dict[str, Any]:
    held = hold(name, 200, query_length)
    return {
        "query": rows_for(held, 5, query_length),
        "records": held.records,
        "latent_segments": held.latents.segments,
        "rotated_segments": held.rotated.segments,
        "latent_extras": held.latents.extras,
        "rotated_extras": held.rotated.extras,
        "sink_start": held.sink_start,
        "latent_layout": held.latents.layout.integers(),
        "rotated_layout": held.rotated.layout.integers(),
        "scaling": SCALING,
        "is_bfloat16": False,
        "bias": torch.randn(2, 1, query_length, 200 + query_length),
        "is_causal": True,
        "window": 150,
        "softcap": 9.0,
        "sink_logits": torch.randn(5),
    }


@pytest.mark.parametrize("name", CASES)
def test_default_of_the_op(name: str) -> None:
    """The plain-torch default says the same as the kernels."""
    arguments = _arguments(name)
    native = torch.ops.kvcache_plugins.attend_latents(*arguments.values())
    plain = DEFAULTS["attend_latents"][0](*arguments.values())
    assert plain.dtype == native.dtype == torch.float32 and plain.shape == native.shape
    assert relative_rms(plain.double(), native) <= FP32_ERROR


@pytest.mark.no_poison
def test_opcheck() -> None:
    torch.library.opcheck(
        torch.ops.kvcache_plugins.attend_latents.default,
        tuple(_arguments().values()),
        test_utils=("test_schema", "test_faketensor"),
    )


def _changed(layout: list[int], field: int, number: int) -> list[int]:
    return [number if i == field else known for i, known in enumerate(layout)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: {"query": a["query"].bfloat16()}, "Invalid dtype of query: expected float32"),
        (lambda a: {"query": a["query"][..., :-1]}, "Invalid shape of query"),
        (lambda a: {"query": a["query"][:1]}, "Invalid shape of query"),
        (lambda a: {"query": a["query"][0]}, "Invalid rank of query: expected 4, got 3"),
        (lambda a: {"query": a["query"].repeat(1, 1, 33, 1)}, "tokens of query: expected 1 to 64, got 66"),
        (lambda a: {"query": a["query"].mT.contiguous().mT}, "Invalid stride of the last dimension of query"),
        (lambda a: {"records": a["records"].int()}, "Invalid dtype of records: expected uint8, got Int"),
        (lambda a: {"records": a["records"].repeat(1, 2, 1, 1)}, "heads of records: expected 1, got 2"),
        (lambda a: {"records": a["records"][:, :, :1]}, "Invalid packed_length of latent_layout"),
        (lambda a: {"records": a["records"][..., :64].contiguous()}, "Invalid field offset of latent_layout"),
        (
            lambda a: {"latent_layout": _changed(a["latent_layout"], 3, 513)},
            "Invalid head_dim of latent_layout: expected 1 to 512, got 513",
        ),
        (lambda a: {"rotated_layout": a["rotated_layout"][:-1]}, "Invalid length of rotated_layout"),
        (lambda a: {"rotated_segments": []}, "Invalid length of values"),
        (
            lambda a: {"latent_segments": [x.double() for x in a["latent_segments"]]},
            "Invalid dtype of latent: expected float32, bfloat16 or float16, got Double",
        ),
        (lambda a: {"bias": torch.zeros(2, 1, 1, 7)}, "Invalid shape of bias"),
        (lambda a: {"bias": a["bias"].double()}, "Invalid bias of attend_latents"),
        (lambda a: {"sink_logits": torch.zeros(4)}, "Invalid shape of sink_logits"),
        (lambda a: {"sink_logits": torch.zeros(2, 5, 9)}, "Invalid shape of sink_logits"),
        (lambda a: {"sink_logits": torch.zeros(5, 2, 2).transpose(0, 1)}, "Invalid strides of sink_logits"),
        (lambda a: {"sink_logits": torch.zeros(5).double()}, "Invalid dtype of sink_logits"),
        (lambda a: {"sink_start": torch.zeros(3, dtype=torch.int64)}, "Invalid shape of sink_start"),
        (lambda a: {"sink_start": torch.zeros(2)}, "Invalid dtype of sink_start"),
    ],
)  # fmt: skip
def test_wrong_arguments(change: Any, said: str) -> None:
    given = _arguments()
    given |= change(given)
    with pytest.raises(ValueError, match=said):
        torch.ops.kvcache_plugins.attend_latents(*given.values())


def test_unknown_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = _arguments()
    monkeypatch.setenv("KVCACHE_CPU_ISA", "sse9")
    with pytest.raises(ValueError, match="KVCACHE_CPU_ISA must be one of avx512, avx2, portable, got sse9"):
        torch.ops.kvcache_plugins.attend_latents(*arguments.values())
