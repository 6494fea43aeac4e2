"""Retaining heads over packed storage: what is kept does not depend on how, and keeps its codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvcache_plugins
from kvcache_plugins.layers.base import PackedLayer
from kvcache_plugins.layers.view import StreamView
from kvcache_plugins.quantizers.packing import BLOCK_TOKENS, unpack_keys, unpack_values
from tests.eviction.feeding import chunks_of, feed, ids, mask_of, model_of
from tests.eviction.locret_feeding import bound_locret

PROMPT, NEW = 200, 70
STORAGES: dict[str, dict[str, Any]] = {
    "int8": {"backend": "int8"},
    "int8-window": {"backend": "int8", "residual_length": 5},
    "k8v4": {"backend": "int4", "key_bits": 8, "value_bits": 4, "residual_length": 0},
    "k8v4-window": {"backend": "int4", "key_bits": 8, "value_bits": 4, "residual_length": 8},
    "float8": {"backend": "float8"},
}
OPTIONS: dict[str, Any] = {
    "budget": 90, "chunk_size": 32, "stabilizer_length": 12, "local_length": 12, "evict_at_decode": True,
}  # fmt: skip


def _run(
    storage: dict[str, Any] | None, pads: list[int] | None, **options: Any
) -> tuple[Any, list[list[tuple[Tensor, Tensor]]], Tensor]:
    """A cache that has read a prompt and generated, what its layers were given, and the logits."""
    model, total = model_of(), PROMPT + NEW
    tokens = ids(total, 2, pads=pads)
    mask = None if pads is None else mask_of(total, pads)
    known = None if mask is None else mask[:, :PROMPT]
    cache = bound_locret(model, PROMPT, known, **OPTIONS, **options, storage=storage)
    given: list[list[tuple[Tensor, Tensor]]] = []
    for layer in cache.evicting_layers:
        calls: list[tuple[Tensor, Tensor]] = []

        def update(
            keys: Tensor, values: Tensor, *args: Any, layer: Any = layer, calls: Any = calls, **kwargs: Any
        ) -> Any:
            calls.append((keys.clone(), values.clone()))
            return type(layer).update(layer, keys, values, *args, **kwargs)

        layer.update = update  # type: ignore[assignment]
        given.append(calls)
    logits = feed(model, cache, tokens, [*chunks_of(PROMPT, 32), *[1] * NEW], mask)
    return cache, given, logits


def _stored(layer: PackedLayer) -> dict[str, Tensor]:
    """Codes, scales and decoded states, one row per token: `(B, H, tokens, ...)`."""
    packed = layer.stored_keys.packed_length
    blocks = -(-packed // BLOCK_TOKENS)
    found = {}
    for stream in layer.streams:
        codes = layer.records.codes(stream.side, 0, blocks)
        bits, width = stream.codec.nbits, stream.head_dim
        unpacked = (
            unpack_keys(codes, bits, width, stream.codec.interleaved)
            if stream.side == "key"
            else unpack_values(codes, bits, width)
        )
        found[f"{stream.side}_codes"] = unpacked.flatten(2, 3)[:, :, :packed]
        for name in stream.codec.metadata_names:
            metadata = layer.records.metadata(stream.side, name, 0, blocks)
            found[f"{stream.side}_{name}"] = metadata.flatten(2, 3)[:, :, :packed]
        view = StreamView(stream, stream.packed_length, (stream.tail.view(),))
        found[f"{stream.side}_decoded"] = view.dense(torch.float32)
    return found


@pytest.mark.parametrize("pads", [None, [0, 70]], ids=["plain", "padded"])
@pytest.mark.parametrize("name", STORAGES)
def test_survivors_keep_their_codes(name: str, pads: list[int] | None) -> None:
    # Beside a cache of the storage's own that is given the same keys and values and evicts nothing.
    cache, given, _ = _run(STORAGES[name], pads)
    mask = None if pads is None else mask_of(PROMPT, pads)
    never = kvcache_plugins.build_cache(model_of(), STORAGES[name]).bind(model_of(), mask)
    for layer, everything, calls in zip(cache.evicting_layers, never.packed_layers, given, strict=True):
        for keys, values in calls:
            everything.update(keys, values)
        assert layer.held_length < 90 + 64 < everything.held_length
        held, got, expected = layer.ledger.positions.long(), _stored(layer), _stored(everything)
        assert got["key_codes"].shape[2] >= 90 - 8 and len(got) >= 6
        for side, rows in got.items():
            index = held[..., : rows.shape[2], None].expand(-1, -1, -1, rows.shape[-1])
            assert torch.equal(rows, expected[side].gather(2, index)), side


@pytest.mark.parametrize("pads", [None, [0, 70]], ids=["plain", "padded"])
@pytest.mark.parametrize("name", STORAGES)
def test_the_storage_changes_no_choice(name: str, pads: list[int] | None) -> None:
    # The first layer reads embeddings, which no storage touches.
    packed, _, got = _run(STORAGES[name], pads)
    dense, _, expected = _run(None, pads)
    ledger, other = packed.evicting_layers[0].ledger, dense.evicting_layers[0].ledger
    assert torch.equal(ledger.positions, other.positions)
    assert torch.equal(ledger.scores, other.scores)
    assert packed.kv_bytes() < 0.55 * dense.kv_bytes()
    is_real = mask_of(PROMPT + NEW, pads or [0, 0]).bool()
    error = (got - expected)[is_real].square().mean().sqrt() / expected[is_real].square().mean().sqrt()
    assert 0 < error < 0.3  # packed, and close
