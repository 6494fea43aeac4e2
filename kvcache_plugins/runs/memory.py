"""How much memory the machine has, and how much of it this process takes: on Linux, macOS and Windows."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

__all__ = ["machine_memory", "peak_resident_bytes", "resident_bytes"]


def machine_memory() -> int:
    """Return the bytes of memory that the machine has."""
    return int(psutil.virtual_memory().total)


def resident_bytes() -> int:
    """Return the bytes of memory in which this process lies now."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """Return the most bytes of memory in which this process has lain."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    # Linux hands `ru_maxrss` on to what a process starts; this line begins anew with each program
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # not there on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
