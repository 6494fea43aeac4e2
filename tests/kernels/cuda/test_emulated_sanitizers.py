"""Races, memory that nobody wrote, and accesses that a GPU refuses, looked for on the emulated GPU.

What compute-sanitizer does on a GPU with racecheck, initcheck and memcheck, `emulated_gpu/sanitizer` does
here, of every load and store of the kernels. It is stricter in what orders two threads: only barriers.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.kernels import fresh_process
from tests.kernels.cuda import emulation
from tests.kernels.cuda.sanitizer_cases import CASES

FAULTS = Path(__file__).with_name("emulated_gpu") / "sanitizer" / "faults.cu"
RACE, COPY = "no barrier since thread", "is copying to it, and has not waited"
UNWRITTEN = "which nobody has written"
UNORDERED = f"{RACE}|{UNWRITTEN}"  # without a barrier readers may also come first
OUTSIDE, UNALIGNED = "outside of its shared memory", "an address is not aligned"
# What is said of the kernels of `faults.cu`.
FOUND = {
    "barriers": None,
    "copies": None,
    "the same number": None,
    "race of warps": RACE,
    "race of lanes": RACE,
    "race with readers": "has read it",
    "race for a byte": RACE,
    "a promise broken": RACE,
    "a copy not waited for": COPY,
    "another copy waited for": COPY,
    "a copy shown to others": RACE,
    "a copy over what is read": "starts a copy to byte",
    "copies left behind": "ends with copies that it has not waited for",
    "shared memory of nobody": UNWRITTEN,
    "shared memory of another block": UNWRITTEN,
    "blocks that write": "of another block has written it",
    "a block that reads": "of another block",
    "threads that write": "of a tensor, and no barrier",
    "behind shared memory": OUTSIDE,
    "before shared memory": OUTSIDE,
    "behind a tensor": OUTSIDE,
    "a copy from behind a tensor": OUTSIDE,
    "8 bytes unaligned": UNALIGNED,
    "2 bytes unaligned": UNALIGNED,
    "a wide shift": "a shift by more bits than there are",
    "a large number": "a number that its integer cannot hold",
    "a large sum": "a sum overflows",
    "an index": "an index outside of its array",
}
RUN_FAULT = """
import ctypes, torch

library = ctypes.CDLL({library!r})
data, sink = torch.zeros(1024, dtype=torch.uint8), torch.zeros(128, dtype=torch.int32)
places = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (data, sink)]
library.kvcache_vary_emulation({seed}, 0)
assert library.kvcache_run_fault({name!r}.encode(), *places)
"""
RUN = "from tests.kernels.cuda import sanitizer_cases\nsanitizer_cases.run({library!r}, {name!r})"
RUN_ONCE = RUN.replace("{name!r})", "{name!r}, [(0, 0xAB)])")


class Mutation(NamedTuple):
    """What is broken, the unit that is compiled again, a case that shows it, and what is said then."""

    file: str
    text: str
    replacement: str
    unit: str
    case: str
    found: str = UNORDERED


LOAD = "return *reinterpret_cast<const uint2*>(codes + swizzled(offset, swizzle)"
MUTATIONS = {
    "copies that others use": Mutation(
        "unit_ring.cuh",
        "    warp_barrier();  // every lane's copies have landed",
        "    //",
        "attend_int4",
        "8 rows",
    ),
    "a copy used too early": Mutation(
        "unit_ring.cuh", "copy_wait<1>();", "copy_wait<2>();", "attend_int4", "8 rows", COPY
    ),
    "results over the copies": Mutation(
        "warp_state.cuh",
        "  block_barrier();  // every warp is done",
        "  //",
        "attend_int4",
        "8 rows",
        f"{RACE}|{COPY}",
    ),
    "a load one byte further": Mutation(
        "fast_lanes.cuh", LOAD, LOAD.replace("(codes", "(codes + 1"), "attend_8_rows", "8 rows", UNALIGNED
    ),
    "copies beyond a unit": Mutation(
        "unit_ring.cuh",
        "left = copy.bytes - copy.code_bytes - first;",
        "left = copy.bytes + 512 - copy.code_bytes - first;",
        "attend_8_rows",
        "8 rows",
        f"{RACE}|{COPY}",
    ),
    "a bias that has ended": Mutation(
        "warp_state.cuh",
        "if (slot < end) biases",
        "if (slot < kBlockTokens) biases",
        "attend_8_rows",
        "layers",
        OUTSIDE,
    ),
    "patches that are not clear": Mutation(
        "level_attention.cuh",
        "kThreads) patches[i] = 0;",
        "kThreads) static_cast<void>(patches);",
        "attend_levels",
        "levels",
        UNWRITTEN,
    ),
    "patches still being read": Mutation(
        "level_keys.cuh", "  warp_barrier();  // every lane has read it", "  //", "attend_levels", "levels"
    ),
    "a maximum still being read": Mutation(
        "general_attention.cuh", "  warp_barrier();  // every lane has read", "  //", "attend_general", "fp32"
    ),
    "scores of other warps": Mutation(
        "general_attention.cuh",
        "  block_barrier();\n  for (int row = thread / 32;",
        "  for (int row = thread / 32;",
        "attend_general",
        "fp32",
    ),
    "parts of other threads": Mutation(
        "merging.cuh",
        "parts[thread] = merged;\n  block_barrier();",
        "parts[thread] = merged;",
        "attend_general",
        "fp32",
    ),
    "tokens before they are decoded": Mutation(
        "decoding.cuh", "    }\n  }\n  block_barrier();\n}", "    }\n  }\n}", "decode_tokens", "decoding"
    ),
    "parameters of other warps": Mutation(
        "encoding.cuh", "parameters);\n  block_barrier();", "parameters);", "encode_tokens", "encoding"
    ),
    "codes of other warps": Mutation(
        "encode_levels.cu",
        "  block_barrier();\n  uint8_t* plane",
        "  uint8_t* plane",
        "encode_levels",
        "encoding levels",
    ),
    "keys of other lanes": Mutation(
        "largest.cuh",
        "    warp_barrier();  // every lane's keys are listed",
        "    //",
        "encode_levels",
        "encoding levels",
    ),
    "a list still being read": Mutation(
        "encode_levels.cu",
        "  warp_barrier();  // every lane has read the list",
        "  //",
        "encode_levels",
        "encoding levels",
    ),
    "sums over sums": Mutation("largest.cuh", "    turn ^= 1;\n", "", "encode_levels", "encoding levels"),
    "counts over sums": Mutation(
        "encode_levels.cu",
        "  block_barrier();  // what `outlying` had in shared memory has been read",
        "  //",
        "encode_levels",
        "encoding levels",
    ),
    "thread blocks at one place": Mutation(
        "append_tokens.cu",
        "if (unit == 0) place_tokens",
        "if (unit >= 0) place_tokens",
        "append_tokens",
        "appending",
        "of another block",
    ),
    "a row too far": Mutation(
        "gather_tokens.cu",
        "record + offset + slot * bytes",
        "record + offset + 64 * bytes",
        "gather_tokens",
        "gathering",
        OUTSIDE,
    ),
}


@pytest.fixture(scope="module", autouse=True)
def watching_compiler(tmp_path_factory: pytest.TempPathFactory) -> None:
    """GCC and Clang tell of loads and stores; another compiler may not."""
    reason = emulation.why_not_watched(tmp_path_factory.mktemp("watching"))
    if reason is not None:
        pytest.skip(reason)


def test_another_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = tmp_path / "c++"
    refusing.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec echo "another 1.0"\necho "-fsanitize?" >&2; exit 1'
    )
    refusing.chmod(0o755)
    monkeypatch.setenv("CXX", str(refusing))
    assert emulation.why_not_watched(tmp_path) == f"{refusing} (another 1.0) does not sanitize: -fsanitize?\n"


@pytest.mark.in_depth
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_found(name: str, builds: Path) -> None:
    library = emulation.build_sanitizing(builds, builds)
    done = fresh_process.run(RUN.format(library=str(library), name=name))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", FOUND)
def test_a_fault_is_found(name: str, builds: Path) -> None:
    """In whatever order the threads happen to run."""
    library = str(emulation.build_watched(FAULTS, builds))
    scripts = [RUN_FAULT.format(library=library, name=name, seed=seed) for seed in (0, 1, 2)]
    expected = FOUND[name]
    for done in fresh_process.run_together(scripts):
        if expected is None:
            assert done.returncode == 0, done.stderr
        else:
            assert done.returncode != 0 and expected in done.stderr


@pytest.mark.in_depth
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_kernel_is_found(name: str, builds: Path, tmp_path: Path) -> None:
    mutation = MUTATIONS[name]
    sources = Path(shutil.copytree(emulation.SOURCES, tmp_path / "sources"))
    content = (sources / mutation.file).read_text()
    assert content.count(mutation.text) == 1, f"{mutation.file} has changed"
    (sources / mutation.file).write_text(content.replace(mutation.text, mutation.replacement))
    library = emulation.build_sanitizing(builds, builds, [sources / f"{mutation.unit}.cu"], tmp_path)
    done = fresh_process.run(RUN_ONCE.format(library=str(library), name=mutation.case))
    assert done.returncode != 0 and re.search(f"emulated GPU: thread .*({mutation.found})", done.stderr), (
        done.stderr
    )
