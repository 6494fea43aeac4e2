"""What a stream learns from the first tokens that it will encode: those behind the pads and the sinks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache_plugins import build_cache
from kvcache_plugins.layers.base import PackedLayer
from kvcache_plugins.layers.windowed import with_window
from kvcache_plugins.testing import tiny_model
from kvcache_plugins.testing.conformance import decoded, feed
from tests.reference.caches import smoothing_factors

SINKS = 3
LEARNING: dict[str, tuple[dict[str, Any], int]] = {
    "int4": ({"backend": "int4", "smooth": 0.5}, 64),
    "kvquant": ({"backend": "kvquant", "calibration": "normal_float", "nbits": 3}, 128),
}
"""Options, and tokens that are learnt from."""
PADS = [None, [0, 7]]
LENGTH = 270


def layer_of(
    name: str, pads: list[int] | None, kernel: str = "auto", residual_length: int = 0
) -> PackedLayer:
    sinks = 0 if residual_length else SINKS
    given = {"residual_length": residual_length, "sink_length": sinks, "kernel": kernel}
    config = {**LEARNING[name][0], **given}
    layer = build_cache(tiny_model("llama", num_key_value_heads=2, head_dim=16).config, config).layers[0]
    layer.padding.set(None if pads is None else torch.tensor(pads))
    return layer  # type: ignore[no-any-return]


def states(pads: list[int] | None, sinks: float = 1.0) -> tuple[Tensor, Tensor]:
    """Keys and values, the keys of the sinks `sinks` times as long."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 2, LENGTH, 16, generator=generator) for _ in range(2))
    for row, start in enumerate(pads or [0, 0]):
        keys[row, :, start : start + SINKS] *= sinks
    return keys, values


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("pads", PADS, ids=["plain", "padded"])
@pytest.mark.parametrize("name", LEARNING)
def test_sinks_take_no_part_in_it(name: str, pads: list[int] | None, kernel: str) -> None:
    learnt, read = [], []
    for sinks in (1.0, 30.0):
        layer = layer_of(name, pads, kernel)
        feed(layer, *states(pads, sinks), [LENGTH])
        learnt.append(layer.stored_keys.codec.batch_state())
        read.append(decoded(layer)[0])
    for key, tensor in learnt[0].items():
        assert torch.equal(tensor, learnt[1][key]), key
    for row, start in enumerate(pads or [0, 0]):
        others = slice(start + SINKS, LENGTH)  # records have codes of sinks, too, which nobody reads
        assert torch.equal(read[0][row, :, others], read[1][row, :, others])


@pytest.mark.parametrize("pads", PADS, ids=["plain", "padded"])
def test_smoothing_factors_are_those_of_the_formula(pads: list[int] | None) -> None:
    layer, (keys, values) = layer_of("int4", pads), states(pads, 30.0)
    feed(layer, keys, values, [LENGTH])
    valid = torch.arange(LENGTH) >= torch.tensor(pads or [0, 0])[:, None]
    assert torch.equal(layer.state()[0]["key_factors"], smoothing_factors(keys, valid, 0.5, SINKS))


@pytest.mark.parametrize("pads", PADS, ids=["plain", "padded"])
@pytest.mark.parametrize("name", LEARNING)
def test_nothing_is_packed_before_it(name: str, pads: list[int] | None) -> None:
    count = LEARNING[name][1] + SINKS + max(pads or [0])
    layer, (keys, values) = layer_of(name, pads), states(pads)
    feed(layer, keys[:, :, : count - 1], values[:, :, : count - 1], [count - 1])
    assert layer.stored_keys.packed_length == 0
    assert torch.equal(decoded(layer)[0], keys[:, :, : count - 1])
    feed(layer, keys[:, :, count - 1 : count], values[:, :, count - 1 : count], [1])
    assert layer.stored_keys.packed_length == count // layer.stored_keys.codec.unit_tokens * (
        layer.stored_keys.codec.unit_tokens
    )


# with 64, the first token that is due is due in a step, and would fit into one
@pytest.mark.parametrize("residual_length", [0, 64])
@pytest.mark.parametrize("pads", PADS, ids=["plain", "padded"])
@pytest.mark.parametrize("name", LEARNING)
def test_kernels_and_torch_end_in_equal_bytes_however_tokens_come(
    name: str, pads: list[int] | None, residual_length: int
) -> None:
    keys, values = states(pads, 30.0)
    expected = layer_of(name, pads, "torch", residual_length)
    feed(expected, keys, values, [LENGTH])
    for chunks in ([LENGTH], [1] * LENGTH, [100, 40, *[1] * 60, 70]):
        layer = layer_of(name, pads, residual_length=residual_length)
        feed(layer, keys, values, chunks)
        for key, tensor in expected.state()[0].items():
            assert torch.equal(layer.state()[0][key], tensor), key


@pytest.mark.parametrize("name", LEARNING)
def test_it_is_forgotten_with_the_tokens(name: str) -> None:
    # before there is enough to learn from, what an earlier text left would be counted, saved and reordered
    layer, (keys, values) = layer_of(name, None), states(None)
    feed(layer, keys, values, [LENGTH])
    layer.reset()
    feed(layer, keys[:1, :, :9], values[:1, :, :9], [9])
    assert layer.stored_keys.codec.batch_state() == {}
    layer.reorder_cache(torch.tensor([0, 0]))
    assert torch.equal(decoded(layer)[0], keys[:1, :, :9].expand(2, -1, -1, -1))


@pytest.mark.parametrize("window", [None, 256])
@pytest.mark.parametrize("count", [30, LENGTH])
@pytest.mark.parametrize("name", LEARNING)
def test_a_loaded_layer_learns_if_it_was_saved_before(name: str, count: int, window: int | None) -> None:
    keys, values = states(None)
    made = [layer_of(name, None) for _ in range(2)]
    if window is not None:
        made = [with_window(type(layer))(layer.config, 0, layer.facts) for layer in made]
        for layer in made:
            layer.window = window
    saved, loaded = made
    feed(saved, keys, values, [count])
    tensors, facts = saved.state()
    loaded.load_state({key: tensor.clone() for key, tensor in tensors.items()}, facts)
    for layer in made:
        feed(layer, keys.flip(2), values.flip(2), [1, 100, LENGTH - 101])
    for key, tensor in saved.state()[0].items():
        assert torch.equal(loaded.state()[0][key], tensor), key
