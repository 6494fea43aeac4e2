"""Which artifacts the options of a cache name, and where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["named_artifacts", "paths_of_artifacts", "still_there", "with_artifacts_at"]

_OPTIONS = ("heads", "calibration", "weights")
"""Options that name a folder or a file."""


def named_artifacts(options: Any) -> Iterator[str]:
    """Yield what the options of a cache name, those of layers, of a storage and of a pool included."""
    if isinstance(options, Mapping):
        for option, value in options.items():
            if option in _OPTIONS and isinstance(value, str):
                yield value
            else:
                yield from named_artifacts(value)


def paths_of_artifacts(options: Any) -> dict[str, str]:
    """Return the absolute path of each artifact that lies here; those of the hub, and words, are left out."""
    return {name: str(Path(name).absolute()) for name in named_artifacts(options) if Path(name).exists()}


def still_there(paths: Mapping[str, str]) -> dict[str, str]:
    """Return the paths at which there still is something."""
    return {name: path for name, path in paths.items() if Path(path).exists()}


def with_artifacts_at(options: Any, paths: Mapping[str, str]) -> Any:
    """Return options whose artifacts are named by `paths` where these have another name for them."""
    if not isinstance(options, Mapping):
        return options
    moved = {}
    for option, value in options.items():
        if option in _OPTIONS and isinstance(value, str):
            moved[option] = paths.get(value, value)
        else:
            moved[option] = with_artifacts_at(value, paths)
    return moved
