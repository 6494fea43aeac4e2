"""What configurations of models of text and images, or sounds, tell without the models."""

from __future__ import annotations

import pytest
import torch
import transformers

import kvcache_plugins as kvp
from kvcache_plugins.models.auto_class import auto_class
from tests.models.multimodal import NAMES, subject


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_tells_of_keys_what_the_model_does(name: str) -> None:
    model = subject(name).model
    of_model, of_config = (
        kvp.build_cache(made, {"backend": "int8"}).packed_layers for made in (model, model.config)
    )
    for one, other in zip(of_model, of_config, strict=True):
        assert one.facts.rotary == other.facts.rotary
        if one.facts.rotary is not None:  # biases matter together with it
            assert one.facts.has_key_bias == other.facts.has_key_bias


@pytest.mark.parametrize("name", NAMES)
def test_configurations_name_the_class_that_loads_them(name: str) -> None:
    model = subject(name).model
    with torch.device("meta"):
        made = auto_class(model.config).from_config(model.config)
    assert hasattr(made, "generate")


def test_language_models_are_loaded_as_such() -> None:
    config = transformers.AutoConfig.for_model("llama")
    assert auto_class(config) is transformers.AutoModelForCausalLM
