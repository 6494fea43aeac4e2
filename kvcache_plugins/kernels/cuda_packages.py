"""nvcc as pip installs it, beside the CUDA libraries of torch's own wheels.

From CUDA 13 on, NVIDIA's packages share one tree, `nvidia/cu13` among the installed packages: torch brings
the libraries and headers there, `cuda-toolkit[nvcc,nvvm,crt,cccl]` the compiler. Earlier packages have none.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

__all__ = ["advice", "how_to_install", "nvccs"]

OLDEST_MAJOR = 13
"""Release of CUDA whose packages have an nvcc."""
_PARTS = "nvcc,nvvm,crt,cccl"


def nvccs() -> Iterator[str]:
    """The nvcc of every tree that there is, of the newest CUDA first."""
    found = [tree for folder in _folders() for tree in folder.glob("cu*") if tree.name[2:].isdecimal()]
    for tree in sorted(found, key=lambda tree: -int(tree.name[2:])):
        yield str(tree / "bin" / "nvcc")


def how_to_install(cuda: str | None) -> str | None:
    """What a user of a torch made with this release of CUDA can do to have nvcc, if pip has it."""
    if cuda is None or int(cuda.split(".")[0]) < OLDEST_MAJOR:
        return None
    return f'pip install "cuda-toolkit[{_PARTS}]=={cuda}.*" ninja'


def advice(home: Path | None, cuda: str | None) -> list[str]:
    """Lines to add where a compiler has failed: what it may be, if it is one of these.

    pip installs the newest of the parts that it is not told the release of, which others do not understand.
    """
    command = how_to_install(cuda)
    if command is None or home is None or home.parent not in _folders():
        return []
    return [f"(If the parts of pip's nvcc are of different releases, `{command}` mends that.)"]


def _folders() -> list[Path]:
    """Where packages of the name `nvidia` are installed."""
    try:
        found = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):  # of a module that somebody has put in its place
        return []
    return [Path(place) for place in (found.submodule_search_locations or [])] if found is not None else []
