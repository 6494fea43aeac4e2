"""What a fresh process imports: what this one would, whatever lies in the current directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvcache_plugins.evaluation.speed.generation import process
from kvcache_plugins.fresh_processes import python_command

ROOT = str(Path(__file__).resolve().parents[1])
SAY = "def say(words):\n    import queue, sys\n    print(__file__, queue.__file__, *words)\n    return 7\n"


def _say() -> tuple[int, list[str]]:
    done = subprocess.run(
        python_command("where", "say", "a b", "ü"), capture_output=True, text=True, check=False
    )
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def test_nothing_is_imported_from_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / 'th"ère'
    for folder in (here, there):
        folder.mkdir()
        (folder / "where.py").write_text(SAY)
    for name in ("queue", "json", "os", "traceback"):
        (here / f"{name}.py").write_text("raise SystemExit('imported from the current directory')\n")
    monkeypatch.chdir(here)
    for first in ("", str(there)):  # as of a session at the keyboard, and as of a script
        monkeypatch.setattr(sys, "path", [first, str(there), *(p for p in sys.path if p)])
        status, (line,) = _say()
        assert status == 7
        where, queue, *words = line.split()
        assert (where, words) == (str(there / "where.py"), ["a", "b", "ü"])
        assert not queue.startswith(str(tmp_path))


def test_this_package_is_found_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", *(entry for entry in sys.path if entry and entry != ROOT)])
    code = python_command("a", "b")[2]
    assert f"sys.path[:] = [{ROOT!r}, " in code and "''" not in code


def test_a_measurement_runs_the_code_of_the_process_that_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout in the current directory is another one."""
    (tmp_path / "kvcache_plugins").mkdir()
    (tmp_path / "kvcache_plugins" / "__init__.py").write_text("raise ImportError('of another checkout')\n")
    (tmp_path / "queue.py").write_text("raise ImportError('of a user')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(process.WorkerError, match="KeyError: 'threads'"):
        process.run_job({"cache_config": {"backend": "dense"}})
