"""The bar shown while something is measured, on the standard error stream to leave tables alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

__all__ = ["Progress", "ProgressBar", "no_bar", "progress_bar", "silent"]


class Progress(Protocol):
    """Told of what goes on."""

    def __call__(self, description: str, advance: int = 0) -> None:
        """Say what is being done, and how many steps were finished since the last call."""


def silent(description: str, advance: int = 0) -> None:
    """Show nothing."""


class ProgressBar(Protocol):
    """Something to be told of what goes on, such as [`progress_bar`] or [`no_bar`]."""

    def __call__(self, total: int) -> AbstractContextManager[Progress]:
        """Begin work of `total` steps."""


@contextmanager
def no_bar(total: int) -> Iterator[Progress]:
    """Show nothing of `total` steps."""
    yield silent


@contextmanager
def progress_bar(total: int) -> Iterator[Progress]:
    """Show a bar of `total` steps; where there is no terminal, a line for every new description."""
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description:<40}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        shown = ""

        def update(description: str, advance: int = 0) -> None:
            nonlocal shown
            bar.update(task, description=description, advance=advance)
            if description != shown and not advance and not bar.console.is_terminal:
                bar.console.print(f"measuring {description}", highlight=False, markup=False)
                shown = description

        yield update
        bar.update(task, completed=total)
