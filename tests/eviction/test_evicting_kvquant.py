"""Evicting over KVQuant's storage: codes, scales and outliers of what stays, and what is held of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcache_plugins
from kvcache_plugins import KVCache
from kvcache_plugins.errors import ArtifactError
from kvcache_plugins.eviction.cache import EvictingCache
from kvcache_plugins.eviction.layer import EvictingLayer
from kvcache_plugins.eviction.renumbering import next_positions
from kvcache_plugins.layers.base import PackedLayer
from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.layers.view import StreamView
from kvcache_plugins.quantizers.outliers import add_outliers
from kvcache_plugins.quantizers.packing import BLOCK_TOKENS, unpack_keys, unpack_values
from tests.eviction.feeding import bound_cache, chunks_of, feed, ids, mask_of, model_of

DIM, HEADS, BUDGET = 16, 2, 230
STORAGE = {
    "backend": "kvquant", "calibration": "normal_float", "outlier_fraction": 0.1, "residual_length": 5
}  # fmt: skip
COUNTS = [33, 140, 64, 7, 200, 50, 42, 64, *[1] * 240]
"""The first eight calls are the prompt of 600 tokens; generated ones make room, too."""
PADS = {"plain": None, "padded": [0, 90], "long": [0, 290]}


def _config(**options: Any) -> dict[str, Any]:
    return {
        "backend": "knorm", "budget": BUDGET, "sink_length": 3, "storage": STORAGE, "evict_at_decode": True,
        "positions": "compact",
    } | options  # fmt: skip


def _states(total: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (batch, HEADS, total, DIM)
    return torch.randn(shape, generator=generator) * 3, torch.randn(shape, generator=generator)


def _stored(layer: PackedLayer) -> dict[str, Tensor]:
    """All that stands for the packed tokens, by name, `(B, H, packed tokens, n)`."""
    found = {}
    packed = layer.stored_keys.packed_length
    blocks = packed // BLOCK_TOKENS
    assert packed % BLOCK_TOKENS == 0
    for stream in layer.streams:
        assert stream.packed_length == packed and stream.outliers is not None
        side, nbits = stream.side, stream.codec.nbits
        data = layer.records.codes(side, 0, blocks)
        codes = (
            unpack_keys(data, nbits, DIM, stream.codec.interleaved)
            if side == "key"
            else unpack_values(data, nbits, DIM)
        )
        found[f"{side}_codes"] = codes.flatten(2, 3)
        for name in stream.codec.metadata_names:
            found[f"{side}_{name}"] = layer.records.metadata(side, name, 0, blocks).flatten(2, 3)
        zeros = torch.zeros(*data.shape[:2], packed, DIM)
        found[f"{side}_outliers"] = add_outliers(zeros, stream.outliers.read(0, blocks))
    return found


def _at(states: Tensor, positions: Tensor) -> Tensor:
    return states.gather(2, positions.long()[..., None].expand(-1, -1, -1, states.shape[-1]))


def _dense(layer: PackedLayer) -> list[Tensor]:
    return [
        StreamView(stream, stream.packed_length, (stream.tail.view(),)).dense(torch.float32)
        for stream in layer.streams
    ]


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("nbits", [2, 3, 4])
def test_survivors_are_what_they_are_where_nothing_is_evicted(nbits: int, kernel: str) -> None:
    # Without rotary embedding keys do not depend on where they are, and all is equal to the last bit.
    model, stored = model_of("gpt2"), {**STORAGE, "nbits": nbits}
    keys, values = _states(sum(COUNTS))
    config = _config(storage=stored, positions="absolute", kernel=kernel)
    cache = bound_cache(model, config, 600)
    everything = kvcache_plugins.build_cache(model, {**stored, "sink_length": 3}).bind(model)
    layer, never = cache.evicting_layers[1], everything.packed_layers[1]
    seen, evictions = 0, 0
    for count in COUNTS:
        before = layer.held_length
        for target in (layer, never):
            target.update(keys[:, :, seen : seen + count], values[:, :, seen : seen + count])
        seen += count
        if layer.held_length == before + count:
            continue
        evictions += 1
        held = layer.ledger.positions
        assert BUDGET - BLOCK_TOKENS < layer.held_length <= BUDGET
        for got, expected in zip(_dense(layer), _dense(never), strict=True):
            assert torch.equal(got, _at(expected, held))
        expected_parts = _stored(never)
        for name, got in _stored(layer).items():
            plain = slice(3, None)  # codes of exact sinks have no meaning
            wanted = _at(expected_parts[name], held[..., : got.shape[2]])
            assert torch.equal(got[:, :, plain], wanted[:, :, plain]), name
    assert evictions > 5


def _feed_rotated(layer: EvictingLayer, keys: Tensor, values: Tensor) -> tuple[Any, Any]:
    """Give a layer new keys `(B, H, n, D)` from before the rotary embedding, as a model would."""
    assert layer.facts.rotary is not None
    positions = next_positions(layer, len(keys), keys.shape[2], keys.device)
    cos, sin = layer.facts.rotary.tables(positions.flatten())
    turned = layer.facts.rotary.turn(
        keys, cos.view(*positions.shape, -1)[:, None], sin.view(*positions.shape, -1)[:, None]
    )
    return layer.update(turned, values)


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("padding", PADS)
def test_what_is_packed_stays_what_it_is(padding: str, kernel: str) -> None:
    model, pads = model_of(), PADS[padding]
    mask = None if pads is None else mask_of(600, pads)
    cache = bound_cache(model, _config(kernel=kernel), 600, mask)
    whole = None if pads is None else mask_of(sum(COUNTS), pads)  # of what it is given in one call
    everything = kvcache_plugins.build_cache(model, {**STORAGE, "sink_length": 3}).bind(model, whole)
    layer, never = cache.evicting_layers[1], everything.packed_layers[1]
    keys, values = _states(sum(COUNTS))
    known: dict[str, Tensor] = {}
    is_known = torch.zeros(2, HEADS, sum(COUNTS), dtype=torch.bool)
    seen, evictions = 0, 0
    for count in COUNTS:
        before = layer.held_length
        new = slice(seen, seen + count)
        _feed_rotated(layer, keys[:, :, new], values[:, :, new])
        seen += count
        evictions += layer.held_length < before + count
        packed = layer.stored_keys.packed_length
        held = layer.ledger.positions[..., :packed].long()
        was_known = is_known.gather(2, held)
        for name, got in _stored(layer).items():
            if name not in known:
                known[name] = torch.zeros(2, HEADS, sum(COUNTS), got.shape[3], dtype=got.dtype)
            assert torch.equal(got[was_known], _at(known[name], held)[was_known]), name
            known[name].scatter_(2, held[..., None].expand_as(got), got)
        is_known.scatter_(2, held, True)
    assert evictions > 5 and is_known.float().mean() > 0.4
    _check_positions(layer, keys)
    if padding == "long":  # ranges are those of the first 128 tokens of a row, of which some have gone
        return
    # Where it was packed made no difference either, but for codes at the boundary of two levels.
    assert never.facts.rotary is not None
    starts = torch.tensor(pads or [0, 0])
    positions = (torch.arange(sum(COUNTS)) - starts[:, None]).clamp_min(0)
    cos, sin = (t.view(2, 1, sum(COUNTS), -1) for t in never.facts.rotary.tables(positions.flatten()))
    never.update(never.facts.rotary.turn(keys, cos, sin), values)
    is_plain = torch.arange(sum(COUNTS)) >= starts[:, None, None] + 3
    usual = _stored(never)
    counts = (is_known & is_plain)[:, :, : usual["key_codes"].shape[2]]
    assert counts.float().mean() > 0.3
    for name in ("key_codes", "value_codes", "value_scale"):
        same = usual[name][counts] == known[name][:, :, : counts.shape[2]][counts]
        assert same.float().mean() > 0.999, name


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_what_attention_was_given_does_not_change(kernel: str) -> None:
    cache = bound_cache(model_of(), _config(kernel=kernel), 600, mask_of(600, [0, 90]))
    keys, values = _states(600)
    layer = cache.evicting_layers[0]
    for start in (0, 200):
        _feed_rotated(layer, keys[:, :, start : start + 200], values[:, :, start : start + 200])
    held = [states.clone() for states in _dense(layer)]
    given = _feed_rotated(layer, keys[:, :, 400:], values[:, :, 400:])
    assert layer.held_length < held[0].shape[2] + 200  # it has evicted meanwhile
    for handle, before in zip(given, held, strict=True):
        assert isinstance(handle, KVHandle)
        assert torch.equal(handle.tokens.dense(torch.float32)[:, :, : before.shape[2]], before)


def test_a_window_that_is_being_read_does_not_turn() -> None:
    # A new token is added to the window that attention then reads a view of, whatever goes meanwhile.
    layer = bound_cache(model_of(), _config(), 300).evicting_layers[0]
    keys, values = _states(580)
    _feed_rotated(layer, keys[:, :, :300], values[:, :, :300])
    evictions = 0
    for seen in range(300, 580):
        held = [states.clone() for states in _dense(layer)]
        new = slice(seen, seen + 1)
        given = _feed_rotated(layer, keys[:, :, new], values[:, :, new])
        for handle, before in zip(given, held, strict=True):
            assert torch.equal(handle.tokens.dense(torch.float32)[:, :, :-1], before)
        evictions += layer.held_length <= held[0].shape[2]
    assert evictions >= 2


def test_heads_that_choose_alike_need_longer_lists() -> None:
    # Of every second token all outliers are in the first head, of the others in the second; each head keeps
    # those where its own are.
    cache = bound_cache(model_of("gpt2"), _config(positions="absolute"), 600)
    layer = cache.evicting_layers[0]
    keys, values = _states(600)
    is_large = torch.arange(600)[:, None] % 2 == torch.arange(HEADS)[:, None, None]
    values *= torch.where(is_large, 100.0, 1.0)
    keys *= torch.where(is_large, 0.1, 1.0)  # small keys are kept
    layer.update(keys, values)
    store = layer.stored_values.outliers
    assert store is not None and store.entries.shape[2] >= store.capacity
    counts = store.starts[..., -1]
    assert counts.max() == store.entries.shape[2] > store.capacity


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_outliers_that_no_list_can_address_are_dropped_and_reported(kernel: str, tmp_path: Path) -> None:
    # All outliers of a token are in one head, and that head keeps it: 8 heads of 102 for each of 64 tokens.
    model = model_of("gpt2", hidden_size=1024, num_attention_heads=8, num_hidden_layers=1)
    storage = STORAGE | {"residual_length": 0}
    cache = bound_cache(
        model, _config(positions="absolute", storage=storage, kernel=kernel, sink_length=1), 1800
    )
    layer = cache.evicting_layers[0]
    generator = torch.Generator().manual_seed(3)
    keys, values = (torch.randn(1, 8, 1800, 128, generator=generator) for _ in range(2))
    is_large = torch.arange(1800)[:, None] % 8 == torch.arange(8)[:, None, None]
    values *= torch.where(is_large, 100.0, 1.0)
    keys *= torch.where(is_large, 0.1, 1.0)  # small keys are kept
    layer.update(keys, values)
    store = layer.stored_values.outliers
    assert store is not None and int(store.starts[..., -1].max()) == store.entries.shape[2] == 32767
    packed = layer.ledger.positions[0, :, : layer.stored_values.packed_length]
    listed = 102 * int((packed % 8 == torch.arange(8)[:, None]).sum())
    # sinks, which are exact, are listed nowhere
    assert layer.dropped_outliers == pytest.approx(listed - 3 * 32767, rel=0.01)
    assert f"outliers dropped      {layer.dropped_outliers:,}" in str(cache.report())
    decoded, expected = _dense(layer)[1], _at(values, layer.ledger.positions)
    assert (decoded - expected).norm() < 0.3 * expected.norm()  # what is left lacks least
    cache.save_pretrained(tmp_path)
    assert KVCache.from_pretrained(tmp_path, model).report() == cache.report()


def _check_positions(layer: EvictingLayer, keys: Tensor) -> None:
    """What is read are the keys of the tokens that are held, rotated to where they are now."""
    assert layer.facts.rotary is not None
    decoded = _dense(layer)[0]
    starts = torch.zeros(2, dtype=torch.long) if layer.padding.lengths is None else layer.padding.lengths
    positions = torch.arange(layer.held_length) - starts[:, None]
    cos, sin = (t.view(2, 1, layer.held_length, -1) for t in layer.facts.rotary.tables(positions.flatten()))
    error = layer.facts.rotary.turn(decoded, cos, -sin) - _at(keys, layer.ledger.positions)
    is_real = (positions >= 0)[:, None].expand(-1, HEADS, -1)
    packed = layer.stored_keys.packed_length
    assert error[:, :, packed:].abs().max() < 1e-4
    is_sink = (is_real & (positions < 3)[:, None])[..., None]
    assert (error * is_sink).abs().max() < 1e-4
    assert error[is_real].norm() < 0.3 * _at(keys, layer.ledger.positions)[is_real].norm()


def _grown_bytes(cache: EvictingCache) -> int:
    """Bytes of lists beyond what the storage itself gives them."""
    grown = 0
    for layer in cache.evicting_layers:
        for stream in layer.streams:
            assert stream.outliers is not None
            batch, blocks, capacity = stream.outliers.entries.shape
            grown += 4 * batch * blocks * (capacity - stream.outliers.capacity)
    return grown


@pytest.mark.parametrize("residual_length", [0, 5, 64])
@pytest.mark.parametrize("chunk", [50, 64, 1000])
def test_estimate_is_what_is_held_after_a_prompt(chunk: int, residual_length: int) -> None:
    model = model_of()
    storage = {**STORAGE, "residual_length": residual_length}
    config = _config(storage=storage, chunk_size=chunk, budget=260)
    for length in (500, 431, 100):
        cache = bound_cache(model, config, length)
        feed(model, cache, ids(length, 2), chunks_of(length, chunk))
        grown = _grown_bytes(cache)
        assert kvcache_plugins.estimate(model, config, length, 2) == cache.kv_bytes() - grown
        assert 0 <= grown <= 0.2 * cache.kv_bytes()
        packed = (260 - residual_length - (length - residual_length) % 64) // 64 * 64
        tail = residual_length + (length - residual_length) % 64
        if length > 260:  # the same however it was read
            assert {layer.held_length for layer in cache.evicting_layers} == {packed + tail}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"positions": "absolute"},
            r"storage=.*kvquant.*positions must be 'compact', got 'absolute'.*'int4'",
        ),
        (
            {"budget": 134},
            r"3 sinks and 68 newest.*residual_length of the storage and 63 of a block.*63 that",
        ),
        ({"storage": {**STORAGE, "sink_length": 5}}, "keeps 5 sinks exact, of which sink_length=3"),
        ({"storage": {**STORAGE, "calibration": None}}, "calibration must be the directory"),
        ({"storage": {"backend": "int8"}}, "positions='compact'.*storage must be None, or 'kvquant'"),
        ({"pool": "merge"}, "storage must be None"),
    ],
)
def test_wrong_requests(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        bound_cache(model_of(), _config(**options), 600)


def test_the_smallest_budget_is_accepted() -> None:
    model = model_of()
    cache = bound_cache(model, _config(budget=135, local_length=0, stabilizer_length=0, chunk_size=31), 600)
    feed(model, cache, ids(500), chunks_of(500, 31))
    assert 135 - BLOCK_TOKENS < cache.num_held() <= 135
    for layer in cache.evicting_layers:
        assert (layer.ledger.positions[..., :3] == torch.arange(3)).all()


def test_the_calibration_of_another_model() -> None:
    storage = {"backend": "kvquant", "calibration": "examples/models/tiny-llama-books-kvquant3"}
    with pytest.raises(ArtifactError, match="tiny-llama-books-kvquant3"):
        kvcache_plugins.build_cache(model_of(), _config(budget=500, storage=storage))
