"""`kvcache-plugins report`: one self-contained HTML page from the result files below a directory."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_parser", "run"]

_PAGE = "report.html"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser(
        "report",
        help="show result files as one HTML page",
        description="Put every result file below a directory into one HTML page that opens from disk: "
        "pictures, tables with the dense baseline, what was skipped, and where each number comes from.",
    )
    parser.add_argument("directory", metavar="DIR", help="where to look for results.json and other *.json")
    parser.add_argument("--output", metavar="FILE.html", help=f"default: DIR/{_PAGE}")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the page and say what it shows and what it leaves out."""
    if not args.directory:
        raise ValueError(f"DIR must be a directory, got {args.directory!r}.")
    directory = Path(args.directory)
    output = directory / _PAGE if args.output is None else Path(args.output)
    if output.is_dir() or args.output == "":
        given = f"the directory {str(output)!r}" if args.output else repr(args.output)
        raise ValueError(f"--output must be a file, got {given}.")
    if output.suffix.lower() == ".json":  # which the page would replace
        raise ValueError(f"--output must be a page of HTML, not a file of json, got {str(output)!r}.")

    from ..artifacts.files import replaced
    from ..evaluation.pages.documents import find_results
    from ..evaluation.pages.page import render_page

    files, refused = find_results(directory)
    page = render_page(files, refused, directory.resolve().name or str(directory))
    output.parent.mkdir(parents=True, exist_ok=True)
    with replaced(output) as unfinished:
        unfinished.write_text(page, encoding="utf-8", errors="replace")
    for entry in refused:
        if not entry.is_of_others:
            print(f"left out {entry.path}: {entry.reason}")
    if others := [str(entry.path) for entry in refused if entry.is_of_others]:
        print(f"left out {len(others)} json files that hold no results, such as {others[0]}")
    print(f"{len(files)} result file{'' if len(files) == 1 else 's'}: {output}")
    return 0
