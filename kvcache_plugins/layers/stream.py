"""One tensor stream of a layer (its keys, or its values): `[packed blocks | residual tail]` with exact sinks.

The closed form. After T tokens, the first `packed_length(T)` are packed and the others exact:

    packed_length(T) = block_length * floor(max(0, T - keep_recent) / block_length)

KIVI's keys are `(block_length, keep_recent) = (R, 0)`, its values `(1, R)`, int8 and float8 `(1, 0)`. The
split is a function of T alone, every token is encoded once, from its exact value, and groups never straddle
calls, so any way of feeding the same tokens ends in the same bytes. A call is scored against what was packed
before it, plus everything else exact; then the tokens that are due are packed.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ..quantizers.half_range import kept_finite
from ..quantizers.packing import (
    BLOCK_TOKENS,
    pack_keys,
    pack_values,
    padded_head_dim,
    unpack_keys,
    unpack_values,
)
from .codec import Encoded, check_encoded
from .level_encoding import encoder_for
from .native_encoding import NativeEncoder
from .outliers import OutlierStore
from .padding import Padding
from .ranges import block_runs, cut
from .records import Records, size_class
from .storing import storing
from .stream_spec import StreamSpec
from .tail import Tail
from .view import StreamView

__all__ = ["Stream", "StreamSpec"]

_SLAB_VALUES = 1 << 20
"""Values encoded at once: 4 MB in fp32, so that the temporaries of a long prompt stay a few tens of MB."""


class Stream:
    """The keys or the values of one layer.

    Args:
        side (`str`): `"key"` or `"value"`; decides the order of the codes.
        spec (`StreamSpec`): How tokens are stored.
        records (`Records`): The layer's buffer, shared with the other stream.
        padding (`Padding`): Left padding and sinks of every row.
        head_dim (`int`): Channels.
        dtype (`torch.dtype`), device (`torch.device`): As the model's states.
        use_native (`bool`): Whether native kernels may encode.
    """

    def __init__(
        self,
        side: str,
        spec: StreamSpec,
        records: Records,
        padding: Padding,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        use_native: bool = True,
    ) -> None:
        self.side, self.spec, self.codec = side, spec, spec.codec
        if device.type != "meta":
            spec.codec.place(device)
        self.records, self.padding = records, padding
        self.head_dim, self.use_native = head_dim, use_native
        self.packed_length = 0
        self.final_length: int | None = None
        batch_size, num_heads = records.data.shape[:2]
        self.tail = Tail(batch_size, num_heads, head_dim, spec.keep_recent + spec.block_length, dtype, device)
        self.sinks: Tensor | None = None
        capacity = spec.codec.outlier_capacity
        self.outliers = OutlierStore(batch_size, num_heads, capacity, device) if capacity else None
        self.is_calibrated = spec.codec.warmup_tokens == 0
        self._encoder: NativeEncoder | None = None
        self.described: Any = None  # what attention has looked up of it for its kernels

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.packed_length + self.tail.length

    @property
    def slab_tokens(self) -> int:
        """Tokens encoded or decoded at once: whole blocks and whole groups."""
        batch_size, num_heads = self.records.data.shape[:2]
        unit = max(BLOCK_TOKENS, self.codec.unit_tokens)
        if self.records.data.is_meta:  # a prompt of any length takes no memory
            return unit << 32
        return max(unit, _SLAB_VALUES // max(1, batch_size * num_heads * self.head_dim) // unit * unit)

    @property
    def encoder(self) -> NativeEncoder:
        """What native kernels must know to encode the stream as it is now."""
        if self._encoder is None or not self._encoder.is_for(self.codec, self.records):
            self._encoder = encoder_for(self.codec, self.side, self.records)
        return self._encoder

    def append(self, states: Tensor, *, defer: bool = False) -> StreamView:
        """Take new tokens, pack what is due, and return what attention reads in this call.

        Args:
            states (`torch.Tensor` of shape `(B, H, n, D)`): The new tokens.
            defer (`bool`): Pack nothing yet, because a `crop` will follow (assisted decoding).
        """
        seen = self.length + states.shape[2]
        fits = self.tail.length + states.shape[2] <= max(self.tail.room(seen), self.tail.capacity)
        if fits or defer:
            self.tail.append(states, seen)
            view = StreamView.of(self)
            if not defer:
                self.settle()
            return view
        # A long run goes from the incoming tensor to the records; only its end passes through the tail, whose
        # present content attention still needs in this call.
        held = (self.tail.view().clone(),) if self.tail.length else ()
        view = StreamView(self, self.packed_length, (*held, states))
        due = self.due(seen)
        self._pack(view, self.packed_length, due)
        self.tail.replace(view.read(due, seen) if due < seen else states[:, :, :0], seen)
        return view

    def settle(self) -> None:
        """Bring the split between packed and exact tokens to the closed form."""
        seen = self.length
        due = self.due(seen)
        if due > self.packed_length:
            view = StreamView.of(self)
            self.tail.drop(due - self.packed_length)
            self._pack(view, self.packed_length, due)
        if self.tail.capacity > self.tail.room(seen) and self.tail.length <= self.tail.limit:
            self.tail.shrink(seen)

    def decode(self, start: int, stop: int) -> Tensor:
        """Decode packed tokens `[start, stop)`: fp32 `(B, H, stop - start, D)`, sinks exact."""
        data = self.records.data
        if data.is_meta:  # of shapes alone, as in `_pack`
            return data.new_empty(*data.shape[:2], stop - start, self.head_dim, dtype=torch.float32)
        first, last = start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)
        unpack = self._unpack(self.records.codes(self.side, first, last))
        metadata = {
            name: self.records.metadata(self.side, name, first, last).float().flatten(2, 3)
            for name in self.codec.metadata_names
        }
        outliers = None if self.outliers is None else self.outliers.read(first, last)
        encoded = Encoded(unpack.flatten(2, 3), metadata, outliers)
        states = self.codec.decode(encoded, first * BLOCK_TOKENS)
        states = states[:, :, start - first * BLOCK_TOKENS : stop - first * BLOCK_TOKENS]
        if self.sinks is not None:
            self.padding.write_sinks(states, start, self.sinks)
        return states

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens.

        Tokens of a group that is cut return to the exact tail as their decoded values: they cannot be
        re-encoded together with other neighbours and still be what they were.
        """
        if length >= self.packed_length:
            self.tail.truncate(self.length - length)
            return
        kept = length // self.codec.unit_tokens * self.codec.unit_tokens
        dtype = self.tail.buffer.dtype
        survivors = kept_finite(self.decode(kept, length), dtype).to(dtype) if kept < length else None
        self._clear(kept)
        self.packed_length = kept
        empty = self.tail.buffer[:, :, :0]
        self.tail.replace(empty if survivors is None else survivors, length)

    def gathered(self, index: Tensor, records: Records, padding: Padding) -> Stream:
        """Return a stream of chosen tokens; this one stays as it is, for views that still read it.

        Args:
            index (`torch.Tensor` of shape `(B, H, K)`): Slots to keep, ascending. If any token is packed, all
                exact ones are among them, and of the packed ones as many as make up whole units.
            records (`Records`): Where the packed ones of `index` have been moved to.
            padding (`Padding`): Of the tokens that stay.
        """
        chosen = copy.copy(self)
        chosen.records, chosen.padding, chosen.codec = records, padding, self.codec.with_padding(padding)
        if self.packed_length:
            chosen.packed_length = index.shape[2] - self.tail.length
            if self.outliers is not None:
                packed = index[:, :, : chosen.packed_length]
                chosen.outliers = self.outliers.gathered(packed, records.num_blocks)
        else:
            chosen.tail = self.tail.gathered(index)
        return chosen

    def without_oldest(self, count: int, records: Records, padding: Padding) -> Stream:
        """A stream less its `count` oldest, packed tokens; the others are in `records`. This one stays."""
        later = copy.copy(self)
        later.records, later.padding, later.codec = records, padding, self.codec.with_padding(padding)
        later.packed_length -= count
        later.sinks = self.sinks if padding.first_plain_slot else None
        if self.outliers is not None:
            later.outliers = self.outliers.without_oldest(count // BLOCK_TOKENS, records.num_blocks)
        return later

    def index_batch(self, indices: Tensor) -> None:
        """Replace the rows of the batch by rows `indices` (the records are the layer's to index)."""
        self.tail.buffer = self.tail.buffer.index_select(0, indices)
        if self.sinks is not None:
            self.sinks = self.sinks.index_select(0, indices)
        if self.outliers is not None:
            self.outliers.index_batch(indices)
        state = self.codec.batch_state()
        self.codec.load_batch_state({name: tensor.index_select(0, indices) for name, tensor in state.items()})

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor this stream owns beside the records, by name."""
        owned = {"tail": self.tail.buffer, **self.codec.batch_state()}
        if self.outliers is not None:
            owned |= self.outliers.tensors()
        return owned if self.sinks is None else owned | {"sinks": self.sinks}

    def saved_tensors(self) -> dict[str, Tensor]:
        """The same, without what is allocated and not in use."""
        live = self.tensors() | {"tail": self.tail.view()}
        if self.outliers is not None:
            live |= self.outliers.saved_tensors(-(-self.packed_length // BLOCK_TOKENS))
        return live

    def load(self, tensors: dict[str, Tensor], packed_length: int, length: int) -> None:
        """Take over `saved_tensors`; the records are the layer's to load, before."""
        self.packed_length = packed_length
        self.tail.replace(tensors["tail"], length)
        self.sinks = tensors.get("sinks")
        self.codec.load_batch_state(tensors)
        if self.outliers is not None:
            self.outliers.load(tensors)
            self.outliers.ensure(self.records.num_blocks if packed_length else 0)
        self.is_calibrated = packed_length > 0 or self.codec.warmup_tokens == 0

    def to(self, device: torch.device) -> None:
        """Move the tensors to `device`."""
        self.tail.buffer = self.tail.buffer.to(device)
        self.sinks = None if self.sinks is None else self.sinks.to(device)
        state = self.codec.batch_state()
        self.codec.load_batch_state({name: tensor.to(device) for name, tensor in state.items()})
        if self.outliers is not None:
            self.outliers.to(device)

    def due(self, seen: int) -> int:
        """Return how many tokens should be packed after `seen`, never fewer than already are."""
        if not self.is_calibrated and seen < self._learning_stop:
            return self.packed_length
        due = self.spec.packed_length(seen)
        return due if due > self.packed_length else self.packed_length

    @property
    def awaited_tokens(self) -> int:
        """Tokens that have to come before any is packed, although some that are held could be; 0 if none."""
        could_be_packed = not self.is_calibrated and self.spec.packed_length(self.length) > 0
        return max(0, self._learning_stop - self.length) if could_be_packed else 0

    def room(self, limit: int) -> int:
        """Tokens, from 1 to `limit`, up to and including the one that makes something be packed."""
        for count in range(1, limit):
            if self.due(self.length + count) > self.packed_length:
                return count
        return limit

    def reserve(self, stop: int) -> None:
        """Make room for the codes of the tokens up to `stop`, which will be written."""
        self.records.mark_dirty(self.packed_length, stop)
        if stop > self.records.num_blocks * BLOCK_TOKENS:
            final = self.spec.packed_length(self.final_length) if self.final_length else None
            with storing():
                self.records.ensure(stop, final)
        if self.outliers is not None:
            self.outliers.ensure(self.records.num_blocks)

    def _pack(self, source: StreamView, start: int, stop: int) -> None:
        """Pack tokens `[start, stop)` of `source`."""
        if start >= stop:
            return
        self.reserve(stop)
        if not self.is_calibrated:
            self.calibrate(source)
        if self.padding.sink_length and start < self.padding.first_plain_slot:
            self._keep_sinks(source, start, stop)
        if not self.records.data.is_meta:  # of shapes alone: what is allocated does not depend on the codes
            self._encode(source, start, stop)
        self.packed_length = stop

    def _encode(self, source: StreamView, start: int, stop: int) -> None:
        """Encode tokens `[start, stop)` of `source` in slabs and write them into the records."""
        step, slabs, first = self.slab_tokens, 1, stop
        if self.use_native:  # pads and sinks are the codec's, and no more than the blocks that hold them
            slabs, first = self.encoder.slabs_at_once, self.encoder.first_slot(start, self.padding)
        for low, high in cut(start, min(first, stop), step) + cut(first, stop, step * slabs):
            states = source.read(low, high)
            given = self.records, states, low, self.padding, self.outliers
            if self.use_native and self.encoder.encode(*given):
                continue
            for begin, end in cut(low, high, step):
                part = states[:, :, begin - low : end - low].float()
                self._write(begin, self.codec.encode(part, begin, self.padding.plain_mask(begin, part)))

    @property
    def _learning_stop(self) -> int:
        """The slot behind those that the codec learns from, in the row where they come last."""
        return self.padding.first_plain_slot + self.codec.warmup_tokens

    def calibrate(self, source: StreamView) -> None:
        """Let the codec learn from the first tokens of `source`, which begins at slot 0."""
        states = source.read(0, self._learning_stop).float()
        self.codec.calibrate(states, self.padding.first_tokens(self.codec.warmup_tokens, states))
        self.is_calibrated = True

    def _keep_sinks(self, source: StreamView, start: int, stop: int) -> None:
        # no more than there are tokens
        room = min(self.padding.sink_length, size_class(stop + self.padding.dropped))
        sinks = self.tail.buffer[:, :, :0] if self.sinks is None else self.sinks
        self.sinks = torch.nn.functional.pad(sinks, (0, 0, 0, max(0, room - sinks.shape[2])))
        found = source.read(start, min(stop, self.padding.first_plain_slot))
        self.padding.read_sinks(found, start, self.sinks)

    def _write(self, start: int, encoded: Encoded) -> None:
        """Write a run of encoded tokens, completing partial blocks with a bitwise or."""
        check_encoded(self.codec, encoded)
        stop = start + encoded.codes.shape[2]
        self.records.fit(encoded.metadata.values())
        for low, high in block_runs(start, stop):
            first, last = low // BLOCK_TOKENS, -(-high // BLOCK_TOKENS)
            codes = encoded.codes[:, :, low - start : high - start]
            target = self.records.codes(self.side, first, last)
            if (high - low) % BLOCK_TOKENS:
                before, after = low - first * BLOCK_TOKENS, last * BLOCK_TOKENS - high
                codes = torch.nn.functional.pad(codes, (0, 0, before, after))
                target |= self._pack_codes(codes)
            else:
                target.copy_(self._pack_codes(codes))
        for name, rows in encoded.metadata.items():
            self._write_metadata(name, start, rows)
        if self.outliers is not None and encoded.outliers is not None:
            self.outliers.write(start // BLOCK_TOKENS, encoded.outliers)

    def _write_metadata(self, name: str, start: int, rows: Tensor) -> None:
        tokens = self.codec.stored_granularity.tokens
        per_block = self.codec.rows_per_block
        begin = start // tokens
        end = begin + rows.shape[2]
        for low, high in block_runs(begin, end, per_block):
            first, last = low // per_block, -(-high // per_block)
            target = self.records.metadata(self.side, name, first, last)
            part = rows[:, :, low - begin : high - begin]
            if (high - low) % per_block:
                target[:, :, 0, low - first * per_block : high - first * per_block] = part
            else:
                target.copy_(part.expand(-1, target.shape[1], -1, -1).unflatten(2, (last - first, per_block)))

    def _pack_codes(self, codes: Tensor) -> Tensor:
        """uint8 `(B, H, 64 n, D)` -> `(B, H, n, nbytes)`."""
        missing = padded_head_dim(self.head_dim) - self.head_dim
        if missing:
            codes = torch.nn.functional.pad(codes, (0, missing))
        blocks = codes.unflatten(2, (-1, BLOCK_TOKENS))
        if self.side == "key":
            return pack_keys(blocks, self.codec.nbits, self.codec.interleaved)
        return pack_values(blocks, self.codec.nbits)

    def _unpack(self, data: Tensor) -> Tensor:
        """uint8 `(B, H, n, nbytes)` -> codes `(B, H, n, 64, D)`."""
        width = padded_head_dim(self.head_dim)
        if self.side == "key":
            codes = unpack_keys(data, self.codec.nbits, width, self.codec.interleaved)
        else:
            codes = unpack_values(data, self.codec.nbits, width)
        return codes[..., : self.head_dim]

    def _clear(self, length: int) -> None:
        """Zero the codes of tokens from `length` on, as a later bitwise or expects."""
        self.records.mark_dirty(length, self.packed_length)
        first, used = length // BLOCK_TOKENS, -(-self.packed_length // BLOCK_TOKENS)
        partial = length % BLOCK_TOKENS
        if partial:
            codes = self._unpack(self.records.codes(self.side, first, first + 1)).clone()
            codes[..., partial:, :] = 0
            self.records.codes(self.side, first, first + 1).copy_(self._pack_codes(codes.flatten(2, 3)))
        self.records.codes(self.side, first + bool(partial), used).zero_()
