"""Tokens moved between records: bit for bit what they were, whoever moves them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache_plugins.attention.description import describe
from kvcache_plugins.kernels import gathering, loader
from kvcache_plugins.kernels.gathering import gather_records
from kvcache_plugins.kernels.layout import SideLayout
from kvcache_plugins.kernels.writing_ops import gather_tokens
from kvcache_plugins.layers.base import PackedLayer
from kvcache_plugins.layers.field_layout import side_layout
from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.layers.records import Records
from kvcache_plugins.quantizers.packing import unpack_keys, unpack_values
from tests.kernels.decode_cases import build_layer

LENGTH = 333
CASES: dict[str, dict[str, Any]] = {
    "int8": {"backend": "int8"},
    "int8-groups": {"backend": "int8", "granularity": "group", "q_group_size": 8},
    "int4": {"backend": "int4", "residual_length": 0},
    "int4-keys8": {"backend": "int4", "residual_length": 0, "key_bits": 8},
    "int4-2bit": {"backend": "int4", "residual_length": 0, "nbits": 2},
    "e4m3": {"backend": "float8"},
    "e5m2": {"backend": "float8", "format": "e5m2"},
}


@pytest.fixture(params=["torch", "native"])
def gather(request: pytest.FixtureRequest) -> Any:
    """The default of the op, and the native implementation."""
    if request.param == "torch":
        return gather_records
    if not loader.try_load():
        pytest.skip("no native library can be built here")
    return gather_tokens


def packed(options: dict[str, Any], head_dim: int) -> PackedLayer:
    """A layer of two rows and two heads that holds `LENGTH` tokens, all of them packed."""
    layer = build_layer(options, LENGTH, head_dim=head_dim)
    assert all(stream.packed_length == LENGTH for stream in layer.streams)
    return layer


def layouts(layer: PackedLayer) -> tuple[SideLayout, SideLayout]:
    """Both sides as the op wants them, of the packed tokens before one more is added."""
    found = []
    probe = copy.deepcopy(layer)
    dims = [stream.head_dim for stream in layer.streams]
    for handle in probe.update(*(torch.randn(2, 2, 1, dim) for dim in dims)):
        assert isinstance(handle, KVHandle)
        side = describe(handle.tokens)
        assert side is not None and side.layout.packed_length == LENGTH
        found.append(side.layout)
    return found[0], found[1]


def blank(layer: PackedLayer, tokens: int) -> Tensor:
    """Room for `tokens` slots, filled with a value nobody can mistake for data."""
    batch_size, heads, _, size = layer.records.data.shape
    return torch.full((batch_size, heads, -(-tokens // 64), size), 0xAB, dtype=torch.uint8)


def decoded(layer: PackedLayer, records: Tensor, count: int) -> list[Tensor]:
    """What both streams decode from `records`, slots `[0, count)`."""
    other = copy.deepcopy(layer)
    replaced = Records(other.records.layout, 2, 2, records.device)
    replaced.data = records
    other.records = replaced
    for stream in other.streams:
        stream.records = replaced
    return [stream.decode(0, count) for stream in other.streams]


def some_slots(count: int) -> Tensor:
    """Slots of every row and head, out of order and some of them repeated."""
    index = torch.randint(0, LENGTH, (2, 2, count))
    index[..., 0], index[..., -1] = LENGTH - 1, 0
    return index


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200, 500])
@pytest.mark.parametrize("head_dim", [40, 64, 80, 128])
@pytest.mark.parametrize("name", CASES)
def test_gathered_tokens_decode_to_the_chosen_ones(gather: Any, name: str, head_dim: int, count: int) -> None:
    layer = packed(CASES[name], head_dim)
    index, target = some_slots(count), blank(layer, count)
    before = layer.records.data.clone()
    gather(layer.records.data, target, index, *layouts(layer))
    assert torch.equal(layer.records.data, before)
    for got, stream in zip(decoded(layer, target, count), layer.streams, strict=True):
        everything = stream.decode(0, LENGTH)
        assert everything.std() > 0.5  # there is something to confuse
        expected = everything.gather(2, index[..., None].expand(-1, -1, -1, head_dim))
        assert torch.equal(got, expected)


@pytest.mark.parametrize("count", [1, 65, 500])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_both_write_the_same_bytes(name: str, interleaved: bool, count: int) -> None:
    if not loader.try_load():
        pytest.skip("no native library can be built here")
    for head_dim in (64, 80, 128, 512):
        layer = packed(CASES[name], head_dim)
        keys, values = layouts(layer)
        keys = keys._replace(interleaved=int(interleaved))  # as codes they may be read in either order
        index, targets = some_slots(count), [blank(layer, count) for _ in range(2)]
        for gather, target in zip((gather_records, gather_tokens), targets, strict=True):
            gather(layer.records.data, target, index, keys, values)
        assert torch.equal(*targets)


@pytest.mark.parametrize("name", CASES)
def test_a_prefix_is_what_cropping_leaves(gather: Any, name: str) -> None:
    """Also beyond the last token: a partial block is zero there, so that later tokens complete it."""
    layer = packed(CASES[name], 64)
    target = torch.zeros_like(layer.records.data[:, :, :2])
    gather(layer.records.data, target, torch.arange(100).expand(2, 2, 100), *layouts(layer))
    layer.crop(100 - LENGTH)
    keys, values = (stream.decode(0, 100) for stream in layer.streams)
    got = decoded(layer, target, 100)
    assert torch.equal(got[0], keys) and torch.equal(got[1], values)
    for side in ("key", "value"):  # cropped codes are zero beyond the last token
        offset, size = layer.records.layout.fields[f"{side}_codes"]
        codes = layer.records.data[:, :, :2, offset : offset + size]
        assert torch.equal(target[..., offset : offset + size], codes)


@pytest.mark.parametrize("name", ["int4-keys8", "int8"])
def test_gathering_everything_copies_the_blocks(gather: Any, name: str) -> None:
    layer = packed(CASES[name], 64)
    source = layer.records.data[:, :, : LENGTH // 64]
    target = torch.zeros_like(source)
    gather(layer.records.data, target, torch.arange(LENGTH // 64 * 64).expand(2, 2, -1), *layouts(layer))
    assert torch.equal(target, source)


def test_blocks_beyond_the_last_slot_are_left_alone(gather: Any) -> None:
    layer = packed(CASES["int4"], 80)
    target = blank(layer, 400)
    gather(layer.records.data, target, some_slots(65), *layouts(layer))
    assert (target[:, :, 2:] == 0xAB).all() and (target[:, :, :2] != 0xAB).any()


def test_fp32_metadata_and_views(gather: Any) -> None:
    layer = packed(CASES["int4"], 80)
    layer.records.widen_metadata()
    index = some_slots(130).transpose(0, 1)
    room = blank(layer, 400)
    gather(layer.records.data, room[:, :, 2:], index, *layouts(layer))
    keys = decoded(layer, room[:, :, 2:].contiguous(), 130)[0]
    expected = layer.streams[0].decode(0, LENGTH).gather(2, index[..., None].expand(-1, -1, -1, 80))
    assert torch.equal(keys, expected)
    assert (room[:, :, :2] == 0xAB).all()


def test_no_slot_at_all(gather: Any) -> None:
    layer = packed(CASES["int8"], 64)
    target = blank(layer, 64)
    gather(layer.records.data, target, torch.zeros(2, 2, 0, dtype=torch.int64), *layouts(layer))
    assert (target == 0xAB).all()


def test_slabs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = packed(CASES["int4"], 64)
    index, targets = some_slots(200), [blank(layer, 200) for _ in range(2)]
    gather_records(layer.records.data, targets[0], index, *layouts(layer))
    monkeypatch.setattr(gathering, "_SLAB_CODES", 1)
    gather_records(layer.records.data, targets[1], index, *layouts(layer))
    assert torch.equal(*targets)


def test_threads_change_nothing() -> None:
    if not loader.try_load():
        pytest.skip("no native library can be built here")
    layer = packed(CASES["int4"], 128)
    index, targets = some_slots(3000), [blank(layer, 3000) for _ in range(2)]
    for threads, target in zip((1, 2), targets, strict=True):
        torch.set_num_threads(threads)
        gather_tokens(layer.records.data, target, index, *layouts(layer))
    assert torch.equal(*targets)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"index": torch.full((2, 2, 5), LENGTH)}, rf"slots in \[0, {LENGTH}\), got {LENGTH} to {LENGTH}"),
        ({"index": torch.full((2, 2, 5), -1)}, "got -1 to -1"),
        ({"index": torch.zeros(2, 1, 5, dtype=torch.int64)}, "index"),
        ({"index": torch.zeros(2, 2, 5, dtype=torch.int32)}, "int64"),
        ({"index": torch.zeros(2, 2, 65, dtype=torch.int64)}, "got 65"),
        ({"records_out": torch.zeros(2, 2, 1, 64, dtype=torch.uint8)}, "records"),
    ],
)
def test_wrong_arguments(gather: Any, change: dict[str, Tensor], said: str) -> None:
    layer = packed(CASES["int8"], 64)
    given = {"records_in": layer.records.data, "records_out": blank(layer, 64), "index": some_slots(64)}
    with pytest.raises(ValueError, match=said):
        gather(*(given | change).values(), *layouts(layer))


def test_records_that_overlap_are_refused(gather: Any) -> None:
    layer = packed(CASES["int8"], 64)
    data = layer.records.data
    with pytest.raises(ValueError, match="the same"):
        gather(data, data, some_slots(64), *layouts(layer))


def test_shared_metadata_is_refused(gather: Any) -> None:
    layer = packed(CASES["int8"], 64)
    keys, values = layouts(layer)
    with pytest.raises(ValueError, match="share no metadata"):
        gather(layer.records.data, blank(layer, 64), some_slots(64), keys._replace(group_tokens=32), values)


def test_heads_of_more_channels_are_refused() -> None:
    if not loader.try_load():
        pytest.skip("no native library can be built here")
    layer = packed(CASES["int8"], 64)
    keys, values = layouts(layer)
    with pytest.raises(ValueError, match="Invalid head_dim of key_layout: expected 1 to 512, got 513"):
        gather_tokens(
            layer.records.data, blank(layer, 64), some_slots(64), keys._replace(head_dim=513), values
        )


@pytest.mark.parametrize("nbits", [2, 3, 4])
def test_metadata_that_is_not_stored(gather: Any, nbits: int) -> None:
    # KVQuant's keys have ranges beside the records, which tell nothing of how tokens are grouped.
    options = {"backend": "kvquant", "calibration": "normal_float", "nbits": nbits, "residual_length": 0}
    layer = build_layer(options, 320, head_dim=80)
    keys, values = (side_layout(stream, 320, 0) for stream in layer.streams)
    assert keys.group_tokens == 64 and keys.scale_offset == keys.minimum_offset == -1
    index, target = some_slots(130).clamp_max(319), blank(layer, 130)
    gather(layer.records.data, target, index, keys, values)
    for stream, unpack in zip(layer.streams, (unpack_keys, unpack_values), strict=True):
        offset, size = layer.records.layout.fields[f"{stream.side}_codes"]
        before, after = (
            unpack(data[..., offset : offset + size], nbits, 80).flatten(2, 3)
            for data in (layer.records.data, target)
        )
        assert torch.equal(after[:, :, :130], before.gather(2, index[..., None].expand(-1, -1, -1, 80)))
        assert not after[:, :, 130:].any()
    fields = [layer.records.metadata("value", name, 0, 5).flatten(2, 3) for name in ("scale", "offset")]
    layer.records.data = target
    for name, rows in zip(("scale", "offset"), fields, strict=True):
        moved = layer.records.metadata("value", name, 0, 3).flatten(2, 3)
        assert torch.equal(moved[:, :, :130], rows.gather(2, index[..., None]))


@pytest.mark.no_poison
def test_opcheck() -> None:
    layer = packed(CASES["int4"], 64)
    keys, values = layouts(layer)
    torch.library.opcheck(
        torch.ops.kvcache_plugins.gather_tokens.default,
        (layer.records.data, blank(layer, 70), some_slots(70), keys.integers(), values.integers()),
        test_utils=("test_schema", "test_faketensor"),
    )
