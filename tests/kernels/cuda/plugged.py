"""A pytest of its own, with a plugin that changes the whole process: simulated GPUs, or the PTX machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["run"]

_ROOT = Path(__file__).parents[3]


def run(plugin: str, arguments: list[str], environment: Mapping[str, str], least: int) -> str:
    """Run tests, all of which must pass, and `least` of them at least; return what pytest printed."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", plugin, "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command, cwd=_ROOT, env=inherited | dict(environment), capture_output=True, text=True
    )
    passed = re.search(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and passed is not None, done.stdout[-8000:] + done.stderr[-2000:]
    assert int(passed[1]) >= least
    return done.stdout
