"""Every device file compiles for every architecture nvcc knows, and decode attention keeps to its registers.

Needs nvcc and no GPU. The bindings are checked against torch's own headers, as far as these go without CUDA.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from kvcache_plugins.kernels import compiler
from tests.kernels.cuda import kept
from tests.kernels.cuda.emulation import SOURCES, included

# Architectures, and the virtual one through which each is compiled: for 12.0, nvcc translates as for 10.0.
ARCHITECTURES = {"80": "80", "90": "90", "100": "100", "120": "100"}
CUDA_HEADERS = {"cuda_runtime.h", "cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h", "cstdint"}
_NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
needs_nvcc = pytest.mark.skipif(_NVCC is None, reason="no nvcc")


@cache
def answer(option: str) -> str:
    """What nvcc says to an option."""
    return subprocess.run([str(_NVCC), option], capture_output=True, text=True).stdout


def compiled(file: Path, output: Path, reports: Path | None) -> dict[str, str]:
    """What ptxas says of a file per architecture; kept in `reports` until the file or nvcc changes."""
    known = {
        real: via for real, via in ARCHITECTURES.items() if f"compute_{real}" in answer("--list-gpu-arch")
    }
    flags = ["-std=c++17", "-O3", "-Xptxas", "-v", "-Werror", "all-warnings"]
    flags += [f"-gencode=arch=compute_{via},code=sm_{real}" for real, via in known.items()]
    read = [path.read_text() for path in included(file)]
    key = hashlib.sha256("\0".join([answer("--version"), *flags, *read]).encode()).hexdigest()[:16]
    known_report = reports / f"{file.stem}-{key}.txt" if reports is not None else None
    if known_report is not None and kept.is_there(known_report):
        report = known_report.read_text()
    else:
        command = [str(_NVCC), *flags, "-c", str(file), "-o", str(output)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        report = done.stderr
        if known_report is not None:
            known_report.write_text(report)
    kernels = re.split(r"(?=^ptxas info +: Compiling entry function)", report, flags=re.MULTILINE)
    return {real: "".join(part for part in kernels if f"for 'sm_{real}'" in part) for real in known}


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(SOURCES.glob("*.cu")), ids=lambda path: path.stem)
def test_device_code_compiles(file: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    reports = compiled(file, tmp_path / "out.o", kept.folder(request.config, "compiled_cuda"))
    assert reports, f"this nvcc knows none of {list(ARCHITECTURES)}"
    for architecture, report in reports.items():
        used = [int(count) for count in re.findall(r"Used (\d+) registers", report)]
        assert used, f"nothing was compiled for sm_{architecture}"
        if not file.stem.startswith("attend"):
            continue
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
        frames = re.findall(r"(\d+) bytes stack frame", report)
        assert spills and frames and not any(map(int, spills + frames)), report
        # three thread blocks of 128 on a multiprocessor, which the fast path counts on
        assert max(used) <= (168 if file.stem == "attend_8_rows" else 255), report


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
