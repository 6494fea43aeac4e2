"""Where gradients end: what a cache stores is a copy, and attention over it is not recorded.

A backward pass that goes on as if nothing had been there computes wrong gradients and says nothing. So what
is made of stored tokens carries a refusal, which only a backward pass meets: forwards outside of
`torch.no_grad()` stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedOperationError
from .storing import storing

__all__ = ["copies_to_take", "refusing_gradients"]


class _Refusal(torch.autograd.Function):
    """The identity, whose derivative is not to be had."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, *sources: Tensor) -> Tensor:
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UnsupportedOperationError(
            "A gradient was asked for through a cache that stores copies of its tokens, which have none. "
            "Allowed are transformers' DynamicCache, use_cache=False and, with backends that show attention "
            "their first call as it comes, that call."
        )


def refusing_gradients(made: Tensor, *sources: Tensor) -> Tensor:
    """Return `made`, which was made of `sources` and of stored tokens; a backward pass through it raises.

    Args:
        made (`torch.Tensor`): What the model goes on with.
        sources (`torch.Tensor`): What the model gave, and weights. If none of them needs a gradient, none is
            refused.
    """
    if not torch.is_grad_enabled():
        return made
    refusing: Tensor = _Refusal.apply(made, *sources)  # type: ignore[no-untyped-call]  # torch declares no types here
    return refusing


def copies_to_take(tensors: Iterable[Tensor]) -> dict[int, Any]:
    """Return what `copy.deepcopy` takes as its `memo` to copy tensors that were computed with gradients.

    It refuses these by itself. Copies have none: a backward pass through one raises.

    Args:
        tensors (`torch.Tensor`): Among what will be copied, and alive until it is.
    """
    found: dict[int, Any] = {}
    for tensor in tensors:
        if tensor.grad_fn is None:
            continue
        with storing():
            copied = tensor.clone()
        if torch.is_grad_enabled():
            # not what the function returns, which is a view that nothing may be written to
            copied = refusing_gradients(copied, tensor).clone()
        found[id(tensor)] = copied
    return found
