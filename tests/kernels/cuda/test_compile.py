"""Every device file compiles for every architecture nvcc knows, and decode attention keeps to its registers.

Needs nvcc and no GPU. The bindings are checked against torch's own headers, as far as these go without CUDA.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvcache_plugins.kernels import compiler
from tests.kernels.cuda.emulation import SOURCES

ARCHITECTURES = ("80", "90", "100", "120")
CUDA_HEADERS = {"cuda_runtime.h", "cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h", "cstdint"}
_NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
needs_nvcc = pytest.mark.skipif(_NVCC is None, reason="no nvcc")


def known(architecture: str) -> bool:
    assert _NVCC is not None
    done = subprocess.run([_NVCC, "--list-gpu-arch"], capture_output=True, text=True)
    return f"compute_{architecture}" in done.stdout.split()


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("file", sorted(SOURCES.glob("*.cu")), ids=lambda path: path.stem)
def test_device_code_compiles(file: Path, architecture: str, tmp_path: Path) -> None:
    if not known(architecture):
        pytest.skip(f"this nvcc does not know sm_{architecture}")
    command = [
        str(_NVCC), "-std=c++17", "-O3", f"-arch=sm_{architecture}", "-Xptxas", "-v", "-Werror",
        "all-warnings", "-c", str(file), "-o", str(tmp_path / "out.o"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if not file.stem.startswith("attend"):
        return
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)
    assert spills and not any(map(int, spills)), done.stderr
    used = [int(count) for count in re.findall(r"Used (\d+) registers", done.stderr)]
    # three thread blocks of 128 on a multiprocessor, which the fast path counts on
    assert max(used) <= (168 if file.stem == "attend_8_rows" else 255)


def test_device_code_includes_only_cuda_headers() -> None:
    for file in [*SOURCES.glob("*.cu"), *SOURCES.glob("*.cuh")]:
        for header in re.findall(r"#include <(.+)>", file.read_text()):
            assert header in CUDA_HEADERS, f"{file.name} includes {header}"
    emulated_only = {"emulation.h"}
    for file in SOURCES.iterdir():
        for header in re.findall(r'#include "(.+)"', file.read_text()):
            assert header not in emulated_only or file.name == "platform.cuh"


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(SOURCES.glob("*_binding.cpp")), ids=lambda path: path.stem)
def test_bindings_compile(file: Path, tmp_path: Path) -> None:
    """Against c10's CUDA headers; a file that only CUDA builds of torch have is replaced by an empty one."""
    found = compiler.find_compiler()
    if found is None:
        pytest.skip("no C++ compiler")
    empty = tmp_path / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"
    empty.parent.mkdir(parents=True)
    empty.write_text("#pragma once\n")
    assert _NVCC is not None
    toolkit = Path(_NVCC).resolve().parents[1] / "include"
    if not (toolkit / "cuda_runtime_api.h").exists():
        toolkit = Path("/usr/local/cuda/include")
    if not (toolkit / "cuda_runtime_api.h").exists():
        pytest.skip("no CUDA headers beside nvcc")
    paths = [f"-isystem{tmp_path}", *compiler._binding_options(), f"-isystem{toolkit}"]
    command = [found.path, "-std=c++17", "-Wall", "-fsyntax-only", *paths, str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
