"""Packed layers of attention that looks back a limited distance: sliding windows, and chunks.

The model is shown what transformers' own layer shows it, the newest `window - 1` tokens and the new ones, so
its masks fit, whichever of its windowed layers are packed. Behind them lie up to a sixteenth of the window of
older tokens: whole blocks leave, many at a time, by moving those that stay to a new buffer. Which ones have
left depends on how many tokens were seen and on nothing else; what would leave at once is never encoded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from math import lcm
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedOperationError
from ..models.facts import LayerFacts
from ..models.layer_plan import caches_latents, key_value_heads
from ..quantizers.packing import BLOCK_TOKENS
from .base import PackedLayer
from .extending import extended
from .outliers import OutlierStore
from .padding import Padding
from .records import Records
from .storing import storing
from .stream import Stream
from .tail import Tail
from .view import StreamView

__all__ = ["WindowedLayer", "pays_off", "window_rule", "with_window"]

_SLACK = 16
"""A window is that many times as long as what may have left it and be stored still."""
_SHORTEST = 4 * BLOCK_TOKENS
"""A window of fewer tokens is not worth packing, however they are stored."""
_LARGEST_SHARE = 0.75
"""Of the bytes of transformers' own layer: what takes more of them is not worth packing."""


class WindowedLayer(PackedLayer):
    """A packed layer that forgets what has left its window. Made by [`with_window`].

    Attributes:
        window (`int`): A query sees its own token and at most `window - 1` before it.
        unit (`int`): Tokens that leave at once, known with the first of them: whole blocks, whose groups and
            rotations begin where they did.
    """

    is_sliding = True
    is_ragged = True
    window: int
    unit: int

    @property
    def held_length(self) -> int:
        """Tokens that the next query sees."""
        return min(self.cumulative_length, self.window - 1)

    @property
    def dense_length(self) -> int:
        return self.held_length

    def get_max_length(self) -> int:
        """The window, as of transformers' own layer."""
        return self.window

    def _allocate(self, key_states: Tensor, value_states: Tensor) -> None:
        super()._allocate(key_states, value_states)
        parts = [BLOCK_TOKENS]
        for stream in self.streams:
            parts += [stream.spec.block_length, getattr(stream.codec, "period", 1)]
        smallest = lcm(*parts)
        self.unit = smallest * max(1, self.window // _SLACK // smallest)
        self._bound_final_length()

    def bind(
        self, facts: LayerFacts, pads: Tensor | None, final_length: int | None, columns: int | None = None
    ) -> None:
        super().bind(facts, pads, final_length, columns)
        self._bound_final_length()

    def _append(
        self, key_states: Tensor, value_states: Tensor, *, defer: bool
    ) -> tuple[StreamView, StreamView]:
        stored = self.stored_length
        surplus = stored - self.held_length
        leaving = 0 if defer else self._leaving(self.cumulative_length + key_states.shape[2])
        if leaving > stored:
            keys, values = self._start_over(key_states, value_states, leaving)
        else:
            keys, values = super()._append(key_states, value_states, defer=defer)
            self._forget_oldest(leaving)
        return (keys.without_oldest(surplus), values.without_oldest(surplus)) if surplus else (keys, values)

    def check_crop(self, tokens_to_remove: int) -> None:
        super().check_crop(tokens_to_remove)
        seen = max(0, self.cumulative_length + min(0, int(tokens_to_remove)))
        if self.padding.dropped > max(0, seen - self.window + 1):
            raise UnsupportedOperationError(
                f"crop({int(tokens_to_remove)}): layer {self.layer_idx} sees {self.window} tokens back, and "
                f"of the {self.cumulative_length} it was given it has forgotten the first "
                f"{self.padding.dropped}, some of which token {seen} sees. `activate_past_recording` before "
                "the tokens that are to be removed keeps them."
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` tokens.

        Raises:
            UnsupportedOperationError: If tokens that the next query should then see have left the window;
                `activate_past_recording` keeps them until the next `crop`.
        """
        self.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)
        if self.is_initialized:
            self._forget_oldest(self._leaving(self.cumulative_length))

    def load_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        super().load_state(tensors, facts)
        if tensors:
            self.padding.dropped = self.cumulative_length - self.stored_length
            for stream in self.streams:  # although all that was packed may have left
                stream.is_calibrated = stream.is_calibrated or self.padding.dropped > 0
            self._bound_final_length()

    def _bound_final_length(self) -> None:
        """No more is ever stored than a window and what may have left it."""
        if self.is_initialized and self.final_length is not None:
            most = min(self.final_length, self.window - 1 + self.unit)
            self.stored_keys.final_length = self.stored_values.final_length = most

    def _leaving(self, seen: int) -> int:
        """Tokens that leave when `seen` have been given, all of them packed by then.

        It depends on their number alone, and so does what is stored.
        """
        unit = self.unit
        leaving = max(0, seen - self.window + 1) // unit * unit - self.padding.dropped
        due = min(stream.due(seen - self.padding.dropped) for stream in self.streams)
        return max(0, min(leaving, due // unit * unit))

    @property
    def _room(self) -> int:
        """Blocks of records that a full window needs, with what may have left it."""
        most = self.window - 1 + self.unit
        return -(-max(stream.spec.packed_length(most) for stream in self.streams) // BLOCK_TOKENS)

    def _forget_oldest(self, leaving: int) -> None:
        """Move what is stored behind the first `leaving` tokens to records of its own."""
        if leaving == 0:
            return
        packed = max(stream.packed_length for stream in self.streams) - leaving
        with storing():
            padding = self.padding.without_oldest(leaving)
            room = max(self._room, -(-packed // BLOCK_TOKENS))
            records = self.records.without_oldest(leaving // BLOCK_TOKENS, room)
            later = [stream.without_oldest(leaving, records, padding) for stream in self.streams]
            self._replace(padding, records, later)

    def _start_over(
        self, key_states: Tensor, value_states: Tensor, leaving: int
    ) -> tuple[StreamView, StreamView]:
        """Take new tokens of which the first leave at once, with all that is stored, and are not encoded."""
        given, views = (key_states, value_states), []
        for stream, states in zip(self.streams, given, strict=True):
            exact = (stream.tail.view(),) if stream.tail.length else ()
            views.append(StreamView(stream, stream.packed_length, (*exact, states)))
        skipped = leaving - self.stored_length
        with storing():
            for stream, view in zip(self.streams, views, strict=True):
                if not stream.is_calibrated:
                    stream.calibrate(view)
            padding = self.padding.without_oldest(leaving)
            records = self.records.without_oldest(self.records.num_blocks, self._room)
            self._replace(padding, records, [_emptied(stream, records, padding) for stream in self.streams])
            for stream, states in zip(self.streams, given, strict=True):
                stream.append(states[:, :, skipped:])
        return views[0], views[1]

    def _replace(self, padding: Padding, records: Records, streams: list[Stream]) -> None:
        """Go on with these; views of the old streams still read them."""
        self.padding, self.records = padding, records
        self.stored_keys, self.stored_values = streams


def _emptied(stream: Stream, records: Records, padding: Padding) -> Stream:
    """A stream of the same kind that holds nothing."""
    later = copy.copy(stream)
    later.records, later.padding, later.codec = records, padding, stream.codec.with_padding(padding)
    later.packed_length, later.sinks = 0, None
    tail = stream.tail
    rows, heads, _, width = tail.buffer.shape
    later.tail = Tail(rows, heads, width, tail.limit, tail.buffer.dtype, tail.buffer.device, tail.slack)
    if stream.outliers is not None:
        later.outliers = OutlierStore(rows, heads, stream.outliers.capacity, tail.buffer.device)
    return later


def with_window(layer_class: type[PackedLayer]) -> type[WindowedLayer]:
    """Return the class of a backend's layers that forget what has left a window.

    Args:
        layer_class (`type[PackedLayer]`): The backend's class. Set `window` of the instances.
    """
    made: type[WindowedLayer] = extended(WindowedLayer, layer_class)
    return made


def pays_off(layer: PackedLayer, window: int, num_heads: int, key_dim: int, value_dim: int) -> bool:
    """Whether packing a window takes at most three quarters of what transformers' own layer takes for it.

    What a backend keeps exact weighs the more the shorter the window is: gpt-oss's of 128 tokens is not worth
    packing, Gemma 3's of 1024 is.

    Args:
        layer (`PackedLayer`): An empty one of a backend's class.
        window (`int`): The window, in tokens.
        num_heads (`int`): Heads of the states.
        key_dim (`int`): Channels of the keys.
        value_dim (`int`): Channels of the values.
    """
    if window < _SHORTEST:
        return False
    full = with_window(type(layer))(layer.config, layer.layer_idx, layer.facts)
    full.window = window
    keys, values = (
        torch.empty(1, num_heads, 4 * window, dim, dtype=torch.bfloat16, device="meta")
        for dim in (key_dim, value_dim)
    )
    full.is_trial = True
    full.update(keys, values)  # on shapes alone
    dense_bytes = (window - 1) * num_heads * (key_dim + value_dim) * keys.element_size()
    return full.kv_bytes <= _LARGEST_SHARE * dense_bytes


def window_rule(
    model_config: Any,
    layer_configs: Sequence[Any],
    facts: Sequence[LayerFacts],
    storage_of: Callable[[Any], tuple[type[PackedLayer], Any] | None],
) -> Callable[[int, int], bool]:
    """Return whether to pack the layer of an index, whose window has so many tokens.

    Args:
        model_config (`PreTrainedConfig`): The decoder's.
        layer_configs (`Sequence[BackendConfig]`): Options of every layer.
        facts (`Sequence[LayerFacts]`): Of every layer.
        storage_of (`Callable`): From such options to the class and the options of what stores a window;
            `None` if nothing does.
    """
    known: dict[tuple[Any, ...], bool] = {}

    def packs_window(layer_idx: int, window: int) -> bool:
        stored = storage_of(layer_configs[layer_idx])
        if stored is None or caches_latents(model_config):
            return False
        layer_class, config = stored
        shape = (window, *key_value_heads(model_config, layer_idx))
        kind = (repr(config), *shape)
        if kind not in known:
            known[kind] = pays_off(layer_class(config, layer_idx, facts[layer_idx]), *shape)
        return known[kind]

    return packs_window
