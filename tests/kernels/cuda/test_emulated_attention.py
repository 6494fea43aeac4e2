"""Decode attention by the CUDA kernels, on an emulated GPU, against the torch reference on the same codes.

fp32 queries take the general kernel, which must agree to fp32 rounding. bf16 and fp16 queries take the tensor
cores for whole packed blocks; with fp16 the output is fine enough to show a wrong digit of theirs, so most
tests use it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvcache_plugins.artifacts.scales import Scales, save_scales
from kvcache_plugins.attention.description import describe, first_sinks
from kvcache_plugins.attention.reference import AttentionOptions, attend
from kvcache_plugins.backends.kvquant import NORMAL_FLOAT
from kvcache_plugins.kernels.decoding import attend_dense, decode_side
from kvcache_plugins.kernels.layout import Side
from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.layers.windowed import with_window
from kvcache_plugins.testing.comparison import relative_rms
from tests.kernels.cuda import emulation
from tests.kernels.decode_cases import (
    CASES,
    FP32_ERROR,
    LOGIT_OPTIONS,
    WIDE,
    attention_options,
    build_layer,
    masks,
    states,
    step,
)

pytestmark = pytest.mark.usefixtures("emulated")
# fp16: queries and outputs have 11 bits, decoded keys and weights in between too
BOUNDS = {torch.float32: FP32_ERROR, torch.float16: 6e-4, torch.bfloat16: 2.5e-3}
# layouts that only the general kernel reads
GENERAL = ("int8-group",)


def check(
    query: Tensor,
    key: KVHandle,
    value: KVHandle,
    options: AttentionOptions,
    *,
    fast: bool | None = None,
    bound: float | None = None,
) -> Tensor:
    before = emulation.products()
    got = emulation.attend(query, key, value, options)
    assert fast is None or fast == (emulation.products() > before)
    expected = attend(query.double(), key.tokens, value.tokens, options)
    assert got.dtype == query.dtype and got.shape == expected.shape
    assert torch.isfinite(got).all()
    assert relative_rms(expected, got) <= (bound if bound is not None else BOUNDS[query.dtype])
    return got


# -- every codec


KNOWN: dict[str, dict[str, Any]] = {
    "int8": {"backend": "int8"},
    "float8": {"backend": "float8"},
    "int4": {"backend": "int4"},
    "kivi-4": {"backend": "kivi", "nbits": 4},
    "kivi-4-g64": {"backend": "kivi", "nbits": 4, "q_group_size": 64},
    "kivi-2": {"backend": "kivi", "nbits": 2},
    "kivi-4-block": {"backend": "kivi", "nbits": 4, "rope_mode": "block"},
    "kivi-4-g64-block": {"backend": "kivi", "nbits": 4, "q_group_size": 64, "rope_mode": "block"},
    "kivi-2-block": {"backend": "kivi", "nbits": 2, "rope_mode": "block"},
    "kvquant-2": {"backend": "kvquant", "nbits": 2, "calibration": NORMAL_FLOAT},
    "kvquant-3": {"backend": "kvquant", "nbits": 3, "calibration": NORMAL_FLOAT, "sink_length": 5},
    "kvquant-4": {"backend": "kvquant", "nbits": 4, "calibration": NORMAL_FLOAT, "sink_length": 0},
}
"""Of 128 channels, those that have kernels of their own (known_formats.h)."""


def attend_by_both(
    query: Tensor, key: KVHandle, value: KVHandle, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """By the kernel of a format, then by the one for all."""
    kernels()
    known = check(query, key, value, options)
    by_known = kernels()
    records = key.layer.records
    records.data = F.pad(records.data, (0, 128))  # records that are longer are no known ones
    of_all = check(query, key, value, options)
    by_all = kernels()
    if by_all[0] != "attend_general":  # as where the window is shorter than the exact tokens
        assert by_known == ["attend_known", "merge"] and by_all[0] in ("attend", "attend_levels")
    return known, of_all


def kernels() -> list[str]:
    """Those that have been launched, in order."""
    names = [re.search(r"(attend(?:_\w+)?|merge)_kernel", line) for line in emulation.launched()]
    return [name.group(1) for name in names if name is not None]


@pytest.mark.parametrize(("length", "dtype"), [(257, torch.float16), (500, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("name", KNOWN)
def test_a_kernel_of_a_format_gives_the_numbers_of_the_one_for_all(
    name: str, length: int, dtype: torch.dtype
) -> None:
    layer = build_layer(KNOWN[name], length, kv_heads=2, head_dim=128, dtype=dtype)
    for query_length in (1, 2):  # the second time one of the tokens is hidden from a query
        chosen = AttentionOptions(is_causal=query_length > 1)
        known, general = attend_by_both(*step(layer, query_length, 4), chosen)
        assert relative_rms(general.double(), known) <= BOUNDS[dtype]
        layer.records.data = layer.records.data[..., :-128].contiguous()


def test_every_format_has_a_kernel_of_its_own() -> None:
    """All in one, of which each is launched wherever this runs."""
    for options in KNOWN.values():
        layer = build_layer(options, 320, batch_size=1, kv_heads=1, head_dim=128, dtype=torch.bfloat16)
        attend_by_both(*step(layer, 1, 4), AttentionOptions())


@pytest.mark.parametrize("options", LOGIT_OPTIONS, ids=str)
def test_a_kernel_of_a_format_takes_every_option(options: dict[str, Any]) -> None:
    # so long that a warp has summed something before it comes to what changes
    layer = build_layer(KNOWN["kivi-2"], 1200, kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    query, key, value = step(layer, 2, 4)
    known, general = attend_by_both(query, key, value, attention_options(options, 2, key.shape[2]))
    assert relative_rms(general.double(), known) <= BOUNDS[torch.bfloat16]


@pytest.mark.parametrize(("head_dim", "most"), [(128, 64), (16, 128), (512, 16)])
def test_more_splits_than_are_merged_at_once(
    head_dim: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a thread takes of its channels, or than a lane takes of the sums; some see nothing at all."""
    monkeypatch.setenv("KVCACHE_EMULATED_MULTIPROCESSORS", "132")
    dtype = torch.float16 if head_dim < 128 else torch.float32
    length = 64 * (most + 2) * (4 if dtype == torch.float16 else 1)  # a fast split has a block for every warp
    layer = build_layer({"backend": "int8"}, length, batch_size=1, kv_heads=1, head_dim=head_dim, dtype=dtype)
    query, key, value = step(layer, 1, 1)
    mask = torch.ones(1, 1, 1, key.shape[2], dtype=torch.bool)
    mask[..., 64 : 64 * (most // 2)] = False
    check(query, key, value, AttentionOptions(mask=mask))
    check(query, key, value, AttentionOptions(sink_logits=torch.ones(1)))


@pytest.mark.parametrize("name", ["int4-sinks", "kvquant-default"])
def test_what_is_packed_where_sinks_are_may_be_anything(name: str) -> None:
    layer = build_layer(CASES[name], 300, padding=torch.tensor([62, 0]), dtype=torch.float16)
    query, key, value = step(layer, 1, 4)
    options = AttentionOptions(mask=(torch.arange(301) >= torch.tensor([[62], [0]]))[:, None, None])
    expected = check(query, key, value, options)
    length = layer.config.sink_length
    for row, first in enumerate((62, 0)):
        for slot in range(first, first + length):
            for field in value.tokens.stream.codec.metadata_names:
                layer.records.metadata("value", field, 0, 5)[row, :, slot // 64, slot % 64] = torch.nan
    assert torch.equal(emulation.attend(query, key, value, options), expected)


@pytest.mark.parametrize("name", CASES)
def test_packed_and_exact_tokens_are_read_by_one_kernel(name: str) -> None:
    layer = build_layer(CASES[name], 333, head_dim=64, dtype=torch.bfloat16)
    kernels()
    check(*step(layer, 1, 4), AttentionOptions())
    expected = ["attend_levels" if "kvquant" in name else "attend", "merge"]
    if name.startswith(GENERAL):
        expected[0] = "attend_general"
    elif name == "kivi-no-window":  # where keys, and no values, wait for others to share their scales
        expected.insert(0, "attend_general")
    assert kernels() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_tiles_without_an_exact_token_take_no_products(head_dim: int, dtype: torch.dtype) -> None:
    """As behind whole blocks: of 64 slots one is there. Keys are multiplied 32 at a time, values 16."""
    found, needed = [], []
    for first, exact in (
        (256, 1),
        (256, 16),
        (256, 17),
        (256, 33),
        (256, 64),
        (250, 6),
        (230, 27),
        (200, 99),
    ):
        options = {"backend": "int4", "residual_length": exact - 1}  # and the token of the step
        layer = build_layer(
            options, first + exact - 1, batch_size=1, kv_heads=1, head_dim=head_dim, dtype=dtype
        )
        query, key, value = step(layer, 1, 4)
        assert key.tokens.packed_length == value.tokens.packed_length == first
        before = emulation.products()
        check(query, key, value, AttentionOptions(), fast=True)
        found.append(emulation.products() - before)
        slots = range(first, first + exact)
        key_tiles, value_tiles = (len({slot // count for slot in slots}) for count in (32, 16))
        parts = 1 if dtype == torch.float16 else 2  # of a weight
        needed.append(head_dim // 16 * (2 * key_tiles + parts * value_tiles))
    assert len({a - b for a, b in zip(found, needed, strict=True)}) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["int4-sinks", "kivi-sinks", "kvquant-default"])
def test_exact_tokens_in_two_parts_are_left_to_the_general_kernel(name: str, dtype: torch.dtype) -> None:
    layer = build_layer(CASES[name], 333, padding=torch.tensor([70, 0]), dtype=dtype)
    query, key, value = step(layer, 2, 4)
    for handle in (key, value):
        (newest,) = handle.tokens.segments
        handle.tokens.segments = (newest[:, :, :3].clone(), newest[:, :, 3:].clone())
    for options in (AttentionOptions(), AttentionOptions(is_causal=True, sliding_window=300, softcap=20.0)):
        kernels()
        check(query, key, value, options)
        assert kernels() == ["attend_general", "attend_levels" if "kvquant" in name else "attend", "merge"]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("is_key", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize("name", ["int4-default", "int4-sinks", "kivi-default", "kivi-sinks"])
def test_factors_multiply_what_was_decoded_alone(
    name: str, is_key: bool, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what is exact: the newest slots, sinks, and of keys that are packed the values that wait."""
    layer = build_layer(CASES[name], 333, head_dim=head_dim, dtype=torch.float16)
    query, key, value = step(layer, 2, 4)
    factors = 0.5 + torch.rand(2, 2, head_dim)
    sides: list[Side] = []
    for tokens in (key.tokens, value.tokens):
        side = describe(tokens)
        assert side is not None and side.layout.packed_length < side.length
        sides.append(replace(side, factors=factors) if (len(sides) == 0) == is_key else side)
    monkeypatch.setattr(emulation, "describe", lambda tokens: sides[tokens is value.tokens])
    before = emulation.products()
    got = emulation.attend(query, key, value, AttentionOptions(is_causal=True))
    assert emulation.products() > before
    records, first = layer.records.data, first_sinks(key.tokens, *sides)
    keys, values = (decode_side(side, records, is_key=side is sides[0], sink_start=first) for side in sides)
    expected = attend_dense(query.float(), keys, values, head_dim**-0.5, None, True, 0, 0.0, None)
    assert relative_rms(expected.double(), got) <= BOUNDS[torch.float16]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pads", [(0, 0), (2, 28), (29, 31), (61, 66)], ids=str)
@pytest.mark.parametrize("length", [40, 63, 97])
def test_sinks_whose_values_wait(length: int, pads: tuple[int, int], dtype: torch.dtype) -> None:
    """All, some or none of them; and of some rows the keys are not packed either."""
    if max(pads) >= length:
        pytest.skip("a row of pads alone")
    layer = build_layer(CASES["kivi-sinks"], length, padding=torch.tensor(pads), dtype=dtype)
    query, key, value = step(layer, 2, 4)
    assert key.tokens.packed_length > value.tokens.packed_length > 0
    mask = (torch.arange(key.shape[2]) >= torch.tensor(pads)[:, None])[:, None, None]
    kernels()
    for options in (AttentionOptions(mask=mask), AttentionOptions(mask=mask, softcap=5.0)):
        check(query, key, value, options)
    assert "attend_general" not in kernels()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_exact_tokens_that_nobody_sees_may_be_anything(dtype: torch.dtype) -> None:
    layer = build_layer({"backend": "kivi", "nbits": 2}, 700, kv_heads=2, head_dim=128, dtype=dtype)
    query, key, value = step(layer, 1, 4)
    mask = torch.ones(2, 1, 1, key.shape[2], dtype=torch.bool)
    mask[0, ..., -3:] = mask[1, ..., -40:-1] = False  # of the second row exact values of packed keys, too
    options = AttentionOptions(mask=mask)
    expected = emulation.attend(query, key, value, options)
    for handle in (key, value):
        described = describe(handle.tokens)
        assert described is not None
        (exact,) = described.segments
        exact[0, :, -3:] = torch.nan
        exact[1, :, -40:-1] = torch.inf  # all there are, of keys
    assert torch.equal(emulation.attend(query, key, value, options), expected)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("length", [65, 333])
@pytest.mark.parametrize("name", CASES)
def test_every_backend(name: str, length: int, dtype: torch.dtype) -> None:
    layer = build_layer(CASES[name], length, dtype=dtype)
    is_fast = dtype != torch.float32 and not name.startswith(GENERAL)
    is_fast = is_fast and (length > 300 or None)  # of 65 tokens some backends have packed a block
    check(*step(layer, 1, 4), AttentionOptions(), fast=is_fast)
    check(*step(layer, 3, 4), AttentionOptions(is_causal=True), fast=is_fast)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_half_precision_is_no_worse_than_dense(name: str, dtype: torch.dtype) -> None:
    layer = build_layer(CASES[name], 400, dtype=dtype, head_dim=128)
    query, key, value = step(layer, 1, 4)
    expected = attend(query.double(), key.tokens, value.tokens, AttentionOptions())
    dense = key.tokens.dense(torch.bfloat16), value.tokens.dense(torch.bfloat16)
    plain = F.scaled_dot_product_attention(query.bfloat16(), *dense, enable_gqa=True)
    check(query, key, value, AttentionOptions(), bound=2 * relative_rms(expected, plain))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("nbits", [2, 3, 4, 8])
@pytest.mark.parametrize("rotary_dim", [32, 96])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_rotation_inside_blocks(nbits: int, interleaved: bool, rotary_dim: int, group: int) -> None:
    options = {"backend": "kivi", "nbits": nbits, "rope_mode": "block", "q_group_size": group}
    layer = build_layer(
        {**options, "residual_length": 128}, 400, head_dim=96, dtype=torch.float16, interleaved=interleaved,
        rotary_dim=rotary_dim,
    )  # fmt: skip
    check(*step(layer, 1, 2), AttentionOptions(), fast=nbits < 8 and rotary_dim == 96)


@pytest.mark.parametrize("nbits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_groups(nbits: int, group: int, head_dim: int) -> None:
    options = {"backend": "kivi", "nbits": nbits, "q_group_size": group, "residual_length": 128}
    layer = build_layer(options, 400, head_dim=head_dim, dtype=torch.float16)
    check(*step(layer, 1, 4), AttentionOptions(), fast=True)
    check(*step(layer, 3, 4), AttentionOptions(is_causal=True), fast=True)


@pytest.mark.parametrize("query_length", [1, 3])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192])
@pytest.mark.parametrize("group", [8, 16, 32])
def test_scales_of_a_part_of_a_token(group: int, head_dim: int, query_length: int) -> None:
    options = {"backend": "int8", "granularity": "group", "q_group_size": group}
    layer = build_layer(options, 300, head_dim=head_dim, dtype=torch.float16)
    case = step(layer, query_length, 6)
    check(*case, AttentionOptions(is_causal=query_length > 1), fast=group > 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_metadata_in_fp32(dtype: torch.dtype) -> None:
    layer = build_layer(CASES["kivi-default"], 300, dtype=dtype)
    layer.records.widen_metadata()
    check(*step(layer, 1, 4), AttentionOptions(), fast=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", ["head", "tensor"])
@pytest.mark.parametrize(
    "options",
    [{"backend": "float8"}, {"backend": "float8", "format": "e5m2"}, {"backend": "int8"}],
    ids=["e4m3", "e5m2", "int8"],
)
def test_static_scales(options: dict[str, Any], scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    absmax = {0: torch.tensor([3.0, 8.0])}
    save_scales(tmp_path, Scales(absmax, {0: 2 * absmax[0]}))
    option = "granularity" if options["backend"] == "int8" else "scale"
    layer = build_layer({**options, option: scheme, "calibration": str(tmp_path)}, 200, dtype=dtype)
    check(*step(layer, 1, 4), AttentionOptions(), fast=dtype == torch.float16)
    check(*step(layer, 3, 4), AttentionOptions(is_causal=True))


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 100.0])
@pytest.mark.parametrize(
    "name", ["kivi-default", "kivi-2bit-g32", "int8-default", "int4-default", "float8-default"]
)
def test_small_and_large_numbers(name: str, scale: float) -> None:
    """Weights times scales must neither vanish nor overflow; runs of small values meet large ones."""
    layer = build_layer(CASES[name], 0, dtype=torch.float16, head_dim=128)
    keys, values = torch.randn(2, 2, 2, 600, 128).half()
    values = values * scale
    values[:, :, 300:] *= 30
    layer.update(keys, values)
    check(*step(layer, 1, 4), AttentionOptions(), fast=True, bound=1e-3)


# -- shapes


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 200, 333, 1000])
@pytest.mark.parametrize("name", ["int8-default", "int4-default", "kivi-no-window", "kivi-2bit-g32"])
def test_lengths(name: str, length: int) -> None:
    check(*step(build_layer(CASES[name], length, dtype=torch.float16), 1, 4), AttentionOptions())


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 7, 8, 16])
@pytest.mark.parametrize("query_length", [1, 3, 8])
@pytest.mark.parametrize("name", ["kivi-default", "int8-default"])
def test_group_ratios(name: str, group: int, query_length: int) -> None:
    layer = build_layer(CASES[name], 250, dtype=torch.float16)
    check(*step(layer, query_length, group), AttentionOptions(is_causal=query_length > 1), fast=True)


@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize(
    "name",
    [
        "kivi-default",
        "kivi-2bit-g32",
        "kivi-3bit-block",
        "kivi-8bit-g64",
        "int8-default",
        "int4-default",
        "int4-2bit",
        "float8-default",
        "float8-e5m2",
    ],
)
def test_head_sizes(name: str, head_dim: int) -> None:
    layer = build_layer(CASES[name], 300, head_dim=head_dim, dtype=torch.float16)
    check(*step(layer, 1, 4), AttentionOptions(), fast=head_dim % 16 == 0)


@pytest.mark.parametrize("name", ["kivi-default", "int8-default"])
def test_many_rows_of_wide_heads(name: str) -> None:
    layer = build_layer(CASES[name], 250, head_dim=256, dtype=torch.float16)
    check(*step(layer, 3, 7), AttentionOptions(is_causal=True), fast=True)


@pytest.mark.parametrize(
    "name", ["int8-default", "kivi-default", "kivi-2bit-g32", "kivi-3bit", "int4-default"]
)
def test_long_texts_lose_no_precision(name: str) -> None:
    """Hundreds of products in a row, of values whose mean is 0: what each is cut off by must not add up."""
    layer = build_layer(CASES[name], 0, batch_size=1, dtype=torch.float16)
    torch.manual_seed(0)
    for count in (32768, 1):
        key, value = layer.update(*(torch.randn(1, 2, count, 64).half() for _ in range(2)))
    query = torch.randn(1, 8, 1, 64).half()
    check(query, key, value, AttentionOptions(), fast=True, bound=1e-3)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(512, 512), (320, 320), (512, 64), (128, 272)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wider_heads(dtype: torch.dtype, key_dim: int, value_dim: int) -> None:
    """Those of which tensor cores read none; more than a row of a batch has them in the next test."""
    for name in WIDE:
        layer = build_layer(
            CASES[name], 260, batch_size=1, head_dim=key_dim, value_dim=value_dim, dtype=dtype
        )
        check(*step(layer, 3, 2), AttentionOptions(is_causal=True), fast=False)


def test_what_changes_logits_of_wider_heads() -> None:
    """Windows and masks that end inside of half a block, sinks, more rows than one thread block takes."""
    for name in ("int4-sinks", "kivi-sinks", "kvquant-2bit-window"):
        for pads, window in (((0, 40), 75), ((30, 66), 130)):
            layer = build_layer(CASES[name], 230, head_dim=512, padding=torch.tensor(pads))
            query, key, value = step(layer, 3, 4)
            mask = (torch.arange(key.shape[2]) >= torch.tensor(pads)[:, None])[:, None, None]
            check(
                query, key, value,
                AttentionOptions(mask=mask, is_causal=True, sliding_window=window, softcap=20.0),
            )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["int4-sinks", "kivi-sinks"])
def test_a_window_has_left_the_sinks_of_one_row(name: str, dtype: torch.dtype) -> None:
    plain = build_layer(CASES[name], 0, dtype=dtype)
    layer = with_window(type(plain))(plain.config, 0, plain.facts)
    layer.window = 400
    layer.padding.set(torch.tensor([0, 300]))
    for count in (555, *[1] * 20):
        layer.update(*states(2, 2, count, 64, None, dtype))
    query, key, value = step(layer, 3, 4)
    first = first_sinks(key.tokens, *(describe(handle.tokens) for handle in (key, value)))
    assert first is not None and first[0] > key.shape[2] > first[1] > 0
    slots = torch.arange(key.shape[2])
    own, pads = slots[-3:, None], torch.tensor([0, 300 - layer.padding.dropped])
    mask = (slots <= own) & (slots > own - 400) & (slots >= pads[:, None, None, None])
    check(query, key, value, AttentionOptions(mask=mask))


@pytest.mark.parametrize(("key_dim", "value_dim"), [(192, 128), (64, 96)])
@pytest.mark.parametrize("name", ["kivi-default", "int8-default", "int4-default"])
def test_head_sizes_of_keys_and_values_differ(name: str, key_dim: int, value_dim: int) -> None:
    layer = build_layer(CASES[name], 300, head_dim=key_dim, value_dim=value_dim, dtype=torch.float16)
    check(*step(layer, 1, 4), AttentionOptions(), fast=True)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_that_sees_nothing_but_the_least_number(dtype: torch.dtype, head_dim: int) -> None:
    """As eager attention marks pads: of such slots alone, all are seen alike."""
    layer = build_layer(CASES["kivi-default"], 300, head_dim=head_dim, dtype=dtype)
    query, key, value = step(layer, 1, 4)
    mask = torch.zeros(2, 1, 1, key.shape[2], dtype=dtype)
    mask[0] = torch.finfo(dtype).min
    mask[1, ..., :9] = torch.finfo(dtype).min
    got = check(query, key, value, AttentionOptions(mask=mask))
    assert got[0].norm() > 0


def test_queries_that_are_not_contiguous() -> None:
    layer = build_layer(CASES["int8-default"], 200, dtype=torch.float16)
    query, key, value = step(layer, 3, 4)
    check(query.transpose(1, 2).contiguous().transpose(1, 2), key, value, AttentionOptions(is_causal=True))


# -- what changes a logit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("query_length", [1, 3])
@pytest.mark.parametrize("mask", masks(2, 4, 1, 80))
def test_masks(mask: str, query_length: int, dtype: torch.dtype) -> None:
    padding = torch.tensor([70, 3])
    layer = build_layer({"backend": "kivi", "residual_length": 32}, 200, padding=padding, dtype=dtype)
    query, key, value = step(layer, query_length, 4)
    given = masks(2, 8, query_length, key.shape[2])[mask]
    check(query, key, value, AttentionOptions(mask=given), fast=dtype == torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("query_length", [1, 3])
@pytest.mark.parametrize("options", LOGIT_OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["kivi-default", "int8-default"])
def test_options(name: str, options: dict[str, Any], query_length: int, dtype: torch.dtype) -> None:
    layer = build_layer(CASES[name], 333, dtype=dtype)
    query, key, value = step(layer, query_length, 4)
    bound = 1e-3 if dtype == torch.float16 else None  # a logit of 0.5 q.k is large
    check(query, key, value, attention_options(options, query_length, key.shape[2]), bound=bound)


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    layer = build_layer(CASES["int8-default"], 200, dtype=torch.float16)
    query, key, value = step(layer, 1, 4)
    mask = torch.ones(2, 1, 1, 201, dtype=torch.bool)
    mask[0] = False
    got = check(query, key, value, AttentionOptions(mask=mask), fast=True)
    assert torch.equal(got[0], torch.zeros_like(got[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["int4-sinks", "kivi-sinks"])
def test_sinks_with_padding(name: str, dtype: torch.dtype) -> None:
    """Sinks in different blocks of two rows, at the border of two, and nowhere beyond."""
    for pads in ((66, 0), (62, 10)):
        padding = torch.tensor(pads)
        layer = build_layer(CASES[name], 300, padding=padding, dtype=dtype)
        query, key, value = step(layer, 1, 4)
        mask = (torch.arange(301) >= padding[:, None])[:, None, None]
        check(query, key, value, AttentionOptions(mask=mask), fast=dtype == torch.float16)


# -- memory that holds nothing, and numbers that are not


@pytest.mark.parametrize(
    "name", ["kivi-default", "kivi-no-window", "int8-default", "int4-default", "float8-default"]
)
@pytest.mark.parametrize("length", [65, 200, 300])
def test_unused_memory_is_not_read(name: str, length: int) -> None:
    layer = build_layer(CASES[name], length, dtype=torch.float16)
    layer.records.ensure(1000)
    query, key, value = step(layer, 1, 4)
    expected = emulation.attend(query, key, value, AttentionOptions())
    for handle in (key, value):
        stream, packed = handle.tokens.stream, handle.tokens.packed_length
        layer.records.codes(stream.side, -(-packed // 64), layer.records.num_blocks).fill_(0xFF)
        for field in stream.codec.metadata_names:
            rows = layer.records.metadata(stream.side, field, 0, layer.records.num_blocks)
            used = -(-packed // stream.codec.stored_granularity.tokens)
            per_block = rows.shape[3]
            rows[:, :, used // per_block + (used % per_block > 0) :] = torch.nan
            if used % per_block:
                rows[:, :, used // per_block, used % per_block :] = torch.nan
    assert torch.equal(emulation.attend(query, key, value, AttentionOptions()), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_what_is_hidden_does_not_count(dtype: torch.dtype) -> None:
    layer = build_layer({"backend": "kivi", "residual_length": 32}, 185, dtype=dtype)
    query, key, value = step(layer, 3, 4)
    length = key.shape[2]
    mask = torch.ones(2, 1, 3, length, dtype=torch.bool)
    mask[:, :, :, length - 9] = False
    mask[:, :, 0, length - 5] = False
    expected = attend(query, key.tokens, value.tokens, AttentionOptions(mask=mask))
    for handle in (key, value):
        handle.tokens.segments[-1][:, :, -9] = torch.nan
    got = emulation.attend(query, key, value, AttentionOptions(mask=mask))
    assert relative_rms(expected, got) <= BOUNDS[dtype]
    value.tokens.segments[-1][:, :, -5] = torch.nan
    got = emulation.attend(query, key, value, AttentionOptions(mask=mask))
    assert torch.isnan(got[:, :, 1:]).all()
    # by tensor cores it reaches rows that do not see it, as in dense attention under a mask
    is_spared = relative_rms(expected[:, :, 0], got[:, :, 0]) <= BOUNDS[dtype]
    assert is_spared == (dtype == torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", ["kivi-default", "int8-default", "float8-default", "kivi-3bit-block"])
def test_what_is_not_a_number_spoils_the_rows_that_see_it(case: str, dtype: torch.dtype) -> None:
    layer = build_layer(CASES[case], 300, dtype=dtype)
    query, key, value = step(layer, 2, 3)
    exact = emulation.attend(query, key, value, AttentionOptions(is_causal=True))
    query[0, 4, 1, 7] = torch.nan  # one query head and token
    got = emulation.attend(query, key, value, AttentionOptions(is_causal=True))
    assert got[0, 4, 1].isnan().all()
    spoilt = torch.zeros(got.shape[:3], dtype=torch.bool)
    spoilt[0, 4, 1] = True
    assert torch.equal(got[~spoilt], exact[~spoilt])
    key.tokens.segments[-1][1, 1, -1, 3] = torch.nan  # the newest key: only its own query sees it
    got = emulation.attend(query, key, value, AttentionOptions(is_causal=True))
    assert got[1, 3:, 1].isnan().all() and torch.equal(got[1, :, 0], exact[1, :, 0])
