"""What nvcc makes of the device files, once for all tests and checkouts: it is most of what they compile.

One call per file, for every architecture nvcc knows. It leaves the machine code with the host's, what ptxas
says of it, and the PTX of one architecture, which the PTX machine interprets.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kvcache_plugins.kernels.compiler import file_lock
from kvcache_plugins.kernels.cuda_loader import CUDA_FLAGS
from kvcache_plugins.kernels.cuda_toolkit import Toolkit
from tests.kernels.cuda import emulation, kept

__all__ = ["ARCHITECTURES", "Translation", "known_architectures", "translated"]

# Each is compiled through the virtual one of its own, as torch does: through others its registers differ.
ARCHITECTURES = ("80", "90", "100", "120")
_INTERPRETED = "90"
_FLAGS = ["-std=c++17", *CUDA_FLAGS, "-Xcompiler", "-fPIC", "-Xptxas", "-v", "-Werror", "all-warnings"]


class Translation(NamedTuple):
    """What belongs to a device file."""

    code: Path
    """The object."""
    report: Path
    """What ptxas has said."""
    listing: Path
    """The PTX for architecture 9.0, if nvcc knows that."""

    def reports(self) -> dict[str, str]:
        """What ptxas has said, by architecture."""
        kernels = re.split(
            r"(?=^ptxas info +: Compiling entry function)", self.report.read_text(), flags=re.MULTILINE
        )
        return {
            real: "".join(part for part in kernels if f"for 'sm_{real}'" in part) for real in ARCHITECTURES
        }


@cache
def known_architectures(toolkit: Toolkit) -> tuple[str, ...]:
    """Those of `ARCHITECTURES` for which nvcc compiles."""
    done = subprocess.run([toolkit.nvcc, "--list-gpu-arch"], capture_output=True, text=True)
    return tuple(real for real in ARCHITECTURES if f"compute_{real}" in done.stdout)


@cache
def _shared() -> Path | None:
    return kept.shared_folder("nvcc")


def translated(toolkit: Toolkit, file: Path, folder: Path) -> Translation:
    """Compile a device file, unless that has been done; into `folder` where checkouts cannot share one."""
    folder = _shared() or folder
    known = known_architectures(toolkit)
    flags = [*_FLAGS, *(f"-gencode=arch=compute_{real},code=sm_{real}" for real in known)]
    read = [path.read_text() for path in emulation.included(file)]
    name = f"{file.stem}-{emulation.key_of([toolkit.description, *flags, *read])}"
    found = Translation(*(folder / f"{name}.{suffix}" for suffix in ("o", "txt", "ptx")))
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(folder / f"{file.stem}.lock"), tempfile.TemporaryDirectory(dir=folder) as made:
        there = [kept.is_there(path) for path in found]
        if not all(there):
            command = [toolkit.nvcc, *flags, "--keep", "--keep-dir", made, "-c", str(file)]
            done = subprocess.run([*command, "-o", f"{made}/host.o"], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            listing = Path(made) / f"{file.stem}.compute_{_INTERPRETED}.ptx"
            listing.touch()  # an nvcc that does not know the architecture has made none
            listing.replace(found.listing)
            found.report.write_text(done.stderr)
            (Path(made) / "host.o").replace(found.code)
    return found
