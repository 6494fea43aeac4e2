"""The packed cache layer: the whole contract transformers expects of a layer, on packed data.

Backends derive from [`PackedLayer`] and write `key_stream` and `value_stream`; everything else is final.

Invariants, tested by the conformance suite:

* a token is encoded exactly once, from its exact value; old blocks never change;
* a layer fed the same tensors ends in the same bytes, however they were split into calls (but for the first);
* an operation that cannot be done exactly raises, naming backend and operation.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..config import BackendConfig
from ..models.facts import LayerFacts
from ..quantizers.packing import BLOCK_TOKENS
from .checking import changing, check_agreement, check_states
from .handle import KVHandle
from .offloading import Shelf, make_records
from .padding import Padding
from .prompts import shows_prompt
from .records import RecordLayout
from .rows import num_rows
from .stepping import take_step
from .storing import storing
from .stream import Stream, StreamSpec
from .telling import TellingLayer
from .view import StreamView, joined

__all__ = ["PackedLayer"]


class PackedLayer(TellingLayer, CacheLayerMixin):
    """One attention layer's keys and values, `[sink | packed blocks | residual tail]`.

    Args:
        config (`BackendConfig`): Options of this layer.
        layer_idx (`int`): Index of the layer in the model.
        facts (`LayerFacts`): What is known of the attention layer.
    """

    is_compileable = is_sliding = False
    is_croppable = True
    is_ragged = False  # other layers may hold another number of tokens, and one mask is made for all
    is_torn = False  # a change of it is under way, or was interrupted
    awaits_scores = False  # a forward has not come to its end
    prompt_dtype: torch.dtype | None = None  # of first tokens that are better attended to as handles
    window: int | None = None
    """How far back a query sees, its own token included; to the first one if not given."""
    shelf: Shelf | None = None  # of records that wait in the host's memory for their turn on a GPU

    def __init__(self, config: BackendConfig, layer_idx: int, facts: LayerFacts) -> None:
        # `keys` and `values` are views here, not the attributes the mixin's own `__init__` would set.
        self.config, self.layer_idx, self.facts = config, layer_idx, facts
        self.padding = Padding(config.sink_length)
        self.final_length: int | None = None
        self.fallback_reads = 0
        self.is_read_as_tensors = False
        self.kernel = "torch"
        self.kernel_reason: str | None = None
        self.record_past = False
        self._prepared: tuple[tuple[int, int, int], StreamSpec, StreamSpec] | None = None
        self._forget()

    @abstractmethod
    def key_stream(self, head_dim: int) -> StreamSpec:
        """How keys of `head_dim` channels are stored."""

    @abstractmethod
    def value_stream(self, head_dim: int) -> StreamSpec:
        """How values of `head_dim` channels are stored."""

    def prepare(self, num_heads: int, key_dim: int, value_dim: int) -> None:
        """Build the streams for the heads the model announces, so that wrong options fail now.

        Raises:
            ValueError: If an option does not fit the head size, or an artifact cannot be read.
        """
        self.num_heads, self.key_dim = num_heads, key_dim
        shape = (num_heads, key_dim, value_dim)
        self._prepared = (shape, self.key_stream(key_dim), self.value_stream(value_dim))

    def bind(
        self, facts: LayerFacts, pads: Tensor | None, final_length: int | None, columns: int | None = None
    ) -> None:
        """Learn what a cache layer is not told by `update`.

        Args:
            facts (`LayerFacts`): Facts read from the model; ignored once tokens are held.
            pads (`torch.Tensor` of shape `(B,)`, *optional*): Left pads of every row; ignored once tokens are
                held.
            final_length (`int`, *optional*): Tokens the cache will hold at the end of the run.
            columns (`int`, *optional*): Tokens of the mask that told of the pads.
        """
        self.final_length = final_length
        if self.cumulative_length == 0:
            self._forget()
            self.padding.set(pads, columns)
            if facts != self.facts:
                self.facts = facts
                if self._prepared is not None:
                    self.prepare(*self._prepared[0])
        elif self.is_initialized:
            for stream in self.streams:
                stream.final_length = final_length

    def set_prompt_length(self, length: int | None) -> None:
        """Say after how many tokens the prompt, or the next turn of it, has been read; evicting layers care.

        Args:
            length (`int`, *optional*): Tokens, those of earlier turns included; `None` if unknown.
        """

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for the shape, dtype and device of the first states, `(B, H, T, D)` each."""
        with storing():
            self._allocate(key_states, value_states)

    def _allocate(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        batch_size, num_heads = key_states.shape[:2]
        check_agreement(key_states, value_states)
        if not self.padding.fits(key_states.shape[2]):
            self._lose_padding(key_states.shape[2])
        key_dim, value_dim = key_states.shape[-1], value_states.shape[-1]
        if self._prepared is None or self._prepared[0] != (num_heads, key_dim, value_dim):
            self.prepare(num_heads, key_dim, value_dim)
        assert self._prepared is not None
        _, keys, values = self._prepared
        self._prepared = None  # codecs may learn from the tokens to come, so they serve once
        layout = RecordLayout({"key": (keys.codec, key_dim), "value": (values.codec, value_dim)})
        self.records = make_records(layout, batch_size, num_heads, self.device, self.shelf)
        shared = (self.records, self.padding)
        use_native = self.config.kernel != "torch"
        self.stored_keys = Stream(
            "key", keys, *shared, key_dim, self.dtype, self.device, use_native=use_native
        )
        self.stored_values = Stream(
            "value", values, *shared, value_dim, value_states.dtype, self.device, use_native=use_native
        )
        self.stored_keys.final_length = self.stored_values.final_length = self.final_length
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take new keys and values, each `(B, H, q, D)`, and return what attention reads.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: The exact tensors while nothing is packed (always so for the
            first call, i.e. the prompt, unless of `prompt_dtype`), else two [`KVHandle`]s `(B, H, T + q, D)`.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        check_states(self, key_states, value_states)
        is_first, self.is_torn = self.cumulative_length == 0, True
        self.prefetch()
        keys, values = self._append(key_states, value_states, defer=self.record_past)
        self.cumulative_length += key_states.shape[-2]
        self.is_torn = False
        if is_first and not shows_prompt(self, key_states, keys, values):
            return key_states, value_states
        if not is_first and keys.packed_length == values.packed_length == 0:
            return joined(keys, key_states), joined(values, value_states)
        return KVHandle(self, keys, key_states), KVHandle(self, values, value_states)

    def _append(
        self, key_states: Tensor, value_states: Tensor, *, defer: bool
    ) -> tuple[StreamView, StreamView]:
        """Hand the new tokens to both streams, and return what attention reads of them in this call."""
        if not defer:
            views = take_step(self.stored_keys, self.stored_values, key_states, value_states)
            if views is not None:
                return views
        with storing():
            self._follow(key_states.dtype, value_states.dtype)
            return (
                self.stored_keys.append(key_states, defer=defer),
                self.stored_values.append(value_states, defer=defer),
            )

    def _follow(self, *dtypes: torch.dtype) -> None:
        """Keep exact tokens in the dtypes of new ones: the model was cast, is another, or autocast began."""
        self.dtype = dtypes[0]
        for stream, dtype in zip(self.streams, dtypes, strict=True):
            stream.tail.buffer = stream.tail.buffer.to(dtype)
            stream.sinks = None if stream.sinks is None else stream.sinks.to(dtype)

    def room(self, limit: int) -> int:
        """Tokens, from 1 to `limit`, that may come in one call and are read as if they came one by one."""
        return min(stream.room(limit) for stream in self.streams) if self.is_initialized else 1

    @property
    def observes_queries(self) -> bool:
        """Whether `attended` does anything with what it is shown."""
        return False

    def attended(self, query: Tensor, tokens: StreamView, options: Any) -> None:
        """Take notice of a `query` `(B, Hq, q, D)` answered from the keys `tokens`; evicting layers do."""

    def own_mask(self, tokens: StreamView) -> Tensor | None:
        """Which slots are no pads, bool `(B, 1, 1, T)`; `None` if none is."""
        return tokens.real_slots()

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The key and the value stream."""
        return self.stored_keys, self.stored_values

    @property
    def uniform_layers(self) -> tuple[PackedLayer, ...]:
        """What this layer consists of: itself, unless some of its heads hold more tokens than others."""
        return (self,)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """The exact, newest keys: the residual tail, not the whole history."""
        return self.stored_keys.tail.view() if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """The exact, newest values: the residual tail, not the whole history."""
        return self.stored_values.tail.view() if self.is_initialized else None

    @property
    def stored_length(self) -> int:
        """Tokens stored per row and head."""
        return self.stored_keys.length if self.is_initialized else 0

    @property
    def held_length(self) -> int:
        """Tokens that the next query sees: all that were given, unless the layer evicts or has a window."""
        return self.cumulative_length

    @property
    def dense_length(self) -> int:
        """Tokens that transformers' own layer would hold."""
        return self.cumulative_length

    def get_seq_length(self) -> int:
        """Tokens seen."""
        # a sum: what is an attribute, a compiler reads again where a graph ends, when it has changed
        return self.cumulative_length + 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what the next `update` of `query_length` tokens returns."""
        return self.held_length + query_length, self.cumulative_length - self.held_length

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def reset(self) -> None:
        """Forget all tokens, the padding and everything learnt from them."""
        self._forget()
        self.padding.set(None)
        self.record_past = False

    def activate_past_recording(self) -> None:
        """Pack before a `crop` only, so that rejected tokens never were part of a block; until `bind`."""
        self.record_past = True

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise `UnsupportedOperationError` or `ValueError` if `crop` would; caches ask all layers first."""
        if int(tokens_to_remove) > 0:
            raise ValueError(f"`crop` takes a negative integer, tokens to remove, got {tokens_to_remove}.")

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` tokens.

        Survivors of a group that shares metadata return to the residual window as their decoded values.
        """
        PackedLayer.check_crop(self, tokens_to_remove)
        tokens_to_remove = int(tokens_to_remove)  # some releases of transformers pass a tensor
        if not self.is_initialized:
            return
        self.prefetch()
        if self.cumulative_length + tokens_to_remove <= 0:
            self._forget()
            return
        length = max(0, self.stored_length + tokens_to_remove)  # 0 too where older tokens were evicted
        with storing(), changing(self):
            self.cumulative_length += tokens_to_remove
            for stream in self.streams:
                stream.truncate(length)
                stream.settle()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row `i` by row `beam_idx[i]` (beam search)."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self.batch_select_indices(torch.arange(num_rows(self), device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` (integers, or a boolean mask over the rows)."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().squeeze(1)
        with storing(), changing(self):
            self.padding.index(indices)
            if self.is_initialized:
                self.records.select_rows(indices)
                for stream in self.streams:
                    stream.index_batch(indices.to(stream.tail.buffer.device))

    def offload(self) -> None:
        """Move everything to the CPU; the next `update` or `prefetch` brings it back."""
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Bring everything back to the layer's device."""
        if self.is_initialized and self.stored_keys.tail.buffer.device != self.device:
            self._move(self.device)

    def beside(self) -> dict[str, Tensor]:
        """What is kept beside keys and values as the model gave it, by name."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor this layer owns, by name."""
        owned: dict[str, Tensor] = {}
        if self.is_initialized:
            owned |= self.records.tensors()
            for stream in self.streams:
                owned |= {f"{stream.side}_{name}": tensor for name, tensor in stream.tensors().items()}
        return owned if self.padding.lengths is None else owned | {"padding": self.padding.lengths}

    @property
    def dropped_outliers(self) -> int:
        """Outliers that found no room in the longest list there can be, when tokens moved."""
        streams = self.streams if self.is_initialized else ()
        return sum(stream.outliers.dropped for stream in streams if stream.outliers is not None)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors in use and plain facts, from which `load_state` rebuilds this layer."""
        if not self.is_initialized:
            return {}, {}
        used = -(-max(stream.packed_length for stream in self.streams) // BLOCK_TOKENS)
        tensors = {"records": self.records.at_rest()[:, :, :used]}
        for stream in self.streams:
            tensors |= {f"{stream.side}_{name}": t for name, t in stream.saved_tensors().items()}
        if self.padding.lengths is not None:
            tensors["padding"] = self.padding.lengths
        facts = {
            "cumulative_length": self.cumulative_length,
            "metadata_bytes": self.records.layout.metadata_bytes,
            "packed_lengths": {stream.side: stream.packed_length for stream in self.streams},
        }
        return tensors, facts

    def load_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        if not tensors:
            return
        self._forget()
        self.padding.set(tensors.get("padding"))
        self.lazy_initialization(tensors["key_tail"][:, :, :0], tensors["value_tail"][:, :, :0])
        if facts["metadata_bytes"] == 4:
            self.records.widen_metadata()
        self.records.load(tensors["records"])
        self.cumulative_length = facts["cumulative_length"]
        for stream in self.streams:
            prefix = f"{stream.side}_"
            own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            length = facts["packed_lengths"][stream.side] + own["tail"].shape[2]
            stream.load(own, facts["packed_lengths"][stream.side], length)

    @property
    def kv_bytes(self) -> int:
        """Bytes of every tensor this layer owns: capacity, not what is in use."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors().values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(layer_idx={self.layer_idx}, tokens={self.cumulative_length})"

    def _forget(self) -> None:
        self.is_initialized = self.is_torn = False
        self.cumulative_length = 0
        for name in ("records", "stored_keys", "stored_values"):
            self.__dict__.pop(name, None)

    def _lose_padding(self, count: int) -> None:
        """Go on without knowing which of the first `count` tokens are pads: they count as tokens."""
        self.padding.set(None)

    def _move(self, device: torch.device) -> None:
        if self.is_initialized:
            with storing():
                self.records.to(device)
                for stream in self.streams:
                    stream.to(device)
