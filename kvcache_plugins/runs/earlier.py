"""What a directory holds of an earlier run when another one writes its results there.

A run that repeats the earlier one, with the same settings and of the same files, replaces its results. What
any other run has left, or another program, is set aside under a name of its own, such as
`results-bench-attention.json`, and so is its picture. Either is said in a line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from ..artifacts.files import plain_values, read_json
from ..errors import ArtifactError

__all__ = ["free_name", "is_repeated", "picture_name", "set_aside"]

_PICTURES = {"train locret": "training.png"}
"""Of tasks that have another one than `picture_name` would call it."""


def picture_name(task: str) -> str:
    """Return what the picture of a task is called, by its last word: `attention.png` of `bench attention`."""
    return _PICTURES.get(task, f"{_words(task)[-1]}.png")


def is_repeated(path: Path, document: Mapping[str, Any]) -> bool:
    """Whether a result file is of a run with the same settings, files and caches.

    Args:
        path (`Path`): The file; it need not exist, nor be one of ours.
        document (`Mapping`): `task`, `settings`, `inputs`, `results` and `skipped` of a run; of the last two,
            nothing but the options of the caches counts.
    """
    return _identity(_read(path)) == _identity(plain_values(document))


def set_aside(path: Path, document: Mapping[str, Any]) -> None:
    """Make room for a result file, where there is another one.

    Whenever this is interrupted, all that there was is there, and the next run does the rest.

    Args:
        path (`Path`): Where it will be written.
        document (`Mapping`): What it will hold.
    """
    if not path.exists():
        return
    if is_repeated(path, document):
        print(f"replaced: {path}, of an earlier run with the same settings")
        return
    task = str(_read(path).get("task", ""))
    picture = path.with_name(picture_name(task))
    parts = {source: source.suffix for source in (picture, path) if source.exists()}
    kept = free_name(path, task, parts.values())
    for source, suffix in parts.items():  # the picture first, which nobody would look for without its numbers
        source.replace(kept.with_suffix(suffix))
    print(f"kept: {kept.with_suffix(path.suffix)}, the results of an earlier run")


def free_name(path: Path, task: str, suffixes: Iterable[str]) -> Path:
    """Return a name beside a result file for what an earlier run has left, without a suffix.

    Args:
        path (`Path`): The result file.
        task (`str`): What was measured, which the name says.
        suffixes (`Iterable[str]`): Nothing of that name is there with any of these.
    """
    name = "-".join([path.stem, *_words(task)])[:100]
    names = (path.with_name(name if number == 1 else f"{name}-{number}") for number in count(1))
    return next(kept for kept in names if not any(kept.with_suffix(suffix).exists() for suffix in suffixes))


def _words(task: str) -> list[str]:
    """Return what the name of a task can give to the names of files; whoever wrote it, and whatever it is."""
    return re.findall("[a-z0-9]+", task.lower()) or ["unknown"]


def _read(path: Path) -> dict[str, Any]:
    """Return what a file holds; nothing of one that is not ours."""
    try:
        return read_json(path)
    except (ArtifactError, RecursionError):
        return {}


def _identity(document: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a run was told, and of which files."""
    lists = [document.get(name) for name in ("results", "skipped")]
    entries = [entry for found in lists if isinstance(found, list) for entry in found]
    caches = {json.dumps(e.get("cache_config"), sort_keys=True) for e in entries if isinstance(e, dict)}
    inputs = document.get("inputs")
    known = {name: digest for name, digest in inputs.items() if digest} if isinstance(inputs, dict) else {}
    return document.get("task"), document.get("settings"), known, caches
