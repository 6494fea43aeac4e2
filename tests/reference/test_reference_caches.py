"""The fake-quantized caches: what they read as quantized, and what as exact."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from .caches import (
    FakeQuantizer,
    Int4Oracle,
    KiviOracle,
    OracleLayer,
    oracle_cache,
    rotate_half_split,
    smoothing_factors,
    value_group_size,
)
from .host import CACHE
from .quantizers import asymmetric, symmetric8
from .test_reference import CONFIG


class TestCaches:
    @staticmethod
    def states(length: int, *, batch_size: int = 2, head_dim: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
        """Random keys and values of shape `(B, 2, T, D)`."""
        keys, values = torch.randn(2, batch_size, 2, length, head_dim)
        return keys, values

    @pytest.mark.parametrize(
        ("length", "keys", "values"),
        [(0, 0, 0), (31, 0, 0), (32, 32, 0), (33, 32, 1), (63, 32, 31), (64, 64, 32), (100, 96, 68)],
    )
    def test_kivi_quantized_lengths(self, length: int, keys: int, values: int) -> None:
        assert KiviOracle(residual_length=32).quantized_lengths(length) == (keys, values)

    def test_per_token_quantized_lengths(self) -> None:
        assert Int4Oracle().quantized_lengths(64) == (0, 0)
        assert Int4Oracle().quantized_lengths(65) == (1, 1)

    def test_what_a_call_reads(self) -> None:
        keys, values = self.states(40)
        layer = OracleLayer(KiviOracle(key_bits=2, value_bits=2, q_group_size=16, residual_length=16))
        read = layer.update(keys[:, :, :35], values[:, :, :35])
        assert torch.equal(read[0], keys[:, :, :35])
        assert torch.equal(read[1], values[:, :, :35])

        # 35 tokens before this call: 32 keys and 19 values are quantized, the last 5 tokens are new.
        read_keys, read_values = layer.update(keys[:, :, 35:], values[:, :, 35:])
        assert torch.equal(read_keys[:, :, 32:], keys[:, :, 32:])
        assert torch.equal(read_values[:, :, 19:], values[:, :, 19:])
        # Group 1 of channel 3 of row 1, head 0, and the only group of token 18's value.
        expected = asymmetric(keys[1, 0, 16:32, 3], 2, axis=0).dequantized
        assert torch.equal(read_keys[1, 0, 16:32, 3], expected)
        assert torch.equal(read_values[1, 0, 18], asymmetric(values[1, 0, 18], 2, axis=0).dequantized)
        assert not torch.equal(read_keys[:, :, :32], keys[:, :, :32])
        assert layer.get_seq_length() == 40
        assert layer.get_mask_sizes(3) == (43, 0)

    @pytest.mark.parametrize(
        ("method", "options"),
        [
            ("kivi", {"q_group_size": 16, "residual_length": 32}),
            ("int8", {}),
            ("int4", {"residual_length": 16}),
            ("float8", {"format": "e5m2"}),
        ],
    )
    def test_splits_do_not_matter(self, method: str, options: dict[str, Any]) -> None:
        keys, values = self.states(101)
        last_reads = []
        for sizes in ([100, 1], [1] * 101, [7, 50, 43, 1]):
            cache = oracle_cache(CONFIG, method, **options)
            for chunk_keys, chunk_values in zip(keys.split(sizes, 2), values.split(sizes, 2), strict=True):
                read = cache.update(chunk_keys, chunk_values, 0)
            last_reads.append(read)
        for read in last_reads[1:]:
            assert torch.equal(read[0], last_reads[0][0])
            assert torch.equal(read[1], last_reads[0][1])
        assert not torch.equal(last_reads[0][0], keys)

    def test_low_precision_is_kept(self) -> None:
        keys, values = (states.bfloat16() for states in self.states(20))
        cache = oracle_cache(CONFIG, "int8")
        cache.update(keys, values, 0)
        read_keys, _ = cache.update(keys[:, :, :1], values[:, :, :1], 0)
        assert read_keys.dtype == torch.bfloat16
        assert torch.equal(read_keys[:, :, :20], symmetric8(keys, axis=-1).dequantized.bfloat16())

    def test_padding_does_not_touch_the_statistics(self) -> None:
        keys, values = self.states(33)
        noisy = keys.clone()
        noisy[0, :, :5] = 1000.0
        reads = []
        for states in (keys, noisy):
            layer = OracleLayer(KiviOracle(q_group_size=32, residual_length=32), padding=[5, 0])
            layer.update(states[:, :, :32], values[:, :, :32])
            reads.append(layer.update(states[:, :, 32:], values[:, :, 32:])[0])
        assert torch.equal(reads[0][:, :, 5:], reads[1][:, :, 5:])

    def test_rows_move_with_their_padding(self) -> None:
        keys, values = self.states(33)
        layer = OracleLayer(KiviOracle(q_group_size=32, residual_length=32), padding=[5, 0])
        layer.update(keys, values)
        layer.batch_repeat_interleave(2)
        layer.batch_select_indices(torch.tensor([0, 2]))
        layer.reorder_cache(torch.LongTensor([1, 0]))
        assert layer.padding is not None
        assert layer.padding.tolist() == [0, 5]
        assert layer.keys is not None
        assert torch.equal(layer.keys, keys[[1, 0]])

    def test_rotation_by_hand(self) -> None:
        # One pair (0, 1) with a quarter turn per position, two channels left alone.
        states = torch.tensor([1.0, 0.0, 5.0, 6.0]).expand(1, 1, 3, 4)
        rotated = rotate_half_split(states, torch.arange(3), torch.tensor([math.pi / 2], dtype=torch.float64))
        expected = torch.tensor([[1.0, 0.0, 5.0, 6.0], [0.0, 1.0, 5.0, 6.0], [-1.0, 0.0, 5.0, 6.0]])
        torch.testing.assert_close(rotated[0, 0], expected, atol=1e-7, rtol=0)

    def test_rotation_is_the_models_own(self) -> None:
        rotary = LlamaRotaryEmbedding(CONFIG)
        keys, _ = self.states(50)
        cos, sin = rotary(keys, torch.arange(50)[None])
        expected, _ = apply_rotary_pos_emb(keys, keys, cos, sin)
        torch.testing.assert_close(rotate_half_split(keys, torch.arange(50), rotary.inv_freq), expected)

    def test_biased_key_channels(self) -> None:
        # Unit-variance keys, six channels off by 100 before rotation; error of the logits of unit-variance
        # queries.
        head_dim, length = 128, 512
        inv_freq = 10000 ** (-torch.arange(64, dtype=torch.float64) / 64)
        keys = torch.randn(1, 1, length, head_dim)
        keys[..., torch.randperm(head_dim)[:6]] += 100.0
        keys = rotate_half_split(keys, torch.arange(length), inv_freq)
        query = torch.randn(1, 1, 256, head_dim)
        valid = torch.ones(1, length, dtype=torch.bool)

        def logit_error(quantizer: FakeQuantizer) -> float:
            error = quantizer.read_keys(keys, length, valid, length) - keys
            return float((query @ error.mT * head_dim**-0.5).std())

        block: dict[str, Any] = {"rope_mode": "block", "inv_freq": inv_freq}
        assert logit_error(KiviOracle(**block)) == pytest.approx(0.079, abs=0.002)
        assert logit_error(KiviOracle(2, 2, **block)) == pytest.approx(0.397, abs=0.01)
        assert logit_error(KiviOracle()) > 0.3
        assert logit_error(Int4Oracle()) > 2

    def test_block_mode_makes_a_rotating_offset_free(self) -> None:
        # Keys that are one constant vector times the rotation of their position: constant again once rotated
        # back.
        inv_freq = 10000 ** (-torch.arange(8) / 8)
        offset = torch.linspace(-50, 50, 16).half().float().expand(1, 1, 65, 16)
        keys = rotate_half_split(offset, torch.arange(65), inv_freq)
        errors = {}
        for rope_mode in ("post", "block"):
            quantizer = KiviOracle(2, 2, residual_length=32, rope_mode=rope_mode, inv_freq=inv_freq)
            valid = torch.ones(1, 65, dtype=torch.bool)
            read = quantizer.read_keys(keys, 32, valid, 65)
            errors[rope_mode] = float((read - keys[:, :, :32]).abs().max())
        assert errors["block"] < 1e-4
        assert errors["post"] > 1

    def test_smoothing_factors(self) -> None:
        keys = torch.zeros(1, 1, 70, 4)
        keys[0, 0, 0, 0] = 100.0  # padding
        keys[0, 0, 1] = torch.tensor([4.0, 0.0, -9.0, 0.0])
        keys[0, 0, 65, 1] = 100.0  # the 65th real token
        valid = torch.ones(1, 70, dtype=torch.bool)
        valid[0, 0] = False
        factors = smoothing_factors(keys, valid, 0.5)
        # Pairs (0, 2) and (1, 3): the square roots of 9 and of the floor 1e-5.
        torch.testing.assert_close(factors[0, 0, 0], torch.tensor([3.0, 1e-5**0.5, 3.0, 1e-5**0.5]))

    def test_smoothing_is_undone_on_reading(self) -> None:
        keys, values = self.states(80)
        keys[..., 3] *= 100
        errors = {}
        for smooth in (0.0, 0.5):
            cache = oracle_cache(CONFIG, "int4", residual_length=0, smooth=smooth)
            cache.update(keys, values, 0)
            read, _ = cache.update(keys[:, :, :1], values[:, :, :1], 0)
            errors[smooth] = float((read[:, :, :80] - keys)[..., [0, 1, 2]].abs().mean())
        assert 0 < errors[0.5] < errors[0.0]

    @pytest.mark.parametrize(("head_dim", "expected"), [(64, 32), (80, 16), (96, 32), (112, 16), (24, 24)])
    def test_value_group_size(self, head_dim: int, expected: int) -> None:
        assert value_group_size(head_dim, 32) == expected

    def test_wrong_options(self) -> None:
        with pytest.raises(ValueError, match="method must be one of"):
            oracle_cache(CONFIG, "int5")
        with pytest.raises(TypeError, match="smooth"):
            oracle_cache(CONFIG, "int8", smooth=0.5)
        with pytest.raises(ValueError, match="multiple of q_group_size"):
            oracle_cache(CONFIG, "kivi", residual_length=100)
        with pytest.raises(ValueError, match="needs inv_freq"):
            oracle_cache(CONFIG, "kivi", rope_mode="block")

    def test_generate_runs(self) -> None:
        torch.manual_seed(0)
        model = LlamaForCausalLM(CONFIG).eval()
        prompt = torch.randint(2, 64, (1, 20))
        options = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
        cache = oracle_cache(CONFIG, "int8")
        text = model.generate(prompt, **{CACHE: cache}, **options)
        assert text.shape == (1, 60)
        assert cache.get_seq_length() == 59
        never = oracle_cache(CONFIG, "int8", residual_length=60)
        dense = model.generate(prompt, **options)
        assert torch.equal(model.generate(prompt, **{CACHE: never}, **options), dense)
