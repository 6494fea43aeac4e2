"""How thread blocks are divided: what is chosen ends about as soon as the best of all choices."""

from __future__ import annotations

import ctypes
import heapq
import re
import subprocess
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from kvcache_plugins.attention.reference import AttentionOptions
from kvcache_plugins.kernels import compiler
from tests.kernels.cuda import emulation
from tests.kernels.cuda.emulation import SOURCES
from tests.kernels.cuda.test_emulated_attention import check
from tests.kernels.decode_cases import build_layer, step

WARPS, BEGIN = 4, 1.0
_EXPORTED = """
#include "splits.h"
extern "C" int32_t choose(int64_t units, int64_t groups, int64_t places) {
  return kvcache::choose_splits(units, groups, places);
}
extern "C" bool has_exact_split(int64_t packed, int64_t exact, int64_t work, int64_t splits, int64_t groups,
                                int64_t places) {
  return kvcache::has_exact_split(packed, exact, work, splits, groups, places);
}
extern "C" int32_t choose_general(int64_t blocks, int64_t groups, int64_t places) {
  return kvcache::choose_general_splits(blocks, groups, places);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    found = compiler.find_compiler()
    if found is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("splits")
    (folder / "splits.cpp").write_text(_EXPORTED)
    target = folder / "splits.so"
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    command = [found.path, *flags, f"-I{SOURCES}", f"-I{SOURCES.parent}", str(folder / "splits.cpp"), "-o"]
    done = subprocess.run([*command, str(target)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(target))
    for function in (loaded.choose, loaded.choose_general):
        function.argtypes, function.restype = [ctypes.c_int64] * 3, ctypes.c_int32
    loaded.has_exact_split.argtypes, loaded.has_exact_split.restype = [ctypes.c_int64] * 6, ctypes.c_bool
    return loaded


def end(splits: int, units: int, groups: int, places: int) -> float:
    """When a GPU that gives every thread block, in order, the place that is free first has done all."""
    free = [0.0] * places
    for _ in range(groups * splits):
        heapq.heappush(free, heapq.heappop(free) + BEGIN + units / (WARPS * splits))
    return max(free)


# Units of a row and head, rows and heads, places: 132 multiprocessors of a Hopper.
CASES = {
    "kivi, batch 1": (521, 8, 528),
    "kivi, batch 8": (521, 64, 528),
    "int8, batch 1": (515, 8, 396),
    "a window that is half of the text": (712, 64, 528),
    "more rows and heads than places": (43, 700, 528),
    "a short text": (6, 8, 528),
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_ends_much_sooner(library: ctypes.CDLL, case: str) -> None:
    units, groups, places = CASES[case]
    splits = library.choose(units, groups, places)
    most = -(-units // WARPS)
    assert 1 <= splits <= most
    others = range(1, min(most, 3 * places // groups + 1) + 1)
    assert end(splits, units, groups, places) <= 1.1 * min(end(n, units, groups, places) for n in others)


@pytest.mark.parametrize("case", ["kivi, batch 1", "kivi, batch 8", "int8, batch 1"])
def test_where_all_run_at_once(library: ctypes.CDLL, case: str) -> None:
    units, groups, places = CASES[case]
    assert 0.9 * places < groups * library.choose(units, groups, places) <= places


@pytest.mark.parametrize(
    ("blocks", "groups", "places", "expected"),
    [(0, 8, 264, 0), (3, 8, 264, 3), (512, 8, 264, 66), (512, 1, 264, 128), (512, 700, 264, 1)],
)
def test_what_is_left_to_the_general_kernel(
    library: ctypes.CDLL, blocks: int, groups: int, places: int, expected: int
) -> None:
    """A block each, as long as few thread blocks of a place wait for others."""
    assert library.choose_general(blocks, groups, places) == expected


# -- a split of what is not packed

EXACT_WORK = 3
"""`AttentionArguments::exact_work`."""


def largest_work(packed: int, exact: int, splits: int, has_own: bool, exact_work: float) -> float:
    """Of any warp; splits as `SplitUnits` has them."""
    sharing, work = (splits - 1, packed) if has_own else (splits, packed + EXACT_WORK * exact)

    def first_unit(split: int) -> int:
        if split == splits:
            return packed + exact
        done = split * work // sharing
        return done if done <= packed else packed - (packed - done) // EXACT_WORK

    firsts = [first_unit(split) for split in range(splits + 1)]
    assert firsts[0] == 0 and firsts == sorted(firsts)
    return max(
        sum(1.0 if unit < packed else exact_work for unit in range(first + warp, last, WARPS))
        for first, last in pairwise(firsts)
        for warp in range(WARPS)
    )


def units_of(name: str, length: int) -> tuple[int, int]:
    """Packed blocks, which may be parts, and units beyond them, in a step that makes a text so long."""
    keys = values = length - 1 - (64 if name == "int4" else 0)
    if name.startswith("kivi"):
        keys, values = (length - 1) // 128 * 128, length - 129
    return units_between(min(keys, values), keys, length)


def units_between(packed: int, keys: int, length: int) -> tuple[int, int]:
    """The same where so many tokens are packed, and so many keys."""

    def blocks(first: int, last: int) -> int:
        return -(-last // 64) - first // 64 if first < last else 0

    return blocks(0, packed), blocks(packed, keys) + blocks(keys, length)


RESIDENT = {"int8": 3, "int4": 4, "kivi-4": 4, "kivi-2": 5}
"""Thread blocks on a multiprocessor."""


def plan_of(library: ctypes.CDLL, name: str, length: int, batch_size: int) -> tuple[int, int, int, bool]:
    """Of 8 heads on a Hopper: packed blocks, further units, splits, and whether the last is theirs."""
    packed, exact = units_of(name, length)
    groups, places = 8 * batch_size, 132 * RESIDENT[name]
    splits = library.choose(packed + EXACT_WORK * exact, groups, places)
    return packed, exact, splits, library.has_exact_split(packed, exact, EXACT_WORK, splits, groups, places)


@pytest.mark.parametrize("batch_size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", RESIDENT)
def test_no_warp_has_more_to_do_for_a_split_of_what_is_exact(
    library: ctypes.CDLL, name: str, batch_size: int
) -> None:
    """Whatever an exact unit takes, in packed blocks."""
    for start in (1000, 4096, 16384, 32768, 65536):
        for length in range(start, start + 128, 5):
            packed, exact, splits, own = plan_of(library, name, length, batch_size)
            for work in (1, 2, EXACT_WORK, 5, 20):
                assert largest_work(packed, exact, splits, own, work) <= largest_work(
                    packed, exact, splits, False, work
                )


@pytest.mark.parametrize(
    ("name", "length", "batch_size", "before", "now"),
    [
        ("int8", 32768, 1, 5, 3),
        ("int8", 65536, 1, 7, 6),
        ("int8", 16384, 2, 5, 3),
        ("kivi-2", 32768, 1, 4, 3),
        ("kivi-2", 16384, 2, 4, 3),
        ("kivi-2", 32900, 4, 8, 7),
        ("kivi-4", 32768, 1, 4, 3),
        ("kivi-4", 65536, 1, 5, 4),
        ("kivi-4", 32768, 2, 5, 4),
        ("int4", 65536, 1, 5, 4),
        ("int4", 16384, 4, 6, 5),
        ("int4", 32768, 4, 10, 9),
        # all have the same work, so little or so much that exact units are not what is waited for
        ("int8", 16384, 1, 3, 3),
        ("kivi-2", 4096, 1, 3, 3),
        ("kivi-4", 32768, 8, 17, 17),
    ],
)
def test_work_of_the_warp_that_has_most(
    library: ctypes.CDLL, name: str, length: int, batch_size: int, before: int, now: int
) -> None:
    packed, exact, splits, own = plan_of(library, name, length, batch_size)
    assert largest_work(packed, exact, splits, False, EXACT_WORK) == before
    assert largest_work(packed, exact, splits, own, EXACT_WORK) == now
    assert own == (now < before)


@pytest.mark.parametrize(
    ("packed", "exact", "work", "splits", "groups", "places"),
    [
        (512, 0, 3, 49, 8, 396),  # nothing is exact
        (512, 1, 1, 49, 8, 396),  # KVQuant's, of which an exact unit takes no longer
        (512, 1, 3, 49, 9, 396),  # not all run at once
        (512, 1, 3, 1, 8, 396),
        (512, 5, 3, 49, 8, 396),  # a warp would have two
        (3, 4, 3, 5, 1, 396),  # there would be splits of nothing
    ],
)
def test_all_splits_have_the_same_work(
    library: ctypes.CDLL, packed: int, exact: int, work: int, splits: int, groups: int, places: int
) -> None:
    assert library.has_exact_split(packed, exact, work, splits, groups, places) is False


def attended_splits() -> int:
    """Of the only kernel that has been launched to attend."""
    lines = [line for line in emulation.launched() if "attend" in line]
    (found,) = (re.search(r" of \d+ x (\d+)$", line) for line in lines)
    assert found is not None
    return int(found[1])


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"backend": "int8"},
        {"backend": "int8", "residual_length": 170},
        {"backend": "int4", "sink_length": 4},
        {"backend": "kivi", "nbits": 2},
        {"backend": "kivi", "nbits": 4, "q_group_size": 64},
    ],
    ids=str,
)
def test_attention_with_a_split_of_what_is_exact(
    library: ctypes.CDLL, options: dict[str, Any], dtype: torch.dtype, is_known: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By the kernel of a format, and by the one for all."""
    heads = 2
    monkeypatch.setenv("KVCACHE_EMULATED_MULTIPROCESSORS", "4")
    layer = build_layer(options, 3800, batch_size=1, kv_heads=heads, head_dim=128, dtype=dtype)
    if not is_known:
        layer.records.data = F.pad(layer.records.data, (0, 128))  # records that are longer are no known ones
    query, key, value = step(layer, 2, 4)
    emulation.launched()
    check(query, key, value, AttentionOptions(is_causal=True))
    splits = attended_splits()
    keys, values = key.tokens.packed_length, value.tokens.packed_length
    packed, exact = units_between(min(keys, values), keys, key.shape[2])
    exact += "sink_length" in options  # all sinks are a unit
    assert library.has_exact_split(packed, exact, EXACT_WORK, splits, heads, heads * splits)
