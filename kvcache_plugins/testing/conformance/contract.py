"""What transformers asks of a layer, and the invariants behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ...building import build_cache
from ...cache import KVCache
from ...layers.base import PackedLayer
from ...layers.handle import KVHandle
from ...layers.windowed import with_window
from .feeding import decoded, fed, feed, state_bytes
from .fixtures import Fixtures

__all__ = ["ContractConformance"]


class ContractConformance(Fixtures):
    """Lengths, masks, splits, immutability, what a handle reads."""

    def test_lengths_and_masks(self, layer: PackedLayer, states: tuple[Tensor, Tensor]) -> None:
        keys, values = states
        seen = 0
        for count in (70, 1, 1, 40, 7, 130, 1):
            assert layer.get_mask_sizes(count) == (seen + count, 0)
            got = layer.update(keys[:, :, seen : seen + count], values[:, :, seen : seen + count])
            seen += count
            assert layer.get_seq_length() == seen
            assert [tuple(t.shape) for t in got] == [(*keys.shape[:2], seen, keys.shape[3])] * 2
            assert all(t.dtype == keys.dtype and t.device == keys.device for t in got)
        assert layer.stored_keys.packed_length > 0 and layer.stored_values.packed_length > 0

    def test_states_that_do_not_fit_are_refused(
        self, layer: PackedLayer, states: tuple[Tensor, Tensor]
    ) -> None:
        keys, values = states
        feed(layer, keys, values, [130])
        before = decoded(layer)
        new = keys[:, :, 130:134], values[:, :, 130:134]
        for wrong, message in (
            ((new[0], new[1][:, :, :3]), "must agree in all but head_dim"),
            ((new[0][:1], new[1][:1]), "holds .batch, heads."),
            (tuple(side.repeat(1, 2, 1, 1) for side in new), "holds .batch, heads."),
        ):
            with pytest.raises(ValueError, match=message):
                layer.update(*wrong)
        assert layer.get_seq_length() == 130
        for got, old in zip(decoded(layer), before, strict=True):
            assert torch.equal(got, old)

    def test_first_call_is_exact(self, layer: PackedLayer, states: tuple[Tensor, Tensor]) -> None:
        got = layer.update(*states)
        assert torch.equal(got[0], states[0]) and torch.equal(got[1], states[1])

    def test_any_split_ends_in_the_same_bytes(
        self, cache: KVCache, cache_config: dict[str, Any], model: Any, states: tuple[Tensor, Tensor]
    ) -> None:
        keys, values = states
        reference = state_bytes(fed(cache.packed_layers[0], keys, values, [self.tokens]))
        splits = [
            [1] * self.tokens,
            [100, 1, 1, 100, 131],
            [64, 64, 64, 64, 64, 13],
            [self.tokens - 1, 1],
            [7] * 47 + [4],
        ]
        for split in splits:
            assert sum(split) == self.tokens
            other = state_bytes(fed(build_cache(model, cache_config).packed_layers[0], keys, values, split))
            assert other.keys() == reference.keys()
            for name, tensor in reference.items():
                assert torch.equal(tensor, other[name]), f"{name} differs when fed in calls of {split[:5]}..."

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_the_default_dtype_does_not_matter(
        self, model: Any, cache_config: dict[str, Any], states: tuple[Tensor, Tensor], dtype: torch.dtype
    ) -> None:
        keys, values = states
        query = torch.randn(self.batch_size, 2 * keys.shape[1], 3, keys.shape[3])
        usual = torch.get_default_dtype()
        found = []
        for chosen in (usual, dtype):
            torch.set_default_dtype(chosen)
            try:
                layer = build_cache(model, cache_config).packed_layers[0]
                feed(layer, keys[:, :, :-3], values[:, :, :-3], [100, 1, 130, self.tokens - 234])
                handles = layer.update(keys[:, :, -3:], values[:, :, -3:])
                output = F.scaled_dot_product_attention(query, *handles, enable_gqa=True)
            finally:
                torch.set_default_dtype(usual)
            found.append({**state_bytes(layer), "output": output})
        for name, tensor in found[0].items():
            assert torch.equal(tensor, found[1][name]), f"{name} depends on the default dtype"

    def test_packed_blocks_never_change(self, layer: PackedLayer, states: tuple[Tensor, Tensor]) -> None:
        keys, values = states
        feed(layer, keys, values, [200])
        before = [(s.packed_length, s.decode(0, s.packed_length)) for s in layer.streams]
        feed(layer, keys[:, :, 200:], values[:, :, 200:], [1] * 60 + [73])
        for (length, old), stream in zip(before, layer.streams, strict=True):
            assert torch.equal(old, stream.decode(0, length))

    def test_a_window_reads_what_the_whole_layer_has(
        self, cache: KVCache, states: tuple[Tensor, Tensor]
    ) -> None:
        if cache.evicts:
            pytest.skip("what a window holds is not evicted")
        (whole, *_), window = cache.packed_layers, 100
        layer = with_window(type(whole))(whole.config, whole.layer_idx, whole.facts)
        layer.window = window
        seen = 0
        for count in (150, 1, 1, 40, 7, 130, 1, 1):
            new = [side[:, :, seen : seen + count] for side in states]
            shown = min(seen, window - 1) + count
            assert layer.get_mask_sizes(count) == (shown, max(0, seen - window + 1))
            for got, expected in zip(layer.update(*new), whole.update(*new), strict=True):
                read, all_read = (s.dense() if isinstance(s, KVHandle) else s for s in (got, expected))
                assert torch.equal(read, all_read[:, :, -shown:])
            seen += count
        assert layer.stored_length < whole.stored_length == seen

    def test_handle_reads_what_was_packed_before_the_call(
        self, layer: PackedLayer, states: tuple[Tensor, Tensor]
    ) -> None:
        keys, values = states
        feed(layer, keys, values, [150])
        for start, count in ((150, 1), (151, 5), (156, 100), (256, 77)):
            before = decoded(layer)
            got = layer.update(keys[:, :, start : start + count], values[:, :, start : start + count])
            for handle, old, new in zip(got, before, (keys, values), strict=True):
                assert isinstance(handle, KVHandle)
                dense = handle.dense()
                assert torch.equal(dense[:, :, :start].float(), old)
                assert torch.equal(dense[:, :, start:], new[:, :, start : start + count])
