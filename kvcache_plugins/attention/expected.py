"""How much attention every token is expected to receive from queries of which only the moments are known.

Of a normal query `q` with mean `m` and covariance `C`, `exp(s q.k)` is `exp(s m.k + s^2 k.Ck / 2)` on
average. The keys are read once, tile by tile, and no query is ever drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import TokenView, cut_tiles

__all__ = ["expected_attention"]


def expected_attention(
    mean: Tensor, covariance: Tensor | None, keys: TokenView, scaling: float, is_counted: Tensor
) -> Tensor:
    """Share of every token in the expected weights, averaged over the query heads of a group.

    Args:
        mean (`torch.Tensor` of shape `(B, Hq, D)`): fp32, of the queries as they meet the keys.
        covariance (`torch.Tensor` of shape `(B, Hq, D, D)`, *optional*): fp32; zero if not given.
        keys (`TokenView`): `T` tokens of `Hkv` heads.
        scaling (`float`): Factor of the logits.
        is_counted (`torch.Tensor` of shape `(B, T)`): Which tokens share the weights; others get none.

    Returns:
        `torch.Tensor` of shape `(B, Hkv, T)`: fp32, a sum of one per row and head that has counted tokens.
    """
    with torch.autocast(mean.device.type, enabled=False):
        return _expected(mean, covariance, keys, scaling, is_counted)


def _expected(
    mean: Tensor, covariance: Tensor | None, keys: TokenView, scaling: float, is_counted: Tensor
) -> Tensor:
    kv_heads = keys.read(keys.length - 1, keys.length).shape[1]
    rows = mean.unflatten(1, (kv_heads, -1)) * scaling
    spread = None if covariance is None else covariance.unflatten(1, (kv_heads, -1)) * (scaling**2 / 2)
    # the products of a key with a covariance take as much as its logits with one query per channel
    widest = mean[:, :, None] if covariance is None else covariance
    logits = []
    for start, stop in cut_tiles(widest, keys, keys, 0, kv_heads):
        tile = keys.read(start, stop).float()
        found = rows @ tile.mT
        if spread is not None:
            tile = tile[:, :, None]
            found = found + ((tile @ spread) * tile).sum(-1)
        logits.append(found)
    # one number per query head and token, which is little beside the keys
    hidden = ~is_counted[:, None, None]
    weights = torch.cat(logits, dim=-1).masked_fill_(hidden, -torch.inf).softmax(-1)
    return weights.masked_fill_(hidden, 0.0).mean(2)
