"""Where the layers of a model lie, by what it is made of."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from kvcache_plugins.models.placement import layer_devices
from kvcache_plugins.testing import tiny_model

CPU, META = torch.device("cpu"), torch.device("meta")


def test_without_a_model_nobody_knows() -> None:
    assert layer_devices(None, 3) == [None] * 3


def test_layers_that_are_not_numbered_are_where_the_model_is() -> None:
    assert layer_devices(tiny_model("llama"), 3) == [CPU] * 3
    assert layer_devices(torch.nn.Linear(2, 2), 1) == [None]


def test_weights_that_are_nowhere_say_nothing() -> None:
    assert layer_devices(tiny_model("llama").to("meta"), 2) == [None] * 2


def test_where_weights_are_brought_counts_and_not_where_they_wait() -> None:
    """`accelerate` says so of every module whose weights it moves."""
    model = tiny_model("llama")
    model.model.layers[1].self_attn.q_proj._hf_hook = SimpleNamespace(execution_device="meta")
    assert layer_devices(model, 2) == [CPU, META]
    model.to("meta")
    model.model.layers[0].self_attn._hf_hook = SimpleNamespace(execution_device=CPU)
    assert layer_devices(model, 2) == [CPU, META]
