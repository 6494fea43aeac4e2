"""How much of the processor others had while something was timed, which no time shows by itself."""

from __future__ import annotations

import os
import time

import psutil

__all__ = ["OtherWork"]

_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
"""Fields of `psutil.cpu_times`, of which every system has some; what guests take is part of the user's."""


class OtherWork:
    """Counts from now on what other processes, and other machines on the same hardware, let a processor do.

    What this process does, and what the processes that it has waited for have done, is not counted.
    """

    def __init__(self) -> None:
        self._begun = _readings()

    def share(self) -> float:
        """Return the share of all cores that others had until now, 0 to 1; 0 where no system counts it."""
        busy, own, seconds = (now - then for now, then in zip(_readings(), self._begun, strict=True))
        others = max(0.0, busy - own) / max(seconds * (os.cpu_count() or 1), 1e-9)
        return round(min(1.0, others), 3)


def _readings() -> tuple[float, float, float]:
    """Seconds of work of all cores, of this process and its children, and of the clock."""
    fields, own = psutil.cpu_times(), os.times()
    busy = sum(getattr(fields, name, 0.0) for name in _BUSY)
    return busy, sum(own[:4]), time.monotonic()
