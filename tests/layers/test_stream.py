"""A stream of tokens: when they are packed, into which bytes, and what is read back.

The closed form of the split, the bytes in the records against the oracle's codes packed by naive loops,
independence of the way tokens arrive, memory nobody wrote, and metadata that fp16 cannot hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcache_plugins import build_cache
from kvcache_plugins.backends.int4 import Int4Config, Int4Layer
from kvcache_plugins.backends.int8 import Int8Config, Int8Layer
from kvcache_plugins.backends.kivi import KIVIConfig, KIVILayer
from kvcache_plugins.layers import stream as stream_module
from kvcache_plugins.layers.base import PackedLayer
from kvcache_plugins.layers.codec import AffineCodec, Encoded
from kvcache_plugins.layers.native_encoding import NativeEncoder
from kvcache_plugins.layers.stream import Stream, StreamSpec
from kvcache_plugins.layers.view import StreamView
from kvcache_plugins.models.facts import LayerFacts
from kvcache_plugins.models.rotary import Rotary
from kvcache_plugins.quantizers.granularity import per_channel_group, per_token_head
from kvcache_plugins.testing import tiny_model
from kvcache_plugins.testing.conformance import decoded, feed
from tests.reference import packing
from tests.reference.caches import value_group_size
from tests.reference.quantizers import Quantized, asymmetric, symmetric8

ROTARY = Rotary(tuple(10000.0 ** (-i / 24) for i in range(24)))


def kivi(rotary: Rotary | None = None, **options: Any) -> PackedLayer:
    return KIVILayer(KIVIConfig(**options), 0, LayerFacts(rotary))


def int8(**options: Any) -> PackedLayer:
    return Int8Layer(Int8Config(**options), 0, LayerFacts())


def int4(**options: Any) -> PackedLayer:
    return Int4Layer(Int4Config(**options), 0, LayerFacts(ROTARY))


def random_states(
    tokens: int, key_dim: int = 48, value_dim: int = 48, batch_size: int = 2
) -> tuple[Tensor, Tensor]:
    keys = torch.randn(batch_size, 2, tokens, key_dim) * torch.linspace(0.1, 5, key_dim)
    return keys, torch.randn(batch_size, 2, tokens, value_dim)


LENGTHS: dict[str, Callable[[int], int]] = {
    "1": lambda r: 1,
    "R-1": lambda r: r - 1,
    "R": lambda r: r,
    "R+1": lambda r: r + 1,
    "2R-1": lambda r: 2 * r - 1,
    "2R": lambda r: 2 * r,
    "1000": lambda r: 1000,
}


class TestClosedForm:
    @pytest.mark.parametrize("residual_length", [32, 64, 128], ids=lambda r: f"R{r}")
    @pytest.mark.parametrize("tokens", LENGTHS)
    def test_kivi_packs_what_the_paper_says(self, residual_length: int, tokens: str) -> None:
        count = LENGTHS[tokens](residual_length)
        keys, values = random_states(count, 16, 16, batch_size=1)
        for chunks in (
            [count],
            [count - 1, 1] if count > 1 else [1],
            [1] * min(count, 70) + [max(0, count - 70)],
        ):
            layer = kivi(residual_length=residual_length)
            feed(layer, keys, values, [c for c in chunks if c])
            assert layer.stored_keys.packed_length == residual_length * (count // residual_length)
            assert layer.stored_values.packed_length == max(0, count - residual_length)
            for stream, exact in zip(layer.streams, (keys, values), strict=True):
                assert stream.length == count
                assert torch.equal(stream.tail.view(), exact[:, :, stream.packed_length :])

    @pytest.mark.parametrize(
        ("layer", "expected"),
        [
            (int8(), (0, 1, 63, 64, 65, 333)),
            (int8(residual_length=10), (0, 0, 53, 54, 55, 323)),
            (int4(), (0, 0, 0, 0, 1, 269)),
            # 64 tokens share a scale and are packed together
            (int8(granularity="tensor", residual_length=10), (0, 0, 0, 0, 0, 320)),
        ],
        ids=["int8", "int8-R10", "int4", "int8-tensor-R10"],
    )
    def test_other_backends(self, layer: PackedLayer, expected: tuple[int, ...]) -> None:
        for count, packed in zip((0, 1, 63, 64, 65, 333), expected, strict=True):
            for spec in (layer.key_stream(16), layer.value_stream(16)):
                assert spec.packed_length(count) == packed

    def test_a_split_that_cuts_groups_is_refused(self) -> None:
        codec = AffineCodec(4, per_channel_group(32))
        with pytest.raises(ValueError, match="multiple of the codec's unit of 32 tokens, got 0 and 48"):
            StreamSpec(codec, block_length=48)
        with pytest.raises(ValueError, match="got -1 and 32"):
            StreamSpec(codec, block_length=32, keep_recent=-1)

    @pytest.mark.parametrize("sinks", [0, 3])
    @pytest.mark.parametrize("pads", [0, 5])
    def test_nothing_is_packed_before_the_warm_up(self, pads: int, sinks: int) -> None:
        layer = int4(smooth=0.5, residual_length=0, sink_length=sinks)
        layer.padding.set(torch.tensor([0, pads]))
        keys, values = random_states(75)
        for seen in range(1, 76):
            assert layer.room(100) == 1  # values learn nothing
            layer.update(keys[:, :, seen - 1 : seen], values[:, :, seen - 1 : seen])
            assert layer.stored_keys.packed_length == (seen if seen >= 64 + sinks + pads else 0)
            assert layer.stored_values.packed_length == seen
            assert layer.stored_keys.room(100) == max(1, 64 + sinks + pads - seen)


# -- the bytes


def _assert_block_bytes(stream: Stream, codes: Tensor, bias: int = 0) -> None:
    """The packed codes of all blocks are the oracle's `(B, H, n, D)`, zero beyond token n and channel D."""
    count, head_dim = codes.shape[2:]
    assert count == stream.packed_length
    width, blocks = -(-head_dim // 16) * 16, -(-count // 64)
    padded = torch.zeros(*codes.shape[:2], blocks * 64, width, dtype=torch.int)
    padded[:, :, :count, :head_dim] = codes.int() + bias
    naive = packing.pack_keys if stream.side == "key" else packing.pack_values
    stored = stream.records.codes(stream.side, 0, blocks)
    for row, heads in enumerate(padded):
        for head, tokens in enumerate(heads):
            for block in range(blocks):
                of_block = tokens[block * 64 : block * 64 + 64]
                if stream.side == "key" and stream.codec.interleaved and stream.codec.nbits < 8:
                    # the oracle lays (i, i + D/2) together
                    of_block = torch.cat([of_block[:, 0::2], of_block[:, 1::2]], dim=1)
                expected = naive(of_block.tolist(), stream.codec.nbits)
                assert bytes(stored[row, head, block].tolist()) == expected, f"{row=}, {head=}, {block=}"


def _assert_metadata(stream: Stream, name: str, expected: Tensor) -> None:
    """The stored rows of a metadata field are `expected` `(B, H, rows, width)`, bit for bit."""
    rows = stream.records.metadata(stream.side, name, 0, -(-stream.packed_length // 64)).flatten(2, 3)
    assert rows.dtype == torch.float16
    assert torch.equal(rows[:, :, : expected.shape[2]].float(), expected)


class TestBytes:
    CHUNKS = (70, 1, 1, 1, 100, 27)
    TOKENS = sum(CHUNKS)

    @pytest.mark.parametrize("nbits", [2, 3, 4, 8], ids=lambda b: f"{b}bit")
    @pytest.mark.parametrize(("key_dim", "value_dim"), [(48, 80), (24, 64)], ids=["D48-Dv80", "D24-Dv64"])
    def test_kivi(self, nbits: int, key_dim: int, value_dim: int) -> None:
        keys, values = random_states(self.TOKENS, key_dim, value_dim)
        layer = kivi(nbits=nbits, residual_length=64)
        feed(layer, keys, values, self.CHUNKS)

        packed = 64 * (self.TOKENS // 64)
        expected = asymmetric(keys[:, :, :packed].unflatten(2, (-1, 32)), nbits, axis=3)
        _assert_block_bytes(layer.stored_keys, expected.codes.flatten(2, 3))
        for name in ("scale", "minimum"):
            _assert_metadata(layer.stored_keys, name, getattr(expected, name).squeeze(3))

        packed, group = self.TOKENS - 64, value_group_size(value_dim, 32)
        expected = asymmetric(values[:, :, :packed].unflatten(3, (-1, group)), nbits, axis=-1)
        _assert_block_bytes(layer.stored_values, expected.codes.flatten(3))
        for name in ("scale", "minimum"):
            _assert_metadata(layer.stored_values, name, getattr(expected, name).squeeze(-1))

        for got, exact in zip(decoded(layer), (keys, values), strict=True):
            assert torch.equal(got[:, :, -(self.TOKENS % 64) :], exact[:, :, -(self.TOKENS % 64) :])

    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:]
    )
    def test_int8(self, dtype: torch.dtype) -> None:
        states = tuple(t.to(dtype) for t in random_states(self.TOKENS, 80, 48))
        layer = int8(residual_length=7)
        feed(layer, *states, self.CHUNKS)
        for stream, exact in zip(layer.streams, states, strict=True):
            expected = symmetric8(exact[:, :, :-7], axis=-1)
            _assert_block_bytes(stream, expected.codes, bias=128)
            _assert_metadata(stream, "scale", expected.scale)
            assert torch.equal(stream.decode(0, stream.packed_length), expected.dequantized)
            assert stream.tail.view().dtype == dtype

    def test_a_group_longer_than_a_block_is_stored_with_each_of_its_blocks(self) -> None:
        keys, values = random_states(300)
        layer = kivi(q_group_size=128, residual_length=128)
        feed(layer, keys, values, [130, 170])
        expected = asymmetric(keys[:, :, :256].unflatten(2, (-1, 128)), 4, axis=3)
        _assert_block_bytes(layer.stored_keys, expected.codes.flatten(2, 3))
        _assert_metadata(
            layer.stored_keys, "minimum", expected.minimum.squeeze(3).repeat_interleave(2, dim=2)
        )
        assert torch.equal(layer.stored_keys.decode(0, 256), expected.dequantized.flatten(2, 3))

    @pytest.mark.parametrize("rotary", [None, ROTARY, Rotary(ROTARY.inv_freq, True)])
    def test_key_codes_lie_by_rotary_pairs_where_keys_are_turned(self, rotary: Rotary | None) -> None:
        keys, values = random_states(96)
        layers = [
            kivi(rotary, residual_length=32, rope_mode=mode) for mode in ("post", "block")[: 1 + bool(rotary)]
        ]
        for layer in layers:
            feed(layer, keys, values, [96])
            is_turned = layer is layers[-1] and rotary is not None
            assert layer.stored_keys.codec.interleaved == (rotary.interleaved if is_turned else True)
            encoded = layer.stored_keys.codec.encode(keys, 0)
            _assert_block_bytes(layer.stored_keys, encoded.codes)

    def test_padding_takes_no_part(self) -> None:
        keys, values = random_states(96)
        pads = torch.tensor([0, 37])
        keys[1, :, :37], values[1, :, :37] = 1e5, -1e5
        layer = kivi(residual_length=32)
        layer.padding.set(pads)
        feed(layer, keys, values, [96])
        valid = (torch.arange(96) >= pads[:, None])[:, None, :, None].expand(keys.shape)
        expected = asymmetric(keys.unflatten(2, (-1, 32)), 4, axis=3, valid=valid.unflatten(2, (-1, 32)))
        _assert_block_bytes(layer.stored_keys, expected.codes.flatten(2, 3))
        _assert_metadata(layer.stored_keys, "scale", expected.scale.squeeze(3))

    def test_sinks_are_exact_and_take_no_part(self) -> None:
        keys, values = random_states(160)
        pads = torch.tensor([0, 37])
        for row, pad in enumerate(pads.tolist()):
            keys[row, :, pad : pad + 3] *= 1e3
        layer = kivi(residual_length=32, sink_length=3)
        layer.padding.set(pads)
        feed(layer, keys, values, [70, 1, 1, 88])
        valid = (torch.arange(160) >= pads[:, None] + 3)[:, None, :, None].expand(keys.shape)
        expected = asymmetric(keys.unflatten(2, (-1, 32)), 4, axis=3, valid=valid.unflatten(2, (-1, 32)))
        _assert_block_bytes(layer.stored_keys, expected.codes.flatten(2, 3))
        want = expected.dequantized.flatten(2, 3)
        for row, pad in enumerate(pads.tolist()):
            want[row, :, pad : pad + 3] = keys[row, :, pad : pad + 3]
        for start, stop in [(0, 160), (1, 2), (38, 39), (2, 160), (39, 65), (100, 160)]:
            assert torch.equal(layer.stored_keys.decode(start, stop), want[:, :, start:stop])

    def test_slabs_do_not_show(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # 64 tokens a slab instead of thousands
        keys, values = random_states(500)
        whole, sliced = (int8(sink_length=3) for _ in range(2))
        feed(whole, keys, values, [450, 50])
        reference = whole.state()[0]
        monkeypatch.setattr(stream_module, "_SLAB_VALUES", 1)
        feed(sliced, keys, values, [450, 50])
        assert sliced.stored_keys.slab_tokens == 64 < 450
        for name, tensor in sliced.state()[0].items():
            assert torch.equal(tensor, reference[name]), name
        view = StreamView(sliced.stored_keys, 500, (keys[:, :, :3],))
        assert torch.equal(view.dense(torch.float32)[:, :, :500], whole.stored_keys.decode(0, 500))

    @pytest.mark.parametrize("number", [0.5, torch.nan], ids=["encoded", "left to torch"])
    def test_several_slabs_of_a_call_do_not_show(
        self, monkeypatch: pytest.MonkeyPatch, number: float
    ) -> None:
        """As on a GPU: a kernel is given three slabs at once; torch, if it refuses, one by one."""
        keys, values = random_states(700)
        keys[1, 0, 400, 3] = number
        whole, sliced = (int8(sink_length=3) for _ in range(2))
        feed(whole, keys, values, [600, 100])
        monkeypatch.setattr(stream_module, "_SLAB_VALUES", 1)
        original = NativeEncoder.__init__
        calls = []

        def grown(encoder: NativeEncoder, *args: Any) -> None:
            original(encoder, *args)
            encoder.slabs_at_once = 3

        def counted(encoder: NativeEncoder, records: Any, states: torch.Tensor, *args: Any) -> bool:
            calls.append(states.shape[2])
            return encode(encoder, records, states, *args)

        encode = NativeEncoder.encode
        monkeypatch.setattr(NativeEncoder, "__init__", grown)
        monkeypatch.setattr(NativeEncoder, "encode", counted)
        feed(sliced, keys, values, [600, 100])
        assert max(calls) == 192
        reference = whole.state()[0]
        for name, tensor in sliced.state()[0].items():
            assert torch.equal(tensor.nan_to_num(7.0), reference[name].nan_to_num(7.0)), name


# -- any way of feeding


LAYERS = {
    "kivi": lambda: kivi(q_group_size=16, residual_length=32, nbits=3),
    "kivi-block": lambda: kivi(ROTARY, q_group_size=32, residual_length=64, rope_mode="block", sink_length=2),
    "kivi-no-window": lambda: kivi(q_group_size=16, residual_length=0, nbits=2),
    "int8": lambda: int8(residual_length=5, sink_length=1),
    "int8-tensor": lambda: int8(granularity="tensor"),
    "int4-smooth": lambda: int4(smooth=0.5, residual_length=64, sink_length=2),
}
_FED = 263


@pytest.fixture(scope="module")
def references() -> dict[str, tuple[tuple[Tensor, Tensor], dict[str, Tensor], int]]:
    """For every layer: the states, the state after one call, and its bytes."""
    made = {}
    for name, build in LAYERS.items():
        torch.manual_seed(1)
        states, layer = random_states(_FED), build()
        layer.padding.set(torch.tensor([19, 0]))
        feed(layer, *states, [_FED])
        made[name] = states, layer.state()[0], layer.kv_bytes
    return made


@given(
    cuts=st.lists(st.integers(1, _FED - 1), max_size=100, unique=True).map(sorted),
    name=st.sampled_from(sorted(LAYERS)),
)
@settings(max_examples=80, deadline=None)
def test_any_chunking_ends_in_the_same_bytes(references: dict[str, Any], cuts: list[int], name: str) -> None:
    states, expected, kv_bytes = references[name]
    layer = LAYERS[name]()
    layer.padding.set(torch.tensor([19, 0]))
    feed(layer, *states, [stop - start for start, stop in zip([0, *cuts], [*cuts, _FED], strict=True)])
    state = layer.state()[0]
    assert state.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(state[key], tensor), key
    assert layer.kv_bytes == kv_bytes  # the room taken is a function of the length, too


# -- memory nobody wrote


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_slack_is_never_read(name: str) -> None:
    layer = LAYERS[name]()
    keys, values = random_states(200)
    start = 0
    for count in (33, 1, 1, 60, 1, 40, 1, 1, 62):
        handles = layer.update(keys[:, :, start : start + count], values[:, :, start : start + count])
        start += count
        reads = [handle + 0 for handle in handles]  # valid until the next call
        for stream in layer.streams:
            # Fresh memory of the package is NaN in these tests; what is stale is made so here.
            tail = stream.tail
            tail.buffer[:, :, : tail.start] = math.nan
            tail.buffer[:, :, tail.start + tail.length :] = math.nan
            blocks = -(-stream.packed_length // 64)
            tokens = stream.codec.stored_granularity.tokens
            for field in stream.codec.metadata_names:
                rows = stream.records.metadata(stream.side, field, 0, blocks)
                used = stream.packed_length // tokens
                for row in range(used, rows.shape[2] * rows.shape[3]):
                    rows[:, :, row // rows.shape[3], row % rows.shape[3]] = math.nan
        for read in (*reads, *decoded(layer)):
            assert torch.isfinite(read).all()
    assert layer.stored_keys.tail.buffer.isnan().any()


# -- metadata beyond fp16


class TestWideMetadata:
    @pytest.mark.parametrize("chunks", [[100, 60], [100] + [1] * 60], ids=["at-once", "one-by-one"])
    @pytest.mark.parametrize("build", [lambda: int4(residual_length=0), lambda: kivi(residual_length=32)])
    def test_earlier_tokens_stay_and_later_ones_are_right(self, build: Any, chunks: list[int]) -> None:
        keys, values = random_states(160)
        keys[:, :, 110:] *= 1e7
        layer = build()
        feed(layer, keys, values, chunks[:1])
        assert layer.records.layout.metadata_bytes == 2
        before = [stream.decode(0, stream.packed_length) for stream in layer.streams]
        feed(layer, keys[:, :, 100:], values[:, :, 100:], chunks[1:])
        assert layer.records.layout.metadata_bytes == 4
        for stream, old in zip(layer.streams, before, strict=True):
            assert old.shape[2] > 60
            assert torch.equal(stream.decode(0, old.shape[2]), old)
        expected: Quantized
        if isinstance(layer, KIVILayer):
            expected = asymmetric(keys.unflatten(2, (-1, 32)), 4, axis=3)
        else:
            expected = asymmetric(keys, 4, axis=-1)
        want = expected.dequantized.reshape(keys.shape)
        assert want[:, :, 128:].abs().max() > 1e7
        assert torch.equal(layer.stored_keys.decode(0, 160), want)
        assert layer.stored_values.packed_length in (128, 160)
        group = 16 if isinstance(layer, KIVILayer) else 48
        packed = layer.stored_values.packed_length
        value = asymmetric(values[:, :, :packed].unflatten(-1, (-1, group)), 4, axis=-1).dequantized.flatten(
            -2
        )
        assert torch.equal(layer.stored_values.decode(0, packed), value)

    def test_the_largest_half_is_still_a_half(self) -> None:
        layer = int4(residual_length=0)
        keys, values = torch.zeros(1, 1, 2, 16), torch.zeros(1, 1, 2, 16)
        keys[..., 0] = -65519.0  # rounds to -65504; 65520 would round to infinity
        layer.update(keys, values)
        assert layer.records.layout.metadata_bytes == 2
        keys[..., 0] = -65520.0
        layer.update(keys, values)
        assert layer.records.layout.metadata_bytes == 4
        read = layer.stored_keys.decode(0, 4)[0, 0, :, 0]
        assert read.tolist() == [-65504.0, -65504.0, -65520.0, -65520.0]

    def test_symmetric_scales_too(self) -> None:
        layer = int8()
        keys, values = random_states(70)
        feed(layer, keys, values * 1e9, [30, 40])
        assert layer.records.layout.metadata_bytes == 4
        for stream, exact in zip(layer.streams, (keys, values * 1e9), strict=True):
            assert torch.equal(stream.decode(0, 70), symmetric8(exact, axis=-1).dequantized)


# -- reading and cutting


def test_views_read_any_range_across_their_sources() -> None:
    keys, values = random_states(150)
    layer = kivi(residual_length=32)
    feed(layer, keys, values, [130])
    view = layer.stored_values.append(values[:, :, 130:])
    assert view.packed_length == 98 and view.length == 150
    assert view.boundaries[0] == 98 and view.boundaries[-1] == 150
    whole = view.dense(torch.float32)
    assert torch.equal(whole[:, :, 98:], values[:, :, 98:])
    assert torch.equal(
        whole[:, :, :98],
        asymmetric(values[:, :, :98].unflatten(-1, (-1, 16)), 4, axis=-1).dequantized.flatten(-2),
    )
    for start, stop in [
        (0, 1),
        (0, 150),
        (63, 65),
        (97, 98),
        (97, 99),
        (98, 150),
        (129, 131),
        (149, 150),
        (5, 140),
    ]:
        assert torch.equal(view.read(start, stop), whole[:, :, start:stop])


@pytest.mark.parametrize("cut", [1, 31, 32, 33, 64, 100, 150, 199])
def test_tokens_cut_and_fed_again_are_as_if_never_cut(cut: int) -> None:
    # Values: every token is its own group, so nothing of a cut shows. Keys: whole groups.
    keys, values = random_states(200)
    layer, straight = kivi(q_group_size=16, residual_length=32), kivi(q_group_size=16, residual_length=32)
    feed(straight, keys, values, [200])
    feed(layer, keys, values, [150, 50])
    layer.crop(cut - 200)
    assert layer.get_seq_length() == cut and layer.stored_values.length == layer.stored_keys.length == cut
    assert torch.equal(
        layer.stored_values.decode(0, layer.stored_values.packed_length),
        straight.stored_values.decode(0, layer.stored_values.packed_length),
    )
    feed(layer, keys[:, :, cut:], values[:, :, cut:], [200 - cut])
    assert layer.stored_values.packed_length == 168 and layer.stored_keys.packed_length == 192
    assert torch.equal(layer.stored_values.decode(0, 168), straight.stored_values.decode(0, 168))
    stable = cut // 16 * 16
    read, want = (each.stored_keys.decode(0, 192) for each in (layer, straight))
    assert torch.equal(read[:, :, :stable], want[:, :, :stable])
    assert torch.equal(read[:, :, stable + 16 :], want[:, :, stable + 16 :])


def test_the_largest_numbers_of_fp16_are_finite_when_they_are_exact_again() -> None:
    layer = int8(granularity="tensor", kernel="torch")
    states = torch.randn(1, 2, 200, 48).half()
    states[:, :, 70] = 65504.0
    layer.update(states, states)
    assert float(layer.stored_keys.decode(64, 128).max()) > 65520
    layer.crop(-100)
    assert layer.stored_keys.packed_length == 64
    kept = layer.stored_keys.tail.view()
    assert kept.dtype == torch.float16 and kept[:, :, 6].eq(65504.0).all()


class Broken(AffineCodec):
    """A codec that makes something else than it has announced."""

    changes: ClassVar[dict[str, Any]] = {}

    def encode(self, states: Tensor, position: int, valid: Tensor | None = None) -> Encoded:
        encoded = super().encode(states, position, valid)
        return encoded._replace(**{name: change(encoded) for name, change in self.changes.items()})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"codes": lambda made: made.codes.float()}, r"codes of torch\.uint8, got torch\.float32"),
        ({"metadata": lambda made: {}}, r"metadata \['minimum', 'scale'\].*got \[\]"),
        (
            {"metadata": lambda made: {**made.metadata, "extra": made.codes.float()}},
            r"got \['extra', 'minimum', 'scale'\]",
        ),
    ],
)
def test_a_codec_that_breaks_its_word_is_named(
    changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Broken, "changes", changes)
    layer = build_cache(tiny_model("llama"), {"backend": "int8", "kernel": "torch"}).packed_layers[0]
    codec = Broken(4, per_token_head())
    monkeypatch.setattr(layer, "key_stream", lambda head_dim: StreamSpec(codec))
    layer._prepared = None
    states = torch.randn(1, 2, 70, 16)
    with pytest.raises(ValueError, match=f"Broken must make .*{said}"):
        layer.update(states, states)


@pytest.mark.parametrize("nbits", [0, 5, 6, 7, 16])
def test_codes_of_a_width_that_nothing_packs(nbits: int) -> None:
    with pytest.raises(ValueError, match=rf"AffineCodec\.nbits .* \(1, 2, 3, 4, 8\), got {nbits}"):
        StreamSpec(AffineCodec(nbits, per_token_head()))
