"""Every device file compiles for every architecture nvcc knows, and decode attention keeps to its registers.

Needs nvcc and no GPU. The bindings are checked against torch's own headers, as far as these go without CUDA.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from kvcache_plugins.kernels import compiler
from kvcache_plugins.kernels.cuda_toolkit import find_toolkit
from tests.kernels.cuda.emulation import BINDINGS, SOURCES
from tests.kernels.cuda.translation import ARCHITECTURES, known_architectures, translated

CUDA_HEADERS = {"cuda_runtime.h", "cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h", "cstdint"}
needs_nvcc = pytest.mark.skipif(find_toolkit() is None, reason="no nvcc")


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(SOURCES.glob("*.cu")), ids=lambda path: path.stem)
def test_device_code_compiles(file: Path, builds: Path) -> None:
    toolkit = find_toolkit()
    assert toolkit is not None and known_architectures(toolkit), f"nvcc knows none of {ARCHITECTURES}"
    reports = translated(toolkit, file, builds).reports()
    for architecture in known_architectures(toolkit):
        report = reports[architecture]
        used = [int(count) for count in re.findall(r"Used (\d+) registers", report)]
        assert used, f"nothing was compiled for sm_{architecture}"
        if not file.stem.startswith("attend"):
            continue
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
        frames = re.findall(r"(\d+) bytes stack frame", report)
        assert spills and frames and not any(map(int, spills + frames)), report
        assert max(used) <= 65536 // 128 // resident(file.stem, architecture), report


def resident(stem: str, architecture: str) -> int:
    """Thread blocks of 128 on a multiprocessor that the plan of decode attention counts on, by registers."""
    if stem == "attend_kivi_2" and architecture in ("90", "120"):
        return 5
    if stem.startswith(("attend_int8", "attend_float8", "attend_kvquant")) or stem.endswith("rotated"):
        return 3
    return 4 if stem.startswith(("attend_int4", "attend_kivi")) or stem == "attend_8_rows" else 2


def test_device_code_includes_only_cuda_headers() -> None:
    for file in [*SOURCES.glob("*.cu"), *SOURCES.glob("*.cuh")]:
        for header in re.findall(r"#include <(.+)>", file.read_text()):
            assert header in CUDA_HEADERS, f"{file.name} includes {header}"
    for file in SOURCES.iterdir():
        for header in re.findall(r'#include "(.+)"', file.read_text()):
            is_of_tests = (file.name, header) == ("platform.cuh", "emulation.h")
            assert is_of_tests or (SOURCES / header).exists(), f"{file.name} includes {header}"


@needs_nvcc
@pytest.mark.slow
def test_bindings_compile(tmp_path: Path) -> None:
    """Against c10's CUDA headers; a file that only CUDA builds of torch have is replaced by an empty one.

    All at once, since torch's headers take most of the time, and in another order than for the emulated GPU:
    none may need what one before it has included.
    """
    found, given = compiler.find_compiler(), find_toolkit()
    if found is None:
        pytest.skip("no C++ compiler")
    empty = tmp_path / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"
    empty.parent.mkdir(parents=True)
    empty.write_text("#pragma once\n")
    assert given is not None
    toolkit = Path(given.nvcc).resolve().parents[1] / "include"
    if not (toolkit / "cuda_runtime_api.h").exists():
        toolkit = Path("/usr/local/cuda/include")
    if not (toolkit / "cuda_runtime_api.h").exists():
        pytest.skip("no CUDA headers beside nvcc")
    bindings = sorted(SOURCES.glob("*_binding.cpp"), reverse=True)
    names = re.findall(r'#include "(.+)"', BINDINGS.read_text())
    assert names == [file.name for file in reversed(bindings)]
    together = tmp_path / "bindings.cpp"
    together.write_text("".join(f'#include "{file}"\n' for file in bindings))
    paths = [f"-isystem{tmp_path}", *compiler._binding_options(), f"-isystem{toolkit}"]
    command = [found.path, "-std=c++17", "-Wall", "-fsyntax-only", *paths, str(together)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert bindings and done.returncode == 0, done.stderr
