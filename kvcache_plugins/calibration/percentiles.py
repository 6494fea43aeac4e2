"""Exact percentiles of numbers that come in portions, from the largest and the smallest of them alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..device_dtypes import doubled

__all__ = ["StreamingRange"]


class StreamingRange:
    """The percentiles `tail * 100` and `(1 - tail) * 100` of every channel, by linear interpolation.

    A percentile near an end depends on the few numbers nearest to that end only, so it is enough to keep the
    largest and the smallest that were seen: the result is exactly that of all numbers together
    (`numpy.percentile`), in whatever portions and order they come.

    Args:
        total (`int`): How many numbers each channel will have had in the end, at least 1.
        tail (`float`): In `[0, 0.5)`; 0 gives minimum and maximum.
    """

    def __init__(self, total: int, tail: float) -> None:
        self.total, self.tail = total, tail
        # numbers below the percentile, and how far it lies towards the next one
        place = tail * (total - 1)
        self._below, self._fraction = math.floor(place), place - math.floor(place)
        self.kept = min(self._below + 2, total)
        self.largest: Tensor | None = None
        self.smallest: Tensor | None = None
        self.seen = 0

    def add(self, numbers: Tensor) -> None:
        """Take `numbers` `(H, T, D)`, fp32: `T` further numbers of each of `H x D` channels."""
        if not bool(torch.isfinite(numbers).all()):
            raise ValueError("The keys of a calibration must be finite; use --dtype bf16 or fp32.")
        self.seen += numbers.shape[1]
        for name, largest in (("largest", True), ("smallest", False)):
            held = getattr(self, name)
            pool = numbers if held is None else torch.cat([held.to(numbers.device), numbers], dim=1)
            count = min(self.kept, pool.shape[1])
            setattr(self, name, pool.topk(count, dim=1, largest=largest, sorted=True).values)

    def bounds(self) -> tuple[Tensor, Tensor]:
        """Return the lower and the upper percentile, fp32 `(H, D)`."""
        assert self.largest is not None and self.smallest is not None and self.seen == self.total
        return self._interpolate(self.smallest).cpu(), self._interpolate(self.largest).cpu()

    def _interpolate(self, extremes: Tensor) -> Tensor:
        """The percentile, from the extremes of one end, the outermost first."""
        near = doubled(extremes[:, self._below])
        further = doubled(extremes[:, min(self._below + 1, self.kept - 1)])
        return (near + (further - near) * self._fraction).float()
