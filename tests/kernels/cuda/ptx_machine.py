"""The CUDA kernels as nvcc translates them, on a machine without a GPU: their PTX, interpreted.

nvcc compiles the device files as for a GPU, host code included. Their launches call a CUDA runtime, whose
place `ptx` takes: it runs the PTX on the memory of CPU tensors, warp by warp, and refuses what a GPU may let
pass (addresses, barriers that not all lanes reach, memory and registers that nobody has written, copies that
are still under way, accesses that no barrier orders). It shares no code with the emulated GPU, which runs the
source, and shows what that cannot: inline PTX, and what the compiler has made of the rest. What ptxas makes
of the PTX it does not show. It knows the instructions that nvcc 13 writes, and refuses others by name.
Asked to, it counts what they want of memory (`access_counts`).

The operators have the names of the emulated GPU's: a process has one of both. As a plugin of pytest,

    python -m pytest -p tests.kernels.cuda.ptx_machine tests/kernels/cuda/test_emulated_tokens.py

runs tests of the emulated GPU on it.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from kvcache_plugins.kernels import compiler
from kvcache_plugins.kernels.cuda_toolkit import find_toolkit
from tests.kernels.cuda import emulation, simulated_device
from tests.kernels.cuda.translation import translated

FOLDER = "KVCACHE_PTX"
"""Environment variable: where builds are kept; a temporary directory if unset."""
NEVER_LAUNCHED = "kernels that were never launched: "
"""What the summary of pytest says of kernels, followed by their names."""
_INTERPRETER = Path(__file__).with_name("ptx")

# What is missing for a machine, if something is.
needs_compilers = pytest.mark.skipif(
    find_toolkit() is None or compiler.find_compiler() is None, reason="no nvcc, or no C++ compiler"
)


class Machine(NamedTuple):
    """The library of the interpreter and of all host code, and the PTX of every device file by its stem."""

    library: Path
    listings: dict[str, Path]


def build(folder: Path) -> Machine:
    """Compile everything into `folder`, or what of it has changed."""
    found, toolkit = compiler.find_compiler(), find_toolkit()
    assert found is not None and toolkit is not None
    folder.mkdir(parents=True, exist_ok=True)
    units = sorted(emulation.SOURCES.glob("*.cu"), key=lambda file: -len(emulation.included(file)))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        translations = list(pool.map(lambda file: translated(toolkit, file, folder), units))
    with compiler.file_lock(folder / "lock"), ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = pool.map(lambda file: _interpreting(found, file, folder), sorted(_INTERPRETER.glob("*.cpp")))
        objects = [emulation.compiled(found, emulation.BINDINGS, folder), *parts]
        by_unit = {file.stem: made for file, made in zip(units, translations, strict=True)}
        objects += [by_unit[stem].code for stem in sorted(by_unit)]
        listings = {stem: made.listing for stem, made in by_unit.items()}
        return Machine(emulation.linked(found, objects, folder), listings)


def load(machine: Machine) -> ctypes.CDLL:
    """Register the operators, with the PTX of the machine."""
    library = emulation.load(machine.library)
    library.kvcache_read_ptx.restype = library.kvcache_ptx_kernels.restype = ctypes.c_char_p
    for listing in machine.listings.values():
        read(library, listing)
    return library


def read(library: ctypes.CDLL, listing: Path) -> None:
    """Take kernels from a PTX file, in the place of others of the same names."""
    error = library.kvcache_read_ptx(str(listing).encode())
    assert error is None, error


def launch(library: ctypes.CDLL, kernel: str, memory: torch.Tensor) -> None:
    """Run one warp of a kernel whose parameter is a tensor, with as many bytes of shared memory."""
    pointer = ctypes.c_uint64(memory.data_ptr())
    library.kvcache_launch_ptx.restype = ctypes.c_char_p
    error = library.kvcache_launch_ptx(kernel.encode(), ctypes.c_size_t(memory.nbytes), ctypes.byref(pointer))
    assert error is None, error


def kernels(library: ctypes.CDLL, is_launched: bool) -> list[str]:
    """Names of the kernels that have been launched, or have not."""
    return library.kvcache_ptx_kernels(is_launched).decode().split()  # type: ignore[no-any-return]


def _interpreting(found: compiler.Compiler, file: Path, folder: Path) -> Path:
    # every operation rounds, as PTX says; what interprets runs for longer than -O3 takes to compile
    return emulation.compiled(found, file, folder, "-ffp-contract=off", "-O3")


# -- as a plugin of pytest

_libraries: list[ctypes.CDLL] = []
# `KVCACHE_SIMULATION_MOST` parameter sets of a test are run at most
pytest_collection_modifyitems = simulated_device.pytest_collection_modifyitems


def pytest_configure(config: pytest.Config) -> None:
    """Let the tests of the emulated GPU get this machine where they build that."""
    machine = build(Path(os.environ.get(FOLDER) or tempfile.mkdtemp(prefix="kvcache-ptx-")))
    _libraries.append(load(machine))  # before tests make tensors, all of which it wants to know
    emulation.build = lambda *_: machine.library


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for library in _libraries:
        terminalreporter.write_line(f"{NEVER_LAUNCHED}{kernels(library, is_launched=False)}")
