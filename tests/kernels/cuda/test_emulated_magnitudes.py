"""Keys and queries of any magnitude: fp16 holds what scales and queries become, whatever they were."""

from __future__ import annotations

import pytest
import torch

from kvcache_plugins.attention.reference import AttentionOptions, attend
from kvcache_plugins.backends.int8 import Int8Layer
from kvcache_plugins.layers.codec import SymmetricCodec
from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.layers.stream import StreamSpec
from kvcache_plugins.quantizers.granularity import Granularity
from kvcache_plugins.testing.comparison import relative_rms
from tests.kernels.cuda import emulation
from tests.kernels.decode_cases import build_layer, states

pytestmark = pytest.mark.usefixtures("emulated")

POST = {"backend": "kivi", "rope_mode": "post", "residual_length": 32}
LAYERS = {
    "kivi-2": {**POST, "nbits": 2},
    "kivi-3": {**POST, "nbits": 3},
    "kivi-4": {**POST, "nbits": 4},
    "kivi-8-g16": {**POST, "nbits": 8, "q_group_size": 16},
    "kivi-4-g64": {**POST, "q_group_size": 64, "residual_length": 64},
    "kivi-4-block": {**POST, "rope_mode": "block"},
    "int8": {"backend": "int8"},
    "int4": {"backend": "int4", "residual_length": 0},
    "float8": {"backend": "float8"},
}


@pytest.mark.parametrize("query_factor", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("key_factor", [1e-3, 1.0, 40.0, 5000.0])
@pytest.mark.parametrize("name", LAYERS)
def test_magnitudes(name: str, key_factor: float, query_factor: float) -> None:
    torch.manual_seed(3)
    layer = build_layer(LAYERS[name], 0, dtype=torch.bfloat16)
    keys, values = states(2, 2, 220, 64, None, torch.float32)
    keys[:, :, 70:140] /= 50  # of blocks one whose scales are all small, beside others
    keys = (keys * key_factor).bfloat16()
    layer.update(keys[:, :, :219], values[:, :, :219].bfloat16())
    key, value = layer.update(keys[:, :, 219:], values[:, :, 219:].bfloat16())
    assert isinstance(key, KVHandle) and isinstance(value, KVHandle)
    query = (torch.randn(2, 8, 1, 64) * query_factor).bfloat16()
    options = AttentionOptions(scaling=0.125 / (key_factor * query_factor))
    before = emulation.products()
    got = emulation.attend(query, key, value, options)
    assert emulation.products() > before, "the tensor cores were not used"
    assert relative_rms(attend(query.double(), key.tokens, value.tokens, options), got) <= 2.5e-3


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("is_one_alone", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_values_that_grow(name: str, is_one_alone: bool, head_dim: int) -> None:
    """All of them, or, of 40 tokens, one: each time what was summed before has to become less."""
    torch.manual_seed(4)
    layer = build_layer(LAYERS[name], 0, dtype=torch.float16, head_dim=head_dim)
    length = 620
    keys, values = states(2, 2, length, head_dim, None, torch.float32)
    factors = 2.0 ** torch.linspace(-12, 12, length)[:, None]
    if is_one_alone:
        factors[torch.arange(length) % 40 != 7] = 2.0**-12
    keys, values = keys.half(), (values * factors).half()
    layer.update(keys[:, :, :-1], values[:, :, :-1])
    key, value = layer.update(keys[:, :, -1:], values[:, :, -1:])
    assert isinstance(key, KVHandle) and isinstance(value, KVHandle)
    query = torch.randn(2, 8, 1, head_dim).half()
    for seen in (40, 200, 333, length):  # of which the last are largest
        options = AttentionOptions(mask=(torch.arange(length) < seen)[None, None, None])
        got = emulation.attend(query, key, value, options)
        assert torch.isfinite(got).all()
        expected = attend(query.double(), key.tokens, value.tokens, options)
        assert relative_rms(expected, got) <= 2e-3


@pytest.mark.parametrize("head_dim", [48, 80, 112])
def test_the_last_of_an_odd_number_of_scales(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = StreamSpec(SymmetricCodec(Granularity(64, 16)), 64)
    monkeypatch.setattr(Int8Layer, "value_stream", lambda self, head_dim: spec)
    # no kernel encodes such groups
    layer = build_layer({"backend": "int8", "kernel": "torch"}, 0, head_dim=head_dim, dtype=torch.bfloat16)
    keys, values = states(2, 2, 220, head_dim, None, torch.bfloat16)
    values[..., -16:] *= 50000
    layer.update(keys[:, :, :219], values[:, :, :219])
    key, value = layer.update(keys[:, :, 219:], values[:, :, 219:])
    assert isinstance(key, KVHandle) and isinstance(value, KVHandle)
    query = torch.randn(2, 8, 1, head_dim).bfloat16()
    before = emulation.products()
    got = emulation.attend(query, key, value, AttentionOptions())
    assert emulation.products() > before, "the tensor cores were not used"
    expected = attend(query.double(), key.tokens, value.tokens, AttentionOptions())
    for channels in (slice(-16, None), slice(None, -16)):
        assert relative_rms(expected[..., channels], got[..., channels]) <= 2.5e-3
