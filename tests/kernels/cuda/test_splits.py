"""How thread blocks are divided: what is chosen ends about as soon as the best of all choices."""

from __future__ import annotations

import ctypes
import heapq
import subprocess

import pytest

from kvcache_plugins.kernels import compiler
from tests.kernels.cuda.emulation import SOURCES

WARPS, BEGIN, TILE = 4, 1.0, 2.0
_EXPORTED = """
#include "splits.h"
extern "C" int64_t choose(int64_t fast, int64_t general, int64_t sinks, int64_t groups, int64_t places) {
  const kvcache::Splits splits = kvcache::choose_splits(fast, general, sinks, groups, places);
  return static_cast<int64_t>(splits.general) << 32 | splits.fast;
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
    loaded.choose.argtypes, loaded.choose.restype = [ctypes.c_int64] * 5, ctypes.c_int64
    return loaded


def choose(library: ctypes.CDLL, *arguments: int) -> tuple[int, int]:
    """General splits and fast ones."""
    return divmod(library.choose(*arguments), 1 << 32)


def end(general: int, fast: int, fast_blocks: int, tiles: int, sinks: int, groups: int, places: int) -> float:
    """When a GPU that gives every thread block, in order, the place that is free first has done all."""
    tiles = -(-tiles // general) if general else sinks
    times = [BEGIN + TILE * tiles] * (groups * (general + sinks))
    times += [BEGIN + fast_blocks / (WARPS * fast)] * (groups * fast)
    free = [0.0] * places
    for time in times:
        heapq.heappush(free, heapq.heappop(free) + time)
    return max(free)


# Blocks of the fast path, of the general one, sinks, rows and heads, places: 132 multiprocessors of a Hopper.
CASES = {
    "kivi, batch 1": (512, 3, 0, 8, 528),
    "kivi, batch 8": (512, 3, 0, 64, 528),
    "int4, batch 8": (512, 2, 0, 64, 528),
    "int8, batch 1": (512, 1, 0, 8, 396),
    "sinks and a long window": (2048, 17, 1, 8, 528),
    "a window that is half of the text": (512, 200, 0, 64, 528),
    "more rows and heads than places": (40, 3, 0, 700, 528),
    "a short text": (3, 2, 1, 8, 528),
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_ends_much_sooner(library: ctypes.CDLL, case: str) -> None:
    blocks, tiles, sinks, groups, places = CASES[case]
    general, fast = choose(library, *CASES[case])
    assert 1 <= general <= tiles and 1 <= fast <= -(-blocks // WARPS)
    got = end(general, fast, blocks, tiles, sinks, groups, places)
    most = min(-(-blocks // WARPS), 3 * places // groups + 1)
    others = {(n, s) for n in range(1, tiles + 1, max(1, tiles // 12)) for s in range(1, most + 1)}
    assert got <= 1.1 * min(end(n, s, blocks, tiles, sinks, groups, places) for n, s in others)


@pytest.mark.parametrize("case", ["kivi, batch 1", "kivi, batch 8", "int4, batch 8", "int8, batch 1"])
def test_where_all_run_at_once(library: ctypes.CDLL, case: str) -> None:
    _, _, sinks, groups, places = CASES[case]
    general, fast = choose(library, *CASES[case])
    assert 0.9 * places < groups * (general + sinks + fast) <= places


def test_nothing_but_the_fast_path(library: ctypes.CDLL) -> None:
    assert choose(library, 512, 0, 0, 8, 528) == (0, 66)
    assert choose(library, 512, 0, 1, 8, 528) == (0, 65)
