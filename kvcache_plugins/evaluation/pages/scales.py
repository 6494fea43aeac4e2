"""Axes of a picture: from values to pixels, and where ticks stand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Scale", "linear", "logarithmic"]


@dataclass(frozen=True)
class Scale:
    """One axis.

    Args:
        low (`float`), high (`float`): Ends, in values; `low < high`.
        ticks (`tuple[float, ...]`): Values with a line and a number, within the ends.
        is_log (`bool`): Whether equal factors, not equal differences, take equal space.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return where a value lies between the ends, from 0 to 1."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def labels(self) -> list[str]:
        """Return the numbers at the ticks, with no more digits than tell them apart."""
        if self.is_log:
            return [_short(tick) for tick in self.ticks]
        step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else abs(self.ticks[0]) or 1.0
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        return [f"{tick:,.{digits}f}" for tick in self.ticks]


def linear(values: Iterable[float], *, wanted: int = 5) -> Scale:
    """Span values with about `wanted` round ticks and a little room around.

    Args:
        values (`Iterable[float]`): At least one, all finite.
        wanted (`int`): About so many ticks.
    """
    values = list(values)
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = abs(high) / 2 or 1.0
        low, high = low - room, high + room
    room = 0.06 * (high - low)
    low, high = low - room, high + room
    step = _round_step((high - low) / wanted)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return Scale(low, high, tuple(step * index for index in range(first, last + 1)))


def logarithmic(values: Iterable[float], *, ticks: Iterable[float] | None = None) -> Scale:
    """Span positive values by factors.

    Args:
        values (`Iterable[float]`): At least one, all positive.
        ticks (`Iterable[float]`, *optional*): Where ticks stand, such as the measured lengths; otherwise at
            powers of ten, and at 2 and 5 times those where the span is short.
    """
    values = list(values)
    low, high = min(values), max(values)
    room = max((high / low) ** 0.06, 1.15)
    low, high = low / room, high * room
    if ticks is not None:
        return Scale(low, high, tuple(ticks), is_log=True)
    decades = math.log10(high / low)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        found = [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p <= high]
        if len(found) >= 3:
            break
    if len(found) < 3:
        between = linear([low, high], wanted=8).ticks
        return Scale(low, high, tuple(tick for tick in between if low <= tick <= high), is_log=True)
    every = max(1, math.ceil(decades / 6)) if len(found) > 8 else 1
    return Scale(low, high, tuple(found[::every]), is_log=True)


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.999)


def _short(value: float) -> str:
    if value >= 1e5 or value < 1e-4:
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    return f"{value:,.10g}"
