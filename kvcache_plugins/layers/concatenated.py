"""Handles put one after the other along their tokens, as T5Gemma 2 does with its text and its encoder's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .handle import KVHandle
from .lazy import LazyTensor, intercept

__all__ = ["ConcatenatedHandle", "Part"]

Part: TypeAlias = "KVHandle | Tensor"
_TOKENS = 2
"""The dimension of tokens."""


class ConcatenatedHandle(LazyTensor):
    """Keys or values `(B, H, T, D)` of several caches, or of one and of none.

    Attributes:
        parts (`tuple[KVHandle | torch.Tensor, ...]`): What stands there, in order.
    """

    parts: tuple[Part, ...]

    @staticmethod
    def __new__(cls, parts: Sequence[Part]) -> ConcatenatedHandle:
        batch_size, heads, _, head_dim = parts[0].shape
        length = sum(part.shape[_TOKENS] for part in parts)
        handle: ConcatenatedHandle = Tensor._make_wrapper_subclass(
            cls, (batch_size, heads, length, head_dim), dtype=parts[0].dtype, device=parts[0].device
        )
        handle.parts = tuple(parts)
        return handle

    @property
    def lengths(self) -> list[int]:
        """Tokens of every part."""
        return [part.shape[_TOKENS] for part in self.parts]

    @property
    def is_changed(self) -> bool:
        """Whether its numbers, or those of a part, have been changed."""
        handles = (part for part in self.parts if isinstance(part, KVHandle))
        return super().is_changed or any(handle.is_changed for handle in handles)

    def _made(self) -> Tensor:
        """Bring everything into one tensor; the layers count the read."""
        parts = [part.dense() if isinstance(part, LazyTensor) else part for part in self.parts]
        return torch.cat(parts, dim=_TOKENS)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ConcatenatedHandle({', '.join(map(repr, self.parts))})"


@intercept(torch.cat, torch.concat)
def _concatenated(tensors: Any, dim: int = 0, **others: Any) -> Any:
    parts = tuple(tensors)
    is_along_tokens = dim in (_TOKENS, _TOKENS - 4) and not others
    return ConcatenatedHandle(parts) if is_along_tokens and _are_alike(parts) else NotImplemented


def _are_alike(parts: tuple[Any, ...]) -> bool:
    """Whether all are plain tensors or handles of one shape, but for their tokens, and one is packed."""
    if not all(_can_stand_there(part) for part in parts):
        return False
    kinds = {(part.shape[:2], part.shape[3], part.dtype, part.device) for part in parts}
    handles = [part for part in parts if isinstance(part, KVHandle)]
    return len(kinds) == 1 and any(handle.tokens.packed_length for handle in handles)


def _can_stand_there(part: Any) -> bool:
    if isinstance(part, LazyTensor):
        # what an evicting layer is to be shown of queries, nobody would show it
        return type(part) is KVHandle and not part.is_changed and not part.layer.observes_queries
    return isinstance(part, Tensor) and part.dim() == 4
