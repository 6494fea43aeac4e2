"""Attention over handles put one after the other is attention over the tensors they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvcache_plugins import build_cache
from kvcache_plugins.attention.dispatch import attention_forward
from kvcache_plugins.errors import KernelUnavailableError
from kvcache_plugins.layers.concatenated import ConcatenatedHandle
from kvcache_plugins.testing import tiny_model
from tests.reference.attention import naive_attention

HEADS, QUERY_HEADS, WIDTH = 2, 4, 16
CONFIGS: dict[str, dict[str, Any]] = {
    "int8": {"backend": "int8"},
    "int4": {"backend": "int4", "residual_length": 16},
    "kivi": {"backend": "kivi", "residual_length": 32},
}
MASKS = ("none", "boolean", "added", "causal", "window", "slopes")


def handles(config: dict[str, Any], length: int, seed: int, newest: int) -> tuple[Any, Any, Any]:
    """Keys and values of a layer that holds `length` tokens, its `newest` exact ones last."""
    layer = build_cache(tiny_model("llama"), config).layers[0]
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 2, HEADS, length, WIDTH, generator=generator)
    layer.update(keys[:, :, :-newest], values[:, :, :-newest])
    key, value = layer.update(keys[:, :, -newest:], values[:, :, -newest:])
    return layer, key, value


def masked(kind: str, queries: int, length: int) -> tuple[Tensor | None, dict[str, Any]]:
    """A mask for an attention function, and what else says what is hidden."""
    if kind == "none":
        return None, {"is_causal": False}
    if kind == "causal":
        return None, {"is_causal": True}
    if kind == "slopes":
        return None, {"is_causal": True, "alibi_slopes": torch.linspace(0.01, 0.1, QUERY_HEADS)}
    if kind == "window":
        return None, {"is_causal": True, "sliding_window": 40}
    visible = torch.rand(2, 1, queries, length, generator=torch.Generator().manual_seed(9)) > 0.3
    added = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    return (visible if kind == "boolean" else added), {}


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("queries", [1, 5, 80])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_attention_over_what_they_stand_for(name: str, kind: str, queries: int, kernel: str) -> None:
    config = CONFIGS[name] | {"kernel": kernel}
    one, key_of_one, value_of_one = handles(config, 150, 0, 3)
    other, key_of_other, value_of_other = handles(config, 200, 1, 1)
    exact = torch.randn(2, 2, HEADS, 7, WIDTH, generator=torch.Generator().manual_seed(2))
    key = torch.cat([key_of_one, exact[0], key_of_other], dim=2)
    value = torch.cat([value_of_one, exact[1], value_of_other], dim=-2)
    assert isinstance(key, ConcatenatedHandle) and key.shape == (2, HEADS, 357, WIDTH)
    query = torch.randn(2, QUERY_HEADS, queries, WIDTH, generator=torch.Generator().manual_seed(3))
    sinks = torch.linspace(-1, 1, QUERY_HEADS)
    mask, options = masked(kind, queries, 357)
    module = torch.nn.Module()
    found, _ = attention_forward(module, query, key, value, mask, 0.3, softcap=5.0, s_aux=sinks, **options)
    assert one.fallback_reads == other.fallback_reads == 0
    assert {one.kernel, other.kernel} == {"cpu" if kernel == "auto" else "torch"}
    keys = torch.cat([key_of_one.dense(), exact[0], key_of_other.dense()], dim=2)
    values = torch.cat([value_of_one.dense(), exact[1], value_of_other.dense()], dim=2)
    expected = naive_attention(
        query, keys, values, mask=mask, scaling=0.3, softcap=5.0, sinks=sinks, **options
    )
    torch.testing.assert_close(found.transpose(1, 2).double(), expected, atol=2e-5, rtol=1e-4)


def test_what_differs_from_query_to_query() -> None:
    """More queries than one pass takes, each with sink logits and a bias of its own."""
    _, first, first_values = handles(CONFIGS["int8"], 150, 0, 3)
    exact = torch.randn(2, 2, HEADS, 7, WIDTH, generator=torch.Generator().manual_seed(2))
    key, value = torch.cat([first, exact[0]], 2), torch.cat([first_values, exact[1]], 2)
    query, bias, sinks = (
        torch.randn(2, QUERY_HEADS, 80, WIDTH),
        torch.randn(80, 157),
        torch.randn(2, 4, 80, 1),
    )
    others = {"is_causal": True, "position_bias": bias, "sinks": sinks}
    found, _ = attention_forward(torch.nn.Module(), query, key, value, None, 0.3, **others)
    keys, values = (states.dense().repeat_interleave(2, dim=1) for states in (key, value))
    hidden = torch.ones(80, 157, dtype=torch.bool).triu(157 - 80 + 1)
    logits = (0.3 * query @ keys.mT + bias).masked_fill(hidden, -torch.inf)
    weights = torch.cat([logits, sinks], dim=-1).softmax(-1)[..., :-1]
    torch.testing.assert_close(found, (weights @ values).transpose(1, 2), atol=1e-5, rtol=1e-4)


def test_torchs_own_attention() -> None:
    _, first, first_values = handles(CONFIGS["int8"], 150, 0, 3)
    _, second, second_values = handles(CONFIGS["int8"], 90, 1, 3)
    key, value = torch.cat([first, second], 2), torch.cat([first_values, second_values], 2)
    query = torch.randn(2, HEADS, 1, WIDTH, generator=torch.Generator().manual_seed(3))
    found = F.scaled_dot_product_attention(query, key, value)
    expected = F.scaled_dot_product_attention(query, key.dense(), value.dense())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    _, first, first_values = handles(CONFIGS["int8"], 150, 0, 3)
    exact = torch.randn(2, 2, HEADS, 7, WIDTH)
    key, value = torch.cat([first, exact[0]], 2), torch.cat([first_values, exact[1]], 2)
    query = torch.randn(2, QUERY_HEADS, 2, WIDTH)
    mask = torch.ones(1, 1, 2, 157, dtype=torch.bool)
    mask[:, :, 0] = False
    found, _ = attention_forward(torch.nn.Module(), query, key, value, mask)
    assert found[:, 0].abs().max() == 0 < found[:, 1].abs().min()


def test_a_part_that_was_changed_in_place_is_read_as_it_is() -> None:
    _, key, value = handles(CONFIGS["int8"], 150, 0, 3)
    exact = torch.randn(2, 2, HEADS, 7, WIDTH)
    together = torch.cat([key, exact[0]], dim=2), torch.cat([value, exact[1]], dim=2)
    key.mul_(2)
    query = torch.randn(2, HEADS, 1, WIDTH)
    keys, values = torch.cat([key.dense(), exact[0]], dim=2), torch.cat([value.dense(), exact[1]], dim=2)
    expected = F.scaled_dot_product_attention(query, keys, values)
    torch.testing.assert_close(F.scaled_dot_product_attention(query, *together), expected)


@pytest.mark.parametrize(
    "how", ["changed", "other dimension", "other dtype", "nothing packed", "of an output"]
)
def test_what_is_no_attention_gets_tensors(how: str) -> None:
    layer, key, _ = handles(CONFIGS["int8"], 150, 0, 3)
    exact = torch.randn(2, HEADS, 7, WIDTH)
    if how == "changed":
        together = torch.cat([key, exact], dim=2)
        assert torch.equal(together + 0, torch.cat([key.dense(), exact], dim=2))
        together.mul_(2)  # in place, which attention has to notice
        assert together.is_changed and torch.equal(
            together + 0, torch.cat([2 * key.dense() / 2, exact], dim=2) * 2
        )
        return
    parts, options = [key, exact], {"dim": 2}
    if how == "other dimension":
        parts, options = [key, key], {"dim": 3}
    elif how == "other dtype":
        parts = [key, exact.double()]
    elif how == "nothing packed":
        parts = [exact, exact]
    else:
        options["out"] = torch.empty(2, HEADS, 157, WIDTH)
    together = torch.cat(parts, **options)
    assert type(together) is Tensor
    assert layer.fallback_reads == (0 if how == "nothing packed" else 1)


def test_an_evicting_layer_is_shown_its_queries_or_decoded() -> None:
    layer, key, _ = handles({"backend": "h2o", "budget": 64, "storage": {"backend": "int8"}}, 60, 0, 3)
    assert layer.observes_queries
    assert not isinstance(torch.cat([key, torch.randn(2, HEADS, 7, WIDTH)], dim=2), ConcatenatedHandle)


def test_native_is_met_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, key, value = handles({"backend": "int8", "kernel": "native"}, 150, 0, 3)
    exact = torch.randn(2, 2, HEADS, 7, WIDTH)
    key, value = torch.cat([key, exact[0]], 2), torch.cat([value, exact[1]], 2)
    query = torch.randn(2, QUERY_HEADS, 1, WIDTH)
    attention_forward(torch.nn.Module(), query, key, value, None)
    with pytest.raises(KernelUnavailableError, match="float64"):
        attention_forward(torch.nn.Module(), query.double(), key, value, None)
