"""Files that appear whole or not at all, and errors that name them."""

from __future__ import annotations

import errno
import json
import math
import os
import re
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
    "json_line",
    "json_text",
    "naming",
    "plain_values",
    "read_json",
    "read_tensors",
    "replaced",
    "write_json",
    "write_tensors",
]

_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a writing, which name no file; others without one, as of a network, are about something else."""
_TORCH_WRITER = ("inline_container", "PytorchStreamWriter")
"""Either is in what `torch.save` says when it cannot write: a `RuntimeError` like any other."""


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

    Raises:
        OSError: Naming `path`, if it cannot be written, for instance because the disk is full.
    """
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.unfinished")
    try:
        with naming(path, unfinished):
            yield unfinished
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: dict[str, Tensor], facts: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file, with `facts` in its header.

    Raises:
        OSError: If it cannot be written, for instance because the disk is full.
    """
    with replaced(path) as unfinished:
        save_file(tensors, unfinished, metadata=None if facts is None else dict(facts))


@contextmanager
def naming(path: Path, unfinished: Path | None = None) -> Iterator[None]:
    """Say in the error of a writing which file or folder it is about: a full disk's names none.

    Args:
        path (`Path`): What is written, as the reader knows it.
        unfinished (`Path`, *optional*): What it is called until it is complete.

    Raises:
        OSError: If it cannot be written; also where safetensors and torch raise errors of other kinds.
    """
    try:
        yield
    except SafetensorError as error:
        said = re.search(r"\(os error (\d+)\)", str(error))
        code, reason = (errno.EIO, str(error)) if said is None else (int(said[1]), os.strerror(int(said[1])))
        raise OSError(code, reason, str(path)) from error
    except RuntimeError as error:
        if not any(word in str(error) for word in _TORCH_WRITER):
            raise
        raise OSError(errno.EIO, f"torch cannot write it ({error})", str(path)) from error
    except OSError as error:
        known = _known_name(error.filename, path, unfinished)
        if known is None or (error.filename is None and error.errno not in _WRITING):
            raise
        raise OSError(error.errno, error.strerror, str(known)) from error


def _known_name(found: Any, path: Path, unfinished: Path | None) -> Path | None:
    """Return what an error should name; None if it names that already, or another file."""
    if found is None:
        return path
    if unfinished is None or not isinstance(found, (str, os.PathLike)):
        return None
    inside = Path(found)
    return path / inside.relative_to(unfinished) if inside.is_relative_to(unfinished) else None


def write_json(path: Path, facts: dict[str, Any]) -> None:
    """Write a json file."""
    with replaced(path) as unfinished:
        unfinished.write_text(json_text(facts), encoding="utf-8")


def json_text(facts: dict[str, Any]) -> str:
    """Return what a json file holds, in a form that people can read and compare; see [`json_line`]."""
    return json.dumps(_finite(facts), indent=2, sort_keys=True, allow_nan=False) + "\n"


def json_line(value: Any) -> str:
    """Return a value as json on one line, null for numbers that json cannot hold: infinite ones and NaN."""
    return json.dumps(_finite(value), allow_nan=False)


def plain_values(value: Any) -> Any:
    """Return a value as it is read from the file that it was written to."""
    return json.loads(json_line(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value
