"""KIVI: keys with a projection bias (Qwen 2.5), rotary modes, group sizes."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, Qwen2Config, Qwen2ForCausalLM
from transformers.cache_utils import QuantizedCache

import kvcache_plugins as kvp
from kvcache_plugins.layers.codec import AffineCodec, RotatedCodec
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing import tiny_model
from kvcache_plugins.testing.comparison import relative_rms
from kvcache_plugins.testing.conformance import decoded

TOKENS = torch.randint(0, 512, (1, 480), generator=torch.Generator().manual_seed(3))


@lru_cache(maxsize=2)
def qwen(bias_norm: float) -> Any:
    """A small Qwen 2 whose first layer's keys have a bias of the given norm; Qwen 2.5's is about 600."""
    torch.manual_seed(1)
    config = Qwen2Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=512, max_position_embeddings=4096,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    bias = model.model.layers[0].self_attn.k_proj.bias
    with torch.no_grad():
        direction = torch.randn_like(bias)
        bias.copy_(direction / direction.norm() * bias_norm)
    return model


def logits(model: Any, cache: Cache) -> Tensor:
    """Logits of a prompt's last token and of what follows, read through the cache in blocks."""
    with torch.no_grad():
        out = [model(TOKENS[:, :256], **as_argument(cache)).logits[:, -1:]]
        out += [model(TOKENS[:, i : i + 32], **as_argument(cache)).logits for i in range(256, 480, 32)]
    return torch.cat(out, dim=1)


def error(model: Any, make: Callable[[], Cache]) -> float:
    return relative_rms(logits(model, DynamicCache(config=model.config)), logits(model, make()))


def key_error(bias_norm: float, **options: Any) -> float:
    """RMS error of the first layer's packed keys."""
    model = qwen(bias_norm)
    dense, cache = DynamicCache(config=model.config), kvp.build_cache(model, {"backend": "kivi", **options})
    with torch.no_grad():
        model(TOKENS, **as_argument(dense))
        model(TOKENS, **as_argument(cache))
    layer = cache.packed_layers[0]
    packed = layer.stored_keys.packed_length
    return float((decoded(layer)[0] - dense.layers[0].keys)[:, :, :packed].square().mean().sqrt())


@pytest.mark.parametrize("nbits", [2, 3, 4])
def test_a_key_bias_costs_nothing(nbits: int) -> None:
    with_bias, without = key_error(600.0, nbits=nbits), key_error(0.0, nbits=nbits, rope_mode="block")
    assert with_bias == pytest.approx(without, rel=0.05)
    assert key_error(600.0, nbits=nbits, rope_mode="post") > 5 * with_bias


def test_the_qwen_case() -> None:
    model = qwen(600.0)
    assert (
        error(model, lambda: kvp.build_cache(model, {"backend": "kivi", "key_bits": 4, "value_bits": 8}))
        < 0.02
    )
    kivi = error(model, lambda: kvp.build_cache(model, {"backend": "kivi"}))
    # A bias this large makes attention pick single tokens, so the 4-bit error of a value is not averaged.
    assert kivi < 0.08
    assert error(model, lambda: kvp.build_cache(model, {"backend": "kivi", "rope_mode": "post"})) > 3 * kivi


def test_the_qwen_case_breaks_the_built_in_cache() -> None:
    pytest.importorskip("optimum.quanto")
    model = qwen(600.0)
    assert error(model, lambda: QuantizedCache("quanto", model.config, nbits=4)) > 0.3


@pytest.mark.parametrize(("options", "warned"), [({}, True), ({"key_bits": 8}, False), ({"nbits": 2}, True)])
def test_int4_warns_of_a_key_bias(options: dict[str, Any], warned: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kvp.build_cache(qwen(600.0), {"backend": "int4", **options})
    assert any("Layer 0 adds a bias" in str(w.message) for w in caught) == warned
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvp.build_cache(qwen(0.0), {"backend": "int4", **options})


@pytest.mark.parametrize(
    ("family", "rope_mode", "is_block"),
    [
        ("llama", "auto", False), ("llama", "block", True), ("qwen2", "auto", True), ("qwen2", "post", False),
        ("gpt_neox", "auto", True), ("gpt2", "auto", False), ("deepseek_v3", "auto", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("source", ["model", "config"])
def test_rotation_is_undone_where_keys_have_a_bias(
    family: str, rope_mode: str, is_block: bool, source: str
) -> None:
    model = tiny_model(family)
    cache = kvp.build_cache(
        model if source == "model" else model.config, {"backend": "kivi", "rope_mode": rope_mode}
    )
    codec = cache.packed_layers[0].key_stream(16).codec
    assert isinstance(codec, RotatedCodec if is_block else AffineCodec)


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_tables_of_a_block_are_those_of_all_layers_and_caches(kernel: str) -> None:
    """`kv_bytes()` does not count them."""
    model = tiny_model("llama", head_dim=44, num_hidden_layers=3)
    caches = [
        kvp.build_cache(model, {"backend": "kivi", "rope_mode": "block", "kernel": kernel}) for _ in range(2)
    ]
    for cache in caches:
        for tokens in torch.arange(3, 123).repeat(1, 3).split([300, 59, 1], dim=1):
            with torch.inference_mode():
                model(tokens, **as_argument(cache))
        assert all(layer.stored_keys.packed_length for layer in cache.packed_layers)
    tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
    tables = [tensor for tensor in tensors if tensor.shape == (32, 22)]
    assert len(tables) == 2, "a cosine and a sine"
    assert not any(table.is_inference() for table in tables)


def test_block_without_rotary_embedding_says_so() -> None:
    with pytest.warns(UserWarning, match=r"rope_mode='block'.*no rotary"):
        kvp.build_cache(tiny_model("gpt2"), {"backend": "kivi", "rope_mode": "block"})


@pytest.mark.parametrize(
    ("head_dim", "group", "expected"),
    [(128, 32, 32), (80, 32, 16), (96, 64, 48), (112, 32, 16), (24, 32, 24), (64, 128, 64)],
)
def test_groups_of_channels_fit_the_head(head_dim: int, group: int, expected: int) -> None:
    layer = kvp.build_cache(
        tiny_model("llama"), {"backend": "kivi", "q_group_size": group, "residual_length": 128}
    ).layers[0]
    assert layer.value_stream(head_dim).codec.granularity.channels == expected
