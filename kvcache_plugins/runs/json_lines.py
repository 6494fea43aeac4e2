"""Files of one json object a line, read with errors that name file and line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["check_row", "parse_rows", "read_rows"]


def read_rows(
    path: Path, columns: Mapping[str, tuple[type, ...]], *, source: str | None = None
) -> list[dict[str, Any]]:
    """Read a file with one json object a line.

    Args:
        path (`Path`): The file.
        columns (`Mapping[str, tuple]`): Columns every row must have, and the types of each.
        source (`str`, *optional*): What errors call the file; its path by default.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it holds no row, or a line is no object or lacks a column.
    """
    source = source or str(path)
    try:
        with path.open(encoding="utf-8-sig") as file:  # some editors begin a file with a mark
            return parse_rows(file, source, columns)
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text: {error}.") from error


def parse_rows(
    lines: Iterable[str], source: str, columns: Mapping[str, tuple[type, ...]]
) -> list[dict[str, Any]]:
    """Turn lines into rows; `source` is what errors call the file. Blank lines are passed over."""
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{source}, line {number}"
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{place} is not json: {error}.") from error
        if not isinstance(row, dict):
            raise ValueError(f"{place} must be a json object, got {line.strip()[:60]!r}.")
        check_row(row, place, columns)
        rows.append(row)
    if not rows:
        raise ValueError(f"{source} is empty: it must hold one json object a line.")
    return rows


def check_row(row: Mapping[str, Any], place: str, columns: Mapping[str, tuple[type, ...]]) -> None:
    """Check that a row has the columns it needs.

    Raises:
        ValueError: Naming the place, the column, what was found and what is expected.
    """
    missing = [name for name in columns if name not in row]
    if missing:
        raise ValueError(f"{place} lacks {', '.join(missing)}; it has {', '.join(sorted(row))}.")
    for name, types in columns.items():
        value = row[name]
        if not isinstance(value, types):
            allowed = " or ".join("null" if kind is type(None) else kind.__name__ for kind in types)
            raise ValueError(f"{place}: {name} must be {allowed}, got {value!r:.80}.")
        if isinstance(value, list) and not all(isinstance(item, str) for item in value):
            raise ValueError(f"{place}: {name} must hold strings, got {value!r:.80}.")
