"""Where the text decoder of a model is."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers import LlamaConfig, MambaConfig

from kvcache_plugins.models.decoder import decoder_of, most_positions
from kvcache_plugins.testing.models import tiny_model
from tests.models.families import small_model
from tests.models.multimodal import subject


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        ({"rope_type": "default"}, 4096),
        ({"rope_type": "linear", "factor": 8.0}, 32768),
        ({"rope_type": "dynamic", "factor": 2.0}, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
    ],
    ids=lambda rope: "-".join(map(str, rope.values())) if isinstance(rope, dict) else "",
)
def test_stretched_rotary_frequencies_are_more_positions(rope: dict[str, Any], most: int) -> None:
    rope = {"rope_theta": 1e4, **rope}
    config = LlamaConfig(max_position_embeddings=4096, rope_parameters=rope)
    assert most_positions(config) == most
    config.rope_parameters = {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}
    assert most_positions(config) == most


def test_a_model_may_have_no_limit_of_positions() -> None:
    assert most_positions(MambaConfig()) is None


def test_the_decoder_has_no_head_and_is_its_own() -> None:
    model = tiny_model("llama")
    assert decoder_of(model) is model.model is decoder_of(model.model)


def test_a_head_is_no_decoder_whatever_it_is_called() -> None:
    model = small_model("modernbert-decoder")
    assert model.get_decoder() is model.get_output_embeddings()
    assert decoder_of(model) is model.base_model


def test_the_towers_of_a_multimodal_model_are_no_decoder() -> None:
    model = subject("llava").model
    assert decoder_of(model) is model.model.language_model


def test_what_knows_of_no_decoder_is_its_own() -> None:
    class Asked(nn.Linear):
        """A model that is asked, and has none."""

        def get_decoder(self) -> None:
            return None

    for module in (nn.Linear(2, 2), Asked(2, 2)):
        assert decoder_of(module) is module
