"""Tables and the lines below them, on a terminal or in a file."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..registry import TRANSFORMERS_BACKENDS
from ..runs.labels import cache_label

__all__ = ["show", "show_failures", "show_results"]

_FILE_WIDTH = 200
"""Characters a line where the output is a file, which has no width of its own; more if a table needs them."""


def show(tables: Iterable[Any], lines: Iterable[str] = ()) -> None:
    """Print tables of rich, then lines as they are.

    Args:
        tables (`Iterable[rich.table.Table]`): One below the other. Of one that is too wide, text folds and
            numbers do not: its columns make several tables if need be.
        lines (`Iterable[str]`): Footnotes and the places of files; never wrapped, colored or marked up.
    """
    from rich.console import Console

    from .fitting import fitted, width_needed

    # results are not lost to a terminal that lacks a sign of theirs
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    console = Console()
    tables = list(tables)
    if not (is_terminal := console.is_terminal):
        console = Console(width=max([_FILE_WIDTH, *map(width_needed, tables)]))
    for table in tables:
        for part in fitted(table, console.width, folds_names=is_terminal):
            console.print(part)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def show_results(
    document: dict[str, Any],
    output: Path,
    tables: Iterable[Any],
    footnotes: Iterable[str],
    plot: Callable[[dict[str, Any], Path], None] | None,
) -> None:
    """Print what an evaluation has found and where it is, then draw it: a picture may fail.

    Args:
        document (`dict`): Its results, which are in `output`.
        output (`Path`): Directory of the results.
        tables (`Iterable[rich.table.Table]`): Of the document.
        footnotes (`Iterable[str]`): Of the tables.
        plot (`Callable`, *optional*): Draws a document into a file, if a picture is wanted.

    Raises:
        OSError: If the picture cannot be written.
    """
    from ..runs.earlier import picture_name
    from ..runs.results import RESULTS_FILE

    show(tables, [*footnotes, f"numbers: {output / RESULTS_FILE}"])
    if plot is not None:
        picture = output / picture_name(document["task"])
        plot(document, picture)
        show([], [f"picture: {picture}"])


def show_failures(document: dict[str, Any]) -> int:
    """Print on the standard error stream which caches broke down, apart from those of transformers'.

    Args:
        document (`dict`): The results of a run.

    Returns:
        `int`: Exit status: 1 if there are any.
    """
    broken = [entry for entry in document["skipped"] if entry.get("is_failure")]
    failed = [entry for entry in broken if entry["cache_config"]["backend"] not in TRANSFORMERS_BACKENDS]
    for entry in failed:
        print(f"error: {cache_label(entry['cache_config'])} {entry['reason']}", file=sys.stderr)
    return 1 if failed else 0
