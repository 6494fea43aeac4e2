"""Files that appear whole or not at all, and errors that name them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import ArtifactError

__all__ = [
    "json_text",
    "read_json",
    "read_tensors",
    "replaced",
    "write_json",
    "write_tensors",
    "writing_tensors",
]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file.

    Raises:
        ArtifactError: If it is missing or damaged.
    """
    try:
        return load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a json file that holds an object.

    Raises:
        ArtifactError: If it is missing or damaged, or holds something else.
    """
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from error
    if not isinstance(facts, dict):
        raise ArtifactError(f"{path} must hold a json object, got {facts!r}.")
    return facts


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a name beside `path`; what was written there takes its place if the block ends well.

    The name is nobody else's, so that several processes may write at once: the last one to end has its way.
    """
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.unfinished")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: dict[str, Tensor], facts: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file, with `facts` in its header.

    Raises:
        OSError: If it cannot be written, for instance because the disk is full.
    """
    with replaced(path) as unfinished, writing_tensors():
        save_file(tensors, unfinished, metadata=None if facts is None else dict(facts))


@contextmanager
def writing_tensors() -> Iterator[None]:
    """Raise `OSError` where safetensors cannot write a file: the error of its own is of no such kind."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from error


def write_json(path: Path, facts: dict[str, Any]) -> None:
    """Write a json file."""
    with replaced(path) as unfinished:
        unfinished.write_text(json_text(facts), encoding="utf-8")


def json_text(facts: dict[str, Any]) -> str:
    """Return what a json file holds, in a form that people can read and compare."""
    return json.dumps(facts, indent=2, sort_keys=True) + "\n"
