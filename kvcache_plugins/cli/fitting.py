"""Tables that are wider than a line: names fold, and numbers are never cut. rich is imported here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

__all__ = ["fitted", "width_needed"]

_LONGEST_HEAD = 16
"""Characters of a heading beyond which it folds, where what is below it is shorter."""

_SHORTEST_TEXT = 12
"""Characters of a column of text, the names of the rows apart, that a line of it may be as short as."""


def fitted(table: Table, width: int, *, folds_names: bool = True) -> list[Any]:
    """Return what shows a table in so many characters a line.

    That is the table itself if it fits, or fits once its columns of text are folded. Else there are several
    tables of some columns each, one below the other, and every one begins with the names of the rows: with
    the columns up to the first that is not aligned on the right. If not even one column has room beside
    them, every row is a list of its cells.

    Args:
        table (`rich.table.Table`): Its columns of numbers have `no_wrap`, those of text have not.
        width (`int`): Characters a line.
        folds_names (`bool`): Whether the names of the rows may fold.

    Returns:
        `list`: What rich prints, in this order.
    """
    if _measure(table).maximum <= width:
        return [table]
    least = _least_widths(table, width // 3 if folds_names else None)
    # columns without a width share what room there is
    widths = [
        None if not column.no_wrap and (folds_names or index not in _names(table)) else least[index]
        for index, column in enumerate(table.columns)
    ]
    names = _names(table)
    groups: list[list[int]] = []
    for columns in _pairs(table, len(names)):
        if not groups or _width(table, [*names, *groups[-1], *columns], least) > width:
            groups.append([])
        groups[-1] += columns
    if any(_width(table, [*names, *group], least) > width for group in groups):
        return _records(table)
    parts = [_part(table, [*names, *group], widths) for group in groups]
    parts[0].title = table.title
    return parts


def width_needed(table: Table) -> int:
    """Return the characters a line in which a table is one, and the names of its rows do not fold."""
    return _width(table, range(len(table.columns)), _least_widths(table, None))


def _names(table: Table) -> list[int]:
    """Columns that say what a row is of: a length, perhaps, and the cache."""
    lasts = (index for index, column in enumerate(table.columns) if column.justify != "right")
    return list(range(next(lasts, 0) + 1))


def _pairs(table: Table, start: int) -> list[list[int]]:
    """Return the columns from `start` on; one headed "of dense" or alike is about the one before it."""
    together: list[list[int]] = []
    for index in range(start, len(table.columns)):
        if together and _plain(table.columns[index].header).startswith("of"):
            together[-1].append(index)
        else:
            together.append([index])
    return together


def _measure(renderable: Any) -> Measurement:
    # on a terminal that TERM calls dumb, rich takes a width for granted only beside a height
    console = Console(width=10**6, height=25)
    return Measurement.get(console, console.options, renderable)


def _natural(table: Table, index: int) -> int:
    """Return the widest line of a column."""
    column = table.columns[index]
    widest = max(_measure(cell).maximum for cell in (column.header, *column.cells))
    return min(widest, column.max_width or widest)


def _least_widths(table: Table, most_of_a_name: int | None) -> list[int]:
    """Return how many characters of each column have to be there; None folds no name."""
    return [_least(table, index, most_of_a_name) for index in range(len(table.columns))]


def _least(table: Table, index: int, most_of_a_name: int | None) -> int:
    column = table.columns[index]
    if column.no_wrap:
        head = min(_measure(column.header).maximum, _LONGEST_HEAD)
        return max([head, *(_measure(cell).maximum for cell in column.cells)])
    is_name = index in _names(table)
    if is_name and most_of_a_name is None:
        return _natural(table, index)
    most = most_of_a_name if is_name and most_of_a_name is not None else _SHORTEST_TEXT
    words = max(_measure(cell).minimum for cell in (column.header, *column.cells))
    return min(_natural(table, index), words, most)


def _width(table: Table, columns: Sequence[int], widths: Sequence[int | None]) -> int:
    return _measure(_part(table, columns, widths)).maximum


def _part(table: Table, columns: Sequence[int], widths: Sequence[int | None]) -> Table:
    """Return a table of some columns."""
    part = Table(box=table.box, title_justify=table.title_justify, show_header=table.show_header)
    for index in columns:
        column = table.columns[index]
        part.add_column(
            column.header,
            justify=column.justify,
            overflow="fold",
            width=widths[index],
            max_width=column.max_width,
        )
    cells = [list(table.columns[index].cells) for index in columns]
    for number, row in enumerate(table.rows):
        part.add_row(*(column[number] for column in cells), end_section=row.end_section)
    return part


def _records(table: Table) -> list[Text]:
    """Return the title, and the cells of each row below each other."""
    lines = [Text(str(table.title))] if table.title else []
    names = _names(table)
    cells = [[_plain(cell) for cell in column.cells] for column in table.columns]
    heads = [_plain(column.header).replace("-\n", "").replace("\n", " ") for column in table.columns]
    for number in range(len(table.rows)):
        for index, column in enumerate(cells):
            if column[number]:
                head = f"{heads[index]}: " if heads[index] else ""
                lines.append(Text(f"{'' if index in names else '  '}{head}{column[number]}", overflow="fold"))
    return [*lines, Text()]


def _plain(cell: Any) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)
