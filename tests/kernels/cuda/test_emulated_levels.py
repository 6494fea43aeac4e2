"""KVQuant on the tensor cores of an emulated GPU: levels, ranges per channel, positions, outliers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache_plugins.attention.description import describe, first_sinks
from kvcache_plugins.attention.reference import AttentionOptions
from kvcache_plugins.backends.kvquant import NORMAL_FLOAT
from kvcache_plugins.kernels.decoding import attend_dense, decode_side
from kvcache_plugins.kernels.layout import Side
from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.layers.windowed import with_window
from kvcache_plugins.models.facts import LayerFacts
from kvcache_plugins.registry import get_backend
from kvcache_plugins.testing.comparison import relative_rms
from tests.kernels.cuda import emulation
from tests.kernels.cuda.test_emulated_attention import check
from tests.kernels.decode_cases import build_layer, states, step

pytestmark = pytest.mark.usefixtures("emulated")
BOUND = 6e-4


def options(nbits: int = 3, fraction: float = 0.01, **others: Any) -> dict[str, Any]:
    given = {"nbits": nbits, "outlier_fraction": fraction, "residual_length": 32, "calibration": NORMAL_FLOAT}
    return {"backend": "kvquant"} | given | others


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("fraction", [0.0, 0.01])
@pytest.mark.parametrize("nbits", [2, 3, 4])
def test_codes_and_head_sizes(nbits: int, fraction: float, head_dim: int, dtype: torch.dtype) -> None:
    layer = build_layer(options(nbits, fraction), 400, head_dim=head_dim, dtype=dtype)
    check(*step(layer, 1, 4), AttentionOptions(), fast=True)


@pytest.mark.parametrize(("key_bits", "value_bits"), [(4, 2), (2, 3), (3, 4)])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(192, 128), (64, 96), (128, 256)])
def test_keys_and_values_differ(key_bits: int, value_bits: int, key_dim: int, value_dim: int) -> None:
    given = options(key_bits=key_bits, value_bits=value_bits)
    layer = build_layer(given, 400, head_dim=key_dim, value_dim=value_dim, dtype=torch.float16)
    check(*step(layer, 1, 4), AttentionOptions(), fast=True)


@pytest.mark.parametrize("group", [1, 4, 8, 16])
@pytest.mark.parametrize("query_length", [1, 3, 8])
def test_group_ratios(group: int, query_length: int) -> None:
    layer = build_layer(options(), 330, dtype=torch.float16)
    check(*step(layer, query_length, group), AttentionOptions(is_causal=query_length > 1), fast=True)


@pytest.mark.parametrize("length", [161, 1200])
def test_lengths(length: int) -> None:
    """The first packed blocks, and more than there are warps for."""
    layer = build_layer(options(), length, head_dim=128, dtype=torch.float16)
    check(*step(layer, 1, 4), AttentionOptions(), fast=True)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [32, 96])
@pytest.mark.parametrize("nbits", [2, 3, 4])
def test_rotary_pairs(nbits: int, rotary_dim: int, interleaved: bool) -> None:
    """Of a part of the channels, pairs of halves are not those whose codes lie together."""
    layer = build_layer(
        options(nbits), 330, head_dim=96, dtype=torch.float16, interleaved=interleaved, rotary_dim=rotary_dim
    )
    check(*step(layer, 1, 4), AttentionOptions(), fast=interleaved or rotary_dim == 96)


def test_keys_without_rotary_embedding() -> None:
    given = options()
    cache_class = get_backend(given.pop("backend"))
    layer = cache_class.layer_class(cache_class.config_class.from_dict(given), 0, LayerFacts(None))
    layer.update(*states(2, 2, 330, 64, None, torch.float16))
    check(*step(layer, 1, 4), AttentionOptions(), fast=True)


@pytest.mark.parametrize("pads", [(70, 3), (0, 129)])
@pytest.mark.parametrize("query_length", [1, 3])
def test_padding(pads: tuple[int, int], query_length: int) -> None:
    """Positions count from a row's first token, and so do its exact first tokens."""
    padding = torch.tensor(pads)
    layer = build_layer(options(sink_length=4), 400, padding=padding, dtype=torch.float16)
    query, key, value = step(layer, query_length, 4)
    slots = torch.arange(key.shape[2])
    mask = (slots >= padding[:, None])[:, None, None]
    check(query, key, value, AttentionOptions(mask=mask, is_causal=query_length > 1), fast=True)


@pytest.mark.parametrize("window", [0, 150, 498])
@pytest.mark.parametrize("pads", [(62, 0), (254, 126)])
@pytest.mark.parametrize("nbits", [2, 3, 4])
def test_sinks_beside_their_blocks(nbits: int, pads: tuple[int, int], window: int) -> None:
    """In one block, in two; what is packed in their place may be anything."""
    padding = torch.tensor(pads)
    layer = build_layer(
        options(nbits, sink_length=5), 500, head_dim=128, padding=padding, dtype=torch.bfloat16
    )
    query, key, value = step(layer, 1, 4)
    mask = (torch.arange(key.shape[2]) >= padding[:, None])[:, None, None]
    given = AttentionOptions(mask=mask, sliding_window=window or None)
    expected = check(query, key, value, given, fast=True)
    scales = describe(value.tokens).layout.scale_offset  # type: ignore[union-attr]
    for row, first in enumerate(pads):
        for slot in range(first, min(first + 5, key.tokens.packed_length)):
            record = layer.records.data[row, :, slot // 64]
            record[:, scales : scales + 256].view(torch.float16)[:, slot % 64 :: 64] = torch.inf
    assert torch.equal(emulation.attend(query, key, value, given), expected)


@pytest.mark.parametrize("given", ["nothing", "a mask", "a window"])
@pytest.mark.parametrize("head_dim", [128, 96])
@pytest.mark.parametrize("nbits", [2, 3, 4])
def test_a_window_has_left_some_sinks(nbits: int, head_dim: int, given: str) -> None:
    """Of one row the first two, so that its first sink would lie before slot 0."""
    plain = build_layer(options(nbits, sink_length=5), 0, head_dim=head_dim, dtype=torch.float16)
    layer = with_window(type(plain))(plain.config, 0, plain.facts)
    layer.window = 256
    layer.padding.set(torch.tensor([62, 0]))
    layer.update(*states(2, 2, 300, head_dim, None, torch.float16))
    for _ in range(19):
        layer.update(*states(2, 2, 1, head_dim, None, torch.float16))
    query, key, value = step(layer, 1, 4)
    first = first_sinks(key.tokens, describe(key.tokens), describe(value.tokens))
    assert first is not None and first[0] == -2 and first[1] > key.shape[2]
    mask = torch.ones(2, 1, 1, key.shape[2], dtype=torch.bool).index_fill(3, torch.tensor([0, 7]), False)
    window = {"sliding_window": 256} if given == "a window" else {}
    more = {"mask": mask} if given == "a mask" else {}
    check(query, key, value, AttentionOptions(**window, **more), fast=True, bound=BOUND)
    if given == "a mask":  # and what lies before the mask in memory is not read
        beside = torch.full((2, 1, 1, key.shape[2] + 8), 50.0)
        beside[..., 8:] = torch.zeros(()).masked_fill(~mask, -torch.inf)
        check(query, key, value, AttentionOptions(mask=beside[..., 8:]), fast=True, bound=BOUND)


@pytest.mark.parametrize("query_length", [1, 3])
@pytest.mark.parametrize(
    "given",
    [
        {"sliding_window": 100},
        {"softcap": 5.0},
        {"sink_logits": True, "alibi_slopes": True, "softcap": 20.0, "sliding_window": 250},
        {"position_bias": True},
    ],
    ids=lambda given: " ".join(given),
)
def test_options(given: dict[str, Any], query_length: int) -> None:
    layer = build_layer(options(), 400, dtype=torch.float16)
    query, key, value = step(layer, query_length, 4)
    made = {
        "sink_logits": torch.randn(8) + 2,
        "alibi_slopes": 2.0 ** -torch.arange(1.0, 9.0),
        "position_bias": torch.randn(1, 8, query_length, key.shape[2]),
    }
    given = {name: made.get(name, option) for name, option in given.items()}
    check(query, key, value, AttentionOptions(is_causal=query_length > 1, **given), fast=True)


# -- what only tensors show: a side that is changed after it was described


def attend(
    query: Tensor, key: KVHandle, keys: Side, values: Side, sink_start: Tensor | None = None
) -> Tensor:
    """What the emulated kernel gives, on its tensor cores."""
    before = emulation.products()
    sides = keys.contiguous_rows(), values.contiguous_rows(), keys.extras, values.extras
    got: Tensor = torch.ops.kvcache_emulated.decode_attention(
        query, key.tokens.stream.records.data, *sides, sink_start,
        keys.layout.integers(), values.layout.integers(),
        query.shape[3] ** -0.5, None, False, 0, 0.0, None, None,
    )  # fmt: skip
    assert emulation.products() > before
    return got


def error(query: Tensor, key: KVHandle, keys: Side, values: Side) -> float:
    """How far that is from what it should be."""
    records = key.tokens.stream.records.data
    decoded = (
        decode_side(side, records, is_key=is_key, sink_start=None)
        for side, is_key in ((keys, True), (values, False))
    )
    scaling = query.shape[3] ** -0.5
    expected = attend_dense(query.float(), *decoded, scaling, None, False, 0, 0.0, None, None)
    return float(relative_rms(expected, attend(query, key, keys, values)))


def case(fraction: float, head_dim: int = 128) -> tuple[Tensor, KVHandle, Side, Side]:
    layer = build_layer(options(fraction=fraction), 400, head_dim=head_dim, dtype=torch.float16)
    query, key, value = step(layer, 1, 4)
    sides = describe(key.tokens), describe(value.tokens)
    assert sides[0] is not None and sides[1] is not None
    return query, key, sides[0], sides[1]


@pytest.mark.parametrize("position", [0, 1_000_003, -70, 2**31])
def test_positions_of_long_contexts(position: int) -> None:
    query, key, keys, values = case(0.01)
    keys = replace(keys, positions=torch.tensor([position, position // 3]))
    assert error(query, key, keys, values) <= BOUND


def test_sinks_of_a_row_that_has_none() -> None:
    """They begin behind everything that is packed."""
    query, key, keys, values = case(0.01)
    given = [replace(side, sinks=torch.full((2, 2, 3, 128), torch.nan).half()) for side in (keys, values)]
    without = [replace(side, sinks=None) for side in (keys, values)]
    for start in (keys.layout.packed_length, 2**40):
        got = attend(query, key, *given, torch.full((2,), start))
        assert torch.equal(got, attend(query, key, *without))


def test_lists_longer_than_registers_hold() -> None:
    """A tenth of all numbers; among them both channels of many a pair."""
    query, key, keys, values = case(0.1)
    assert keys.outlier_starts is not None and int(keys.outlier_starts.diff().max()) > 512
    assert error(query, key, keys, values) <= BOUND


@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_small_and_large_outliers(scale: float) -> None:
    query, key, keys, values = case(0.01)
    assert keys.outliers is not None and values.outliers is not None

    def scaled(entries: Tensor, factor: float) -> Tensor:
        numbers = (entries & 0xFFFF).to(torch.int16).view(torch.float16) * factor
        return entries & ~0xFFFF | numbers.half().view(torch.int16).int() & 0xFFFF

    keys = replace(keys, outliers=scaled(keys.outliers, min(scale, 1.0)))
    values = replace(values, outliers=scaled(values.outliers, scale))
    assert error(query, key, keys, values) <= 1e-3  # a few tokens are all of the output


def test_lists_that_are_no_lists() -> None:
    """What lies outside of a list, a block or a head is neither read nor written."""
    query, key, keys, values = case(0.01, head_dim=80)
    assert keys.outliers is not None and keys.outlier_starts is not None and values.outlier_starts is not None
    nothing = torch.zeros_like(keys.outlier_starts)
    without = replace(keys, outlier_starts=nothing), replace(values, outlier_starts=nothing)
    expected = attend(query, key, *without)
    bad = nothing + torch.tensor([-5, 30000, 32000], dtype=torch.int16)
    got = attend(query, key, replace(keys, outlier_starts=bad), replace(values, outlier_starts=bad))
    assert torch.equal(got, expected)
    beyond = keys.outliers | 1 << 25 | 1 << 24  # channels from 768 on
    got = attend(query, key, replace(keys, outliers=beyond), without[1])
    assert torch.equal(got, expected)


def test_ranges_of_any_size() -> None:
    """A channel that never moves has next to no range, one with a bias is all offset."""
    query, key, keys, values = case(0.01)
    assert keys.channel_scale is not None and keys.channel_offset is not None
    scale, offset = keys.channel_scale.clone(), keys.channel_offset.clone()
    scale[..., ::7] = torch.finfo(torch.float16).tiny
    offset[..., ::11] += 20.0
    ranges = replace(keys, channel_scale=scale, channel_offset=offset)
    assert error(query, key, ranges, values) <= 2e-3  # logits of a hundred, of which 2^-11 is 0.05


def test_rows_do_not_spoil_each_other() -> None:
    query, key, keys, values = case(0.01)
    exact = attend(query, key, keys, values)
    query[0, 3, 0, 5] = torch.nan
    got = attend(query, key, keys, values)
    assert got[0, 3].isnan().all()
    spoilt = torch.zeros(got.shape[:2], dtype=torch.bool)
    spoilt[0, 3] = True
    assert torch.equal(got[~spoilt], exact[~spoilt])
