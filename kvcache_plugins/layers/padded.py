"""Handles with channels of zeros behind their own, as Moonshine wants its heads for attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from .handle import KVHandle
from .lazy import LazyTensor, intercept

__all__ = ["PaddedHandle"]


class PaddedHandle(LazyTensor):
    """A handle of shape `(B, H, T, D + added)`, of which nothing has been decoded.

    Attributes:
        handle (`KVHandle` of shape `(B, H, T, D)`): What it is made of.
        added (`int`): Channels that are zero.
    """

    handle: KVHandle
    added: int

    @staticmethod
    def __new__(cls, handle: KVHandle, added: int) -> PaddedHandle:
        *others, head_dim = handle.shape
        padded: PaddedHandle = Tensor._make_wrapper_subclass(
            cls, (*others, head_dim + added), dtype=handle.dtype, device=handle.device
        )
        padded.handle, padded.added = handle, added
        return padded

    @property
    def is_changed(self) -> bool:
        """Whether its numbers, or those of the handle, have been changed."""
        return super().is_changed or self.handle.is_changed

    def _made(self) -> Tensor:
        """Decode the handle, and put zeros behind."""
        return F.pad(self.handle.dense(), (0, self.added))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PaddedHandle({self.added}, {self.handle!r})"


@intercept(F.pad)
def _padded(states: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    is_plain = type(states) is KVHandle and not states.is_changed and mode == "constant" and not value
    if not is_plain or len(pad) != 2 or pad[0] != 0 or pad[1] < 0:
        return NotImplemented
    return PaddedHandle(states, pad[1])
