"""Bytes: what a cache takes, what it takes while it is filled, and what it says of both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig

import kvcache_plugins as kvp
from kvcache_plugins.models.cache_argument import as_argument, cache_of
from kvcache_plugins.testing import tiny_model

CONFIG = LlamaConfig(
    num_hidden_layers=1, hidden_size=1024, num_attention_heads=8, num_key_value_heads=8, head_dim=128,
    vocab_size=128, dtype=torch.bfloat16, max_position_embeddings=65536,
)  # fmt: skip


def filled(options: dict[str, Any], tokens: int) -> kvp.KVCache:
    cache = kvp.build_cache(CONFIG, options)
    states = torch.randn(1, 8, tokens, 128, dtype=torch.bfloat16)
    cache.layers[0].update(states, states)
    return cache


@pytest.mark.parametrize(
    ("options", "tokens", "most"),
    [
        ({"backend": "kivi", "nbits": 4, "q_group_size": 64}, 4096, 5.1),
        ({"backend": "kivi", "nbits": 4, "q_group_size": 64}, 32768, 4.65),
        ({"backend": "kivi", "nbits": 2, "q_group_size": 32}, 4096, 3.6),
        ({"backend": "kivi", "nbits": 2, "q_group_size": 32}, 32768, 3.15),
        ({"backend": "int8"}, 4096, 8.5),
        ({"backend": "int4"}, 4096, 4.75),
        ({"backend": "float8"}, 4096, 8.5),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_effective_bits(options: dict[str, Any], tokens: int, most: float) -> None:
    cache = filled(options, tokens)
    report = cache.report()
    assert report.dense_bytes == 2 * 8 * tokens * 128 * 2
    assert report.bits_per_value == 8 * cache.kv_bytes() / (2 * 8 * tokens * 128)
    assert report.memory_fraction == pytest.approx(report.bits_per_value / 16)
    assert report.bits_per_value <= most
    assert kvp.estimate(CONFIG, options, tokens) == cache.kv_bytes()


@pytest.mark.parametrize("kernel", ["torch", "auto"])
@pytest.mark.parametrize(
    "options", [{"backend": "kivi"}, {"backend": "kivi", "rope_mode": "block"}, {"backend": "int8"}]
)
def test_a_long_prompt_is_encoded_in_slabs(options: dict[str, Any], kernel: str) -> None:
    tokens = 16384
    states = torch.randn(1, 8, tokens, 128, dtype=torch.bfloat16)
    cache = kvp.build_cache(CONFIG, {**options, "kernel": kernel})
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        cache.layers[0].update(states, states)
    allocated = peak = 0
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    # The profile did see the buffers; in torch there are temporaries besides.
    assert peak > (cache.kv_bytes() if kernel == "torch" else 0.9 * cache.kv_bytes())
    assert peak <= 1.25 * cache.kv_bytes() + 64 * 2**20


@pytest.mark.parametrize("backend", ["kivi", "int8", "int4", "float8"])
def test_estimate_equals_what_is_taken(backend: str) -> None:
    for tokens in (1, 63, 129, 1000):
        assert (
            kvp.estimate(CONFIG, {"backend": backend}, tokens)
            == filled({"backend": backend}, tokens).kv_bytes()
        )


def test_estimate_of_the_dense_cache() -> None:
    assert kvp.estimate(CONFIG, {"backend": "dense"}, 1000, batch_size=3) == 3 * 1000 * 8 * 128 * 2 * 2
    with pytest.raises(ValueError, match=r"the dense cache has no options, got \{'nbits': 4\}"):
        kvp.estimate(CONFIG, {"backend": "dense", "nbits": 4}, 1000)


@pytest.mark.parametrize(
    ("name", "value"), [("tokens", 0), ("tokens", 1.5), ("batch_size", -1), ("tokens", True)]
)
def test_estimate_names_a_wrong_count(name: str, value: object) -> None:
    arguments: dict[str, Any] = {"tokens": 10, "batch_size": 1, name: value}
    with pytest.raises(ValueError, match=rf"{name} must be an integer >= 1, got {value!r}"):
        kvp.estimate(CONFIG, {"backend": "kivi"}, **arguments)


def test_estimate_takes_counts_of_numpy() -> None:
    given: dict[str, Any] = {"tokens": np.int64(1000), "batch_size": np.int32(2), "new_tokens": np.int64(3)}
    found = kvp.estimate(CONFIG, {"backend": "int8"}, **given, max_cache_length=np.int64(1002))  # type: ignore[arg-type]
    assert found == kvp.estimate(CONFIG, {"backend": "int8"}, 1000, 2, new_tokens=3)
    assert type(found) is int
    with pytest.raises(ValueError, match="estimate: max_cache_length must be an integer >= 1, or None"):
        kvp.estimate(CONFIG, {"backend": "int8"}, 10, max_cache_length=0)


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "torch.bfloat16"])
def test_a_dtype_may_be_named(name: str) -> None:
    expected = kvp.estimate(CONFIG, {"backend": "int8"}, 100, dtype=torch.bfloat16)
    assert kvp.estimate(CONFIG, {"backend": "int8"}, 100, dtype=name) == expected
    assert kvp.most_tokens(CONFIG, {"backend": "int8"}, expected, dtype=name) == 128  # of whole blocks


@pytest.mark.parametrize("dtype", [torch.int8, "int8", "bf", "", 16, float])
def test_states_are_of_floating_point_numbers(dtype: Any) -> None:
    for options in ({"backend": "dense"}, {"backend": "int8"}, {"backend": "quanto"}):
        for predict in (kvp.estimate, kvp.most_tokens):
            with pytest.raises(ValueError, match="dtype must be a floating-point dtype such as") as failure:
                predict(CONFIG, options, 10**6, dtype=dtype)
            assert repr(dtype) in str(failure.value)


def test_a_final_length_is_no_less_than_what_comes() -> None:
    for options in ({"backend": "dense"}, {"backend": "int8"}, {"backend": "knorm", "budget": 64}):
        kvp.estimate(CONFIG, options, 100, new_tokens=9, max_cache_length=108)
        with pytest.raises(ValueError, match=r"max_cache_length must be at least 108, .*, got 107\."):
            kvp.estimate(CONFIG, options, 100, new_tokens=9, max_cache_length=107)


def test_a_known_final_length_is_allocated_once() -> None:
    cache = kvp.build_cache(CONFIG, {"backend": "int8"}, max_cache_length=1500)
    layer = cache.layers[0]
    states = torch.randn(1, 8, 1500, 128, dtype=torch.bfloat16)
    layer.update(states[:, :, :1000], states[:, :, :1000])
    where = layer.records.data.data_ptr()
    for start in range(1000, 1500):
        layer.update(states[:, :, start : start + 1], states[:, :, start : start + 1])
    assert layer.records.data.data_ptr() == where
    assert layer.records.num_blocks == -(-1500 // 64)


@pytest.mark.parametrize(("backend", "tokens", "new_tokens"), [("int8", 123, 70), ("kivi", 186, 70)])
def test_room_is_made_for_all_but_the_last_token(backend: str, tokens: int, new_tokens: int) -> None:
    """Which would be the first of another block."""
    model, options = tiny_model("llama"), {"backend": backend}
    output = model.generate(
        torch.randint(3, 100, (1, tokens)), cache_implementation="quantized", cache_config=options,
        max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True,
    )  # fmt: skip
    taken = cache_of(output).kv_bytes()
    assert kvp.estimate(model, options, tokens, new_tokens=new_tokens) == taken
    assert kvp.estimate(model, options, tokens, new_tokens=new_tokens + 1) > taken


def test_the_largest_layers_take_turns_beside_the_others() -> None:
    def in_turn(layers: int, overrides: dict[str, Any]) -> int:
        config, options = tiny_model("llama", num_hidden_layers=layers).config, {"backend": "int4"}
        given = {**options, "layer_overrides": overrides}
        return kvp.estimate(config, {**given, "offload": True}, 500) - kvp.estimate(config, given, 500)

    wide = {"nbits": 8}
    none, one, two, all_of_them = (
        in_turn(3, {str(layer): wide for layer in range(first, 3)}) for first in (3, 2, 1, 0)
    )
    assert 0 < none < one < two == all_of_them
    assert in_turn(1, {}) == 0


def test_an_estimate_is_of_what_the_model_was_cast_to() -> None:
    model = tiny_model("llama").bfloat16()
    assert model.config.dtype == torch.float32
    for options in ({"backend": "dense"}, {"backend": "kivi"}):
        found = kvp.estimate(model, options, 500)
        assert found == kvp.estimate(model.config, options, 500, dtype=torch.bfloat16)
        assert found < kvp.estimate(model.config, options, 500)


@pytest.mark.parametrize("new_tokens", [2, 3, 40, 400])
@pytest.mark.parametrize(
    "options",
    [{"backend": "int8"}, {"backend": "knorm", "budget": 64}, {"backend": "kivi", "skip_layers": [0, 1]}],
    ids=lambda options: options["backend"],
)
def test_windows_that_are_dense_do_not_grow(options: dict[str, Any], new_tokens: int) -> None:
    model = tiny_model("gpt_oss", sliding_window=128)
    ids = torch.randint(3, 100, (1, 500), generator=torch.Generator().manual_seed(0))
    cache = kvp.build_cache(model, options)
    told = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    model.generate(ids, **told, **as_argument(cache), attention_mask=torch.ones_like(ids), pad_token_id=0)
    kinds = [type(layer).__name__ for layer in cache.layers]
    assert "ShortWindowLayer" in kinds
    assert kvp.estimate(model, options, 500, new_tokens=new_tokens) == cache.kv_bytes()


def test_a_dense_cache_with_windows_is_predicted() -> None:
    model = tiny_model("gpt_oss", sliding_window=128)
    lengths = [kvp.estimate(model, {"backend": "dense"}, 500, new_tokens=count) for count in (101, 201)]
    full = sum(kind == "full_attention" for kind in model.config.layer_types)
    heads, channels = model.config.num_key_value_heads, model.config.head_dim
    assert lengths[1] - lengths[0] == full * 100 * 2 * heads * channels * model.dtype.itemsize
