"""What torch builds the CUDA kernels with: which nvcc and where what belongs to it lies, and which ninja.

torch takes for a toolkit the directory above the one in which it finds nvcc. That fails where the nvcc on the
`PATH` is a script that calls another. nvcc itself knows better, so it is asked. torch also takes the first it
finds, and refuses it where its CUDA is of another major release, as the nvcc of a distribution often is; here
the others are looked at, too. Where pip or conda has installed one, torch misses the CUDA runtime, or its
headers. torch looks for ninja on the `PATH` alone, where that of a virtual environment is missing if its
Python is called by its path.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from . import cuda_packages

__all__ = ["Toolkit", "find_ninja", "find_toolkit", "used_by_torch", "why_unusable"]

_VERSION = re.compile(r"\d+(?:\.\d+)+")
_TOP = re.compile(r"^#\$ TOP=(.+)$", re.MULTILINE)
_INSTALLED = Path("/usr/local")
"""Where NVIDIA's installers put toolkits, of several releases side by side."""
_HEADER, _LIBRARY = "cuda_runtime_api.h", "libcudart.so"


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit.

    Args:
        nvcc (`str`): The program.
        release (`str`): What it says of itself.
        home (`Path`, *optional*): The directory of its `bin` and `include`, if it could be determined.
    """

    nvcc: str
    release: str
    home: Path | None

    @property
    def description(self) -> str:
        """Program and release."""
        return f"{self.nvcc} ({self.release})"

    @property
    def version(self) -> str:
        """What of the release decides the machine code, as exactly as nvcc says it: `"13.0.48"`."""
        return str(_VERSION.findall(self.release)[-1])

    @property
    def major(self) -> str:
        """The first number of its release: torch refuses one that is not of its own CUDA's."""
        return self.version.split(".")[0]

    def include_paths(self) -> list[str]:
        """Where its headers are, unless torch looks there: conda keeps them by platform."""
        found = None if self.home is None else _include(self.home)
        return [] if self.home is None or found in (None, self.home / "include") else [str(found)]

    def linker_options(self, folder: Path) -> list[str]:
        """What a linker needs beside torch's `-L` and `-lcudart` to find that library.

        Args:
            folder (`Path`): Where a link to it may be made: pip's packages have it under its versioned name
                alone, for which no linker looks.
        """
        if self.home is None:
            return []
        usual = [self.home / name for name in ("lib64", "lib")]
        if any((place / _LIBRARY).exists() for place in usual):
            return []
        others = [place / "lib" for place in _platforms(self.home)]
        if (found := next((place for place in others if (place / _LIBRARY).exists()), None)) is not None:
            return [f"-L{found}"]
        versioned = sorted(path for place in [*usual, *others] for path in place.glob(f"{_LIBRARY}.*"))
        if not versioned:  # the linker says what it misses
            return []
        os.symlink(versioned[-1], folder / _LIBRARY)
        return [f"-L{folder}"]


@cache
def find_toolkit() -> Toolkit | None:
    """The toolkit to build with.

    That of `CUDA_HOME` or `CUDA_PATH`, if there is one. Else, of the nvcc on the `PATH`, those in
    `/usr/local/cuda` and beside it, and those that pip has installed (`cuda_packages`), the first of torch's
    own major release of CUDA, or the first, if there is no such.
    """
    given = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    named = _toolkit(f"{given}/bin/nvcc") if given else None
    if named is not None:
        return named
    others = sorted(_INSTALLED.glob("cuda-*/bin/nvcc"), reverse=True)
    names = ["nvcc", str(_INSTALLED / "cuda" / "bin" / "nvcc"), *map(str, others), *cuda_packages.nvccs()]
    first = None
    for toolkit in filter(None, map(_toolkit, names)):
        if _fits_torch(toolkit):
            return toolkit
        first = first or toolkit
    return first


def why_unusable(toolkit: Toolkit | None) -> str | None:
    """Say why torch would not build with what [`find_toolkit`] has found, and what would help; or `None`."""
    if toolkit is None:
        fault = "no nvcc was found (CUDA_HOME, or nvcc on the PATH)"
    elif torch.version.cuda is not None and not _fits_torch(toolkit):
        fault = f"{toolkit.description} is not of the CUDA that torch was made with, {torch.version.cuda}"
    else:
        return None
    command = cuda_packages.how_to_install(torch.version.cuda)
    return f"{fault}." if command is None else f"{fault}. `{command}` would install one."


def _fits_torch(toolkit: Toolkit) -> bool:
    return toolkit.major == str(torch.version.cuda).split(".")[0]


def _toolkit(name: str) -> Toolkit | None:
    """That of a program, if it runs and says its release."""
    nvcc = shutil.which(name)
    if nvcc is None:
        return None
    lines = [line for line in _answer(nvcc, "--version").splitlines() if "release" in line]
    lines = [line for line in lines if _VERSION.search(line)]
    return Toolkit(nvcc, lines[0].strip(), _home(nvcc)) if lines else None


def find_ninja() -> str | None:
    """The ninja on the `PATH`, or else the one beside this Python, where pip puts it."""
    beside = str(Path(sys.executable).parent) if sys.executable else None
    return shutil.which("ninja") or (None if beside is None else shutil.which("ninja", path=beside))


@contextmanager
def used_by_torch(toolkit: Toolkit | None) -> Iterator[None]:
    """Let torch build extensions with a toolkit and [`find_ninja`]'s ninja, and with its own choice after."""
    from torch.utils import cpp_extension

    before, path, ninja = cpp_extension.CUDA_HOME, os.environ.get("PATH"), find_ninja()
    if toolkit is not None and toolkit.home is not None:
        cpp_extension.CUDA_HOME = str(toolkit.home)
    if ninja is not None and shutil.which("ninja") is None:
        # last, so that nothing else of that directory takes the place of what is used otherwise
        os.environ["PATH"] = os.pathsep.join([path or os.defpath, str(Path(ninja).parent)])
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = before
        if path is None:
            os.environ.pop("PATH", None)
        else:
            os.environ["PATH"] = path


def _home(nvcc: str) -> Path | None:
    """The first directory with a compiler and headers: as torch guesses, as nvcc says, behind links."""
    candidates = [Path(nvcc).parents[1], Path(nvcc).resolve().parents[1]]
    # a dry run prints what nvcc would do, and before that, where it would look
    found = _TOP.search(_answer(nvcc, "--dryrun", "-x", "cu", "-E", os.devnull))
    if found is not None:
        candidates.insert(1, Path(found[1].strip()).resolve())
    return next(filter(_is_complete, candidates), None)


def _is_complete(home: Path) -> bool:
    return (home / "bin" / "nvcc").exists() and _include(home) is not None


def _include(home: Path) -> Path | None:
    """The first directory of a toolkit that has the headers."""
    places = [place / "include" for place in (home, *_platforms(home))]
    return next((place for place in places if (place / _HEADER).exists()), None)


def _platforms(home: Path) -> list[Path]:
    """What a toolkit has for machines like this one, if it keeps that apart."""
    names = {"x86_64": ["x86_64"], "aarch64": ["sbsa", "aarch64"]}.get(platform.machine(), [])
    return [home / "targets" / f"{name}-linux" for name in names]


def _answer(*command: str) -> str:
    """What a command prints, or nothing if it fails."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
