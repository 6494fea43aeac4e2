"""Where the text decoder of a model is."""

from __future__ import annotations

from torch import nn

from kvcache_plugins.models.facts import decoder_of
from kvcache_plugins.testing.models import tiny_model
from tests.models.families import small_model
from tests.models.multimodal import subject


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
