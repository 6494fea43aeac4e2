"""Everything done to a cache beside adding tokens, on packed data."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...building import build_cache
from ...cache import KVCache
from ...estimation import estimate
from ...layers.base import PackedLayer
from ...models.cache_argument import as_argument
from ..comparison import sqnr_db
from .feeding import decoded, fed, feed, state_bytes
from .fixtures import Fixtures

__all__ = ["VerbConformance"]


class VerbConformance(Fixtures):
    """Batch operations, crop, drafts, reset, offload, copies, saving; bytes."""

    def test_batch_operations_move_packed_rows(
        self, layer: PackedLayer, states: tuple[Tensor, Tensor]
    ) -> None:
        keys, values = states
        feed(layer, keys, values, [200])
        before = decoded(layer)
        layer.reorder_cache(torch.tensor([1, 1]))
        layer.batch_repeat_interleave(3)
        order = [1, 1, 1, 1, 1, 1]
        for got, old in zip(decoded(layer), before, strict=True):
            assert torch.equal(got, old[order])
        layer.batch_select_indices(torch.tensor([0, 5]))
        layer.batch_select_indices(torch.tensor([True, False]))
        feed(layer, keys[1:, :, 200:], values[1:, :, 200:], [1] * 50)
        reference = copy.deepcopy(layer)
        reference.reset()
        feed(reference, keys[1:], values[1:], [250])
        for got, want in zip(decoded(layer), decoded(reference), strict=True):
            assert torch.equal(got, want)

    def test_crop_keeps_what_is_left(self, cache: KVCache, states: tuple[Tensor, Tensor]) -> None:
        keys, values = states
        layer = cache.packed_layers[0]
        twin = copy.deepcopy(layer)
        feed(layer, keys, values, [300])
        before = decoded(layer)
        for removed, length in ((0, 300), (3, 297), (64, 233), (90, 143)):
            layer.crop(-removed)
            assert layer.get_seq_length() == length
            for got, old in zip(decoded(layer), before, strict=True):
                assert torch.equal(got, old[:, :, :length])
        # other tokens than those that were there, of whose codes nothing may remain
        others = [torch.cat([t[:, :, :143], t[:, :, 143:].flip(2)], dim=2) for t in states]
        feed(layer, others[0][:, :, 143:], others[1][:, :, 143:], [1] * 40 + [150])
        assert layer.get_seq_length() == 333
        for got, exact in zip(decoded(layer), others, strict=True):
            assert sqnr_db(exact[:, :, 143:], got[:, :, 143:]) >= cache.config.sqnr_floor_db
        layer.crop(-333)
        assert layer.get_seq_length() == 0
        # nothing learnt from the tokens that are gone remains
        again = keys.flip(2).contiguous(), values.flip(2).contiguous()
        feed(layer, *again, [200])
        for name, tensor in state_bytes(fed(twin, *again, [200])).items():
            assert torch.equal(tensor, state_bytes(layer)[name]), name

    def test_rejected_drafts_leave_no_trace(
        self, model: Any, cache_config: dict[str, Any], states: tuple[Tensor, Tensor]
    ) -> None:
        keys, values = states
        plain = fed(build_cache(model, cache_config).packed_layers[0], keys, values, [self.tokens])
        layer = build_cache(model, cache_config).packed_layers[0]
        layer.activate_past_recording()
        start = 0
        while start < self.tokens:
            count = min(9 if start else 100, self.tokens - start)
            drafts = [
                torch.cat([t[:, :, start : start + count], 50 * torch.ones_like(t[:, :, :4])], 2)
                for t in (keys, values)
            ]
            layer.update(*drafts)
            layer.crop(-4)
            start += count
        for name, tensor in state_bytes(plain).items():
            assert torch.equal(tensor, state_bytes(layer)[name]), name

    def test_reset_offload_and_copies(self, layer: PackedLayer, states: tuple[Tensor, Tensor]) -> None:
        keys, values = states
        feed(layer, keys, values, [250])
        before = decoded(layer)
        layer.offload()
        layer.prefetch()
        twin = copy.deepcopy(layer)
        feed(layer, keys[:, :, 250:], values[:, :, 250:], [83])
        for got, old in zip(decoded(twin), before, strict=True):
            assert torch.equal(got, old)
        layer.activate_past_recording()
        layer.reset()
        assert layer.get_seq_length() == 0 and layer.kv_bytes == 0
        feed(layer, keys, values, [250])
        for got, old in zip(decoded(layer), before, strict=True):
            assert torch.equal(got, old)

    def test_saved_and_loaded_it_continues(
        self, model: Any, cache: KVCache, cache_config: dict[str, Any], tmp_path: Path
    ) -> None:
        inputs = torch.randint(3, 120, (2, 250))
        with torch.no_grad():
            model(inputs, **as_argument(cache))
            cache.save_pretrained(tmp_path)
            loaded = KVCache.from_pretrained(tmp_path, model)
            packed, expected_packed = (
                [s.packed_length for layer in each.packed_layers for s in layer.streams]
                for each in (loaded, cache)
            )
            assert packed == expected_packed and min(packed) > 0
            more = torch.randint(3, 120, (2, 1))
            expected = model(more, **as_argument(cache)).logits
            assert torch.equal(expected, model(more, **as_argument(loaded)).logits)
        assert type(loaded) is type(cache) and loaded.config == cache.config
        assert loaded.kv_bytes() == cache.kv_bytes()

    def test_bytes_are_counted_and_predicted(
        self, model: Any, cache: KVCache, cache_config: dict[str, Any]
    ) -> None:
        inputs = torch.randint(3, 120, (2, 150))
        with torch.no_grad():
            model(inputs, **as_argument(cache))
            for step in range(70):
                model(inputs[:, :1], **as_argument(cache))
                if step % 23 == 0:
                    owned = [t for layer in cache.packed_layers for t in layer.tensors().values()]
                    assert cache.kv_bytes() == sum(t.untyped_storage().nbytes() for t in owned)
                    assert cache.kv_bytes() == estimate(
                        model, cache_config, cache.get_seq_length(), batch_size=2
                    )
        report = cache.report()
        assert report.tokens_seen == report.tokens_held == 220
        assert report.dense_bytes == 220 * 2 * 4 * report.values // (220 * 2)
        assert str(report.kv_bytes) in str(report).replace(",", "")

    def test_most_tokens_allocate_nothing(self, cache: KVCache, layer: PackedLayer) -> None:
        keys, values = self.random_states(2, 64, 1200)
        feed(layer, keys, values, [1000])
        moved = 0
        for start in range(1000, 1200):
            before = [t.data_ptr() for t in layer.tensors().values()]
            feed(layer, keys[:, :, start:], values[:, :, start:], [1])
            moved += before != [t.data_ptr() for t in layer.tensors().values()]
        assert moved <= 10
