"""The bar shown while something is measured, on the standard error stream to leave tables alone."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Progress", "ProgressBar", "no_bar", "progress_bar", "silent"]

_PAUSE = 30.0
"""Seconds between two lines at least, where there is no terminal."""


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
    """Show a bar of `total` steps; where there is no terminal, a line now and then and one at the end."""
    from rich.console import Console

    console = Console(stderr=True)
    with (_bar if console.is_terminal or console.is_jupyter else _lines)(console, total) as progress:
        yield progress


@contextmanager
def _bar(console: Console, total: int) -> Iterator[Progress]:
    from rich import progress as bars

    columns = (
        bars.TextColumn("{task.description:<40}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
    )
    with bars.Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total)

        def update(description: str, advance: int = 0) -> None:
            bar.update(task, description=description, advance=advance)

        yield update
        bar.update(task, completed=total)


@contextmanager
def _lines(console: Console, total: int) -> Iterator[Progress]:
    """Say what is done, how far it is and for how long it has run: few lines, which a log file may keep."""
    started = time.monotonic()
    said = -math.inf
    done, doing = 0, "begun"

    def say(now: float) -> None:
        elapsed = timedelta(seconds=int(now - started))
        line = f"{doing}: {done} of {total} steps, {elapsed}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    def update(description: str, advance: int = 0) -> None:
        nonlocal said, done, doing
        done, doing, now = done + advance, description, time.monotonic()
        if now - said >= _PAUSE and done < total:
            said = now
            say(now)

    try:
        yield update
        done, doing = total, "finished"
    finally:
        say(time.monotonic())
