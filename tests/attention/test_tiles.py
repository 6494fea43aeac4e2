"""Attention of many queries over decoded tiles: against the fp64 oracle, and what it reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvcache_plugins.attention import decoded, native, passes, tiles
from kvcache_plugins.attention.native import attend_handles
from kvcache_plugins.attention.reference import AttentionOptions, attend
from kvcache_plugins.attention.tiles import Visibility, can_attend_tiles
from kvcache_plugins.kernels import loader
from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.testing.comparison import relative_rms
from tests.kernels.decode_cases import CASES, build_layer, library, step
from tests.reference.attention import naive_attention

__all__ = ["library"]  # a fixture

PADS = torch.tensor([70, 3])


@pytest.fixture(params=["large", "small", "passes"], autouse=True)
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs with one tile, with tiles and parts of 16, and with passes of 16 queries."""
    monkeypatch.setattr(
        native, "has_fast_passes", lambda dtype: request.param == "passes" and dtype != torch.float16
    )
    monkeypatch.setattr(passes, "PASS_QUERIES", 16)
    if request.param == "small":
        monkeypatch.setitem(tiles._TILE_VALUES, "cpu", 1)
        monkeypatch.setattr(tiles, "_PART", 16)


def check(query: Tensor, key: KVHandle, value: KVHandle, bound: float = 1e-5, **options: Any) -> Tensor:
    """Compare with the oracle over what the handles hold, in fp64."""
    got = attend_handles(query, key, value, AttentionOptions(**options))
    assert key.layer.kernel == "cpu"
    assert got.dtype == query.dtype and torch.isfinite(got).all()
    dense = (handle.tokens.dense(torch.float32).double() for handle in (key, value))
    renamed = {"sinks" if name == "sink_logits" else name: option for name, option in options.items()}
    expected = naive_attention(query.double(), *dense, **renamed)
    assert got.shape == expected.shape
    assert relative_rms(expected, got) <= bound
    return got


# -- codecs and shapes


@pytest.mark.parametrize("name", CASES)
def test_every_backend(name: str) -> None:
    check(*step(build_layer(CASES[name], 250), 21, 2), is_causal=True)


@pytest.mark.parametrize("query_length", [9, 16, 33, 100])
@pytest.mark.parametrize("group", [1, 3, 4])
def test_query_lengths_and_groups(query_length: int, group: int) -> None:
    for name in ("kivi-default", "int8-default"):
        arguments = step(build_layer(CASES[name], 200), query_length, group)
        check(*arguments, is_causal=True)
        check(*arguments, scaling=0.3)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(192, 128), (64, 96), (80, 80), (512, 512), (512, 64)])
def test_head_sizes(key_dim: int, value_dim: int) -> None:
    layer = build_layer(CASES["int8-default"], 150, head_dim=key_dim, value_dim=value_dim)
    check(*step(layer, 20, 2), is_causal=True)


def test_queries_as_models_make_them() -> None:
    # the transpose of (B, q, Hq, D)
    query, key, value = step(build_layer(CASES["kivi-default"], 200), 20, 2)
    transposed = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert not transposed.is_contiguous()
    assert torch.equal(
        check(transposed, key, value, is_causal=True), check(query, key, value, is_causal=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", [1, 3])
def test_queries_whose_channels_lie_apart(group: int, dtype: torch.dtype) -> None:
    # 513: the last part is one query, whose heads are rows of one view whatever their strides
    for query_length in (20, 513):
        query, *handles = step(build_layer(CASES["int8-default"], 200, dtype=dtype), query_length, group)
        apart = query.mT.contiguous().mT
        assert apart.stride(3) == query_length
        options = AttentionOptions(is_causal=True)
        expected = attend_handles(query, *handles, options)
        assert torch.equal(attend_handles(apart, *handles, options), expected)


def test_sinks_kept_exact_with_padding() -> None:
    for name in ("int4-sinks", "kivi-sinks"):
        layer = build_layer(CASES[name], 200, padding=PADS)
        mask = (torch.arange(220) >= PADS[:, None])[:, None, None]
        check(*step(layer, 20, 2), mask=mask, is_causal=True)


# -- what may hide a slot


def _masks(query_length: int, length: int) -> dict[str, Tensor]:
    padding = (torch.arange(length) >= PADS[:, None])[:, None, None]
    causal = torch.ones(query_length, length, dtype=torch.bool).tril(length - query_length)
    random = torch.rand(2, 1, query_length, length) > 0.5
    return {
        "padding": padding,
        "padding-causal": padding & causal,
        "causal": causal,
        "random": random,
        "per head": torch.rand(1, 6, 1, length) > 0.5,
        "full": torch.rand(2, 6, query_length, length) > 0.5,
        "additive": torch.randn(2, 1, query_length, length),
        "additive-hiding": torch.zeros(1).masked_fill(~(padding & causal), -torch.inf),
        "additive-per-head": torch.randn(1, 6, query_length, length).masked_fill(~random[:1], -torch.inf),
        "wide": F.pad(padding & causal, (0, 9), value=True),
        "column": torch.ones(2, 1, 1, 1, dtype=torch.bool),
        "additive-double": torch.randn(2, 1, query_length, length, dtype=torch.float64),
    }


@pytest.mark.parametrize("name", _masks(20, 220))
def test_masks(name: str) -> None:
    query, key, value = step(build_layer({"backend": "kivi", "residual_length": 32}, 200), 20, 3)
    mask = _masks(20, 220)[name]
    got = attend_handles(query, key, value, AttentionOptions(mask=mask))
    assert key.layer.kernel == "cpu"
    expected = attend(query.double(), key.tokens, value.tokens, AttentionOptions(mask=mask))
    assert relative_rms(expected, got) <= 1e-5
    if name != "wide":  # the oracle takes masks of the length only
        check(query, key, value, mask=mask)


@pytest.mark.parametrize("window", [1, 15, 40, 64, 1000])
@pytest.mark.parametrize("padded", [False, True])
def test_windows(window: int, padded: bool) -> None:
    query, key, value = step(build_layer(CASES["kivi-no-window"], 200), 37, 2)
    mask = (torch.arange(237) >= torch.tensor([[0], [10]]))[:, None, None] if padded else None
    check(query, key, value, is_causal=True, sliding_window=window, mask=mask)


@pytest.mark.parametrize("shape", [(6,), (2, 6, 20)], ids=["of-heads", "of-queries"])
@pytest.mark.parametrize("size", [0.0, 3.0, 30.0, -1e4])
def test_sink_logits(size: float, shape: tuple[int, ...]) -> None:
    arguments = step(build_layer(CASES["kivi-default"], 200), 20, 3)
    check(*arguments, is_causal=True, sink_logits=torch.randn(shape) + size)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("additive", [False, True])
def test_a_query_that_sees_nothing_gets_zeros(additive: bool, with_sinks: bool) -> None:
    query, key, value = step(build_layer(CASES["int8-default"], 200), 20, 3)
    visible = torch.ones(2, 1, 20, 220, dtype=torch.bool)
    visible[0, :, 7], visible[1, :, :, :50] = False, False
    mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf) if additive else visible
    sinks = torch.randn(6) if with_sinks else None
    options = AttentionOptions(mask=mask, sink_logits=sinks)
    got = attend_handles(query, key, value, options)
    assert key.layer.kernel == "cpu"
    assert (got[0, :, 7] == 0).all() and (got[0, :, 6] != 0).any()
    assert relative_rms(attend(query.double(), key.tokens, value.tokens, options), got) <= 1e-5


def test_what_is_not_a_number_stays_visible_where_it_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "has_fast_passes", lambda dtype: False)
    query, key, value = step(build_layer(CASES["int8-default"], 200), 20, 2)
    query[0, 1, 5] = torch.nan
    got = attend_handles(query, key, value, AttentionOptions(is_causal=True))
    is_nan = torch.zeros(got.shape, dtype=torch.bool)
    is_nan[0, 1, 5] = True
    assert torch.equal(got.isnan(), is_nan)


# -- precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["kivi-default", "int8-default", "float8-default"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    layer = build_layer(CASES[name], 700, dtype=dtype, head_dim=128)
    query, key, value = step(layer, 50, 4)
    dense = [handle.tokens.dense(torch.float32) for handle in (key, value)]
    expected = naive_attention(query.double(), *(tensor.double() for tensor in dense), is_causal=True)
    mask = torch.ones(50, 750, dtype=torch.bool).tril(700)
    plain = F.scaled_dot_product_attention(
        query, *(tensor.to(dtype) for tensor in dense), attn_mask=mask, enable_gqa=True
    )
    check(query, key, value, 2 * relative_rms(expected, plain), is_causal=True)


# -- what is read, and who serves


def test_slots_are_decoded_once_in_bounded_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "has_fast_passes", lambda dtype: False)
    reads: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    masked: list[bool] = []
    decode, product = decoded.decode_tokens, tiles.attend_tile

    def watch_decode(*arguments: Any, **options: Any) -> Tensor:
        reads[options["is_key"]].append((options["start"], options["stop"]))
        return decode(*arguments, **options)

    def watch_product(*arguments: Any) -> tuple[Tensor, Tensor]:
        masked.append(arguments[3] is not None)
        return product(*arguments)

    monkeypatch.setattr(decoded, "decode_tokens", watch_decode)
    monkeypatch.setattr(tiles, "attend_tile", watch_product)
    monkeypatch.setitem(tiles._TILE_VALUES, "cpu", 2 * 2 * 64 * 64)
    monkeypatch.setattr(tiles, "_PART", 16)
    query, key, value = step(build_layer(CASES["int8-default"], 1000), 32, 2)
    causal = torch.ones(32, 1032, dtype=torch.bool).tril(1000)
    for mask, is_causal in ((None, True), (causal, False)):
        attend_handles(query, key, value, AttentionOptions(mask=mask, is_causal=is_causal))
        for side in reads.values():  # the new tokens are not decoded at all
            assert side == [(start, min(start + 64, 1000)) for start in range(0, 1000, 64)]
            side.clear()
        # whole past without a mask; of the two by two squares of new tokens, those on the diagonal with one
        assert masked == [False] * 16 + [True, False, True]
        masked.clear()
    attend_handles(query, key, value, AttentionOptions(is_causal=True, sliding_window=100))
    assert reads[True][0][0] == 1032 - 32 - 100 + 1 and reads[True] == reads[False]


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 5.0},
        {"alibi_slopes": 2.0 ** -torch.arange(1.0, 5.0)},
        {"position_bias": torch.randn(1, 4, 9, 209)},
    ],
    ids=["softcap", "alibi", "position bias"],
)
def test_what_changes_logits_is_not_for_tiles(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = step(build_layer(CASES["int8-default"], 200), 9, 2)
    given = AttentionOptions(is_causal=True, **options)
    monkeypatch.setattr(native, "has_fast_passes", lambda dtype: False)
    got = attend_handles(query, key, value, given)
    assert key.layer.kernel == "torch"
    assert torch.equal(got, attend(query, key.tokens, value.tokens, given))
    monkeypatch.setattr(native, "has_fast_passes", lambda dtype: True)
    passes = attend_handles(query, key, value, given)
    served = "torch" if options.get("position_bias") is not None else "cpu"
    assert key.layer.kernel == served
    assert relative_rms(attend(query.double(), key.tokens, value.tokens, given), passes) <= 1e-5


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, torch.finfo(torch.float16).min])
def test_rows_hidden_by_finite_numbers(lowest: float) -> None:
    """A pad that may attend to nothing has uniform weights under such a mask; others do not notice."""
    query, key, value = step(build_layer(CASES["int8-default"], 200), 20, 2)
    mask = torch.zeros(2, 1, 20, 220)
    mask[1, :, :, :50] = lowest
    check(query, key, value, mask=mask)
    assert can_attend_tiles(AttentionOptions(mask=mask), 220, 20)
    mask[0, :, 3] = lowest
    assert not can_attend_tiles(AttentionOptions(mask=mask), 220, 20)
    mask[0, :, 3, 204:] = 0.0  # which that query does not see either, if attention is causal
    assert can_attend_tiles(AttentionOptions(mask=mask), 220, 20)
    assert not can_attend_tiles(AttentionOptions(mask=mask, is_causal=True), 220, 20)
    mask[0, :, 3] = lowest
    got = attend_handles(query, key, value, AttentionOptions(mask=mask))
    assert key.layer.kernel == "torch"
    expected = attend(query.double(), key.tokens, value.tokens, AttentionOptions(mask=mask))
    assert relative_rms(expected[:, :, 4:], got[:, :, 4:]) <= 1e-5


def test_kernel_torch_is_the_reference() -> None:
    layer = build_layer(CASES["int8-default"] | {"kernel": "torch"}, 200)
    query, key, value = step(layer, 20, 2)
    options = AttentionOptions(is_causal=True)
    assert torch.equal(
        attend_handles(query, key, value, options), attend(query, key.tokens, value.tokens, options)
    )
    assert layer.kernel == "torch"


# -- visibility


@pytest.mark.parametrize("window", [None, 1, 7, 14, 30])  # 14: windows that begin where a part does
@pytest.mark.parametrize("masked", [False, True])
def test_visibility_of_parts(window: int | None, masked: bool) -> None:
    length, query_length = 60, 25
    slots = torch.arange(length)
    own = torch.arange(length - query_length, length)[:, None]
    visible = (slots <= own) & (slots > own - (window or length))
    mask = torch.rand(1, 1, query_length, length) > 0.3 if masked else None
    if mask is not None:
        mask[..., 10:20], mask[..., 30:40] = True, False
        visible = visible & mask[0, 0]
    options = AttentionOptions(is_causal=True, sliding_window=window, mask=mask)
    visibility = Visibility.of(options, length, query_length, torch.device("cpu"))
    assert not visible[:, : visibility.first_slot].any()
    kinds = set()
    for start in range(0, length, 5):
        for low in range(0, query_length, 5):
            seen = visibility.part((start, start + 5), (low, low + 5))
            expected = visible[low : low + 5, start : start + 5]
            if isinstance(seen, Tensor):
                assert torch.equal(seen.expand(1, 1, 5, 5)[0, 0], expected)
            else:
                assert bool(expected.all()) if seen else not bool(expected.any())
            kinds.add(type(seen) if isinstance(seen, Tensor) else seen)
    assert Tensor in kinds and False in kinds and (True in kinds or window in (1, 7, 14))


@pytest.mark.parametrize("window", [None, 14])
def test_visibility_of_an_additive_mask(window: int | None) -> None:
    length, query_length = 60, 25
    mask = torch.randn(1, 1, query_length, length)
    mask[..., 10:20], mask[..., 30:40] = 0.0, -torch.inf
    options = AttentionOptions(is_causal=True, sliding_window=window, mask=mask)
    visibility = Visibility.of(options, length, query_length, torch.device("cpu"))
    slots, own = torch.arange(length), torch.arange(length - query_length, length)[:, None]
    visible = (slots <= own) & (slots > own - (window or length))
    added = mask[0, 0].masked_fill(~visible, -torch.inf)
    for start in range(0, length, 5):
        for low in range(0, query_length, 5):
            seen = visibility.part((start, start + 5), (low, low + 5))
            expected = added[low : low + 5, start : start + 5]
            if isinstance(seen, Tensor):
                assert torch.equal(seen.expand(1, 1, 5, 5)[0, 0], expected)
            else:
                assert bool((expected == (0.0 if seen else -torch.inf)).all())


# -- which way many queries go


@pytest.mark.parametrize(
    ("isa", "dtype", "with_amx", "expected"),
    [
        ("avx512", torch.bfloat16, False, True),
        ("avx2", torch.float32, False, True),
        ("portable", torch.float32, False, False),
        ("avx512", torch.float16, False, False),
        ("avx512", torch.bfloat16, True, False),
        ("avx512", torch.float32, True, True),
    ],
)
def test_passes_where_they_are_faster_and_exact_enough(
    monkeypatch: pytest.MonkeyPatch, isa: str, dtype: torch.dtype, with_amx: bool, expected: bool
) -> None:
    monkeypatch.undo()  # what the fixture replaced is under test
    monkeypatch.setattr(loader, "instruction_set", lambda: isa)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: with_amx)
    assert native.has_fast_passes(dtype) is expected
