"""Timing on a machine that does other things too: candidates in turn, cold caches, medians and spread."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from transformers.generation.streamers import BaseStreamer

__all__ = ["CacheFlusher", "HostStopwatch", "Spread", "StepTimer", "time_in_turn"]

_Work = TypeVar("_Work")

_LEAST_FLUSH_BYTES = 64 << 20


@dataclass(frozen=True)
class Spread:
    """Times of one candidate.

    Args:
        median_ms (`float`), p20_ms (`float`), p80_ms (`float`): Percentiles 50, 20 and 80.
        mean_ms (`float`): Mean; what is rare and long counts in it.
    """

    median_ms: float
    p20_ms: float
    p80_ms: float
    mean_ms: float

    @classmethod
    def of(cls, times_ms: Sequence[float]) -> Spread:
        """Summarize at least one time."""
        p20, median, p80 = np.percentile(np.asarray(times_ms, dtype=np.float64), [20, 50, 80])
        return cls(float(median), float(p20), float(p80), float(np.mean(times_ms)))

    def plus(self, ms: float) -> Spread:
        """Add what every call takes besides."""
        return Spread(self.median_ms + ms, self.p20_ms + ms, self.p80_ms + ms, self.mean_ms + ms)


class CacheFlusher:
    """Evicts everything from the processor's caches by writing to a buffer twice the size of the largest.

    In a model, a layer's keys and values are touched once per token, after those of all other layers, so they
    never are in a cache; a benchmark of a single layer has to see to that.
    """

    def __init__(self) -> None:
        size = max(2 * _largest_cache_bytes(), _LEAST_FLUSH_BYTES)
        self._buffer = torch.zeros(size // 4, dtype=torch.int32)

    def __call__(self) -> None:
        self._buffer.add_(1)


class HostStopwatch:
    """Times a call on the CPU by the clock on the wall, with nothing of it in the processor's caches."""

    def __init__(self) -> None:
        self._flush = CacheFlusher()

    def __call__(self, call: Callable[[], object]) -> float:
        self._flush()
        started = time.perf_counter()
        call()
        return 1000 * (time.perf_counter() - started)


def time_in_turn(
    candidates: Mapping[str, _Work],
    *,
    repeats: int,
    warm_up: int,
    stopwatch: Callable[[_Work], float],
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Spread]:
    """Time every candidate `repeats` times, in rounds of one call each, every round in an order of its own.

    Whatever slows the machine for a while then slows all of them alike, and so does whatever the call before
    leaves behind (the first packed step after a dense one is a fifth slower than after another).

    Args:
        candidates (`Mapping`): What to time, by name.
        repeats (`int`): Timed rounds.
        warm_up (`int`): Rounds before them that are not counted.
        stopwatch (`Callable`): Runs a candidate once and returns the milliseconds it took.
        advance (`Callable`): Called after every round, for a progress bar.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    order = random.Random(0)
    for turn in range(warm_up + repeats):
        for name, work in order.sample(list(candidates.items()), len(candidates)):
            ms = stopwatch(work)
            if turn >= warm_up:
                times[name].append(ms)
        advance()
    return {name: Spread.of(samples) for name, samples in times.items()}


class StepTimer(BaseStreamer):
    """Notes when `generate()` hands out each token, by then on the CPU, so that the device has finished."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, or the tokens of one step."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""

    def prefill_ms(self) -> float:
        """Return the time to the first token: the first two calls bring the prompt and prefill's token."""
        return 1000 * (self.times[1] - self.times[0])

    def decode_ms(self) -> list[float]:
        """Return the time of each decode step."""
        return [1000 * (b - a) for a, b in zip(self.times[1:], self.times[2:], strict=False)]


def _largest_cache_bytes() -> int:
    """Size of the largest cache the system reports for the first core, 0 if it reports none."""
    sizes = [0]
    for entry in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = entry.read_text(encoding="ascii", errors="replace").strip()
        number, unit = text[:-1], {"K": 10, "M": 20, "G": 30}.get(text[-1:])
        if number.isdigit() and unit is not None:
            sizes.append(int(number) << unit)
    return max(sizes)
