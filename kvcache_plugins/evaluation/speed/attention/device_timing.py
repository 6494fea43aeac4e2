"""Times of work on a GPU: by events, around a CUDA graph of several calls where they can be captured.

A graph leaves out what Python and the launches take on the CPU, which in a loop of `generate()` may well be
longer; `DeviceTimer.window` tells both. Calls of one recording work on different data, together several times
what the GPU's cache holds (`DeviceTimer.sets`), so that each finds its own gone.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

__all__ = ["DeviceTimer", "Recording"]

_LEAST_CALLS = 16
"""Calls of a graph: enough that its launch is a small part of it."""
_MOST_SETS = 64
_CACHES = 3
"""So many times what the cache holds, sets of data take turns."""
_COPY_BYTES = 1 << 31
_COPIES = 5
_WAITED = "called a synchronizing CUDA operation"
"""What torch warns of in its debug mode; the mode itself is announced by a warning too."""


@dataclass(frozen=True)
class Recording:
    """Calls ready to be repeated.

    Args:
        run (`Callable`): Makes all of them.
        calls (`int`): How many.
        is_graph (`bool`): Whether they are a CUDA graph.
        note (`str`, *optional*): Why they are none.
    """

    run: Callable[[], object]
    calls: int
    is_graph: bool = True
    note: str | None = None


class DeviceTimer:
    """Times work on one GPU, the current one.

    Args:
        device (`torch.device`): The GPU, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._failed: list[torch.cuda.CUDAGraph] = []

    def record(self, calls: Sequence[Callable[[], object]]) -> Recording:
        """Make calls repeatable, as a CUDA graph if none of them waits for the device.

        They are made three times: to build and allocate what a first use does, to see whether they wait, for
        that would break a capture, and to be captured. What is not captured is timed as it is launched.

        Args:
            calls (`Sequence[Callable]`): The same work on different data.
        """

        def run() -> None:
            for call in calls:
                call()

        run()
        self.synchronize()
        if self._waits(run):
            note = "not captured: it waits for the device"
        else:
            rounds = math.ceil(_LEAST_CALLS / len(calls))
            try:
                return Recording(self._capture([*calls] * rounds), rounds * len(calls))
            except RuntimeError as error:
                note = f"not captured: {str(error).splitlines()[0]}"
        self.synchronize()
        return Recording(run, len(calls), is_graph=False, note=note)

    def milliseconds(self, recording: Recording) -> float:
        """Run a recording once and return the device's time per call."""
        if recording.is_graph:
            recording.run()  # the device is busy while the timed one is launched, so it begins at once
        else:
            self.synchronize()
        return self._elapsed(recording.run) / recording.calls

    def window(self, call: Callable[[], object]) -> tuple[float, float]:
        """Make a call as any program would; return the CPU's and the device's milliseconds."""
        launched: list[float] = []

        def run() -> None:
            call()
            launched.append(time.perf_counter())

        self.synchronize()
        started = time.perf_counter()
        device_ms = self._elapsed(run)
        return 1000 * (launched[0] - started), device_ms

    def copy_gb_per_s(self) -> float:
        """Measure the bytes a copy within the device's memory reads and writes, in GB/s."""
        free, _ = self._memory()
        size = min(_COPY_BYTES, free // 8)
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        recording = Recording(lambda: target.copy_(source), 1)
        times = [self.milliseconds(recording) for _ in range(_COPIES)]
        return 2 * size / statistics.median(times) / 1e6

    def sets(self, nbytes: int) -> int:
        """Return how many sets of `nbytes` each are so large that none stays in the device's cache."""
        return max(2, min(_MOST_SETS, math.ceil(_CACHES * self.cache_bytes() / nbytes)))

    def cache_bytes(self) -> int:
        """Return the size of the device's last cache."""
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Give memory that is no longer used back, after an attempt that failed or a point that is done."""
        with suppress(RuntimeError):  # as after a failed capture, see `_capture`
            torch.cuda.empty_cache()

    def _memory(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.device)

    def _capture(self, calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.graph(graph):
                for call in calls:
                    call()
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # which torch does only where the end of the capture raises nothing
            # Before torch 2.12 the allocator goes on asking a graph whose capture failed (pytorch #180395).
            self._failed.append(graph)
            if isinstance(error.__context__, RuntimeError):  # what has ended the capture says why
                raise error.__context__ from None
            raise
        return graph.replay

    def _waits(self, run: Callable[[], object]) -> bool:
        """Whether the CPU waits for the device on the way, which no graph can hold."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        return any(_WAITED in str(warning.message) for warning in caught)

    def _elapsed(self, run: Callable[[], object]) -> float:
        """Milliseconds of the device from before a run to after it."""
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        run()
        ended.record()
        ended.synchronize()
        return float(started.elapsed_time(ended))
