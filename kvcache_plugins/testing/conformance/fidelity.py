"""Quality of what is read back: against the states, and against attention over decoded tokens."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...attention.reference import AttentionOptions, attend
from ...building import build_cache
from ...cache import KVCache
from ...layers.base import PackedLayer
from ...layers.handle import KVHandle
from ..comparison import assert_close, relative_rms, sqnr_db
from ..generation import run_scenario
from .feeding import decoded, fed, feed
from .fixtures import Fixtures

__all__ = ["FidelityConformance"]


class FidelityConformance(Fixtures):
    """Errors that are small and not zero; attention over codes; pads, sinks, numbers that are not finite."""

    def test_error_is_small_and_not_zero(
        self, cache: KVCache, layer: PackedLayer, states: tuple[Tensor, Tensor]
    ) -> None:
        feed(layer, *states, [self.tokens])
        for stream, exact, got in zip(layer.streams, states, decoded(layer), strict=True):
            packed = stream.packed_length
            noise = relative_rms(exact[:, :, :packed], got[:, :, :packed])
            assert noise > 1e-4, f"{stream.side}: nothing seems to have been quantized (error {noise})"
            assert sqnr_db(exact[:, :, :packed], got[:, :, :packed]) >= cache.config.sqnr_floor_db
            assert torch.equal(exact[:, :, packed:], got[:, :, packed:])

    def test_attention_over_codes_equals_attention_over_decoded_tokens(
        self, layer: PackedLayer, states: tuple[Tensor, Tensor]
    ) -> None:
        keys, values = states
        feed(layer, keys, values, [300])
        start = 300
        for count, groups in ((1, 1), (1, 4), (3, 2), (20, 7)):
            # each on a copy: the queries of a model's layer always have the same number of heads
            got, _ = (
                target.update(keys[:, :, start : start + count], values[:, :, start : start + count])
                for target in (copy.deepcopy(layer), layer)
            )
            start += count
            query = torch.randn(self.batch_size, keys.shape[1] * groups, count, keys.shape[3])
            mask = torch.ones(count, start, dtype=torch.bool).tril(start - count)
            assert isinstance(got[0], KVHandle) and isinstance(got[1], KVHandle)
            exact_keys, exact_values = got[0].dense(), got[1].dense()
            expected = F.scaled_dot_product_attention(
                query, exact_keys, exact_values, attn_mask=mask, enable_gqa=True
            )
            fused = F.scaled_dot_product_attention(query, got[0], got[1], attn_mask=mask, enable_gqa=True)
            assert_close("fused attention", expected, fused, 1e-5)
            causal = attend(query, got[0].tokens, got[1].tokens, AttentionOptions(is_causal=True))
            assert_close("causal attention", expected, causal, 1e-5)

    def test_with_nothing_packed_it_is_the_dense_cache(
        self, model: Any, cache_config: dict[str, Any]
    ) -> None:
        config = {**cache_config, "residual_length": 4096}
        expected = run_scenario(model, "greedy", max_new_tokens=40)
        assert torch.equal(expected, run_scenario(model, "greedy", cache_config=config, max_new_tokens=40))

    def test_values_that_are_not_finite_stay_where_they_are(
        self, model: Any, cache_config: dict[str, Any], states: tuple[Tensor, Tensor]
    ) -> None:
        keys, values = (t.clone() for t in states)
        clean = fed(build_cache(model, cache_config).packed_layers[0], keys, values, [self.tokens])
        for tensor in (keys, values):
            tensor[0, 0, 5, 3], tensor[0, 0, 40, 2], tensor[1, 0, 70, 1] = math.nan, math.inf, -math.inf
        for split in ([self.tokens], [1] * self.tokens):
            dirty = fed(build_cache(model, cache_config).packed_layers[0], keys, values, split)
            for stream, reference, exact in zip(dirty.streams, clean.streams, states, strict=True):
                got = stream.decode(0, stream.packed_length)
                assert torch.isfinite(got).all()
                # Other tokens may be encoded a little differently (the range of their group changed), not
                # wildly.
                others = torch.ones(stream.packed_length, dtype=torch.bool)
                others[[5, 40, 70]] = False
                want = reference.decode(0, stream.packed_length)
                error = (got - exact[:, :, : stream.packed_length])[:, :, others].abs().max()
                assert error <= 1.5 * (want - exact[:, :, : stream.packed_length]).abs().max()

    def test_pads_do_not_touch_a_row(self, model: Any, cache_config: dict[str, Any]) -> None:
        keys, values = self.random_states(2, 32, self.tokens)
        pads = torch.tensor([0, 128])  # a multiple of every group, so that the groups' phase is the same
        for tensor in (keys, values):
            tensor[1, :, :128] = 1e4
        mask = (torch.arange(self.tokens) >= pads[:, None]).long()
        padded = build_cache(model, cache_config).bind(model, mask).packed_layers[0]
        feed(padded, keys, values, [200, 1, 1, self.tokens - 202])
        alone = build_cache(model, cache_config).packed_layers[0]
        feed(alone, keys[1:, :, 128:], values[1:, :, 128:], [72, 1, 1, self.tokens - 202])
        for got, expected, stream, other in zip(
            decoded(padded), decoded(alone), padded.streams, alone.streams, strict=True
        ):
            # Where a block of tokens is packed together its end is set by the batch, so compare what both
            # packed.
            common = min(stream.packed_length, 128 + other.packed_length)
            assert common > 128
            assert torch.equal(got[1, :, 128:common], expected[0, :, : common - 128])

    def test_sinks_stay_exact(
        self, model: Any, cache_config: dict[str, Any], states: tuple[Tensor, Tensor]
    ) -> None:
        keys, values = states
        pads = torch.tensor([3, 70])
        mask = (torch.arange(self.tokens) >= pads[:, None]).long()
        cache = build_cache(model, {**cache_config, "sink_length": 4}).bind(model, mask)
        for split in ([self.tokens], [1] * self.tokens):
            layer = copy.deepcopy(cache.packed_layers[0])
            feed(layer, keys, values, split)
            for got, exact in zip(decoded(layer), (keys, values), strict=True):
                for row, pad in enumerate(pads.tolist()):
                    assert torch.equal(got[row, :, pad : pad + 4], exact[row, :, pad : pad + 4])
