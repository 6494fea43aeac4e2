"""What is shown of a measurement: a bar on a terminal, and a few lines in a file."""

from __future__ import annotations

import pytest

from kvcache_plugins.runs import progress
from kvcache_plugins.runs.progress import progress_bar


class _Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def test_without_a_terminal_there_are_few_lines_and_each_says_how_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Thirty windows of five caches, a second each."""
    clock = _Clock(monkeypatch)
    with progress_bar(150) as update:
        for _ in range(30):
            for cache in ("dense", "int8", "int4", "kivi [4-bit]", "float8"):
                update(cache)
                clock.now += 1
                update(cache, advance=1)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "dense: 0 of 150 steps, 0:00:00",
        "float8: 30 of 150 steps, 0:00:30",
        "float8: 60 of 150 steps, 0:01:00",
        "float8: 90 of 150 steps, 0:01:30",
        "float8: 120 of 150 steps, 0:02:00",
        "finished: 150 of 150 steps, 0:02:30",
    ]


def test_a_short_run_says_when_it_begins_and_when_it_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _Clock(monkeypatch)
    with progress_bar(2) as update:
        for name in ("a", "b"):
            update(f"[bold]{name}")
            update(f"[bold]{name}", advance=1)
    assert capsys.readouterr().err.splitlines() == [
        "[bold]a: 0 of 2 steps, 0:00:00",
        "finished: 2 of 2 steps, 0:00:00",
    ]


def test_a_run_that_stops_says_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = _Clock(monkeypatch)

    def stopped() -> None:
        with progress_bar(9) as update:
            update("dense", advance=1)
            clock.now += 12
            update("int8")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert capsys.readouterr().err.splitlines()[-1] == "int8: 1 of 9 steps, 0:00:12"


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # with which rich takes anything for a terminal
    with progress_bar(3) as update:
        update("int8", advance=2)
    said = capsys.readouterr().err
    assert "3/3" in said and "int8" in said and "steps" not in said
