"""The conformance suite: what every backend owes its users, whatever it computes.

A third party runs it on its own backend by subclassing in a test file:

```python
class TestMine(BackendConformance):
    @pytest.fixture
    def cache_config(self):
        return {"backend": "mine", "residual_length": 16}
```

Layers are fed random tensors, so that every boundary is crossed within a few hundred tokens and every claim
is about bytes, not about text.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention.reference import AttentionOptions, attend
from ..cache import KVCache, build_cache
from ..estimation import estimate
from ..layers.base import PackedLayer
from ..layers.handle import KVHandle
from .comparison import assert_close, relative_rms, sqnr_db
from .generation import run_scenario
from .models import tiny_model

__all__ = ["BackendConformance", "decoded", "feed"]


def feed(layer: PackedLayer, keys: Tensor, values: Tensor, chunks: Iterable[int]) -> None:
    """Feed `(B, H, T, D)` keys and values to a layer in calls of the given lengths."""
    start = 0
    for count in chunks:
        layer.update(keys[:, :, start : start + count], values[:, :, start : start + count])
        start += count


def decoded(layer: PackedLayer) -> tuple[Tensor, Tensor]:
    """Everything a layer holds, as attention would read it next: two `(B, H, T, D)` tensors."""
    read = []
    for stream in layer.streams:
        parts = [stream.decode(0, stream.packed_length)] if stream.packed_length else []
        read.append(torch.cat([*parts, stream.tail.view().float()], dim=2))
    return read[0], read[1]


def state_bytes(layer: PackedLayer) -> dict[str, Tensor]:
    """The tensors in use, without slack, for comparing two layers bit for bit."""
    return layer.state()[0]


class BackendConformance:
    """Tests of one backend; `cache_config` says which, with settings that pack within a few dozen tokens."""

    batch_size: ClassVar[int] = 2
    tokens: ClassVar[int] = 333

    @pytest.fixture
    def cache_config(self) -> dict[str, Any]:
        """The backend and its options."""
        raise NotImplementedError("Give the suite a `cache_config` fixture.")

    @pytest.fixture
    def model(self) -> Any:
        """A tiny model, of a family with grouped queries and rotary embeddings."""
        return tiny_model("llama")

    @pytest.fixture
    def cache(self, model: Any, cache_config: dict[str, Any]) -> KVCache:
        """A fresh cache of the backend."""
        return build_cache(model, cache_config)

    @pytest.fixture
    def layer(self, cache: KVCache) -> PackedLayer:
        """Its first layer."""
        return cache.packed_layers[0]

    @pytest.fixture(params=[(2, 64), (3, 80), (1, 128), (4, 24)], ids=lambda s: f"H{s[0]}-D{s[1]}")
    def states(self, request: pytest.FixtureRequest) -> tuple[Tensor, Tensor]:
        """Random keys and values, with channels of very different size as keys have them."""
        heads, head_dim = request.param
        return self._random_states(heads, head_dim, self.tokens)

    def _random_states(self, heads: int, head_dim: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shape = (self.batch_size, heads, tokens, head_dim)
        keys = torch.randn(shape, generator=generator)
        return keys, torch.randn(shape, generator=generator)

    # -- what transformers asks of a layer
    # ---------------------------------------------------------------------------

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
        assert layer.key_stream_.packed_length > 0 and layer.value_stream_.packed_length > 0

    def test_first_call_is_exact(self, layer: PackedLayer, states: tuple[Tensor, Tensor]) -> None:
        got = layer.update(*states)
        assert torch.equal(got[0], states[0]) and torch.equal(got[1], states[1])

    def test_any_split_ends_in_the_same_bytes(
        self, cache: KVCache, cache_config: dict[str, Any], model: Any, states: tuple[Tensor, Tensor]
    ) -> None:
        keys, values = states
        reference = state_bytes(_fed(cache.packed_layers[0], keys, values, [self.tokens]))
        splits = [
            [1] * self.tokens,
            [100, 1, 1, 100, 131],
            [64, 64, 64, 64, 64, 13],
            [self.tokens - 1, 1],
            [7] * 47 + [4],
        ]
        for split in splits:
            assert sum(split) == self.tokens
            other = state_bytes(_fed(build_cache(model, cache_config).packed_layers[0], keys, values, split))
            assert other.keys() == reference.keys()
            for name, tensor in reference.items():
                assert torch.equal(tensor, other[name]), f"{name} differs when fed in calls of {split[:5]}..."

    def test_packed_blocks_never_change(self, layer: PackedLayer, states: tuple[Tensor, Tensor]) -> None:
        keys, values = states
        feed(layer, keys, values, [200])
        before = [(s.packed_length, s.decode(0, s.packed_length)) for s in layer.streams]
        feed(layer, keys[:, :, 200:], values[:, :, 200:], [1] * 60 + [73])
        for (length, old), stream in zip(before, layer.streams, strict=True):
            assert torch.equal(old, stream.decode(0, length))

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

    # -- fidelity
    # ----------------------------------------------------------------------------------------------------

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
            got = layer.update(keys[:, :, start : start + count], values[:, :, start : start + count])
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
        clean = _fed(build_cache(model, cache_config).packed_layers[0], keys, values, [self.tokens])
        for tensor in (keys, values):
            tensor[0, 0, 5, 3], tensor[0, 0, 40, 2], tensor[1, 0, 70, 1] = math.nan, math.inf, -math.inf
        for split in ([self.tokens], [1] * self.tokens):
            dirty = _fed(build_cache(model, cache_config).packed_layers[0], keys, values, split)
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

    # -- padding and sinks
    # -------------------------------------------------------------------------------------------

    def test_pads_do_not_touch_a_row(self, model: Any, cache_config: dict[str, Any]) -> None:
        keys, values = self._random_states(2, 32, self.tokens)
        pads = torch.tensor([0, 128])  # a multiple of every group, so that the groups' phase is the same
        for tensor in (keys, values):
            tensor[1, :, :128] = 1e4
        mask = (torch.arange(self.tokens) >= pads[:, None]).long()
        padded = build_cache(model, cache_config).bind(model, mask).packed_layers[0]
        feed(padded, keys, values, [200, 1, 1, self.tokens - 202])
        alone = build_cache(model, cache_config).packed_layers[0]
        feed(alone, keys[1:, :, 128:], values[1:, :, 128:], [72, 1, 1, self.tokens - 202])
        for got, expected, stream in zip(decoded(padded), decoded(alone), padded.streams, strict=True):
            # Where a block of tokens is packed together its end is set by the batch, so compare what both
            # packed.
            common = min(stream.packed_length, 128 + getattr(alone, f"{stream.side}_stream_").packed_length)
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

    # -- verbs
    # -------------------------------------------------------------------------------------------------------

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
        feed(layer, keys, values, [300])
        before = decoded(layer)
        for removed, length in ((0, 300), (3, 297), (64, 233), (90, 143)):
            layer.crop(-removed)
            assert layer.get_seq_length() == length
            for got, old in zip(decoded(layer), before, strict=True):
                assert torch.equal(got, old[:, :, :length])
        feed(layer, keys[:, :, 143:], values[:, :, 143:], [1] * 40 + [150])
        assert layer.get_seq_length() == 333
        for got, exact in zip(decoded(layer), (keys, values), strict=True):
            assert sqnr_db(exact[:, :, 143:], got[:, :, 143:]) >= cache.config.sqnr_floor_db
        layer.crop(-333)
        assert layer.get_seq_length() == 0

    def test_rejected_drafts_leave_no_trace(
        self, model: Any, cache_config: dict[str, Any], states: tuple[Tensor, Tensor]
    ) -> None:
        keys, values = states
        plain = _fed(build_cache(model, cache_config).packed_layers[0], keys, values, [self.tokens])
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
        layer.reset()
        assert layer.get_seq_length() == 0 and layer.kv_bytes == 0
        feed(layer, keys, values, [250])
        for got, old in zip(decoded(layer), before, strict=True):
            assert torch.equal(got, old)

    def test_saved_and_loaded_it_continues(
        self, model: Any, cache: KVCache, cache_config: dict[str, Any], tmp_path: Path
    ) -> None:
        inputs = torch.randint(3, 120, (2, 90))
        with torch.no_grad():
            model(inputs, past_key_values=cache)
            cache.save_pretrained(tmp_path)
            loaded = KVCache.from_pretrained(tmp_path, model)
            more = torch.randint(3, 120, (2, 1))
            expected = model(more, past_key_values=cache).logits
            assert torch.equal(expected, model(more, past_key_values=loaded).logits)
        assert type(loaded) is type(cache) and loaded.config == cache.config
        assert loaded.kv_bytes() == cache.kv_bytes()

    # -- bytes
    # -------------------------------------------------------------------------------------------------------

    def test_bytes_are_counted_and_predicted(
        self, model: Any, cache: KVCache, cache_config: dict[str, Any]
    ) -> None:
        inputs = torch.randint(3, 120, (2, 150))
        with torch.no_grad():
            model(inputs, past_key_values=cache)
            for step in range(70):
                model(inputs[:, :1], past_key_values=cache)
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
        keys, values = self._random_states(2, 64, 1200)
        feed(layer, keys, values, [1000])
        moved = 0
        for start in range(1000, 1200):
            before = [t.data_ptr() for t in layer.tensors().values()]
            feed(layer, keys[:, :, start:], values[:, :, start:], [1])
            moved += before != [t.data_ptr() for t in layer.tensors().values()]
        assert moved <= 10

    # -- options
    # -----------------------------------------------------------------------------------------------------

    def test_options_round_trip(self, cache: KVCache) -> None:
        config = type(cache).config_class.from_dict(cache.config.to_dict())
        assert config == cache.config

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("residual_length", -1), ("residual_length", "many"), ("sink_length", 1.5), ("kernel", "fast"),
            ("skip_layers", 3), ("skip_layers", [99]), ("layer_overrides", {"99": {}}),
            ("layer_overrides", [1]), ("layer_overrides", {"0": {"no_such_option": 1}}), ("no_such_option", 1),
            ("budget", 128),
        ],
    )  # fmt: skip
    def test_wrong_options_are_named(
        self, model: Any, cache_config: dict[str, Any], option: str, value: object
    ) -> None:
        if (
            option == "budget"
            and option in type(build_cache(model, cache_config)).config_class.option_names()
        ):
            pytest.skip("an evicting backend has a budget")
        with pytest.raises(ValueError, match=option) as failure:
            build_cache(model, {**cache_config, option: value})
        assert repr(value).strip("[]{}").split(":")[0] in str(failure.value)

    def test_layers_can_be_skipped_and_overridden(self, model: Any, cache_config: dict[str, Any]) -> None:
        options = {"skip_layers": [-1], "layer_overrides": {"0": {"residual_length": 4096}}}
        cache = build_cache(model, {**cache_config, **options})
        with torch.no_grad():
            model(torch.randint(3, 120, (1, 200)), past_key_values=cache)
            model(torch.randint(3, 120, (1, 1)), past_key_values=cache)
        assert cache.report().dense_layers == {len(cache.layers) - 1: "skip_layers"}
        assert cache.packed_layers[0].key_stream_.packed_length == 0


def _fed(layer: PackedLayer, keys: Tensor, values: Tensor, chunks: Iterable[int]) -> PackedLayer:
    feed(layer, keys, values, chunks)
    return layer
