"""The first run of a build of the CUDA kernels on a kind of GPU: in a process of its own.

A kernel that goes astray there (an illegal address, an endless loop) takes that process with it and not the
user's. It runs the check that every process makes before it uses the kernels (`cuda_check`). A build that has
passed is remembered in a file beside it, per GPU model and driver, so a machine pays for this once, about as
long as importing torch takes. A build that has not is tried again by the next process.

python -m kvcache_plugins.kernels.cuda_trial LIBRARY [INDEX]
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from . import cuda_check, loader
from .compiler import file_lock

__all__ = ["find_fault", "main", "record"]

_logger = logging.getLogger(__name__)
_SECONDS = 300
"""Long enough for a machine that is busy; what takes longer does not end."""
_DEVIATES = 3
"""Status of a process whose kernels are wrong; others tell of a process that broke."""
_LINES = 15
"""Of what such a process said."""


def find_fault(library: Path, device: torch.device) -> str | None:
    """Return why kernels must not be used on a GPU, or `None` if they have passed their trial there.

    Args:
        library (`Path`): A build.
        device (`torch.device`): The GPU, with its index.
    """
    passed = record(library, device)
    if passed.exists():
        return None
    with ExitStack() as stack:
        with suppress(OSError):  # a directory that cannot be written to: nothing is remembered there
            stack.enter_context(file_lock(library.with_suffix(".trial.lock")))
        if passed.exists():  # another process was quicker
            return None
        fault = _run(library, device)
        if fault is None:
            with suppress(OSError):
                passed.write_text(json.dumps({"library": library.name, "device": _model(device)}, indent=1))
        return fault


def record(library: Path, device: torch.device) -> Path:
    """Return the file that says a build has passed on this model of GPU, with this driver."""
    return library.with_suffix(f".{loader._short_hash(_model(device))}.passed")


def _run(library: Path, device: torch.device) -> str | None:
    _logger.warning("trying the CUDA kernels on %s, once on this machine", device)
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", __name__, str(library), str(device.index)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, env=os.environ | {"PYTHONPATH": path}
        )
    except OSError as error:
        return f"no process could be started to try them ({error})"
    except subprocess.TimeoutExpired:
        return f"they had not ended after {_SECONDS} s in a process of their own"
    if done.returncode == 0:
        return None
    if done.returncode == _DEVIATES:
        return done.stdout.strip()
    said = "\n".join(done.stderr.strip().splitlines()[-_LINES:])
    return f"a process that tried them ended with status {done.returncode}: {said}"


def _model(device: torch.device) -> str:
    """Of the GPU, with the driver."""
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, capability {properties.major}.{properties.minor}, driver {_driver()}"


def _driver() -> str:
    with suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    return "unknown"


def main(argv: list[str]) -> int:
    """Load a library, check its kernels on a device, and say what is wrong with them."""
    library, *index = argv
    device = torch.device("cuda", int(index[0]) if index else 0)
    ctypes.CDLL(library)
    deviation = cuda_check.find_deviation(device)
    torch.cuda.synchronize(device)
    print(deviation or f"the kernels agree with torch on {device}")
    return 0 if deviation is None else _DEVIATES


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
