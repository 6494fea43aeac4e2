"""How much of the processor others had: counted as the system tells it, and told below a table."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache_plugins.runs import footnotes, other_work
from kvcache_plugins.runs.other_work import OtherWork


def _clocks(monkeypatch: pytest.MonkeyPatch, seconds: float, own: float, **fields: float) -> None:
    monkeypatch.setattr(other_work.psutil, "cpu_times", lambda: SimpleNamespace(**fields))
    monkeypatch.setattr(other_work.os, "times", lambda: (own / 4, own / 4, own / 4, own / 4, seconds))
    monkeypatch.setattr(other_work.time, "monotonic", lambda: seconds)


def test_what_others_did_is_all_work_but_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_work.os, "cpu_count", lambda: 4)
    _clocks(monkeypatch, 100.0, 7.0, user=50.0, system=10.0, idle=500.0, iowait=3.0, steal=1.0, guest=9.0)
    work = OtherWork()
    assert work.share() == 0
    # 8 seconds of work on 4 cores in 5 seconds, 3 of which are ours
    _clocks(monkeypatch, 105.0, 10.0, user=55.0, system=11.0, idle=510.0, iowait=5.0, steal=3.0, guest=14.0)
    assert work.share() == pytest.approx((8 - 3) / 20)


@pytest.mark.parametrize(("user", "expected"), [(1.0, 0.0), (500.0, 1.0)])
def test_a_share_is_one(user: float, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the system counts nothing, or more than there can be."""
    _clocks(monkeypatch, 0.0, 0.0, user=1.0, idle=0.0)
    work = OtherWork()
    _clocks(monkeypatch, 1.0, 1.0, user=user, idle=0.0)
    assert work.share() == expected


def test_another_process_is_seen() -> None:
    before, until = other_work._readings()[0], time.monotonic() + 0.2
    while time.monotonic() < until:
        pass
    if other_work._readings()[0] == before:
        pytest.skip("this system counts no work")
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.2)  # until it has begun
        work = OtherWork()
        time.sleep(1.0)
        assert work.share() > 0.3 / (other_work.os.cpu_count() or 1)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("environment", "said"), [({}, []), ({"other_work": 0.04}, [])])
def test_little_is_not_told(environment: dict[str, Any], said: list[str]) -> None:
    assert footnotes.other_work({"environment": environment}) == said


def test_much_is_told() -> None:
    (line,) = footnotes.other_work({"environment": {"other_work": 0.256}})
    assert line == "26% of the processor was busy with other work meanwhile: do not rely on the times"
