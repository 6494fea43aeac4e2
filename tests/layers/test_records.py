"""The byte buffer of a layer: room that follows from the length, fields that fit, growth that keeps bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_plugins.layers.codec import AffineCodec, Codec, Float8Codec, SymmetricCodec
from kvcache_plugins.layers.heads import joined_records
from kvcache_plugins.layers.records import RecordLayout, Records, size_class
from kvcache_plugins.quantizers.granularity import (
    per_block,
    per_channel_group,
    per_token_group,
    per_token_head,
)

CPU = torch.device("cpu")


def kivi(nbits: int = 2, head_dim: int = 80, value_dim: int = 48) -> dict[str, tuple[Codec, int]]:
    return {
        "key": (AffineCodec(nbits, per_channel_group(32)), head_dim),
        "value": (AffineCodec(nbits, per_token_group(16)), value_dim),
    }


LAYOUTS: dict[str, dict[str, tuple[Codec, int]]] = {
    "kivi-2bit": kivi(),
    "kivi-3bit-D24": kivi(3, 24, 16),
    "kivi-g16": {
        "key": (AffineCodec(4, per_channel_group(16)), 64),
        "value": (AffineCodec(4, per_token_group(16)), 64),
    },
    "int8": {side: (SymmetricCodec(per_token_head()), 112) for side in ("key", "value")},
    # one scale of two bytes a block, after which the codes of the values must be aligned again
    "int8-tensor": {side: (SymmetricCodec(per_block(64)), 48) for side in ("key", "value")},
    "float8-static": {
        side: (Float8Codec("e4m3", per_token_head(), torch.ones(1, 1, 1, 1)), 48) for side in ("key", "value")
    },
    "1bit-D16": {side: (AffineCodec(1, per_token_head()), 16) for side in ("key", "value")},
}


# -- how much room


@given(st.integers(1, 10**9), st.integers(0, 10**6))
@settings(max_examples=300, deadline=None)
def test_size_class(count: int, more: int) -> None:
    room = size_class(count)
    assert 0 <= room - count <= count / 32
    assert size_class(room) == room  # what was allocated once is not allocated again for the same need
    assert size_class(count + more) >= room


def test_size_classes_are_few() -> None:
    classes = {size_class(n) for n in range(1, 100_001)}
    assert classes.issuperset(range(1, 65))
    # 32 for every doubling beyond 64
    assert len(classes) <= 64 + 32 * 11
    assert size_class(0) == 0


@given(st.lists(st.integers(1, 70_000), min_size=1, max_size=30))
@settings(max_examples=50, deadline=None)
def test_capacity_depends_on_the_longest_need_only(needs: list[int]) -> None:
    layout = RecordLayout(LAYOUTS["1bit-D16"])
    layout.record_bytes = 1  # nothing is written
    stepwise, direct = Records(layout, 1, 1, CPU), Records(layout, 1, 1, CPU)
    for tokens in needs:
        stepwise.ensure(tokens)
        assert stepwise.num_blocks * 64 >= tokens
    direct.ensure(max(needs))
    assert stepwise.num_blocks == direct.num_blocks == size_class(-(-max(needs) // 64))


@pytest.mark.parametrize(
    ("tokens", "final", "blocks"),
    [
        (1, None, 1),
        (64, None, 1),
        (65, None, 2),
        (6400, None, 100),
        (6401, None, 102),
        (6401, 6500, 102),  # just as long as the run
        (6401, 12_000, 188),
        (6401, 20_000, 102),  # far ahead: a run may end early
        (6401, 6400, 102),  # a run longer than announced
    ],
)
def test_a_known_final_length(tokens: int, final: int | None, blocks: int) -> None:
    records = Records(RecordLayout(LAYOUTS["1bit-D16"]), 1, 2, CPU)
    records.ensure(tokens, final)
    assert records.num_blocks == blocks
    pointer = records.data.data_ptr()
    records.ensure(min(blocks * 64, 6500), final)
    assert records.data.data_ptr() == pointer


def test_growth_keeps_bytes_and_gives_zeros() -> None:
    records = Records(RecordLayout(kivi()), 2, 3, CPU)
    records.ensure(70)
    assert records.data.shape == (2, 3, 2, records.layout.record_bytes)
    assert not records.data.any()
    records.data.random_(1, 255)
    before = records.data.clone()
    records.ensure(128)
    assert torch.equal(records.data, before)
    records.ensure(1000)
    assert torch.equal(records.data[:, :, :2], before)
    assert not records.data[:, :, 2:].any()


# -- where things lie


@pytest.mark.parametrize("metadata_bytes", [2, 4])
@pytest.mark.parametrize("name", LAYOUTS)
def test_fields_are_aligned_disjoint_and_in_order(name: str, metadata_bytes: int) -> None:
    codecs = LAYOUTS[name]
    layout = RecordLayout(codecs, metadata_bytes)
    expected = [f"{side}_{field}" for side in codecs for field in ("codes", *codecs[side][0].metadata_names)]
    assert list(layout.fields) == expected
    end = 0
    for field, (offset, size) in layout.fields.items():
        alignment = 16 if field.endswith("_codes") else 4  # for vector copies, and views as fp32
        assert end <= offset < end + alignment and size > 0
        assert offset % alignment == 0, field
        end = offset + size
    assert layout.record_bytes % 64 == 0 and 0 <= layout.record_bytes - end < 64


def test_sizes_are_those_of_the_formulas() -> None:
    # 2 bits, 64 tokens of 80 and 48 channels; in fp16, scale and minimum of keys per channel and 32 tokens,
    # of values per token and 16 channels.
    layout = RecordLayout(kivi())
    sizes = {field: size for field, (_, size) in layout.fields.items()}
    assert sizes == {
        "key_codes": 64 * 80 * 2 // 8,
        "key_scale": 2 * 80 * 2,
        "key_minimum": 2 * 80 * 2,
        "value_codes": 64 * 48 * 2 // 8,
        "value_scale": 64 * 3 * 2,
        "value_minimum": 64 * 3 * 2,
    }
    assert layout.record_bytes == -(-sum(sizes.values()) // 64) * 64
    # a static scale takes no room
    assert RecordLayout(LAYOUTS["float8-static"]).record_bytes == 2 * 64 * 48


@pytest.mark.parametrize("metadata_bytes", [2, 4])
@pytest.mark.parametrize("name", LAYOUTS)
def test_views_write_where_they_read_and_nowhere_else(name: str, metadata_bytes: int) -> None:
    codecs = LAYOUTS[name]
    records = Records(RecordLayout(codecs, metadata_bytes), 2, 3, CPU)
    records.ensure(5 * 64)
    written = {}
    for side, (codec, head_dim) in codecs.items():
        codes = records.codes(side, 1, 4)
        assert codes.shape[:3] == (2, 3, 3)
        written[side, "codes"] = codes.random_(0, 256).clone()
        for field in codec.metadata_names:
            rows = records.metadata(side, field, 1, 4)
            assert rows.shape == (2, 3, 3, codec.rows_per_block, codec.granularity.width(head_dim))
            written[side, field] = rows.copy_(torch.randn(rows.shape)).clone()
    for (side, field), expected in written.items():
        read = records.codes(side, 1, 4) if field == "codes" else records.metadata(side, field, 1, 4)
        assert torch.equal(read, expected)
    assert not records.data[:, :, 0].any() and not records.data[:, :, 4].any()


# -- fp32 metadata


def test_widening_keeps_codes_and_numbers() -> None:
    records = Records(RecordLayout(kivi(3)), 2, 2, CPU)
    records.ensure(300)
    fields = [(side, field) for side in ("key", "value") for field in ("scale", "minimum")]
    for side in ("key", "value"):
        records.codes(side, 0, 5).random_(0, 256)
    for side, field in fields:
        view = records.metadata(side, field, 0, 5)
        view.copy_(torch.randn(view.shape) * 1000)
    codes = {side: records.codes(side, 0, 5).clone() for side in ("key", "value")}
    numbers = {at: records.metadata(*at, 0, 5).float() for at in fields}
    narrow = records.data.nbytes
    records.widen_metadata()
    assert records.layout.metadata_bytes == 4 and records.num_blocks == 5
    assert records.data.nbytes > narrow
    for side, expected in codes.items():
        assert torch.equal(records.codes(side, 0, 5), expected)
    for at, expected in numbers.items():
        wide = records.metadata(*at, 0, 5)
        assert wide.dtype == torch.float32
        assert torch.equal(wide, expected)
        wide.fill_(1e6)
        assert (records.metadata(*at, 0, 5) == 1e6).all()
    records.ensure(2000)
    assert torch.equal(records.codes("key", 0, 5), codes["key"])


def test_heads_that_are_joined_have_metadata_of_one_width() -> None:
    """Of heads apart one may have met a number that fp16 cannot hold; the records of all have one layout."""
    parts = [Records(RecordLayout(kivi()), 2, heads, CPU) for heads in (1, 2)]
    for records in parts:
        records.ensure(128)
        records.codes("value", 0, 2).random_(0, 256)
        records.metadata("key", "scale", 0, 2).fill_(3.0)
    parts[1].widen_metadata()
    parts[1].metadata("key", "scale", 0, 2).fill_(1e6)
    codes = torch.cat([records.codes("value", 0, 2) for records in parts], dim=1)
    joined = joined_records(parts)
    assert joined.layout.metadata_bytes == 4 and torch.equal(joined.codes("value", 0, 2), codes)
    scales = joined.metadata("key", "scale", 0, 2)
    assert (scales[:, :1] == 3.0).all() and (scales[:, 1:] == 1e6).all()
