"""Pooling by convolution (LoCoCo, arXiv 2406.05317): what does not stay is summed up in a few units."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ...layers.padding import first_slots
from ..selection import choose_slots
from .merging import left_out
from .weights import LayerWeights

__all__ = ["Pooled", "pool_evicted", "pooled_last"]


@dataclass(frozen=True)
class Pooled:
    """What is held afterwards.

    Args:
        index (`torch.Tensor` of shape `(B, H, K)`): int64, the slot each unit comes from; of a pooled one,
            the token it stands on.
        keys (`torch.Tensor` of shape `(B, H, K, D)`), values (`torch.Tensor` of shape `(B, H, K, Dv)`): In
            the dtype they came in.
        is_pooled (`torch.Tensor` of shape `(B, H, K)`): bool.
    """

    index: Tensor
    keys: Tensor
    values: Tensor
    is_pooled: Tensor


def pooled_last(scores: Tensor, positions: Tensor) -> Tensor:
    """Return scores in which pooled units have the lowest there is, so that they are pooled again first.

    Args:
        scores (`torch.Tensor` of shape `(B, H, m)`): fp32, higher is kept.
        positions (`torch.Tensor` of shape `(B, H, m)`): Of tokens, their index in the text; of a pooled unit
            the number of tokens that had been seen when it was made, negative.
    """
    return scores.masked_fill(positions < 0, -torch.finfo(scores.dtype).max)


def _in_their_order(rest: Tensor, positions: Tensor) -> Tensor:
    """Put slots `rest` `(B, H, s)` as LoCoCo has them: what stayed last time, pooled units, new tokens."""
    held = positions.gather(2, rest)
    is_unit, pooled_at = held < 0, held.neg().clamp_min(0).amax(2, keepdim=True)
    place = torch.where(is_unit, 1, torch.where(held < pooled_at, 0, 2))
    return rest.gather(2, (place * positions.shape[2] + rest).argsort(dim=2))


def pool_evicted(
    keys: Tensor,
    values: Tensor,
    scores: Tensor,
    count: int,
    weights: LayerWeights,
    *,
    positions: Tensor | None = None,
    pads: Tensor | None = None,
    sink_length: int = 0,
    recent: int = 0,
) -> Pooled:
    """Choose what stays, and pool the rest to `M` units.

    The best `count - M` units stay. Of the `s` others, in the order of the text but that pooled units come
    behind what stayed when they were made, `x = [k; v]` gives `W = softmax(relu(conv(x)))`, `(M, s)`, and
    `R`, `(M, s)`, picks the `M` best of them in their order. Pooled are `K' = W' K` and `V' = W' V` with
    `W' = (1 - gamma) R + gamma W`. They stand before what stays, after the sinks. A row whose real tokens all
    fit keeps them as they are, behind its pads. All arithmetic is fp32.

    Args:
        keys (`torch.Tensor` of shape `(B, H, m, D)`): All keys held, as attention reads them.
        values (`torch.Tensor` of shape `(B, H, m, Dv)`): All values held.
        scores (`torch.Tensor` of shape `(B, H, m)`): fp32, higher is kept; of pooled units the lowest there
            is (see [`pooled_last`]).
        count (`int`): Units to hold afterwards, fewer than `m`.
        weights (`LayerWeights`): With `M < count`.
        positions (`torch.Tensor` of shape `(B, H, m)`, *optional*): Where the units are in the text (see
            [`pooled_last`]); none of them is pooled if not given.
        pads (`torch.Tensor` of shape `(B,)`, *optional*): Leading slots of every row that are padding.
        sink_length (`int`): Slots after the pads that stay.
        recent (`int`): Newest slots that stay.
    """
    pooled_length, length = weights.pooled_length, keys.shape[2]
    first = first_slots(pads, keys.device)
    whole = choose_slots(scores, count, pads=pads, sink_length=sink_length, recent=recent)
    heavy = choose_slots(scores, count - pooled_length, pads=pads, sink_length=sink_length, recent=recent)
    rest = left_out(heavy, length)
    if positions is not None:
        rest = _in_their_order(rest, positions)
    # the best of the rest, pads among them only where all real tokens fit
    among = scores.gather(2, rest).masked_fill(rest < first[:, None, None], -torch.inf)
    # stable, because pooled units have all the same score
    ranked = among.argsort(dim=2, descending=True, stable=True)
    best = ranked[:, :, :pooled_length].sort(dim=2).values
    units = torch.cat([keys, values], dim=3)
    pooled = torch.stack(
        [
            _pool_head(units[:, head], rest[:, head], best[:, head], weights, first)
            for head in range(keys.shape[1])
        ],
        dim=1,
    )
    index = torch.cat([heavy[..., :sink_length], rest.gather(2, best), heavy[..., sink_length:]], dim=2)
    is_pooled = torch.zeros_like(index, dtype=torch.bool)
    is_pooled[..., sink_length : sink_length + pooled_length] = True
    fits = (length - first <= count)[:, None, None]
    index, is_pooled = torch.where(fits, whole, index), is_pooled & ~fits
    held = units.gather(2, index[..., None].expand(-1, -1, -1, units.shape[3]))
    placed = held.clone()
    placed[..., sink_length : sink_length + pooled_length, :] = pooled.to(held.dtype)
    held = torch.where(is_pooled[..., None], placed, held)
    return Pooled(index, held[..., : keys.shape[3]], held[..., keys.shape[3] :], is_pooled)


def _pool_head(units: Tensor, rest: Tensor, best: Tensor, weights: LayerWeights, first: Tensor) -> Tensor:
    """Pool one head: the slots `rest` `(B, s)` of `units` `(B, m, C)` to `(B, M, C)`, fp32."""
    x = units.gather(1, rest[..., None].expand(-1, -1, units.shape[2])).float()
    is_pad = rest < first[:, None]
    x = x.masked_fill(is_pad[..., None], 0.0)  # as the zeros beyond the edge
    kernel = weights.weight.to(x.device).float()
    logits = F.conv1d(x.transpose(1, 2), kernel, weights.bias.to(x), padding=kernel.shape[2] // 2).relu()
    mixture = logits.masked_fill(is_pad[:, None], -torch.inf).softmax(dim=2)
    gamma = weights.gamma.to(x).reshape(())
    mixture = torch.nan_to_num(mixture) * gamma  # of a row of pads alone
    mixture.scatter_add_(2, best[..., None], (1 - gamma).expand(*best.shape, 1))
    return mixture @ x
