"""Layers with a window against the same backend's layer without one, which holds every token.

Whole blocks leave, so what stays must be, bit for bit, what the other layer has of the same tokens, and
attention from it what plain attention with a window is.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

import kvcache_plugins as kvp
from kvcache_plugins.attention import native
from kvcache_plugins.attention.native import attend_handles
from kvcache_plugins.attention.reference import AttentionOptions
from kvcache_plugins.backends import kivi
from kvcache_plugins.errors import UnsupportedOperationError
from kvcache_plugins.layers.base import PackedLayer
from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.layers.windowed import WindowedLayer, pays_off, with_window
from kvcache_plugins.testing import assert_close, tiny_model

BACKENDS: dict[str, dict[str, Any]] = {
    "int8": {"backend": "int8"},
    "int8-group": {"backend": "int8", "granularity": "group", "q_group_size": 16},
    "int8-tensor": {"backend": "int8", "granularity": "tensor"},
    "int4": {"backend": "int4", "residual_length": 16},
    "int4-smooth": {"backend": "int4", "residual_length": 16, "smooth": 0.5, "sink_length": 70},
    "float8": {"backend": "float8", "residual_length": 5},
    "kivi": {"backend": "kivi", "residual_length": 32},
    "kivi-2-block": {"backend": "kivi", "nbits": 2, "residual_length": 32, "rope_mode": "block"},
    "kivi-g128": {"backend": "kivi", "q_group_size": 128, "residual_length": 128, "rope_mode": "block"},
    "kvquant": {"backend": "kvquant", "residual_length": 32, "calibration": "normal_float", "sink_length": 3},
}
WINDOW = 300
BATCH, HEADS, DIM = 2, 2, 32
FEEDS: dict[str, Sequence[int]] = {
    "steps": [77, *[1] * 400],
    "long-prompt": [700, *[1] * 80],
    "long-turn": [250, 700, *[1] * 80],  # of which what is stored and the first of it leave at once
    "chunks": [250, 250, 7, 1, 120, *[1] * 70, 33, 310, 1],
}


def layers(options: dict[str, Any], window: int = WINDOW) -> tuple[WindowedLayer, PackedLayer]:
    """A layer with a window, and one that holds everything."""
    model = tiny_model("llama", head_dim=DIM, num_hidden_layers=1)
    (full,) = kvp.build_cache(model, options).packed_layers
    windowed = with_window(type(full))(full.config, full.layer_idx, full.facts)
    windowed.window = window
    return windowed, full


def states(count: int) -> tuple[Tensor, Tensor]:
    scale = torch.linspace(0.2, 3.0, DIM)  # channels of different size, as keys have them
    return torch.randn(BATCH, HEADS, count, DIM) * scale, torch.randn(BATCH, HEADS, count, DIM)


def dense(read: Tensor) -> Tensor:
    return read.tokens.dense(torch.float32) if isinstance(read, KVHandle) else read


def stored(layer: PackedLayer) -> list[Tensor]:
    """All that a layer stores, decoded, with what is exact as it is."""
    return [
        torch.cat([stream.decode(0, stream.packed_length), stream.tail.view().float()], dim=2)
        for stream in layer.streams
    ]


def feed(windowed: WindowedLayer, full: PackedLayer, count: int) -> None:
    """Give both the same tokens and compare what they return.

    Decoding all that is shown takes most of the time. Of single steps those around which blocks come or go
    are compared, and every seventh: what is stored is shown in the next `WINDOW` steps too.
    """
    seen = full.get_seq_length()
    shown, offset = windowed.get_mask_sizes(count)
    assert (shown, offset) == (min(seen, windowed.window - 1) + count, max(0, seen - windowed.window + 1))
    given = states(count)
    returned = windowed.update(*given), full.update(*given)
    is_edge = (seen + 1) % 32 < 3 or (seen + 2 - WINDOW) % 64 < 4
    compared = count > 1 or is_edge or seen % 7 == 0
    for mine, whole in zip(*returned, strict=True):
        assert mine.shape == (BATCH, HEADS, shown, DIM)
        assert not compared or torch.equal(dense(mine), dense(whole)[:, :, -shown:])


def fed(options: dict[str, Any], counts: Sequence[int], pads: Tensor | None = None) -> Any:
    windowed, full = layers(options)
    for layer in (windowed, full):
        layer.bind(layer.facts, pads, None)
    for count in counts:
        feed(windowed, full, count)
    return windowed, full


@functools.cache
def _past_its_window(kernel: str, **options: Any) -> Any:
    return fed({**options, "kernel": kernel}, [430, *[1] * 45], torch.tensor([0, 90]))


def past_its_window(options: dict[str, Any], kernel: str = "auto") -> Any:
    """Both layers after 475 tokens, of which some have left; the second row's first 90 are pads."""
    return copy.deepcopy(_past_its_window(kernel, **options))


@pytest.mark.parametrize("pads", [None, torch.tensor([0, 90])], ids=["", "padded"])
@pytest.mark.parametrize("counts", FEEDS.values(), ids=FEEDS)
@pytest.mark.parametrize("options", BACKENDS.values(), ids=BACKENDS)
def test_what_is_read_is_what_a_layer_without_a_window_has(
    options: dict[str, Any], counts: Sequence[int], pads: Tensor | None
) -> None:
    windowed, full = fed(options, counts, pads)
    seen = sum(counts)
    assert windowed.get_seq_length() == seen and windowed.held_length == WINDOW - 1
    assert full.stored_length == seen
    assert windowed.stored_length < WINDOW - 1 + windowed.unit
    assert (seen - windowed.stored_length) % windowed.unit == 0
    for mine, whole in zip(stored(windowed), stored(full), strict=True):
        assert torch.equal(mine, whole[:, :, -windowed.stored_length :])


@pytest.mark.parametrize("name", ["int8", "kivi", "kvquant"])
def test_bytes_depend_on_the_number_of_tokens_alone(name: str) -> None:
    one_by_one, in_chunks, later = (layers(BACKENDS[name])[0] for _ in range(3))
    given = states(880)
    for layer, counts in (
        (one_by_one, [430, *[1] * 130]),
        (in_chunks, [430, 100, 30]),
        (later, [430, *[5] * 90]),
    ):
        for end, count in zip(itertools.accumulate(counts), counts, strict=True):
            layer.update(*(part[:, :, end - count : end] for part in given))
    assert one_by_one.stored_length == in_chunks.stored_length
    assert one_by_one.records.data.shape == in_chunks.records.data.shape == later.records.data.shape
    if name != "kvquant":  # lists of outliers grow by what they need
        assert one_by_one.kv_bytes == in_chunks.kv_bytes == later.kv_bytes


def test_a_known_end_reserves_no_more_than_a_window() -> None:
    windowed, _ = layers(BACKENDS["int8"])
    windowed.bind(windowed.facts, None, 100_000)
    for count in (256, *[1] * 700):
        windowed.update(*states(count))
        assert windowed.records.num_blocks * 64 <= WINDOW - 1 + windowed.unit + 63
    for seen in (0, 70):  # told before the first tokens, and between two turns
        told, _ = layers(BACKENDS["int8"])
        if seen:
            told.update(*states(seen))
        told.bind(told.facts, None, 400)
        told.update(*states(250 - seen))
        assert told.records.num_blocks == 6  # of WINDOW - 1 + 64 tokens
    short, _ = layers(BACKENDS["int8"])
    short.bind(short.facts, None, 130)
    short.update(*states(70))
    assert short.records.num_blocks == 3


def test_whole_groups_and_rotations_leave_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kivi, "_SHORTEST_PERIOD", 192)
    for options in ({"residual_length": 96}, {"residual_length": 32, "rope_mode": "block"}):
        windowed, _ = layers({"backend": "kivi", **options})
        windowed.update(*states(1))
        assert windowed.unit == 192


@pytest.mark.parametrize("counts", [[250, 200], [250, 700]], ids=["some", "all"])
def test_sinks_that_have_left_take_no_memory(counts: list[int]) -> None:
    windowed, _ = layers({"backend": "int8", "sink_length": 8})
    windowed.update(*states(counts[0]))
    assert all(stream.sinks is not None for stream in windowed.streams)
    windowed.update(*states(counts[1]))
    assert windowed.padding.dropped > 8 and all(stream.sinks is None for stream in windowed.streams)


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("options", BACKENDS.values(), ids=BACKENDS)
def test_attention_sees_the_window_and_no_more(
    options: dict[str, Any], has_mask: bool, count: int, kernel: str
) -> None:
    windowed, full = past_its_window(options, kernel)
    given, query = states(count), torch.randn(BATCH, 2 * HEADS, count, DIM)
    key, value = windowed.update(*given)
    whole = [dense(read) for read in full.update(*given)]
    assert isinstance(key, KVHandle) and isinstance(value, KVHandle) and key.tokens.first > 0
    length = full.get_seq_length()
    slots, own = torch.arange(length), torch.arange(length - count, length)[:, None]
    visible = (slots <= own) & (slots > own - WINDOW)
    if has_mask:  # with holes of its own
        visible = visible & (slots % 7 != 3)
        asked = AttentionOptions(mask=visible[None, None, :, -key.shape[2] :])
    else:
        asked = AttentionOptions(is_causal=True, sliding_window=WINDOW)
    found = attend_handles(query, key, value, asked)
    assert windowed.kernel == ("torch" if kernel == "torch" else "cpu"), windowed.kernel_reason
    logits = query @ whole[0].repeat_interleave(2, 1).transpose(2, 3) * DIM**-0.5
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    assert_close("output", weights @ whole[1].repeat_interleave(2, 1), found, 2e-5)


@pytest.mark.parametrize("options", BACKENDS.values(), ids=BACKENDS)
def test_tiles_begin_where_the_window_does(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "has_fast_passes", lambda dtype: False)
    windowed, full = past_its_window(options)
    given, query = states(40), torch.randn(BATCH, 2 * HEADS, 40, DIM)
    key, value = windowed.update(*given)
    whole = [dense(read)[:, :, -key.shape[2] :].repeat_interleave(2, 1) for read in full.update(*given)]
    assert isinstance(key, KVHandle) and isinstance(value, KVHandle) and key.tokens.first > 0
    found = attend_handles(query, key, value, AttentionOptions(is_causal=True, sliding_window=WINDOW))
    assert windowed.kernel == "cpu", windowed.kernel_reason
    slots, own = torch.arange(key.shape[2]), torch.arange(key.shape[2] - 40, key.shape[2])[:, None]
    logits = query @ whole[0].transpose(2, 3) * DIM**-0.5
    weights = logits.masked_fill((slots > own) | (slots <= own - WINDOW), -torch.inf).softmax(-1)
    assert_close("output", weights @ whole[1], found, 2e-5)


def test_queries_without_mask_or_window_see_all_that_is_shown() -> None:
    windowed, full = fed(BACKENDS["int8"], [430, *[1] * 45])
    given, query = states(3), torch.randn(BATCH, HEADS, 3, DIM)
    key, value = windowed.update(*given)
    full.update(*given)
    assert isinstance(key, KVHandle) and isinstance(value, KVHandle) and key.tokens.first > 0
    shown = [dense(read) for read in (key, value)]
    found = attend_handles(query, key, value, AttentionOptions())
    assert windowed.kernel == "cpu"
    expected = (query @ shown[0].transpose(2, 3) * DIM**-0.5).softmax(-1) @ shown[1]
    assert_close("output", expected, found, 2e-5)


@pytest.mark.parametrize("options", BACKENDS.values(), ids=BACKENDS)
def test_verbs(options: dict[str, Any]) -> None:
    pads = torch.tensor([0, 90])
    windowed, full = fed(options, [310, *[1] * 120], pads)
    before = stored(windowed)
    copied = copy.deepcopy(windowed)
    for layer in (windowed, full):
        layer.reorder_cache(torch.tensor([1, 0]))
        layer.batch_repeat_interleave(2)
        layer.batch_select_indices(torch.tensor([0, 2]))
        layer.offload()
    feed(windowed, full, 1)
    feed(windowed, full, 200)
    assert all(map(torch.equal, stored(copied), before))
    tensors, facts = windowed.state()
    loaded, _ = layers(options)
    loaded.load_state({name: tensor.clone() for name, tensor in tensors.items()}, facts)
    assert loaded.get_seq_length() == windowed.get_seq_length()
    assert all(map(torch.equal, stored(loaded), stored(windowed)))
    for count in (1, 30, *[1] * 70):
        feed(loaded, full, count)
    windowed.reset()
    assert (windowed.get_seq_length(), windowed.held_length, windowed.padding.dropped) == (0, 0, 0)
    _, fresh = layers(options)
    for count in (400, 1, 1):
        feed(windowed, fresh, count)


@pytest.mark.parametrize("options", BACKENDS.values(), ids=BACKENDS)
def test_drafts_are_taken_back(options: dict[str, Any]) -> None:
    windowed, full = layers(options)
    for layer in (windowed, full):
        layer.activate_past_recording()
    feed(windowed, full, 450)
    for kept in (0, 5, 3, 1) * 12:
        drafts = states(6)
        read = windowed.update(*drafts), full.update(*drafts)
        shown = min(full.get_seq_length() - 6, WINDOW - 1) + 6
        assert all(torch.equal(dense(a), dense(b)[:, :, -shown:]) for a, b in zip(*read, strict=True))
        for layer in (windowed, full):
            layer.crop(kept - 6)
    feed(windowed, full, 1)
    assert windowed.stored_length < WINDOW - 1 + windowed.unit


def test_what_has_left_cannot_be_brought_back() -> None:
    windowed, full = fed(BACKENDS["int8"], [430, *[1] * 45])
    spare = windowed.stored_length - windowed.held_length
    assert 0 < spare < 64
    for layer in (windowed, full):
        layer.crop(-spare)
    feed(windowed, full, 1)
    with pytest.raises(UnsupportedOperationError, match=r"crop\(-2\): layer 0 sees 300 tokens back"):
        windowed.crop(-2)
    with pytest.raises(ValueError, match="negative integer"):
        windowed.crop(1)
    feed(windowed, full, 20)
    short, whole = fed(BACKENDS["int8"], [200, 40])
    for layer in (short, whole):
        layer.crop(-100)
    feed(short, whole, 3)


def test_it_says_of_itself_what_transformers_own_layer_does() -> None:
    windowed, _ = layers(BACKENDS["int8"])
    own = DynamicSlidingWindowLayer(sliding_window=WINDOW)
    assert windowed.is_sliding and own.is_sliding
    for count in (10, 288, 1, 1, 1, 50, 400, 1):
        assert windowed.get_mask_sizes(count) == own.get_mask_sizes(count)
        given = states(count)
        returned = windowed.update(*given)
        assert returned[0].shape == own.update(*given)[0].shape
        assert windowed.get_seq_length() == own.get_seq_length()
        assert windowed.dense_length == own.keys.shape[2]
    assert windowed.get_max_length() == own.get_max_length()


@pytest.mark.parametrize(
    ("options", "window", "expected"),
    [
        ({"backend": "int8"}, 128, False),  # gpt-oss
        ({"backend": "int8"}, 512, True),
        ({"backend": "int4"}, 128, False),
        ({"backend": "int4"}, 512, True),
        ({"backend": "kivi"}, 256, False),  # of which 128 are exact
        ({"backend": "kivi"}, 1024, True),  # Gemma 3
        ({"backend": "kivi", "residual_length": 1024}, 1024, False),
        ({"backend": "kvquant", "calibration": "normal_float"}, 4096, True),
    ],
)
def test_which_windows_are_worth_packing(options: dict[str, Any], window: int, expected: bool) -> None:
    _, full = layers(options)
    assert pays_off(full, window, 8, 128, 128) is expected
