"""Records that rest in the host's memory hold the bytes that others hold, whatever is done to them."""

from __future__ import annotations

import copy
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcache_plugins.building import build_cache
from kvcache_plugins.layers import offloading
from kvcache_plugins.layers.codec import AffineCodec
from kvcache_plugins.layers.offloading import OffloadedRecords, Shelf
from kvcache_plugins.layers.records import RecordLayout, Records
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.quantizers.granularity import per_token_head
from kvcache_plugins.quantizers.packing import BLOCK_TOKENS
from kvcache_plugins.testing.models import tiny_model

CPU = torch.device("cpu")
LAYERS = 3
"""One more than have a place on the device."""


class LateCopies:
    """Copies that are made at the last moment that is allowed."""

    def __init__(self, device: torch.device) -> None:
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.owned: list[int] = []

    def own(self, buffer: Tensor) -> None:
        self.owned.append(buffer.untyped_storage().data_ptr())

    def begin(self, place: Tensor, host: Tensor) -> None:
        assert place.untyped_storage().data_ptr() in self.owned
        place.fill_(255)  # what was there may be overwritten at once
        self.waiting.append((place, host))

    def finish(self) -> None:
        for place, host in self.waiting:
            place.copy_(host)
        self.waiting.clear()


def _layout() -> RecordLayout:
    codec = AffineCodec(4, per_token_head())
    return RecordLayout({"key": (codec, 16), "value": (codec, 16)})


def _write(records: Records, first: int, count: int, seed: int) -> None:
    """Append blocks of noise, as packing tokens does."""
    stop = first + count
    records.ensure(stop * BLOCK_TOKENS)
    records.mark_dirty(first * BLOCK_TOKENS, stop * BLOCK_TOKENS)
    noise = torch.Generator().manual_seed(seed)
    part = records.data[:, :, first:stop]
    part.copy_(torch.randint(0, 255, part.shape, dtype=torch.uint8, generator=noise))


def _clear(records: Records, first: int) -> None:
    records.mark_dirty(first * BLOCK_TOKENS, records.num_blocks * BLOCK_TOKENS)
    records.data[:, :, first:].zero_()


VERBS: dict[str, Callable[[Records, int, int, int], Any]] = {
    "write": lambda records, used, count, seed: _write(records, used, count, seed),
    "rewrite": lambda records, used, count, seed: _write(records, max(0, used - 2), count, seed),
    "clear": lambda records, used, count, seed: _clear(records, max(0, used - count)),
    "rows": lambda records, used, count, seed: records.select_rows(torch.tensor([seed % 2, 0])),
    "widen": lambda records, used, count, seed: records.widen_metadata(),
    "away": lambda records, used, count, seed: isinstance(records, OffloadedRecords) and records.leave(),
    "rest": lambda records, used, count, seed: records.at_rest(),
}
STEPS = st.lists(
    st.tuples(
        st.integers(0, LAYERS - 1),
        st.sampled_from([*VERBS, "pass", "pass", "write", "rewrite", "clear", "copy", "pickle"]),
        st.integers(1, 5),
    ),
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(steps=STEPS, room=st.sampled_from([50, 50, 0]))
def test_bytes_are_those_of_records_that_stay(steps: list[tuple[int, str, int]], room: int) -> None:
    """A few layers, asked in any order, while copies arrive as late as they may."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offloading, "_Copies", LateCopies)
        patch.setattr(offloading, "_MOST_DIRTY_BLOCKS", 6)
        shelf = Shelf()
        moved: list[Any] = [OffloadedRecords(_layout(), 2, 1, CPU, shelf) for _ in range(LAYERS)]
        plain = [Records(_layout(), 2, 1, CPU) for _ in range(LAYERS)]
        for records in moved + plain:
            records.ensure(room * BLOCK_TOKENS)  # or they grow with every block
        used = [0] * LAYERS
        for number, (layer, verb, count) in enumerate(steps):
            if verb == "pass":  # of a model: all layers in order, each of which takes a block
                for index in range(LAYERS):
                    for records in (moved[index], plain[index]):
                        _write(records, used[index], 1, number)
                    used[index] += 1
                    assert torch.equal(moved[index].data, plain[index].data)
            elif verb == "copy":
                before, moved = moved, copy.deepcopy(moved)
                assert len({id(records.shelf) for records in moved}) == 1
                assert moved[0].shelf is not before[0].shelf
                for records in before:
                    _clear(records, 0)  # nothing of it is shared
                    records.at_rest()
            elif verb == "pickle":
                moved = pickle.loads(pickle.dumps(moved))
            else:
                for records in (moved[layer], plain[layer]):
                    VERBS[verb](records, used[layer], count, number)
                if verb in ("write", "rewrite"):
                    first = used[layer] if verb == "write" else max(0, used[layer] - 2)
                    used[layer] = max(used[layer], first + count)
            assert sum(not records.is_away for records in moved) <= 3, "the one at work, and two that wait"
        for got, expected in zip(moved, plain, strict=True):
            assert got.shape == expected.data.shape
            assert torch.equal(got.at_rest(), expected.data)
            assert torch.equal(got.data, expected.data)


class InterruptAt:
    """An interruption when so many lines of the module have been begun, told by `sys.settrace`."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != offloading.__file__:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self

    @classmethod
    def run(cls, line: int, act: Callable[[], Any]) -> bool:
        """Run `act`; whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(cls(line))
        try:
            act()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


MOVES: dict[str, Callable[[list[Any], int], Any]] = {
    "read": lambda moved, layer: moved[layer].data,
    "leave": lambda moved, layer: moved[layer].leave(),
    "rest": lambda moved, layer: moved[layer].at_rest(),
    "clear": lambda moved, layer: moved[layer].shelf.clear(),
    "copy": lambda moved, layer: copy.deepcopy(moved),
    "same rows": lambda moved, layer: moved[layer].select_rows(torch.tensor([0, 1])),
    "one row": lambda moved, layer: moved[layer].select_rows(torch.tensor([0])),
    "first row": lambda moved, layer: moved[layer].select_rows(torch.tensor([0, 0])),
    "more room": lambda moved, layer: moved[layer].ensure((moved[layer].num_blocks + 1) * BLOCK_TOKENS),
}


@pytest.mark.parametrize("move", MOVES)
def test_moves_that_are_interrupted(move: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever that is, it has happened to all the bytes or to none, and all can be asked for again."""
    monkeypatch.setattr(offloading, "_Copies", LateCopies)
    monkeypatch.setattr(offloading, "_MOST_DIRTY_BLOCKS", 3)
    for start in range(4):  # layers at work, on their way, away with what the host lacks, away
        for layer in range(LAYERS):
            line, was_interrupted = 0, True
            while was_interrupted:
                line += 1
                moved, expected = _three_in_turn(start)
                was_interrupted = InterruptAt.run(line, lambda: MOVES[move](moved, layer))  # noqa: B023
                outcome = moved[layer].data.clone()
                for records in moved:  # those that come next take places
                    records.data  # noqa: B018
                for index, records in enumerate(moved):
                    before = [expected[index]]
                    if index == layer:
                        before += [before[0][:1], before[0][[0, 0]]] if "row" in move else []
                        before += [outcome] if move == "more room" else []
                        assert torch.equal(records.data, outcome)
                    assert any(torch.equal(records.data, bytes_) for bytes_ in before)
                    assert torch.equal(records.at_rest(), records.data)
                assert torch.equal(outcome[:1, :, :20], expected[layer][:1])
            assert line > 2


def _three_in_turn(start: int) -> tuple[list[OffloadedRecords], list[Tensor]]:
    """Layers that have been asked in turn a few times, then the first of them; and their bytes."""
    shelf = Shelf()
    moved = [OffloadedRecords(_layout(), 2, 1, CPU, shelf) for _ in range(LAYERS)]
    plain = [Records(_layout(), 2, 1, CPU) for _ in range(LAYERS)]
    for records in moved + plain:
        records.ensure(20 * BLOCK_TOKENS, 20 * BLOCK_TOKENS)
    for step in range(3):
        for records in [*moved, *plain]:
            _write(records, step, 1, step)
    for index in range(start):
        for pair in (moved, plain):
            _write(pair[index % LAYERS], 3, 1, index)
    return moved, [records.data for records in plain]


def test_what_is_copied_at_a_step() -> None:
    """One way, and once: the next layer while one is at work. The host is written now and then."""
    copied: list[int] = []

    class Counting(offloading._Copies):
        def begin(self, place: Tensor, host: Tensor) -> None:
            copied.append(host.numel())
            super().begin(place, host)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offloading, "_Copies", Counting)
        shelf = Shelf()
        layers = [OffloadedRecords(_layout(), 1, 1, CPU, shelf) for _ in range(LAYERS)]
        for records in layers:
            _write(records, 0, 100, 0)
            records.ensure(200 * BLOCK_TOKENS)
        changes = []
        for step in range(1, 3 * offloading._MOST_DIRTY_BLOCKS):
            before = len(copied)
            for records in layers:
                _write(records, 99 + step, 1, step)
            # those of the first layers come twice until their order has been learnt
            assert step < 3 or len(copied) - before == LAYERS
            changes.append(layers[0]._changed)
        # one more block a step, until the host gets them
        most = offloading._MOST_DIRTY_BLOCKS
        lengths = [high - low for low, high in changes]
        assert lengths == [step % (most + 1) for step in range(1, 3 * most)]


def test_only_two_layers_lie_on_the_device() -> None:
    shelf = Shelf()
    layers = [OffloadedRecords(_layout(), 1, 1, CPU, shelf) for _ in range(LAYERS)]
    for _ in range(3):
        for records in layers:
            _write(records, 0, 64, 0)
    (slots,) = shelf._slots.values()
    size = layers[0].data.numel()
    assert [slot.buffer is not None and slot.buffer.numel() for slot in slots] == [size, size]
    owned = shelf.tensors() + [tensor for records in layers for tensor in records.tensors().values()]
    dirty = sum(0 if records._dirty is None else records._dirty[1].numel() for records in layers)
    assert sum(tensor.numel() for tensor in owned) == (LAYERS + 2) * size + dirty
    assert [tensor.numel() for records in layers if (tensor := records._host) is not None] == [size] * LAYERS


def test_layers_that_are_gone_leave_their_place() -> None:
    shelf = Shelf()
    layers = [OffloadedRecords(_layout(), 1, 1, CPU, shelf) for _ in range(LAYERS)]
    for _ in range(2):
        for records in layers:
            _write(records, 0, 3, 1)
    expected = layers[0].data.clone()
    del layers[1:], records
    assert torch.equal(layers[0].data, expected)


def _two_steps() -> tuple[list[OffloadedRecords], list[Records]]:
    """Layers after two steps, so that their order is known and the host lacks their newest block."""
    shelf = Shelf()
    moved = [OffloadedRecords(_layout(), 1, 1, CPU, shelf) for _ in range(LAYERS)]
    plain = [Records(_layout(), 1, 1, CPU) for _ in range(LAYERS)]
    for layers in (moved, plain):
        for records in layers:
            records.ensure(50 * BLOCK_TOKENS)
        for step in range(2):
            for records in layers:
                _write(records, step, 1, step)
    return moved, plain


def test_a_layer_on_its_way_is_whole_after_the_host_had_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "_Copies", LateCopies)
    moved, plain = _two_steps()
    for layers in (moved, plain):
        layers[0].ensure(60 * BLOCK_TOKENS)  # so that the host needs more memory when the next is asked

    def refuse(*_: object) -> Tensor:
        raise RuntimeError("no pinned memory")

    with monkeypatch.context() as patch:
        patch.setattr(offloading, "_pinned_like", refuse)
        with pytest.raises(RuntimeError, match="no pinned memory"):
            _ = moved[1].data
    for got, expected in zip(moved[1:] + moved, plain[1:] + plain, strict=True):
        assert torch.equal(got.data, expected.data)


def test_layers_come_and_go_after_one_was_interrupted_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "_Copies", LateCopies)
    moved, plain = _two_steps()
    fill = offloading._Slot.fill

    def interrupt(*arguments: Any) -> Tensor:
        fill(*arguments)
        raise KeyboardInterrupt

    moved[2].at_rest()  # as for a file, after a step
    with monkeypatch.context() as patch:
        patch.setattr(offloading._Slot, "fill", interrupt)
        with pytest.raises(KeyboardInterrupt):
            _ = moved[2].data
    for index in (2, 1, 0, 2, 1, 0):
        assert torch.equal(moved[index].data, plain[index].data)
        assert sum(not records.is_away for records in moved) <= offloading.SLOTS


@pytest.mark.parametrize("take", [copy.deepcopy, lambda layers: pickle.loads(pickle.dumps(layers))])
def test_copies_rest_in_pinned_memory_too(
    take: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved, plain = _two_steps()
    made: list[Tensor] = []

    def pin(states: Tensor, _: torch.device) -> Tensor:
        made.append(torch.empty_like(states))
        return made[-1]

    monkeypatch.setattr(offloading, "_pinned_like", pin)
    for copied, expected in zip(take(moved), plain, strict=True):
        assert any(copied.at_rest() is tensor for tensor in made)
        assert torch.equal(copied.data, expected.data)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backend": "int8", "offload": 1}, r"Int8Config.offload must be true or false, got 1"),
        ({"backend": "int8", "layer_overrides": {"0": {"offload": True}}}, "offload"),
        ({"backend": "knorm", "budget": 64, "offload": True}, "KnormConfig.offload must be False"),
        (
            {"backend": "knorm", "budget": 64, "storage": {"backend": "int8", "offload": True}},
            "KnormConfig.offload must be False, also of its storage",
        ),
    ],
)
def test_wrong_requests(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build_cache(tiny_model("llama").config, options)


def test_on_a_cpu_nothing_moves_and_that_is_said() -> None:
    model = tiny_model("llama")
    ids = torch.randint(5, 100, (1, 200))
    tokens = []
    for offload in (False, True):
        cache = build_cache(model, {"backend": "int8", "offload": offload})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tokens.append(model.generate(ids, **as_argument(cache), max_new_tokens=20, do_sample=False))
        told = [str(warning.message) for warning in caught if "offload" in str(warning.message)]
        assert bool(told) is offload and all("the model is on the CPU" in text for text in told)
        assert cache.report().host_bytes == (0 if offload else None)
    assert torch.equal(*tokens)
    assert "of these off the GPU  0" in str(cache.report())
