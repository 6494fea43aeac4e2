"""Verbs of a whole cache, whose layers are packed or transformers' own: done to all of them, or to none.

One that is interrupted on its way leaves a cache that says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..compilation import outside_graphs
from ..config import check_count
from .base import PackedLayer
from .checking import changing, check_in_step
from .compiled import CompiledUpdates
from .dense import check_states_are_here, cropped, repeat_rows, select_rows
from .rows import chosen_rows, num_rows

if TYPE_CHECKING:
    from ..models.layer_plan import LayerPlan
    from .offloading import Shelf

__all__ = ["CacheVerbs"]


class CacheVerbs(CompiledUpdates):
    """The part of a cache that changes what all layers hold."""

    _plans: list[LayerPlan]
    _shelf: Shelf | None

    @property
    def packed_layers(self) -> list[PackedLayer]:
        """The layers this package stores."""
        return [layer for layer in self.layers if isinstance(layer, PackedLayer)]

    @property
    def _dense_layers(self) -> list[Any]:
        """Transformers' own among them."""
        return [layer for layer in self.layers if not isinstance(layer, PackedLayer)]

    @property
    def _text_layers(self) -> list[Any]:
        """Those that hold tokens of the text, packed or not, and not of images."""
        pairs = zip(self.layers, self._plans, strict=True)
        return [layer for layer, plan in pairs if not plan.is_cross_attention]

    @property
    def _packed_text_layers(self) -> list[PackedLayer]:
        return [layer for layer in self._text_layers if isinstance(layer, PackedLayer)]

    @property
    def _dense_text_layers(self) -> list[Any]:
        return [layer for layer in self._text_layers if not isinstance(layer, PackedLayer)]

    @outside_graphs
    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        for layer_idx, plan in enumerate(self._plans):
            if not isinstance(self.layers[layer_idx], PackedLayer):
                # in some releases the `reset` of those leaves as many tokens as there were, of zeros
                self.layers[layer_idx] = plan.build_dense()
        if self._shelf is not None:
            self._shelf.clear()

    @outside_graphs
    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` tokens, of all layers or of none.

        Raises:
            UnsupportedOperationError: If a layer has forgotten what would have to be there then.
            ValueError: If the number is positive.
        """
        check_states_are_here(f"crop({tokens_to_remove})", self.layers)
        for layer in self.packed_layers:
            layer.check_crop(tokens_to_remove)
        after = [(layer, cropped(layer, int(tokens_to_remove))) for layer in self._dense_text_layers]
        for layer in self.packed_layers:
            layer.crop(tokens_to_remove)
        for layer, attributes in after:
            vars(layer).update(attributes)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row `i` by row `beam_idx[i]` in all layers (beam search).

        Raises:
            IndexError: If there is no such row. Indices on a GPU, which would have to be waited for at every
                step, are not looked at.
            UnsupportedOperationError: If the model keeps states in its own modules; so do the other verbs.
        """
        check_states_are_here("reorder_cache", self.layers)
        if not isinstance(beam_idx, Tensor) or beam_idx.is_cpu:
            beam_idx = chosen_rows(beam_idx, self._num_rows)
        with changing(*self.packed_layers):
            super().reorder_cache(beam_idx)  # type: ignore[arg-type]  # transformers wants int64

    def check_in_step(self) -> None:
        """Raise `ValueError` if a forward, or a change of a layer, was interrupted."""
        check_in_step(self._packed_text_layers, self._dense_text_layers)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, the copies of a row one after the other.

        Raises:
            ValueError: Unless `repeats` is an integer of at least 1.
        """
        repeats = check_count("batch_repeat_interleave: repeats", repeats)
        check_states_are_here("batch_repeat_interleave", self.layers)
        with changing(*self.packed_layers):
            for layer in self.packed_layers:
                layer.batch_repeat_interleave(repeats)
            for layer in self._dense_layers:
                repeat_rows(layer, repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` (integers, or a boolean mask over the rows).

        Raises:
            IndexError: If there is no such row.
        """
        check_states_are_here("batch_select_indices", self.layers)
        rows = chosen_rows(indices, self._num_rows)
        with changing(*self.packed_layers):
            for layer in self.packed_layers:
                layer.batch_select_indices(rows)
            for layer in self._dense_layers:
                select_rows(layer, rows)
        if self._shelf is not None:
            self._shelf.clear()  # which has places for the rows there were

    @property
    def _num_rows(self) -> int:
        return max(map(num_rows, self.packed_layers), default=0)
