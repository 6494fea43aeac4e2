"""Packed layers that a model asks for their keys and values, which else it is given by `update` alone."""

from __future__ import annotations

from torch import Tensor

from .base import PackedLayer
from .handle import KVHandle
from .stream import Stream
from .view import StreamView

__all__ = ["ShownLayer"]


class ShownLayer(PackedLayer):
    """A packed layer that shows handles of all it holds, and not its newest exact tokens only."""

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """A handle of all keys, `(B, H, T, D)`."""
        return self._whole(self.stored_keys) if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """A handle of all values, `(B, H, T, D)`."""
        return self._whole(self.stored_values) if self.is_initialized else None

    def _whole(self, stream: Stream) -> KVHandle:
        handle = KVHandle(self, StreamView.of(stream))
        handle.may_be_decoded = True
        return handle
