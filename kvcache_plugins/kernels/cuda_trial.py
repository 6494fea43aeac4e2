"""The first run of a build of the CUDA kernels on a model of GPU: in a process of its own.

A kernel that goes astray there (an illegal address, an endless loop) takes that process with it and not the
user's. It makes the check that every process makes before it uses the kernels (`cuda_check`). The verdict is
kept in a file (`verdicts`) named after the build's bytes, the model of GPU and the driver, so each of them
pays for a trial once: importing torch, and the check. Processes that start together wait for one of them and
take its verdict. What was no fault of the kernels (no memory, a GPU that is busy) is tried again by later
ones. So is, once and for longer, what has not come to its end, as where the driver had to translate kernels
for a GPU that they were not compiled for: it keeps what it has translated.

`kvcache-plugins kernels build` holds the trial ahead of time, while nothing else needs the GPU.
"""

from __future__ import annotations

import ctypes
import logging
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from ..fresh_processes import python_command
from . import builds, cuda_check
from .verdicts import Verdict, VerdictFile

__all__ = ["find_fault", "main", "passed"]

_logger = logging.getLogger(__name__)
_SECONDS = 120
"""Long enough for a machine that is busy."""
_SECONDS_AGAIN = 4 * _SECONDS
"""For the trial after one that ran out of time; what takes longer does not end."""
_DEVIATES = 3
"""Status of a process whose kernels are wrong: neither Python's own (1, 2) nor that of a signal."""
_LINES = 15
"""Of what a process said that broke."""
_AHEAD = "`kvcache-plugins kernels build` tries them, while nothing else needs the GPU"
_BEGUN = "begun"
"""What a process says when all is loaded and the kernels' turn comes."""
_NO_FAULT = re.compile(r"out of memory|busy or unavailable", re.IGNORECASE)


def find_fault(library: Path, device: torch.device) -> str | None:
    """Return why kernels must not be used on a GPU, or `None` if they have passed their trial there.

    Args:
        library (`Path`): A build.
        device (`torch.device`): The GPU, with its index.
    """
    started, file = time.time(), _verdict_file(library, device)
    verdict = file.read(started)
    if verdict is None:
        with file.locked():
            verdict = file.read(started)  # of a process that was quicker
            if verdict is None:
                verdict = _try(library, device, file.read(0.0))
                file.write(verdict)
    return verdict.fault


def passed(library: Path, device: torch.device) -> bool:
    """Whether a build is known to have passed its trial on this model of GPU, with this driver."""
    verdict = _verdict_file(library, device).read(time.time()) if library.exists() else None
    return verdict is not None and verdict.fault is None


def _verdict_file(library: Path, device: torch.device) -> VerdictFile:
    # a build ends in its digest
    return VerdictFile(library, builds.short_hash(f"{_model(device)}{library.read_bytes()[-64:].hex()}"))


def _try(library: Path, device: torch.device, earlier: Verdict | None) -> Verdict:
    """Hold the trial, after one that was not final if there is an `earlier` verdict."""
    if earlier is None or not earlier.ran_out:
        try:
            return Verdict(_model(device), *_run(library, device, _SECONDS))
        except _HasNotEnded as error:
            again = f"the next process tries them for {_SECONDS_AGAIN} s; {_AHEAD}"
            return Verdict(_model(device), f"{error}; {again}", is_final=False, ran_out=True)
    try:
        return Verdict(_model(device), *_run(library, device, _SECONDS_AGAIN))
    except _HasNotEnded as error:
        return Verdict(_model(device), f"{error}, nor earlier", is_final=True, ran_out=True)


class _HasNotEnded(Exception):
    """Kernels have begun, and then taken too long."""


def _run(library: Path, device: torch.device, seconds: float) -> tuple[str | None, bool]:
    """Hold the trial; return the fault, and whether another trial would find the same.

    Raises:
        _HasNotEnded: If the kernels have not come to an end within `seconds`.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        return "there is no Python to try them in a process of its own", False
    _logger.warning(
        "trying the CUDA kernels on %s for up to %d s, once for this build, model of GPU and driver",
        device,
        seconds,
    )
    command = python_command(__name__, "main", str(library), str(device.index))
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return f"no process could be started to try them ({error})", False
    except subprocess.TimeoutExpired as error:
        if _BEGUN not in str(error.stdout):  # bytes, whatever was asked for
            return f"a process that was to try them had not begun after {seconds} s", False
        raise _HasNotEnded(f"they had not ended after {seconds} s in a process of their own") from None
    said = done.stdout.strip().removeprefix(_BEGUN).strip()
    if done.returncode == _DEVIATES:
        return said or "they deviate, and nothing says how", True
    if done.returncode == 0:
        tried = said.splitlines()[-1] if said else "nothing"
        return (None, True) if tried == _model(device) else (f"not they were tried, but {tried}", False)
    lines = "\n".join(done.stderr.strip().splitlines()[-_LINES:])
    fault = f"a process that tried them ended with status {done.returncode}: {lines}"
    if _NO_FAULT.search(lines):
        fault += f"\n{_AHEAD}."
    return fault, False


def _model(device: torch.device) -> str:
    """Of the GPU, with the driver."""
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, capability {properties.major}.{properties.minor}, driver {_driver()}"


def _driver() -> str:
    with suppress(OSError, IndexError):
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0].strip()
    version = ctypes.c_int()
    with suppress(OSError, AttributeError):  # where the system tells no more, as in some containers
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return f"for CUDA {version.value}"
    return "unknown"


def main(argv: list[str]) -> int:
    """Load a library (first argument), check its kernels on a device (its index, or 0), and tell.

    Raises:
        FileNotFoundError: If there is no such library.
    """
    library, *index = argv
    if not Path(library).is_file():
        raise FileNotFoundError(f"There is no library {library!r}.")
    device = torch.device("cuda", int(index[0]) if index else 0)
    ctypes.CDLL(library)
    torch.cuda.synchronize(device)
    print(_BEGUN, flush=True)
    deviation = cuda_check.find_deviation(device)
    torch.cuda.synchronize(device)
    print(deviation or _model(device))
    return 0 if deviation is None else _DEVIATES


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
