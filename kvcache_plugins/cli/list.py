"""`kvcache-plugins list`: the registered backends."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .display import show

if TYPE_CHECKING:
    from rich.table import Table

    from .backend_table import BackendRow

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser("list", help="list the backends", description="List the cache backends.")
    parser.add_argument("--verbose", action="store_true", help="with their costs, limits and deviations")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table, or the full description of each backend."""
    from .backend_table import backend_rows

    rows = backend_rows()
    if args.verbose:
        _print_verbose(rows)
    else:
        _print_tables(rows)
    return 0


def _print_tables(rows: list[BackendRow]) -> None:
    from .backend_table import in_one_line

    packing, evicting = ([row for row in rows if row.evicts is kind] for kind in (False, True))
    # what all of them share once, below
    shared = [f"All that evict: {in_one_line(evicting[0].shared)}."] if evicting else []
    show([_table("every token, in fewer bits", packing), _table("some of the tokens", evicting)], shared)


def _table(title: str, rows: list[BackendRow]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("backend", no_wrap=True)
    for column in ("what it does", "paper", "own options and defaults", "native kernel"):
        table.add_column(column, overflow="fold")
    for row in rows:
        # Text, not str: a default such as [] is no markup
        table.add_row(*map(Text, (row.name, row.summary, row.paper, row.own_defaults, row.native)))
    return table


def _print_verbose(rows: list[BackendRow]) -> None:
    import textwrap

    from .backend_table import SECTIONS

    for row in rows:
        print(f"{row.name}: {row.summary}")
        entries = [(name, row.sections[name]) for name in SECTIONS if name in row.sections]
        entries += [("Options", row.defaults), ("Native kernel", row.native), ("Module", row.module)]
        for title, text in entries:
            print(textwrap.fill(f"{title}: {text}", 110, initial_indent=" " * 4, subsequent_indent=" " * 8))
        print()
