"""Packed layers of sparse attention: beside keys and values they keep the keys of an indexer, exactly.

Every query of such a model (DeepSeek-V3.2, GLM-5, Qwen4) first chooses among all tokens by small keys of
their own, and attends to the chosen ones. A choice is worth its precision and these keys are a fraction of
the rest, so they stay in the model's dtype, in a buffer that grows by a 32nd at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

from .base import PackedLayer
from .extending import extended
from .shown import ShownLayer
from .storing import storing
from .tail import Tail

__all__ = ["IndexedLayer", "indexed_state", "is_indexed", "load_indexed_state", "with_indexer"]

_UNBOUNDED = 1 << 62
_POSITIONS = "indexer_position_ids"
_KEPT = ("keys", "values", "indexer_keys", _POSITIONS)


class IndexedLayer(ShownLayer):
    """A packed layer that keeps an indexer's keys too, as transformers' `DynamicIndexedLayer` does.

    Every verb acts on both. Made by [`with_indexer`].

    Attributes:
        indexer_position_ids (`Tensor`, *optional*): Positions of all tokens, `(dimensions, B, T)`. Models
            whose indexers rotate the keys only when they choose leave them in their first indexed layer.
    """

    indexer_position_ids: Tensor | None
    _indexer: Tail | None

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Take new indexer keys `(B, n, Di)`; return all of them, `(B, T, Di)`."""
        if self._indexer is None:
            rows, _, width = indexer_key_states.shape
            with storing():
                self._indexer = Tail(
                    rows, 1, width, _UNBOUNDED, indexer_key_states.dtype, indexer_key_states.device
                )
        with storing():
            self._indexer.buffer = self._indexer.buffer.to(indexer_key_states.dtype)  # the model may be cast
            self._indexer.append(
                indexer_key_states[:, None], self._indexer.length + indexer_key_states.shape[1]
            )
        return self._indexer.view()[:, 0]

    @property
    def indexer_keys(self) -> Tensor | None:
        """All indexer keys, `(B, T, Di)`."""
        return None if self._indexer is None else self._indexer.view()[:, 0]

    @property
    def is_indexer_initialized(self) -> bool:
        """Whether there are any."""
        return self._indexer is not None

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        removed = -int(tokens_to_remove)
        if self._indexer is not None:
            self._indexer.truncate(min(removed, self._indexer.length))
        if self.indexer_position_ids is not None:
            kept = max(0, self.indexer_position_ids.shape[-1] - removed)
            self.indexer_position_ids = self.indexer_position_ids[..., :kept]

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self._indexer is not None:
            with storing():
                self._indexer.buffer = self._indexer.buffer[indices.to(self._indexer.buffer.device)]
        if self.indexer_position_ids is not None:
            device = self.indexer_position_ids.device
            self.indexer_position_ids = self.indexer_position_ids[:, indices.to(device)]

    def beside(self) -> dict[str, Tensor]:
        found = {"indexer_keys": self.indexer_keys, _POSITIONS: self.indexer_position_ids}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def tensors(self) -> dict[str, Tensor]:
        owned = super().tensors() | self.beside()
        return owned if self._indexer is None else owned | {"indexer_keys": self._indexer.buffer}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = super().state()
        return tensors | self.beside(), facts

    def load_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        own = {name: tensors[name] for name in ("indexer_keys", _POSITIONS) if name in tensors}
        super().load_state({name: t for name, t in tensors.items() if name not in own}, facts)
        if "indexer_keys" in own:
            self.update_indexer(own["indexer_keys"])
        self.indexer_position_ids = own.get(_POSITIONS)

    def _forget(self) -> None:
        super()._forget()
        self._indexer = self.indexer_position_ids = None

    def _move(self, device: torch.device) -> None:
        super()._move(device)
        if self._indexer is not None:
            with storing():
                self._indexer.buffer = self._indexer.buffer.to(device)
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids.to(device)


def with_indexer(layer_class: type[PackedLayer]) -> type[IndexedLayer]:
    """Return the class of a backend's layers that keep an indexer's keys too.

    Args:
        layer_class (`type[PackedLayer]`): The backend's class.
    """
    made: type[IndexedLayer] = extended(IndexedLayer, layer_class)
    return made


def is_indexed(layer: Any) -> bool:
    """Whether a layer is transformers' own that keeps an indexer's keys."""
    return type(layer) is DYNAMIC_LAYER_TYPE_MAPPING.get("indexed_attention")


def indexed_state(layer: Any) -> dict[str, Tensor]:
    """Return what transformers' own layer keeps, by name; without keys and values where it borrows those."""
    return {name: tensor for name in _KEPT if (tensor := getattr(layer, name, None)) is not None}


def load_indexed_state(layer: Any, tensors: dict[str, Tensor]) -> None:
    """Give an empty layer of transformers' own what [`indexed_state`] returned of another."""
    if "keys" in tensors:
        layer.lazy_initialization(tensors["keys"], tensors["values"])
    if "indexer_keys" in tensors:
        layer.lazy_initialization_indexer(tensors["indexer_keys"])
    vars(layer).update(tensors)
