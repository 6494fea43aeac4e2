"""Forks processes in which the package is imported and no kernel is loaded: see `fresh_process`.

A request is a line of JSON: `runs`, a list of what to run at the same time (`code`, and the files `out` and
`err` for what it prints), `environment` and `timeout`. The answer is a line with the list of exit statuses,
null for a process that ran for too long.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import traceback
from typing import Any, NoReturn


def _import() -> None:
    """What takes seconds. Nothing of it builds, loads or calls a kernel."""
    import tests.kernels.append_cases
    import tests.kernels.cuda.emulation
    import tests.kernels.decode_cases
    from kvcache_plugins.kernels import cuda_loader, loader

    assert loader._library is None and cuda_loader._path is None and not tests.kernels.cuda.emulation._loaded


def _run(run: dict[str, str], environment: dict[str, str]) -> NoReturn:
    status = 1
    try:
        for number, name in ((0, os.devnull), (1, run["out"]), (2, run["err"])):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
        os.environ.clear()
        os.environ.update(environment)
        exec(compile(run["code"], "<test>", "exec"), {"__name__": "__main__"})
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # nothing of the server, least of all its end, is this process's business


def _statuses(request: dict[str, Any]) -> list[int | None]:
    children = []
    for run in request["runs"]:
        child = os.fork()
        if child == 0:
            _run(run, request["environment"])
        children.append(child)
    deadline = time.monotonic() + request["timeout"]
    return [_status(child, deadline) for child in children]


def _status(child: int, deadline: float) -> int | None:
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.01)


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what importing prints is no answer
    _import()
    # what is imported stays until the end, in every process: no collection of garbage needs to look at it
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(_statuses(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
