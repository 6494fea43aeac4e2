"""Evicting over packed storage: what stays keeps its codes bit for bit, and takes the bytes it should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvcache_plugins
from kvcache_plugins.eviction import keeping
from kvcache_plugins.layers.base import PackedLayer
from kvcache_plugins.layers.view import StreamView
from kvcache_plugins.quantizers.packing import BLOCK_TOKENS, unpack_keys, unpack_values
from tests.eviction.feeding import bound_cache, feed, ids, mask_of, model_of

DIM, HEADS = 16, 2
STORAGES: dict[str, dict[str, Any]] = {
    "int8": {"backend": "int8"},
    "int8-window": {"backend": "int8", "residual_length": 5},
    "int8-group": {"backend": "int8", "granularity": "group", "q_group_size": 8},
    "int8-token": {"backend": "int8", "granularity": "token"},
    "k8v4": {"backend": "int4", "key_bits": 8, "value_bits": 4, "residual_length": 0},
    "k8v4-4": {"backend": "int4", "key_bits": 8, "value_bits": 4, "residual_length": 4},
    "k8v4-64": {"backend": "int4", "key_bits": 8, "value_bits": 4, "residual_length": 64},
    "int2": {"backend": "int4", "nbits": 2, "residual_length": 3},
    "float8": {"backend": "float8"},
    "float8-e5m2": {"backend": "float8", "format": "e5m2"},
}
COUNTS = [33, 40, 64, 7, 64, 50, 42, *[1] * 4, *[9] * 6, *[1] * 8, *[9] * 6, *[1] * 20]
"""The first seven calls are the prompt of 300 tokens; generated ones, alone or several, make room twice."""


def _states(total: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (batch, HEADS, total, DIM)
    return torch.randn(shape, generator=generator) * 3, torch.randn(shape, generator=generator)


def _decoded(layer: PackedLayer) -> tuple[Tensor, ...]:
    return tuple(
        StreamView(stream, stream.packed_length, (stream.tail.view(),)).dense(torch.float32)
        for stream in layer.streams
    )


def _codes(layer: PackedLayer) -> tuple[Tensor, Tensor]:
    """Packed codes `(B, H, packed tokens, D)` of keys and values."""
    keys, values = layer.streams
    packed = keys.packed_length
    assert values.packed_length == packed
    blocks = -(-packed // BLOCK_TOKENS)
    key_codes = unpack_keys(
        layer.records.codes("key", 0, blocks), keys.codec.nbits, DIM, keys.codec.interleaved
    )
    value_codes = unpack_values(layer.records.codes("value", 0, blocks), values.codec.nbits, DIM)
    return tuple(codes.flatten(2, 3)[:, :, :packed] for codes in (key_codes, value_codes))  # type: ignore[return-value]


def _scales(layer: PackedLayer) -> dict[str, Tensor]:
    """Every metadata field, one row per packed token: `(B, H, packed tokens, width)`."""
    packed = layer.stored_keys.packed_length
    blocks = -(-packed // BLOCK_TOKENS)
    return {
        f"{stream.side}_{name}": layer.records.metadata(stream.side, name, 0, blocks).flatten(2, 3)[
            :, :, :packed
        ]
        for stream in layer.streams
        for name in stream.codec.metadata_names
    }


def _at(states: Tensor, positions: Tensor) -> Tensor:
    return states.gather(2, positions.long()[..., None].expand(-1, -1, -1, states.shape[-1]))


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("pads", [None, [0, 90]], ids=["plain", "padded"])
@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("storage", STORAGES)
def test_survivors_keep_their_codes(storage: str, sinks: int, pads: list[int] | None, kernel: str) -> None:
    if kernel == "torch" and (sinks or pads):
        pytest.skip("the reference that moves codes is compared once per storage")
    model, prompt = model_of(), sum(COUNTS[:7])
    mask = None if pads is None else mask_of(prompt, pads)
    stored = STORAGES[storage]
    config = {
        "backend": "knorm", "budget": 150, "sink_length": sinks, "storage": stored, "evict_at_decode": True,
        "kernel": kernel,
    }  # fmt: skip
    cache = bound_cache(model, config, prompt, mask)
    everything = kvcache_plugins.build_cache(model, {**stored, "sink_length": sinks}).bind(model, mask)
    layer, never = cache.evicting_layers[1], everything.packed_layers[1]
    keys, values = _states(sum(COUNTS))
    seen, evictions, window = 0, 0, stored.get("residual_length", layer.key_stream(DIM).keep_recent)
    for count in COUNTS:
        for target in (layer, never):
            target.update(keys[:, :, seen : seen + count], values[:, :, seen : seen + count])
        seen += count
        grew = layer.ledger.positions.shape[2] < min(seen, 150 + 64) and seen > 150
        evictions += grew
        if not grew and seen % 5:  # compare at evictions, and now and then
            continue
        held = layer.ledger.positions
        packed = layer.stored_keys.packed_length
        assert (
            packed == layer.stored_values.packed_length == layer.held_length - min(window, layer.held_length)
        )
        for got, expected in zip(_decoded(layer), _decoded(never), strict=True):
            assert torch.equal(got, _at(expected, held))
        if packed:
            for got, expected in zip(_codes(layer), _codes(never), strict=True):
                _same(got, _at(expected, held[..., :packed]), held, sinks, pads)
            expected_scales = _scales(never)
            for name, scale in _scales(layer).items():
                _same(scale, _at(expected_scales[name], held[..., :packed]), held, sinks, pads)
    assert evictions > 5


def _same(got: Tensor, expected: Tensor, held: Tensor, sinks: int, pads: list[int] | None) -> None:
    """Equal wherever codes have a meaning: sinks are exact beside them."""
    first = torch.tensor(pads or [0, 0])[:, None, None] + sinks
    counts = held[..., : got.shape[2]] >= first
    assert torch.equal(got[counts], expected[counts])


@pytest.mark.parametrize("is_trusted", [True, False])
def test_what_has_failed_its_check_moves_no_codes(is_trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose kernels are loaded and must not be called; the CPU has no part in it."""
    config = {"backend": "knorm", "budget": 150, "storage": {"backend": "int8"}}
    layer = bound_cache(model_of(), config, 300).evicting_layers[0]
    layer.update(*_states(100))
    asked: list[torch.device] = []
    monkeypatch.setattr(keeping.cuda_loader, "try_load", lambda device: asked.append(device) or is_trusted)
    gpu = torch.device("cuda", 0)
    assert keeping._may_gather(layer.stored_keys, gpu) == is_trusted and asked == [gpu]
    assert keeping._may_gather(layer.stored_keys, torch.device("cpu")) and asked == [gpu]


@pytest.mark.parametrize(("kernel", "is_trusted"), [("torch", True), ("auto", False)])
def test_torch_moves_codes(kernel: str, is_trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def decoded() -> tuple[Tensor, ...]:
        config = {"backend": "knorm", "budget": 150, "storage": {"backend": "int8"}, "kernel": kernel}
        layer = bound_cache(model_of(), config, 300).evicting_layers[0]
        keys, values = _states(300)
        for start in range(0, 300, 100):
            layer.update(keys[:, :, start : start + 100], values[:, :, start : start + 100])
        return _decoded(layer)

    expected = decoded()
    if not is_trusted:
        monkeypatch.setattr(keeping, "_may_gather", lambda stream, device: False)
    monkeypatch.setattr(keeping, "gather_tokens", lambda *args: pytest.fail("a kernel was called"))
    assert all(map(torch.equal, decoded(), expected))


@pytest.mark.parametrize("dims", [(512, 64), (16, 528), (528, 16)], ids=str)
def test_wide_heads(dims: tuple[int, int]) -> None:
    """Of more than 512 channels torch moves the codes, whatever was asked for."""
    found = []
    for kernel in ("auto", "torch"):
        config = {"backend": "streaming_llm", "budget": 150, "storage": {"backend": "int8"}, "kernel": kernel}
        layer = bound_cache(model_of(), config, 300).evicting_layers[0]
        generator = torch.Generator().manual_seed(3)
        keys, values = (torch.randn(2, HEADS, 300, dim, generator=generator) for dim in dims)
        for start in range(0, 300, 100):
            layer.update(keys[:, :, start : start + 100], values[:, :, start : start + 100])
        assert layer.held_length < 300 and layer.stored_keys.packed_length
        for stream, dim in zip(layer.streams, dims, strict=True):
            assert keeping._may_gather(stream, keys.device) == (kernel == "auto" and dim <= 512)
        found.append(_decoded(layer))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("storage", STORAGES)
def test_bytes(storage: str) -> None:
    stored = STORAGES[storage]
    window = stored.get("residual_length", 128 if stored["backend"] == "int4" else 0)
    cache = bound_cache(
        model_of(), {"backend": "knorm", "budget": 320, "sink_length": 0, "storage": stored}, 1000
    )
    layer = cache.evicting_layers[0]
    keys, values = _states(1000, batch=3)
    for start in range(0, 1000, 100):
        layer.update(keys[:, :, start : start + 100], values[:, :, start : start + 100])
    key_bits = stored.get("key_bits", stored.get("nbits", 8))
    value_bits = stored.get("value_bits", stored.get("nbits", 8))
    groups = DIM // stored.get("q_group_size", DIM)
    fields = 2 if stored["backend"] == "int4" else 1  # asymmetric codes have a minimum beside the scale
    token = DIM * (key_bits + value_bits) // 8 + 2 * 2 * fields * groups
    blocks = -(-(320 - window) // 64)
    record = -(-token * 64 // 64) * 64
    records = 3 * HEADS * blocks * record
    assert layer.records.data.untyped_storage().nbytes() == records
    # Beside them: the window, and 8 bytes for a score and a position; with 1/32 and 16 tokens of room.
    exact = 2 * DIM * 4
    least = 3 * HEADS * (window * exact + 320 * 8)
    most = 3 * HEADS * ((window * 33 / 32 + 17) * exact + (320 * 33 / 32 + 16) * 8)
    assert least <= layer.kv_bytes - records <= most


@pytest.mark.parametrize(
    ("storage", "backend"),
    [
        ({"backend": "kivi"}, "knorm"),
        ({"backend": "kivi", "residual_length": 0}, "h2o"),
        ({"backend": "int8", "granularity": "tensor"}, "knorm"),
        ({"backend": "kvquant", "calibration": "normal_float", "residual_length": 0}, "streaming_llm"),
    ],
)
def test_storage_that_cannot_be_gathered(storage: dict[str, Any], backend: str) -> None:
    config = {"backend": backend, "budget": 1000, "sink_length": 4, "storage": storage}
    with pytest.raises(ValueError, match=r"storage=.*{}.*int4".format(storage["backend"])):
        kvcache_plugins.build_cache(tiny_heads(), config)


def tiny_heads() -> Any:
    """A model with heads of 32 channels, which every backend stores."""
    return model_of(head_dim=32)


@pytest.mark.parametrize(
    "backend", ["expected_attention", "h2o", "keydiff", "knorm", "lagkv", "snapkv", "tova"]
)
@pytest.mark.parametrize("storage", ["int8", "k8v4-4", "float8"])
def test_attention_reads_what_is_stored(backend: str, storage: str) -> None:
    # The same model fed with what the layers decode to, as dense keys and values, gives the same logits.
    model, tokens = model_of(), ids(120, 2)
    config = {"backend": backend, "budget": 40, "sink_length": 2, "storage": STORAGES[storage]}
    cache = bound_cache(model, config, 119)
    feed(model, cache, tokens[:, :119], [50, 50, 19])
    dense = bound_cache(model, {**config, "storage": None}, 119)
    feed(model, dense, tokens[:, :119], [50, 50, 19])
    for layer, exact in zip(cache.evicting_layers, dense.evicting_layers, strict=True):
        for stream, states in zip(exact.streams, _decoded(layer), strict=True):
            stream.tail.view().copy_(states)
    got, expected = (feed(model, c, tokens[:, 119:], [1]) for c in (cache, dense))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0.0)
