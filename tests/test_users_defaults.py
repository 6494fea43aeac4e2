"""The device and the dtype that a user makes the default of torch change nothing that a cache computes, and
no cache draws from the generator that a user has seeded.

The device is "meta", where nothing can be read, and stands for any on which the model is not.
"""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache_plugins import build_cache
from kvcache_plugins.attention import description
from kvcache_plugins.attention.description import describe
from kvcache_plugins.eviction.pooling.convolution import pool_evicted
from kvcache_plugins.eviction.pooling.weights import LayerWeights
from kvcache_plugins.kernels.decoding import decode_side
from kvcache_plugins.models import rotary
from kvcache_plugins.testing import tiny_model
from tests.kernels.decode_cases import CASES, build_layer, step

EVICTING = {"budget": 40, "chunk_size": 16}
PACKED = {"backend": "int4", "residual_length": 8}
CACHES: dict[str, dict[str, Any]] = {
    "float8": {"backend": "float8"},
    "int4-smooth": {"backend": "int4", "smooth": 0.5},
    "kivi-block": {"backend": "kivi", "residual_length": 32, "rope_mode": "block", "sink_length": 4},
    "kvquant": {"backend": "kvquant", "calibration": "normal_float", "residual_length": 32},
    "snapkv-packed": {**EVICTING, "backend": "snapkv", "storage": PACKED},
    "expected": {**EVICTING, "backend": "expected_attention"},
    "h2o-compact": {**EVICTING, "backend": "h2o", "positions": "compact"},
    "merged": {**EVICTING, "backend": "lagkv", "pool": "merge"},
    "sirllm": {**EVICTING, "backend": "sirllm"},
    "kvzip": {**EVICTING, "backend": "kvzip", "storage": PACKED},
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {
    "device": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
}


def logits(model: Any, config: dict[str, Any]) -> Tensor:
    tokens = torch.randint(3, 120, (2, 90), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    mask = torch.ones_like(tokens)
    mask[1, :9] = 0
    # made anew: what is learnt of a model, its heads or its attention is remembered with it
    output = copy.deepcopy(model).generate(
        tokens, attention_mask=mask, cache_implementation="quantized", cache_config=config, max_new_tokens=12,
        do_sample=False, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return torch.stack(output.logits)


def forget() -> None:
    remembered = (
        description._frequencies, rotary._block_tables, rotary._layout_by_ramp, rotary._turn_by_complex,
    )  # fmt: skip
    for one in remembered:
        one.cache_clear()


@functools.cache
def without_defaults(name: str, attention: str, kernel: str) -> Tensor:
    forget()
    return logits(tiny_model("llama", attn_implementation=attention), {**CACHES[name], "kernel": kernel})


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("name", CACHES)
def test_the_same_numbers(name: str, default: str, attention: str, kernel: str) -> None:
    expected = without_defaults(name, attention, kernel)
    model = tiny_model("llama", attn_implementation=attention)
    forget()
    with DEFAULTS[default]():
        got = logits(model, {**CACHES[name], "kernel": kernel})
    assert torch.equal(got, expected)


FIRST_CALL = """
import torch
import kvcache_plugins as kvp
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing import tiny_model

model, text = tiny_model("llama"), torch.arange(3, 93)[None]
torch.set_default_dtype(torch.{dtype})
logits = []
for kernel in ("auto", "torch"):
    config = {{"backend": "kivi", "rope_mode": "block", "residual_length": 32, "kernel": kernel}}
    cache = kvp.build_cache(model, config)
    with torch.no_grad():
        model(text, **as_argument(cache))
        logits.append(model(text[:, -1:], **as_argument(cache)).logits)
assert torch.isfinite(logits[0]).all() and (logits[0] - logits[1]).abs().max() < 1e-4
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_kernels_begin_under_any_default(dtype: str) -> None:
    """What a kernel asks of torch once in a process, such as how it rounds, it may ask under any default."""
    code = FIRST_CALL.format(dtype=dtype)
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", [*CACHES, "random"])
def test_seeded_samples_stay_what_they_are(name: str) -> None:
    before = torch.get_rng_state()
    logits(tiny_model("llama"), CACHES.get(name, {**EVICTING, "backend": name}))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("is_filled", [False, True])
def test_rows_are_repeated(is_filled: bool) -> None:
    layer = build_cache(tiny_model("falcon_h1"), PACKED).layers[0]
    state = torch.randn(2, 8, 4)
    layer.update_conv_state(state)
    keys = torch.randn(2, 2, 5, 16)
    if is_filled:
        layer.update(keys, keys)
    with torch.device("meta"):
        layer.batch_repeat_interleave(3)
    assert torch.equal(layer.conv_states[0], state.repeat_interleave(3, 0))
    assert not is_filled or torch.equal(layer.keys, keys.repeat_interleave(3, 0))


def test_evicted_tokens_are_convolved() -> None:
    keys, scores = torch.randn(2, 2, 30, 8), torch.rand(2, 2, 30)
    weights = LayerWeights(torch.randn(3, 16, 5), torch.randn(3), torch.tensor(0.3))
    expected = pool_evicted(keys, keys, scores, 14, weights)
    with torch.device("meta"):
        found = pool_evicted(keys, keys, scores, 14, weights)
    assert torch.equal(found.keys, expected.keys) and torch.equal(found.index, expected.index)


def test_sinks_are_placed_by_the_operators_in_torch() -> None:
    _, handle, _ = step(build_layer(CASES["kivi-sinks"], 200), 1, 1)
    side, records = describe(handle.tokens), handle.tokens.stream.records.data
    assert side is not None and side.sinks is not None
    expected = decode_side(side, records, is_key=True, sink_start=None)
    with torch.device("meta"):
        assert torch.equal(decode_side(side, records, is_key=True, sink_start=None), expected)
