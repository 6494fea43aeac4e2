"""What the sanitizer watches the kernels do, in a process of its own: `run`.

Every case is done several times, with threads that run in another order and unused memory that holds other
bytes. Kernels that depend on neither give the same bytes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache_plugins.attention.description import describe
from kvcache_plugins.attention.reference import AttentionOptions
from kvcache_plugins.backends.kvquant import NORMAL_FLOAT
from kvcache_plugins.kernels import cuda_check
from kvcache_plugins.quantizers.outliers import Outliers
from tests.kernels.append_cases import CODES, Case, due_cases
from tests.kernels.cuda import emulation
from tests.kernels.decode_cases import CASES as LAYERS
from tests.kernels.decode_cases import build_layer, step
from tests.kernels.test_append_tokens import rotated, scaled
from tests.kernels.test_decode_tokens import side_of
from tests.kernels.test_encode_levels import arguments
from tests.kernels.test_gather_tokens import CASES as GATHERABLE
from tests.kernels.test_gather_tokens import blank, layouts, packed, some_slots

__all__ = ["CASES", "run"]

VARIANTS = ((0, 0xAB), (1, 0xFF))
"""The seed of the order, which if odd turns that of thread blocks round, and what unused memory holds."""
KIVI2 = {"backend": "kivi", "nbits": 2}
LEVELS = {"backend": "kvquant", "calibration": NORMAL_FLOAT, "nbits": 3, "residual_length": 32}


def run(library: str, name: str, variants: Iterable[tuple[int, int]] = VARIANTS) -> None:
    """Do a case in every variant; whatever the sanitizer finds ends the process."""
    kernels = emulation.load(Path(library))
    kernels.kvcache_watched_accesses.restype = ctypes.c_long
    expected: list[Tensor] | None = None
    for variant in variants:
        kernels.kvcache_vary_emulation(*variant)
        torch.manual_seed(0)
        before = kernels.kvcache_watched_accesses()
        results = [result.contiguous().view(torch.uint8) for result in CASES[name]()]
        assert results and kernels.kvcache_watched_accesses() > before
        expected = results if expected is None else expected
        for i, (result, first) in enumerate(zip(results, expected, strict=True)):
            assert torch.equal(result, first), f"{name}: result {i} depends on {variant}"


def attended(dtype: torch.dtype, head_dim: int, tokens: int) -> Iterator[Tensor]:
    """Attention of two rows and heads to two blocks and some exact tokens, however they are stored."""
    for sample in cuda_check.samples(dtype, head_dim, 2):
        query = torch.randn(2, 8, tokens, head_dim).to(dtype)
        keys, values = sample.keys, sample.values
        yield torch.ops.kvcache_emulated.decode_attention(
            query, sample.records, keys.segments, values.segments, keys.extras, values.extras, None,
            keys.layout.integers(), values.layout.integers(), head_dim**-0.5, None, True, 0, 30.0, None, None,
        )  # fmt: skip


def layers(dtype: torch.dtype, tokens: int) -> Iterator[Tensor]:
    """Attention as layers want it: blocks that are not full, and a bias that ends where the tokens do."""
    for options in list(LAYERS.values())[::tokens]:
        query, key, value = step(build_layer(options, 300, dtype=dtype), tokens, 4)
        mask = torch.rand(2, 8, tokens, key.shape[2]) > 0.1
        yield emulation.attend(query, key, value, AttentionOptions(mask=mask))


def long_contexts() -> Iterator[Tensor]:
    """Several thread blocks for a row, several blocks for a warp; shared memory of large and small GPUs."""
    for shared_bytes in (232448, 101376):
        os.environ["KVCACHE_EMULATED_SHARED_BYTES"] = str(shared_bytes)
        for options in (LAYERS["kivi-2bit-block"], LAYERS["kivi-3bit"], LAYERS["int8-default"], LEVELS):
            case = step(build_layer(options, 1200, dtype=torch.float16, head_dim=128), 1, 4)
            yield emulation.attend(*case, AttentionOptions())
        case = step(build_layer(KIVI2, 1200, dtype=torch.bfloat16, head_dim=128), 1, 4)
        yield emulation.attend(*case, AttentionOptions(softcap=30.0))
    del os.environ["KVCACHE_EMULATED_SHARED_BYTES"]


def what_changes_logits() -> Iterator[Tensor]:
    """Windows, caps, slopes, sinks, of which some values are not packed yet, padding, a tail in two parts."""
    every = {"sink_logits": torch.randn(8), "alibi_slopes": torch.rand(8), "softcap": 20.0}
    for dtype in (torch.float16, torch.float32):
        for name in ("int4-sinks", "kivi-sinks"):
            for length, pads in ((300, (66, 0)), (300, (62, 10)), (63, (2, 28))):
                padding = torch.tensor(pads)
                layer = build_layer(LAYERS[name], length, padding=padding, dtype=dtype)
                query, key, value = step(layer, 3, 4)
                mask = (torch.arange(key.shape[2]) >= padding[:, None])[:, None, None]
                options = AttentionOptions(mask=mask, is_causal=True, sliding_window=100, **every)
                yield emulation.attend(query, key, value, options)
                (newest,) = key.tokens.segments
                key.tokens.segments = (newest[:, :, :3].clone(), newest[:, :, 3:].clone())
                yield emulation.attend(query, key, value, options)


def levels() -> Iterator[Tensor]:
    """KVQuant: heads of other sizes, lists longer than registers hold, padding, and lists that are none."""
    for head_dim, value_dim, fraction in ((80, 80, 0.1), (64, 192, 0.01), (96, 96, 0.0)):
        for nbits in (2, 4):
            options = {**LEVELS, "nbits": nbits, "outlier_fraction": fraction, "sink_length": 4}
            padding = torch.tensor([70, 3])
            layer = build_layer(
                options, 300, head_dim=head_dim, value_dim=value_dim, dtype=torch.float16, padding=padding
            )
            case = step(layer, 3, 2)
            yield emulation.attend(*case, AttentionOptions(is_causal=True))
    for nbits in (2, 3, 4):  # kernels of their own
        options = {**LEVELS, "nbits": nbits, "outlier_fraction": 0.02, "sink_length": 4}
        padding = torch.tensor([62, 0])
        layer = build_layer(options, 500, head_dim=128, dtype=torch.bfloat16, padding=padding)
        yield emulation.attend(*step(layer, 1, 4), AttentionOptions(sliding_window=400))
    query, key, value = step(
        build_layer({**LEVELS, "outlier_fraction": 0.01}, 300, dtype=torch.float16), 1, 4
    )
    keys, values = describe(key.tokens), describe(value.tokens)
    assert keys is not None and keys.outliers is not None and keys.outlier_starts is not None
    assert values is not None and values.outlier_starts is not None
    bad = torch.tensor([-5, 30000, 32000], dtype=torch.int16).expand_as(keys.outlier_starts).contiguous()
    for changed in (
        (replace(keys, outlier_starts=bad), replace(values, outlier_starts=bad)),
        (replace(keys, outliers=keys.outliers | 3 << 24), values),
    ):
        yield torch.ops.kvcache_emulated.decode_attention(
            query, key.tokens.stream.records.data, *(side.contiguous_rows() for side in changed),
            *(side.extras for side in changed), None, *(side.layout.integers() for side in changed),
            0.125, None, False, 0, 0.0, None, None,
        )  # fmt: skip


def decoded() -> Iterator[Tensor]:
    """Slots as numbers."""
    for i, options in enumerate(LAYERS.values()):
        _, *handles = step(build_layer(options, 330, head_dim=(40, 64, 96, 320)[i % 4]), 3, 1)
        for handle in handles:
            records, side, is_key, sink_start = side_of(handle)
            for start, stop, dtype in ((7, 8, torch.float32), (100, 301, torch.bfloat16)):
                yield torch.ops.kvcache_emulated.decode_tokens(
                    records, side.segments, side.extras, sink_start, side.layout.integers(), is_key, start,
                    stop, dtype,
                )  # fmt: skip


def gathered() -> Iterator[Tensor]:
    """Tokens moved between records; at last some that are not there."""
    for options in GATHERABLE.values():
        for head_dim, count in ((40, 65), (128, 200)):
            layer = packed(options, head_dim)
            records, index = blank(layer, count), some_slots(count)
            fields = [layout.integers() for layout in layouts(layer)]
            torch.ops.kvcache_emulated.gather_tokens(layer.records.data, records, index, *fields)
            yield records
    index[..., 3::7] = -1
    torch.ops.kvcache_emulated.gather_tokens(layer.records.data, records, index, *fields)
    yield records
    with pytest.raises(RuntimeError, match="no packed token"):  # as the next call reports
        torch.ops.kvcache_emulated.gather_tokens(layer.records.data, records, index, *fields)


def encoded() -> Iterator[Tensor]:
    """Tokens into records: runs of many, which are searched first, the last of them in vain."""
    encode: Callable[..., bool] = torch.ops.kvcache_emulated.encode_tokens
    for i, codes in enumerate(CODES.values()):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[i % 3]
        case = Case(codes, 1, 0, 0, 0, 0, head_dim=(24, 64)[i % 2], dtype=dtype)
        for tail, layout, is_key in zip(case.tails, case.layouts, (True, False), strict=True):
            assert encode(case.records, tail[:, :, :128], is_key, layout, 0)
        yield case.records
    tail[:] = torch.inf
    assert not encode(case.records, tail[:, :, :128], is_key, layout, 0)


def encoded_levels() -> Iterator[Tensor]:
    """Blocks into records and lists, of few numbers and of so many that not all candidates are listed."""
    encode: Callable[..., bool] = torch.ops.kvcache_emulated.encode_levels
    for i, (heads, dim, side) in enumerate(((2, 24, 1), (2, 80, 8), (24, 64, 77), (3, 32, 0))):
        for is_key in (True, False):
            given = arguments(is_key, heads, dim, 64)
            given["states"] = given["states"].to((torch.float32, torch.bfloat16, torch.float16)[i % 3])
            lists = Outliers(
                torch.zeros(2, 3, 128 * side + 3, dtype=torch.int32),
                torch.zeros(2, 3, heads + 1, dtype=torch.int16),
            )
            if i % 2:
                given["first_plain"] = torch.tensor([0, 100])
            names = ("scale", "offset", "first_plain", "cos", "sin")
            assert encode(
                given["records"], *(lists if side else (None, None)), given["states"], is_key,
                given["layout"], given["boundaries"], given["levels"], side, 64, *map(given.get, names),
            )  # fmt: skip
            yield given["records"]
            if side:
                yield from lists


def appended() -> Iterator[Tensor]:
    """Steps of decoding."""
    append: Callable[..., bool] = torch.ops.kvcache_emulated.append_tokens
    for i, codes in enumerate(CODES.values()):
        new = (1, 3)[i % 2]
        for k, place in enumerate(due_cases(codes, new)[i % 2 :: 2]):
            case = Case(codes, new, *place, head_dim=24 if new == 1 else 64)
            if k % 3 == 1:
                case = scaled(case)
            elif k % 3 == 2:
                case = rotated(case, interleaved=i % 4 == 0)
            done, records, tails = case.run(append)
            assert done
            yield from (records, *tails)


CASES: dict[str, Callable[[], Any]] = {
    "8 rows": lambda: attended(torch.float16, 128, 2),
    "16 rows": lambda: attended(torch.float16, 128, 3),
    "wide heads": lambda: attended(torch.float16, 256, 2),
    "wider heads": lambda: attended(torch.float16, 512, 1),
    "heads of 80": lambda: attended(torch.bfloat16, 80, 2),
    "fp32": lambda: attended(torch.float32, 128, 2),
    "layers": lambda: layers(torch.float16, 1),
    "layers in fp32": lambda: layers(torch.float32, 3),
    "long contexts": long_contexts,
    "logits": what_changes_logits,
    "levels": levels,
    "decoding": decoded,
    "gathering": gathered,
    "encoding": encoded,
    "encoding levels": encoded_levels,
    "appending": appended,
}
