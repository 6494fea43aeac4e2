"""How thread blocks are divided: what is chosen ends about as soon as the best of all choices."""

from __future__ import annotations

import ctypes
import heapq
import subprocess

import pytest

from kvcache_plugins.kernels import compiler
from tests.kernels.cuda.emulation import SOURCES

WARPS, BEGIN = 4, 1.0
_EXPORTED = """
#include "splits.h"
extern "C" int32_t choose(int64_t units, int64_t groups, int64_t places) {
  return kvcache::choose_splits(units, groups, places);
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
