"""One decode step of attention over a dense cache, in the ways a PyTorch program may write it.

The states are preallocated, so none of them pays for the concatenation that `DynamicCache` does per token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["BASELINES", "exact_attention", "max_rel_error"]


def _sdpa_enable_gqa(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)


def _sdpa_packed_query(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    output = F.scaled_dot_product_attention(_grouped(query, keys), keys, values)
    return output.reshape(*query.shape[:3], values.shape[3])


def _matmul(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    logits = torch.matmul(_grouped(query, keys) * query.shape[3] ** -0.5, keys.transpose(2, 3))
    weights = logits.softmax(-1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(weights, values).reshape(*query.shape[:3], values.shape[3])


BASELINES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sdpa_enable_gqa": _sdpa_enable_gqa,
    "sdpa_packed_query": _sdpa_packed_query,
    "matmul": _matmul,
}
"""Each takes a query `(B, Hq, 1, D)`, keys `(B, Hkv, T, D)` and values `(B, Hkv, T, Dv)`. `sdpa_enable_gqa`
is what transformers' models do; `sdpa_packed_query` has the query heads of a group as query tokens of one
head; `matmul` multiplies, takes the softmax, and multiplies. None of them repeats keys or values itself."""


def exact_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend in fp32.

    Args:
        query (`torch.Tensor` of shape `(B, Hq, 1, D)`): One query token.
        keys (`torch.Tensor` of shape `(B, Hkv, T, D)`): Keys it may all see.
        values (`torch.Tensor` of shape `(B, Hkv, T, Dv)`): Values.
    """
    return _matmul(query.float(), keys.float(), values.float())


def max_rel_error(output: Tensor, reference: Tensor) -> float:
    """Return the largest difference of any entry, relative to the largest entry of the reference."""
    difference = (output.float() - reference.float()).abs().max()
    return float(difference / reference.float().abs().max())


def _grouped(query: Tensor, keys: Tensor) -> Tensor:
    """Return a query `(B, Hq, 1, D)` as `(B, Hkv, Hq / Hkv, D)`."""
    return query.reshape(query.shape[0], keys.shape[1], -1, query.shape[3])
