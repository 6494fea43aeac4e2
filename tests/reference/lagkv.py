"""LagKV by brute force, in float64 and one token after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["LagPartitions"]


class LagPartitions:
    """LagKV's judgement of one head: what a token is worth once its partition and the next have been read.

    Counted from the first token after the sinks, every `lag` tokens are a partition. Between the smallest and
    the largest value that a channel takes in the next partition its values run from 0 to 1 (a channel that
    does not vary there is 0 throughout). Tokens whose channels then have the larger standard deviation are
    the better; of keys and of values it goes through a softmax over the tokens of the partition, and both add
    up. The best token of any partition is worth more than all second ones, these more than all third ones,
    and so on, and every token that cannot be judged yet is worth more. Of equal ones the newer is worth more.
    """

    def __init__(self, lag: int, first: int) -> None:
        self.lag, self.first = lag, first
        self.places: dict[int, int] = {}
        """Of every token judged: how many of its partition are better."""

    def judge(self, held: list[int], seen: int, states: Sequence[Callable[[list[int]], Tensor]]) -> None:
        """Judge what can be, after `seen` tokens.

        Args:
            held: Positions of the tokens that are still there.
            seen: Tokens read.
            states: Keys `(n, D)` of `n` positions, and their values.
        """
        for begin in range(self.first, seen - 2 * self.lag + 1, self.lag):
            tokens = [p for p in held if begin <= p < begin + self.lag and p not in self.places]
            if not tokens:
                continue
            following = [*range(begin + self.lag, begin + 2 * self.lag)]
            worth = torch.zeros(len(tokens), dtype=torch.float64)
            for state in states:
                reference = state(following).double()
                own = state(tokens).double()
                bottom, extent = reference.min(0).values, reference.max(0).values - reference.min(0).values
                scaled = torch.where(extent > 0, (own - bottom) / extent.clamp_min(1e-300), 0.0)
                centered = scaled - scaled.mean(1, keepdim=True)
                deviation = (centered.square().sum(1) / (own.shape[1] - 1)).sqrt()
                worth += deviation.exp() / deviation.exp().sum()
            better = (worth > worth[:, None]).sum(1)
            self.places |= dict(zip(tokens, better.tolist(), strict=True))

    def worth(self, position: int) -> float:
        """The larger the better."""
        return position / 10**9 - (1 + self.places[position] if position in self.places else 0)
