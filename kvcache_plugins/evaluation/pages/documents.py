"""The result files below a directory, and what kept the other json files out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...artifacts.files import read_json
from ...errors import ArtifactError
from ...runs.labels import DENSE, cache_label
from ...runs.results import RESULTS_FILE, read_results

__all__ = ["Refused", "ResultFile", "find_results", "label_of", "number"]

_LEAST, _MOST = 1e-100, 1e100
"""Magnitudes of numbers that are drawn, other than zero."""


@dataclass(frozen=True)
class ResultFile:
    """A file that follows the schema of `results.py`.

    Args:
        path (`Path`): Relative to the directory that was searched.
        document (`dict`): What it holds.
    """

    path: Path
    document: dict[str, Any]

    @property
    def task(self) -> str:
        """What was measured."""
        return str(self.document["task"])

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The results, by length and batch size in the order of the file, the dense cache first in each."""
        rows: list[dict[str, Any]] = self.document["results"]
        points = [str((row.get("length"), row.get("batch_size"))) for row in rows]
        order = {point: place for place, point in enumerate(dict.fromkeys(points))}
        keys = [(order[point], row["cache_config"] != DENSE) for point, row in zip(points, rows, strict=True)]
        return [rows[index] for index in sorted(range(len(rows)), key=keys.__getitem__)]

    @property
    def settings(self) -> dict[str, Any]:
        """The merged options of the run; empty if the file has none."""
        settings = self.document.get("settings")
        return settings if isinstance(settings, dict) else {}

    @property
    def skipped(self) -> list[tuple[str, str]]:
        """Label and reason of every cache that could not be measured."""
        entries = self.document.get("skipped")
        return [
            (label_of(entry), str(entry.get("reason", "no reason given")))
            for entry in (entries if isinstance(entries, list) else [])
            if isinstance(entry, dict)
        ]


@dataclass(frozen=True)
class Refused:
    """A json file that is no result file.

    Args:
        path (`Path`): Relative to the directory that was searched.
        reason (`str`): What is wrong with it.
        is_of_others (`bool`): Whether it does not say that it is one, as the configuration of a model.
    """

    path: Path
    reason: str
    is_of_others: bool = False


def find_results(directory: Path) -> tuple[list[ResultFile], list[Refused]]:
    """Read every json file below a directory, hidden directories left out.

    Args:
        directory (`Path`): Where to look.

    Returns:
        `tuple[list[ResultFile], list[Refused]]`: Files that follow the schema, by task and path, and the
        others, by path.

    Raises:
        ValueError: If there is no such directory, or no result file in it.
    """
    if not directory.is_dir():
        raise ValueError(f"report needs a directory with result files, got {str(directory)!r}.")
    found, refused = [], []
    for path in _json_files(directory):
        relative = path.relative_to(directory)
        try:
            found.append(ResultFile(relative, read_results(path)))
        except (ValueError, OSError, RecursionError) as error:
            reason = str(error).replace(str(path), "the file")
            reason = reason if len(reason) <= 300 else f"{reason[:300]}…"
            refused.append(Refused(relative, reason, _is_of_others(path)))
    if not found:
        seen = f"{len(refused)} other json file{'' if len(refused) == 1 else 's'}" if refused else "no json"
        reasons = f" First: {refused[0].path}: {refused[0].reason}" if refused else ""
        raise ValueError(f"No result file below {str(directory)!r} ({seen} there).{reasons}")
    found.sort(key=lambda file: (file.task, file.path.as_posix()))
    return found, refused


def label_of(row: Mapping[str, Any]) -> str:
    """Return the name of a result's cache: the one it carries, else one made of its options."""
    label = row.get("label")
    if isinstance(label, str) and label:
        return label
    cache_config = row.get("cache_config")
    if isinstance(cache_config, dict) and "backend" in cache_config:
        return cache_label(cache_config)
    return "unnamed cache"


def number(value: Any) -> float | None:
    """Return a number as it is and anything else as None, which no picture can show.

    So are numbers that nothing measures: with them, the ends of an axis would be beyond every float.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if value != 0 and not _LEAST <= abs(value) <= _MOST:
        return None
    return float(value)


def _is_of_others(path: Path) -> bool:
    try:
        return path.name != RESULTS_FILE and "schema_version" not in read_json(path)
    except (ArtifactError, OSError, RecursionError):
        return False


def _json_files(directory: Path) -> Iterator[Path]:
    for folder, below, names in os.walk(directory):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if name.endswith(".json") and not path.is_fifo():  # of which nobody may ever write the other end
                yield path
