"""Compiling the native library with the system's C++ compiler, and the lock around it."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from ..errors import KernelUnavailableError

__all__ = ["BUILD_PREFIX", "FLAGS", "Compiler", "compile_library", "file_lock", "find_compiler"]

BUILD_PREFIX = ".kvcache-build-"
"""Of the directories that libraries are compiled in, beside where they will be."""
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-ffp-contract=fast", "-Wno-psabi")
"""For every file; which instructions a file may use is said in the file."""
_BINDING = "binding.cpp"
_AVX512 = "decode_attention_avx512.cpp"
_WITHOUT_AVX512 = "-DKVCACHE_NO_AVX512"
_TIMEOUT_SECONDS = 600.0
_LOCK_SECONDS = 3600.0
"""For who holds a lock. It is alive, as the system releases the locks of the dead, and where few processors
have to compile the CUDA kernels they take many minutes."""
_SILENT_SECONDS = 2.0
"""After which waiting for a lock would look like a hang."""
_LAST_LINES = 20

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler.

    Args:
        path (`str`): The program.
        description (`str`): Program and release.
    """

    path: str
    description: str


def find_compiler() -> Compiler | None:
    """`CXX`, or the first of `g++` and `c++`, if it runs."""
    given = os.environ.get("CXX")
    for name in [given] if given else ["g++", "c++"]:
        path = shutil.which(name)
        release = _release(path) if path is not None else None
        if path is not None and release is not None:
            return Compiler(path, f"{path} ({release})")
    return None


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the system releases it if the process dies.

    Who has to wait for another process says so, once.

    Raises:
        OSError: If the file cannot be opened, or the lock is not granted within an hour.
    """
    try:
        import fcntl
    except ImportError as error:
        raise OSError("this system has no file locks of the kind used here") from error
    with path.open("a") as handle:
        begun, is_silent = time.monotonic(), True
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - begun
            if waited > _LOCK_SECONDS:
                raise TimeoutError(f"{path} has been locked for {_LOCK_SECONDS:.0f} s")
            if waited > _SILENT_SECONDS and is_silent:
                is_silent = False
                _logger.warning(
                    "waiting for the process that has locked %s, for up to %.0f minutes: it builds or tries "
                    "kernels",
                    path,
                    _LOCK_SECONDS / 60,
                )
            time.sleep(0.1)
        yield


def compile_library(
    compiler: Compiler, sources: Path, target: Path, seal: Callable[[bytes], bytes] = bytes
) -> None:
    """Compile all `*.cpp` of a directory into a shared library, which appears at `target` at once or not.

    A compiler too old for the AVX-512 file leaves that out.

    Args:
        compiler (`Compiler`): What compiles.
        sources (`Path`): Directory.
        target (`Path`): The library.
        seal (`Callable`): Applied to the library's bytes before it appears.

    Raises:
        KernelUnavailableError: If the compiler fails, with its last lines.
        OSError: If the target's directory cannot be written to.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=BUILD_PREFIX) as directory:
        objects = _compile_all(compiler, sources, Path(directory))
        library = Path(directory) / "library.so"
        link = [compiler.path, "-shared", "-o", str(library), *map(str, objects), *_link_options()]
        _finish(_start(link, Path(directory) / "link.log"))
        sealed = Path(directory) / "sealed.so"
        sealed.write_bytes(seal(library.read_bytes()))
        sealed.replace(target)


@dataclass(frozen=True)
class _Run:
    command: list[str]
    process: subprocess.Popen[bytes]
    log: Path


def _compile_all(compiler: Compiler, sources: Path, directory: Path) -> list[Path]:
    files = sorted(sources.glob("*.cpp"))
    macros = [] if any(file.name == _AVX512 for file in files) else [_WITHOUT_AVX512]

    def start(file: Path, macros: list[str]) -> _Run:
        output = directory / f"{file.stem}.o"
        options = _binding_options() if file.name.endswith(_BINDING) else []  # only these know torch
        command = [compiler.path, *FLAGS, *options, *macros, "-c", str(file), "-o", str(output)]
        return _start(command, directory / f"{file.stem}.log")

    runs = {file: start(file, macros) for file in files}
    for file, run in runs.items():
        try:
            _finish(run)
        except KernelUnavailableError:
            if file.name != _AVX512:
                for other in runs.values():
                    other.process.kill()
                    other.process.wait()
                raise
            files.remove(file)
    if len(files) < len(runs):
        _finish(start(sources / _BINDING, [_WITHOUT_AVX512]))
    return [directory / f"{file.stem}.o" for file in files]


def _binding_options() -> list[str]:
    include = _torch_directory() / "include"
    paths = [str(include), str(include / "torch" / "csrc" / "api" / "include")]
    abi = int(torch.compiled_with_cxx11_abi())
    openmp = (
        ["-Xpreprocessor", "-fopenmp"] if _is_macos() else ["-fopenmp"]
    )  # Apple's clang takes it so alone
    return [*openmp, f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *(f"-isystem{path}" for path in paths)]


def _link_options() -> list[str]:
    libraries = _torch_directory() / "lib"
    options = [f"-L{libraries}", "-ltorch_cpu", "-lc10"]
    if not _is_macos():
        return options
    # OpenMP's functions are those of the runtime that torch has loaded. The library is linked against none: a
    # second one would end the process. Elsewhere a linker need not be told that symbols may be missing.
    return [*options, "-undefined", "dynamic_lookup", f"-Wl,-rpath,{libraries}"]


def _is_macos() -> bool:
    return platform.system() == "Darwin"


def _torch_directory() -> Path:
    return Path(torch.__file__).parent


def _start(command: list[str], log: Path) -> _Run:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    return _Run(command, process, log)


def _finish(run: _Run) -> None:
    try:
        status = run.process.wait(_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        run.process.kill()
        run.process.wait()
        raise KernelUnavailableError(
            f"the compiler ran for more than {_TIMEOUT_SECONDS:.0f} s: {' '.join(run.command)}"
        ) from None
    if status != 0:
        lines = run.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        if not lines:  # there may have been no room for them
            free = shutil.disk_usage(run.log.parent).free
            lines = [f"It has written nothing; {run.log.parent} has {free:,} bytes left."]
        raise KernelUnavailableError(
            "\n".join([f"the compiler failed (exit status {status}): {' '.join(run.command)}", *lines])
        )


@cache
def _release(path: str) -> str | None:
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, errors="replace", timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = answer.stdout.splitlines()
    return lines[0].strip() if answer.returncode == 0 and lines else None
