"""What a cache leaves on its model works on copies of it, and goes when the dispatch does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import kvcache_plugins as kvp
from kvcache_plugins.models.cache_argument import cache_of
from kvcache_plugins.testing.models import tiny_model
from tests.eviction.feeding import ids
from tests.eviction.locret_feeding import heads_of

CONFIGS: dict[str, dict[str, Any]] = {
    "compact": {"backend": "knorm", "positions": "compact"},
    "locret": {"backend": "locret"},
    "sirllm": {"backend": "sirllm"},
}
COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


def model_of_its_own(family: str = "llama") -> PreTrainedModel:
    return tiny_model(family, vocab_size=512)


def held(model: PreTrainedModel, name: str) -> tuple[Tensor, Tensor]:
    """Positions and keys of what is kept of a prompt and an answer."""
    config = CONFIGS[name] | {"budget": 24, "chunk_size": 16}
    if name == "locret":
        config["heads"] = heads_of(model)
    cache = cache_of(model.generate(  # type: ignore[operator]
        ids(77), max_new_tokens=4, do_sample=False, cache_implementation="quantized", cache_config=config,
        return_dict_in_generate=True,
    ))  # fmt: skip
    layer = cache.evicting_layers[1]
    return layer.ledger.positions, layer.stored_keys.tail.view()


def number_of_hooks(model: nn.Module) -> int:
    return sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in model.modules())


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_copy_does_not_need_the_original(name: str, copied: str) -> None:
    model = model_of_its_own()
    expected = held(model, name)
    twin = COPIES[copied](model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert number_of_hooks(twin) == number_of_hooks(model) > 0
    torch.testing.assert_close(held(twin, name), expected, rtol=0, atol=0)
    del model
    torch.testing.assert_close(held(twin, name), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_uninstalling_takes_the_hooks_off_every_copy(name: str) -> None:
    model = model_of_its_own()
    expected = held(model, name)
    models = [model, *(copied(model) for copied in COPIES.values())]
    kvp.uninstall()
    try:
        assert [number_of_hooks(each) for each in models] == [0, 0, 0]
    finally:
        kvp.install()
    for each in models:
        torch.testing.assert_close(held(each, name), expected, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["gpt_neox", "phi3"])
def test_models_with_fused_projections_can_be_pickled(family: str) -> None:
    model = model_of_its_own(family)
    expected = held(model, "locret")
    twin = COPIES["pickle"](model)
    torch.testing.assert_close(held(twin, "locret"), expected, rtol=0, atol=0)
