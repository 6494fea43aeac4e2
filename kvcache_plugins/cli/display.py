"""Tables and the lines below them, on a terminal or in a file."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from typing import Any

__all__ = ["show"]

_FILE_WIDTH = 200
"""Columns where the output is a file, which has no width of its own."""


def show(tables: Iterable[Any], lines: Iterable[str] = ()) -> None:
    """Print tables of rich, then lines as they are.

    Args:
        tables (`Iterable[rich.table.Table]`): One below the other.
        lines (`Iterable[str]`): Footnotes and the places of files; never wrapped, coloured or marked up.
    """
    from rich.console import Console

    # results are not lost to a terminal that lacks a sign of theirs
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    for table in tables:
        console.print(table)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
