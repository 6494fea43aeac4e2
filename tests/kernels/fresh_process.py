"""Processes of their own, for what a process does once: find, build and load a library.

Importing torch and transformers takes seconds, so it is done once, by a server that forks a process for
every run (`fresh_server`). What runs finds the package imported, the environment it was given, and no kernel
loaded.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path

__all__ = ["run", "run_together"]

_ROOT = Path(__file__).parents[2]


def run(
    code: str, environment: Mapping[str, str] | None = None, timeout: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run a script; like `subprocess.run`, with the output as text.

    Raises:
        subprocess.TimeoutExpired: If it runs for longer than `timeout` seconds.
    """
    return run_together([code], environment, timeout)[0]


def run_together(
    codes: list[str], environment: Mapping[str, str] | None = None, timeout: float = 300.0
) -> list[subprocess.CompletedProcess[str]]:
    """Run scripts at the same time, each in its process; see `run`."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as directory:
        runs = [
            {"code": textwrap.dedent(code), "out": f"{directory}/out{i}", "err": f"{directory}/err{i}"}
            for i, code in enumerate(codes)
        ]
        given = dict(os.environ if environment is None else environment)
        print(
            json.dumps({"runs": runs, "environment": given, "timeout": timeout}),
            file=server.stdin,
            flush=True,
        )
        answer = server.stdout.readline()
        assert answer, "the server of fresh processes has ended"
        done = []
        for run, status in zip(runs, json.loads(answer), strict=True):
            if status is None:
                raise subprocess.TimeoutExpired("<test>", timeout)
            out, err = (Path(run[name]).read_text(errors="replace") for name in ("out", "err"))
            done.append(subprocess.CompletedProcess("<test>", status, out, err))
    return done


@functools.cache
def _server() -> subprocess.Popen[str]:
    """One per test process; it ends when its input does, which is when the test process ends."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVCACHE_")}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.kernels.fresh_server"],
        cwd=_ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
