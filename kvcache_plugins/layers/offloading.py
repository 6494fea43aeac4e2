"""Packed blocks that rest in the host's memory, and lie on a GPU while their layer is at work.

What a model needs on the GPU is then two layers of its cache and not all of them. Codes are moved, so a step
moves a quarter of the bytes that transformers' offloaded cache moves at 4 bits; and they are moved in one
direction, because a token's codes never change: dirty blocks, which the host lacks, stay on the GPU, and are
written back when they have become many.

Everything that reads records asks them for `data`, which is where they arrive. From the order in which layers
were asked, a shelf learns which will be next, and copies it on a stream of its own while the model works on
the layer before (double buffering). So no verb of a layer, and no attention function, knows of any of this.

Memory may run out at any of these moves, and users interrupt them. So what records are is changed by single
statements, with nothing to call among them: before one they are what they were, after it they are what they
were to become.

Torch takes pinned memory in powers of two, so that the host may hold up to twice what a layer needs.
"""

from __future__ import annotations

import copy
import itertools
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedOperationError
from ..quantizers.packing import BLOCK_TOKENS
from .records import RecordLayout, Records
from .storing import storing

__all__ = ["SLOTS", "OffloadedRecords", "Shelf", "make_records"]

_MOST_DIRTY_BLOCKS = 16
"""Blocks that the host may lack, 1024 tokens of one layer: writing them back copies all of a layer."""
SLOTS = 2
"""Layers that lie on a device: the one at work, and the next."""


class Shelf:
    """The places on the devices that the records of one cache take turns in."""

    def __init__(self) -> None:
        self._slots: dict[torch.device, list[_Slot]] = {}
        self._latest: weakref.ref[OffloadedRecords] | None = None

    def is_latest(self, records: OffloadedRecords | None) -> bool:
        """Whether no others have been asked for since these."""
        return self._latest is not None and self._latest() is records

    def enter(self, records: OffloadedRecords) -> None:
        """See to it that `records` lie on their device, and that those that followed them last time come.

        Raises:
            UnsupportedOperationError: While a CUDA graph is recorded, which would repeat one step's copies.
        """
        if records.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UnsupportedOperationError(
                "offload=True: a CUDA graph cannot record layers that take turns on the GPU, for they lie "
                "elsewhere at every step. Allowed is offload=False."
            )
        previous = None if self._latest is None else self._latest()
        self._latest = None  # who fails on the way has not come, and will be asked for again
        if previous is not None and previous is not records:
            previous.successor = weakref.ref(records)
            if previous.is_loose:
                previous.leave()
        records.arrive(self._slot_for(records) if records.is_away else None)
        self._latest = weakref.ref(records)
        following = None if records.successor is None else records.successor()
        if following is not None and following.is_away:
            following.fetch(self._slot_for(following))

    def _slot_for(self, records: OffloadedRecords) -> _Slot:
        """A slot of the device of `records`, whose occupant leaves, if it is not the one at work."""
        if records.device not in self._slots:
            self._slots[records.device] = [_Slot(records.device) for _ in range(SLOTS)]
        slots = self._slots[records.device]
        free = next((slot for slot in slots if slot.occupant is None), None)
        slot = free or next(slot for slot in slots if not self.is_latest(slot.occupant))
        slot.vacate()
        return slot

    def tensors(self) -> list[Tensor]:
        """The places, whether any records lie there or not."""
        slots = itertools.chain.from_iterable(self._slots.values())
        return [slot.buffer for slot in slots if slot.buffer is not None]

    def clear(self) -> None:
        """Give the devices their memory back; what lies there leaves."""
        for slot in itertools.chain.from_iterable(self._slots.values()):
            slot.vacate()
        self._slots.clear()

    def __reduce__(self) -> tuple[type[Shelf], tuple[()]]:
        return Shelf, ()  # a copy has places of its own


class _Copies:
    """Copies to a device, on a stream of their own where it has such."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def own(self, buffer: Tensor) -> None:
        """See to it that copies to `buffer` end before others get its memory, also when the cache is gone."""
        if self._stream is not None:
            buffer.record_stream(self._stream)

    def begin(self, place: Tensor, host: Tensor) -> None:
        """Copy `host` to `place`, once the device has done what it was told so far."""
        if self._stream is None:
            place.copy_(host, non_blocking=True)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            place.copy_(host, non_blocking=True)

    def finish(self) -> None:
        """Let what the device is told from now on begin when all copies have ended."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class _Slot:
    """Memory of a device for the records of one layer after the other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffer: Tensor | None = None
        self._occupant: weakref.ref[OffloadedRecords] | None = None
        self._copies = _Copies(device)
        self._is_filling = False

    @property
    def occupant(self) -> OffloadedRecords | None:
        """The latest to come, unless they have left."""
        latest = None if self._occupant is None else self._occupant()
        return latest if latest is not None and latest.is_in(self) else None

    def fill(self, records: OffloadedRecords, host: Tensor) -> Tensor:
        """Begin to copy `host` here, and return the place."""
        size = host.numel()
        if self.buffer is None or self.buffer.numel() < size:
            self.buffer = None  # first, so that there are never both
            with storing():
                buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._copies.own(buffer)
            self.buffer = buffer
        place = self.buffer[:size].view(host.shape)
        self._copies.begin(place, host)
        self._occupant, self._is_filling = weakref.ref(records), True
        return place

    def wait(self) -> None:
        """Let nothing be read before it is here."""
        if self._is_filling:
            self._copies.finish()
        self._is_filling = False

    def vacate(self) -> None:
        """Let who is here leave."""
        occupant = self.occupant
        if occupant is not None:
            occupant.leave()


class OffloadedRecords(Records):
    """Records that rest in pinned memory of the host; a shelf brings them to their device.

    Args:
        layout (`RecordLayout`): Where the fields lie.
        batch_size (`int`), num_heads (`int`): Leading dimensions.
        device (`torch.device`): Where they are read and written.
        shelf (`Shelf`): Of the cache.

    Attributes:
        successor (`weakref.ref`, *optional*): The records that were asked for after these, the last time.
    """

    def __init__(
        self, layout: RecordLayout, batch_size: int, num_heads: int, device: torch.device, shelf: Shelf
    ) -> None:
        self.shelf, self.device = shelf, device
        self.successor: weakref.ref[OffloadedRecords] | None = None
        self._here: Tensor | None = None
        self._host: Tensor | None = None
        self._slot: _Slot | None = None
        self._dirty: tuple[int, Tensor] | None = None  # the first of the blocks that the host lacks, and they
        self._changed = (0, 0)
        super().__init__(layout, batch_size, num_heads, device)

    @property
    def data(self) -> Tensor:  # an attribute of all others
        """The bytes, `(B, H, N, record_bytes)`, on the device."""
        if self._here is None or not self.shelf.is_latest(self):
            self.shelf.enter(self)
        assert self._here is not None
        return self._here

    @data.setter
    def data(self, data: Tensor) -> None:
        host = None if self._host is None or self._host.shape != data.shape else self._host
        changed = 0, data.shape[2]
        self._here, self._slot, self._host, self._dirty, self._changed = data, None, host, None, changed
        if not self.shelf.is_latest(self):  # else others may come to where the old bytes are still read
            self.shelf.enter(self)

    @property
    def shape(self) -> torch.Size:
        present = self._host if self._here is None else self._here
        assert present is not None
        return present.shape

    @property
    def is_away(self) -> bool:
        """Whether nothing of them is on the device, or on its way, but what the host lacks."""
        return self._here is None

    @property
    def is_loose(self) -> bool:
        """Whether they lie on the device in memory of their own, as when they have just been made."""
        return self._here is not None and self._slot is None

    def is_in(self, slot: _Slot) -> bool:
        """Whether it is there that they lie."""
        return self._slot is slot

    def mark_dirty(self, start: int, stop: int) -> None:
        first, last = start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)
        low, high = self._changed
        self._changed = (first, last) if low == high else (min(low, first), max(high, last))

    def fetch(self, slot: _Slot) -> None:
        """Begin to come into `slot`."""
        assert self._host is not None
        self._here, self._slot = slot.fill(self, self._host), slot

    def arrive(self, slot: _Slot | None) -> None:
        """Be on the device, for all that it is told from now on; in `slot`, if they are not there yet."""
        if slot is not None:
            self.fetch(slot)
        if self._slot is not None:
            self._slot.wait()
        if self._dirty is not None:
            low, blocks = self._dirty
            self._blocks(low, low + blocks.shape[2]).copy_(blocks)
            self._dirty = None

    def leave(self) -> None:
        """Make room on the device: only what the host lacks stays, unless that is much."""
        if self._here is None:
            return
        dirty = self._dirty  # if they never arrived, what the host lacks lies where it was
        with storing():
            low, high = self._changed
            if self._slot is not None and high > low:
                self._slot.wait()  # a step that failed may have left them on their way
            if dirty is not None:
                pass
            elif self._host is None or high - low > _MOST_DIRTY_BLOCKS:
                self._write_back()
            elif high > low:
                dirty = low, self._blocks(low, high).clone()
        self._here, self._slot, self._dirty = None, None, dirty

    def to(self, device: torch.device) -> None:
        if device != self.device:
            self.at_rest()
            self.shelf.clear()

    def tensors(self) -> dict[str, Tensor]:
        found = {"records": self._host, "records_here": self._here if self.is_loose else None}
        found["records_dirty"] = None if self._dirty is None else self._dirty[1]
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def at_rest(self) -> Tensor:
        self.leave()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        assert self._host is not None
        if self._dirty is not None:
            low, blocks = self._dirty
            self._host[:, :, low : low + blocks.shape[2]] = blocks
            self._dirty, self._changed = None, (0, 0)
        return self._host

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedRecords:
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(self.__getstate__() | {"shelf": copy.deepcopy(self.shelf, memo)})
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {"layout": self.layout, "device": self.device, "shelf": self.shelf, "_host": self.at_rest()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        with storing():  # what pickle brings is not pinned, and what a copy is made of is another's
            self._host = _pinned_like(state["_host"], self.device).copy_(state["_host"])
        self.successor = self._here = self._slot = self._dirty = None
        self._changed = (0, 0)

    def _blocks(self, low: int, high: int) -> Tensor:
        """Blocks `[low, high)` where they lie on the device."""
        assert self._here is not None
        return self._here[:, :, low:high]

    def _write_back(self) -> None:
        """Let the host have all of it, as soon as the device comes to it."""
        here = self._here
        assert here is not None
        if self._host is None:
            self._host = _pinned_like(here, self.device)
        self._host.copy_(here, non_blocking=True)
        self._changed = (0, 0)


def make_records(
    layout: RecordLayout, batch_size: int, num_heads: int, device: torch.device, shelf: Shelf | None
) -> Records:
    """Make empty records on `device`, or such as rest in the host's memory where there is a `shelf`."""
    if shelf is None or device.type == "meta":
        return Records(layout, batch_size, num_heads, device)
    if device.type == "cpu":
        warnings.warn(
            "offload=True moves nothing: the model is on the CPU, and so is its cache.", stacklevel=2
        )
        return Records(layout, batch_size, num_heads, device)
    return OffloadedRecords(layout, batch_size, num_heads, device, shelf)


def _pinned_like(states: Tensor, device: torch.device) -> Tensor:
    """Memory of the host that `device` copies from and to by itself."""
    return torch.empty(states.shape, dtype=states.dtype, device="cpu", pin_memory=device.type == "cuda")
