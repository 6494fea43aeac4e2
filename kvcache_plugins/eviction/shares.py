"""How many tokens each head of a layer keeps, where heads share a budget (Ada-KV, arXiv 2407.11550)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from ..device_dtypes import doubled
from .selection import are_best

__all__ = ["grouped_shares", "share_out"]

MOST_GROUPS = 4
"""Groups of heads that keep as many tokens each: every one is a call of a kernel."""


def share_out(ranks: Sequence[Tensor], total: int, floor: int) -> list[float]:
    """Share `total` tokens among heads: every head's `floor` best, then the best of all heads together.

    All rows of a batch are given the same shares, the mean of what each would choose.

    Args:
        ranks (`Sequence[torch.Tensor]`): Of every head, fp32 `(B, m)` as `selection.ranked` returns them; `m`
            may differ.
        total (`int`): Tokens of all heads of a row.
        floor (`int`): Tokens that a head keeps in any case, at most `total` over the number of heads.

    Returns:
        `list[float]`: Tokens of every head, `total` in all.
    """
    raised = [_with_best(head, floor) for head in ranks]
    longest = max(head.shape[1] for head in ranks)
    # newest beside newest, so that of equal ranks the newer are the better, whatever their head
    aligned = [F.pad(head, (longest - head.shape[1], 0), value=-torch.inf) for head in raised]
    joined = torch.stack(aligned, dim=2)
    taken = are_best(joined.flatten(1), min(total, joined[0].numel())).view_as(joined)
    counts = doubled((taken & (joined > -torch.inf)).sum((0, 1)))
    shares: list[float] = (counts * total / counts.sum().clamp_min(1)).tolist()
    return shares


def _with_best(ranks: Tensor, count: int) -> Tensor:
    """Ranks `(B, m)`, of which the `count` best come before everything; pads stay last."""
    best = are_best(ranks, min(count, ranks.shape[1]))
    return ranks.masked_fill(best & (ranks > -torch.inf), torch.inf)


def grouped_shares(
    shares: Sequence[float], lengths: Sequence[int], floor: int
) -> list[tuple[list[int], int]]:
    """Put heads of similar shares together; all heads of a group keep the mean of theirs.

    Groups are those that bring heads nearest to their shares, by least squares; one more is made as long as
    it brings the squares down by a token.

    Args:
        shares (`Sequence[float]`): Tokens of every head.
        lengths (`Sequence[int]`): Tokens that it holds now, at least `floor`: no group keeps more than any of
            its heads holds.
        floor (`int`): Fewest tokens of a group.

    Returns:
        `list[tuple[list[int], int]]`: Heads and tokens of every group, most tokens first.
    """
    order = sorted(range(len(shares)), key=lambda head: -shares[head])
    sums = [0.0, *accumulate(shares[head] for head in order)]
    groups = []
    for start, stop in pairwise(_cuts(sums, MOST_GROUPS)):
        heads = order[start:stop]
        mean = int((sums[stop] - sums[start]) / len(heads) + 1e-6)
        groups.append((heads, min(max(floor, mean), *(lengths[head] for head in heads))))
    return groups


def _cuts(sums: Sequence[float], most: int) -> list[int]:
    """Where to cut a sequence into runs of similar numbers, from its sums up to every place; rather later."""

    def explained(start: int, stop: int) -> float:  # of the sum of squares, by a mean; equal ones are so
        return round((sums[stop] - sums[start]) ** 2 / (stop - start), 6)

    stops = range(1, len(sums))
    best = {stop: (explained(0, stop), [0, stop]) for stop in stops}  # of the first `stop` numbers
    for groups in range(2, min(most, len(sums) - 1) + 1):
        cut = {
            stop: max(
                (best[start][0] + explained(start, stop), [*best[start][1], stop])
                for start in range(groups - 1, stop)
            )
            for stop in stops[groups - 1 :]
        }
        if cut[len(stops)][0] - best[len(stops)][0] < 1.0:
            break
        best = cut
    return best[len(stops)][1]
