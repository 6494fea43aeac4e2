"""Mean and covariance of the queries of a text, however it is split into calls.

The moments of a call are merged with those before it (Chan, Golub and LeVeque, 1983): deviations are taken
from a mean, never a square from a square, so that what comes out is the same to fp32 rounding whatever came
together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..device_dtypes import doubled
from ..models.rotary import Rotary

__all__ = ["QueryMoments", "average_rotation"]


@dataclass
class QueryMoments:
    """Moments of the vectors of every row and head, changed in place.

    Args:
        count (`torch.Tensor` of shape `(B,)`): int64, vectors so far.
        mean (`torch.Tensor` of shape `(B, H, D)`): fp32.
        scatter (`torch.Tensor` of shape `(B, H, D, D)`, *optional*): fp32, sum of the outer products of
            deviations from the mean.
    """

    count: Tensor
    mean: Tensor
    scatter: Tensor | None = None

    @classmethod
    def of_nothing(cls, shape: Sequence[int], device: torch.device, *, has_scatter: bool) -> QueryMoments:
        """Moments of no vector yet, of `shape` `(B, H, D)`."""
        mean = torch.zeros(tuple(shape), dtype=torch.float32, device=device)
        scatter = mean.new_zeros((*shape, shape[-1])) if has_scatter else None
        return cls(mean.new_zeros(shape[0], dtype=torch.long), mean, scatter)

    def tensors(self) -> dict[str, Tensor]:
        """What there is, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def add(self, states: Tensor, is_counted: Tensor) -> None:
        """Add the vectors `states`, fp32 `(B, H, n, D)`, of which those count that `is_counted` `(B, n)`.

        The others may hold anything, also what is no number.
        """
        hidden = ~is_counted[:, None, :, None]
        number = is_counted.sum(1)
        states = states.masked_fill(hidden, 0.0)
        mean = states.sum(2) / number.clamp_min(1)[:, None, None]
        shift = mean - self.mean
        share = (number.float() / (self.count + number).clamp_min(1))[:, None, None]
        if self.scatter is not None:
            deviations = (states - mean[:, :, None]).masked_fill_(hidden, 0.0)
            # the distance of both means, as one more row of the product
            between = shift * (self.count[:, None, None] * share).sqrt()
            rows = torch.cat([deviations, between[:, :, None]], dim=2).flatten(0, 1)
            self.scatter.view(-1, *self.scatter.shape[2:]).baddbmm_(rows.mT, rows)
        self.mean.add_(shift * share)
        self.count.add_(number)

    def covariance(self) -> Tensor | None:
        """fp32 `(B, H, D, D)`, of the vectors themselves and not of what they are a sample of."""
        if self.scatter is None:
            return None
        return self.scatter / self.count.clamp_min(1)[:, None, None, None]

    def turned(self, rotary: Rotary, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
        """Mean and covariance of the vectors once a rotation, or an average of some, is applied to them.

        Args:
            rotary (`Rotary`): Which channels make a pair.
            cos (`torch.Tensor` of shape `(B, rotary_dim / 2)`): Its cosines in every row.
            sin (`torch.Tensor` of shape `(B, rotary_dim / 2)`): Its sines.
        """
        mean, covariance = rotary.turn(self.mean, cos[:, None], sin[:, None]), self.covariance()
        if covariance is None:
            return mean, None
        cos, sin = cos[:, None, None], sin[:, None, None]
        half = rotary.turn(covariance, cos, sin)
        return mean, rotary.turn(half.mT.contiguous(), cos, sin)


def average_rotation(rotary: Rotary, first: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Average the rotations of `length` positions from `first` `(B,)` on.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Mean cosines and sines, fp32 `(B, rotary_dim / 2)`. They shorten
            what they turn, the fast pairs most.
    """
    start = doubled(first)
    half_turns = rotary.frequencies(start.device) / (2 * math.pi)
    # the mean of exp(i w p), p < n, is exp(i w (n - 1) / 2) sin(n w / 2) / (n sin(w / 2))
    shortened = (torch.sinc(length * half_turns) / torch.sinc(half_turns)).float()
    cos, sin = rotary.tables(start + (length - 1) / 2)
    return (cos * shortened).to(first.device), (sin * shortened).to(first.device)
