"""Models that hear and speak: what their parts hand on to one another is what it is with the dense cache."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING

from tests.models.showing import noise
from tests.models.speaking import kyutai


@pytest.mark.skipif("kyutai_speech_to_text" not in CONFIG_MAPPING, reason="this transformers has no Kyutai")
def test_a_configuration_that_will_be_saved_is_given_no_name() -> None:
    """Kyutai has its codec's cache prepared by the configuration that `save_pretrained` writes."""
    model = kyutai()
    own = model.codec_model.generation_config
    names = set(vars(own))
    model.generate(input_values=noise(2, 1, 80 * 20 * 8), max_new_tokens=4)
    assert own.cache_implementation == "dynamic"  # so it was the one
    assert set(vars(own)) == names
