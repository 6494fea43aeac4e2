"""Handles of latent attention: keys and values of all heads, before the model has made them of its latents.

They go where a [`KVHandle`] goes. Our attention reads the latents instead; any other operation has the model
make what it asks for, of all tokens at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from .handle import KVHandle

if TYPE_CHECKING:
    from ..models.latent import LatentProjection

__all__ = ["ExpandedHandle", "Expansion"]

Make = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From latents `(B, 1, T, R)` and rotated keys `(B, 1, T, Dr)` to keys and values of all heads."""


class Expansion:
    """What one layer caches in one call, and how keys and values are made of it.

    Args:
        latents (`KVHandle` of shape `(B, 1, T, R)`): What the layer stores as keys.
        rotated (`KVHandle` of shape `(B, 1, T, Dr)`): What it stores as values: the key all heads share.
        projection (`LatentProjection`): Keys and values of latents.
        make (`Make`): The model's own way.
    """

    def __init__(
        self,
        latents: KVHandle,
        rotated: KVHandle,
        projection: LatentProjection,
        make: Make,
    ) -> None:
        self.latents, self.rotated, self.projection = latents, rotated, projection
        self._make = make
        self._dense: tuple[Tensor, Tensor] | None = None

    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys `(B, H, T, Dn + Dr)` and values `(B, H, T, Dv)`; the layer counts the read."""
        if self._dense is None:
            self._dense = self._make(self.latents.dense(), self.rotated.dense())
        return self._dense

    def handles(self) -> tuple[ExpandedHandle, ExpandedHandle]:
        """What attention is given for the keys and the values."""
        return ExpandedHandle(self, is_key=True), ExpandedHandle(self, is_key=False)


class ExpandedHandle(KVHandle):
    """The keys `(B, H, T, Dn + Dr)` or the values `(B, H, T, Dv)` of all heads in one call.

    Attributes:
        expansion (`Expansion`): What they are made of.
        is_key (`bool`): Which of the two.
    """

    expansion: Expansion
    is_key: bool

    @staticmethod
    def __new__(cls, expansion: Expansion, *, is_key: bool) -> ExpandedHandle:
        latents, projection = expansion.latents, expansion.projection
        key_dim = projection.key_dim + expansion.rotated.tokens.segments[-1].shape[-1]
        handle: ExpandedHandle = cls.standing_for(
            latents.layer,
            latents.tokens,
            heads=projection.heads,
            head_dim=key_dim if is_key else projection.value_dim,
        )
        handle.expansion, handle.is_key = expansion, is_key
        handle.sources = (*latents.sources, *expansion.rotated.sources)
        return handle

    def _made(self) -> Tensor:
        """What the model makes of all latents."""
        return self.expansion.dense()[0 if self.is_key else 1]
