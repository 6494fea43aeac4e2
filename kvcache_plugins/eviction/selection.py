"""Which slots stay: the best by score, besides what is protected, in the order of time.

Of equal scores the newer are the better, so that what a row keeps depends neither on others nor on its pads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layers.padding import first_slots

__all__ = ["are_best", "best_slots", "choose_slots", "ranked"]


def choose_slots(
    scores: Tensor,
    count: int,
    *,
    pads: Tensor | None = None,
    sink_length: int = 0,
    recent: int = 0,
    exact: int = 0,
) -> Tensor:
    """Choose `count` slots per row and head, of at least `sink_length + max(recent, exact)` (see `ranked`).

    The result is in ascending order, so that the pads that remain lie at the left edge, where transformers'
    mask of the newest columns expects them.

    Returns:
        `torch.Tensor` of shape `(B, H, count)`: int64.
    """
    ranks = ranked(scores, pads=pads, sink_length=sink_length, recent=recent, exact=exact)
    return best_slots(ranks, count)


def ranked(
    scores: Tensor, *, pads: Tensor | None = None, sink_length: int = 0, recent: int = 0, exact: int = 0
) -> Tensor:
    """Scores by which the best are chosen: pads go first and protected slots last.

    Args:
        scores (`torch.Tensor` of shape `(B, H, m)`): fp32, higher is kept; one that is not a number counts as
            the lowest.
        pads (`torch.Tensor` of shape `(B,)`, *optional*): Leading slots of every row that are padding.
        sink_length (`int`): Slots after the pads that are protected.
        recent (`int`): Newest slots that are protected, unless they are pads.
        exact (`int`): Newest slots that are kept whatever they are, because their storage is shared between
            rows and heads.

    Returns:
        `torch.Tensor` of shape `(B, H, m)`: -inf over the pads, inf where slots are protected.
    """
    length = scores.shape[2]
    largest = torch.finfo(scores.dtype).max
    ranks = torch.nan_to_num(scores, nan=-largest, posinf=largest, neginf=-largest)
    slots = torch.arange(length, device=scores.device)
    offsets = slots - first_slots(pads, scores.device)[:, None]  # (B or 1, m), negative over the pads
    protected = ((offsets >= 0) & (offsets < sink_length)) | ((offsets >= 0) & (slots >= length - recent))
    ranks = ranks.masked_fill(protected[:, None], torch.inf)
    ranks = ranks.masked_fill((offsets < 0)[:, None], -torch.inf)
    ranks[..., length - exact :] = torch.inf
    return ranks


def best_slots(ranks: Tensor, count: int) -> Tensor:
    """The `count` slots of highest rank, of ranks `(B, H, m)`: int64 `(B, H, count)`, ascending."""
    if ranks.is_meta:  # of shapes alone torch would ask for the square of a length
        return ranks.new_empty((*ranks.shape[:2], count), dtype=torch.int64)
    are_chosen = are_best(ranks, count)
    # not by `nonzero`, which would wait for a GPU
    places = are_chosen.cumsum(2).sub_(1).masked_fill_(~are_chosen, count)  # others go behind the chosen ones
    slots = torch.arange(ranks.shape[2], device=ranks.device).expand_as(places)
    found = places.new_empty((*ranks.shape[:2], count + 1))
    return found.scatter_(2, places, slots)[:, :, :count].contiguous()


def are_best(ranks: Tensor, count: int) -> Tensor:
    """Tell which are the `count` highest of every row of ranks `(..., m)`: of equal ones the last."""
    least = ranks.topk(max(1, count), dim=-1, sorted=False).values.amin(-1, keepdim=True)
    suffice, equal = ranks >= least, ranks == least
    too_many = suffice.sum(-1, keepdim=True, dtype=torch.int32) - count
    return suffice & ~(equal & (equal.cumsum(-1, dtype=torch.int32) <= too_many))
