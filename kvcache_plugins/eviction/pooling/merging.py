"""Merging without training: what an evicted value said is added to the survivor with the most similar key."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...layers.padding import first_slots

__all__ = ["left_out", "merge_evicted"]

_BLOCK = 128
"""Evicted tokens compared with all survivors at once."""


def left_out(kept: Tensor, length: int) -> Tensor:
    """Return the slots of `length` that are not among `kept` `(B, H, K)`: `(B, H, length - K)`, ascending."""
    is_out = torch.ones((*kept.shape[:2], length), dtype=torch.int8, device=kept.device)
    is_out.scatter_(2, kept, 0)
    # stable, so that the ones come first and in order
    return is_out.argsort(dim=2, descending=True, stable=True)[:, :, : length - kept.shape[2]]


def merge_evicted(keys: Tensor, values: Tensor, kept: Tensor, pads: Tensor | None = None) -> Tensor:
    """Return the values of what is kept, each averaged with the evicted ones whose keys resemble its own.

    An evicted token `e` goes to the survivor `s` whose key has the largest cosine with its own, with the
    weight `w_e = max(cosine, 0) |v_e| / (|v_e| + |v_s|)`. A survivor becomes `(v_s + sum w_e v_e) / (1 + sum
    w_e)`. Keys stay as they are, so nothing has to be rotated. All arithmetic is fp32.

    Args:
        keys (`torch.Tensor` of shape `(B, H, m, D)`): All keys held, as attention reads them.
        values (`torch.Tensor` of shape `(B, H, m, Dv)`): All values held.
        kept (`torch.Tensor` of shape `(B, H, K)`): int64, slots that stay.
        pads (`torch.Tensor` of shape `(B,)`, *optional*): Leading slots of every row that are padding; they
            neither give nor take.

    Returns:
        `torch.Tensor` of shape `(B, H, K, Dv)`: In the dtype of `values`.
    """
    evicted = left_out(kept, keys.shape[2])
    survivors, old = F.normalize(_at(keys, kept), dim=-1), _at(values, kept)
    old_norms = torch.linalg.vector_norm(old, dim=-1)
    merged, weights = old.clone(), torch.ones_like(old_norms)
    first = first_slots(pads, keys.device)[:, None, None]
    is_pad = (kept < first)[:, :, None]
    for part in evicted.split(_BLOCK, dim=2):
        cosines = F.normalize(_at(keys, part), dim=-1) @ survivors.transpose(2, 3)
        cosine, nearest = cosines.masked_fill(is_pad, -1.0).max(dim=3)
        lost = _at(values, part)
        norms = torch.linalg.vector_norm(lost, dim=-1)
        both = norms + old_norms.gather(2, nearest)
        weight = cosine.clamp_min(0.0) * norms / both.clamp_min(torch.finfo(both.dtype).tiny)
        weight = weight.masked_fill(part < first, 0.0)
        # what pads hold is arbitrary and may not be a number
        lost = torch.where(weight[..., None] > 0, weight[..., None] * lost, 0.0)
        weights.scatter_add_(2, nearest, weight)
        merged.scatter_add_(2, nearest[..., None].expand_as(lost), lost)
    return (merged / weights[..., None]).to(values.dtype)


def _at(states: Tensor, index: Tensor) -> Tensor:
    """Gather the slots `index` `(B, H, n)` of `states` `(B, H, m, D)`, in fp32."""
    return states.gather(2, index[..., None].expand(-1, -1, -1, states.shape[3])).float()
