"""Timing on a machine that does other things too: candidates in turn, cold caches, medians and spread."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers.generation.streamers import BaseStreamer

__all__ = ["CacheFlusher", "Spread", "StepTimer", "time_in_turn"]

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
        """Summarise at least one time."""
        p20, median, p80 = np.percentile(np.asarray(times_ms, dtype=np.float64), [20, 50, 80])
        return cls(float(median), float(p20), float(p80), float(np.mean(times_ms)))


class CacheFlusher:
    """Evicts everything from the processor's caches by writing to a buffer twice the size of the largest.

    In a model, a layer's keys and values are touched once per token, after those of all other layers, so they
    never are in a cache; a benchmark of a single layer has to see to that.

    Args:
        device (`torch.device`): Whose caches. A GPU's are assumed to be below 64 MB.
    """

    def __init__(self, device: torch.device) -> None:
        largest = 2 * _largest_cache_bytes() if device.type == "cpu" else 0
        self._buffer = torch.zeros(max(largest, _LEAST_FLUSH_BYTES) // 4, dtype=torch.int32, device=device)

    def __call__(self) -> None:
        self._buffer.add_(1)


def time_in_turn(
    candidates: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    warm_up: int,
    device: torch.device,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Spread]:
    """Time every candidate `repeats` times, in rounds of one call each, every round in an order of its own.

    Whatever slows the machine for a while then slows all of them alike, and so does whatever the call before
    leaves behind (the first packed step after a dense one is a fifth slower than after another). The
    processor's caches are emptied before each call.

    Args:
        candidates (`Mapping[str, Callable]`): What to time, by name.
        repeats (`int`): Timed rounds.
        warm_up (`int`): Rounds before them that are not counted.
        device (`torch.device`): Where the candidates run.
        advance (`Callable`): Called after every round, for a progress bar.
    """
    flush = CacheFlusher(device)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    order = random.Random(0)
    for turn in range(warm_up + repeats):
        for name, call in order.sample(list(candidates.items()), len(candidates)):
            flush()
            _synchronize(device)
            started = time.perf_counter()
            call()
            _synchronize(device)
            if turn >= warm_up:
                times[name].append(1000 * (time.perf_counter() - started))
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


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
