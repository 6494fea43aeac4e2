"""How the text parts of models of several rotate their keys: what is found is what they do.

Their modelling files have rotations of other parts, of towers for images and for sounds, beside theirs.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvcache_plugins.models.frequencies import Change
from tests.models.families import as_far_as_it_can_be_built
from tests.models.moving import check_moved_keys, described
from tests.models.text_parts import NAMES, text_part

OTHERWISE_THAN_THEIR_TOWERS = frozenset({"ernie4_5_vl_moe_text", "glm4v_text", "glm_ocr_text"})
"""Whose pairs are neighbours, and those of their towers for images halves."""
NO_SUCH_KEYS = {
    "blip_text_model": "is told no positions",
    "diffusion_gemma_text": "is refused",
    "hunyuan_vl_text": "weighs its keys after it has rotated them",
    "kosmos_2_5_text_model": "adds its positions to its embeddings",
    "kosmos_2_text_model": "adds its positions to its embeddings",
    "mistral_large4_text": "caches latents",
}
BROKEN = frozenset({"glm5_next_text", "pix2struct_text_model", "t5gemma2_decoder"})
"""What cannot be built of our sizes, or by itself, in the release that was looked through."""
HAS_PLAIN_CACHE = frozenset({"unlimited_ocr_text"})
"""Whose own layers of a cache keep some of a text."""


def built(name: str, **overrides: Any) -> Any:
    if name not in NAMES:
        pytest.skip("this release of transformers does not have it")
    with as_far_as_it_can_be_built(name, BROKEN):
        return text_part(name, **overrides)


@pytest.mark.parametrize("from_config", [False, True])
@pytest.mark.parametrize("name", sorted({*NAMES} - {*NO_SUCH_KEYS}))
def test_moving_a_text_turns_the_keys_that_are_said_to_rotate(name: str, from_config: bool) -> None:
    model = built(name)
    turning = check_moved_keys(model, from_config=from_config, has_plain_cache=name in HAS_PLAIN_CACHE)
    if name in OTHERWISE_THAN_THEIR_TOWERS:
        assert turning == [0, 1]
        assert all(fact.rotary is not None and fact.rotary.interleaved for fact in described(model))


@pytest.mark.parametrize("from_config", [False, True])
@pytest.mark.parametrize("scaled", [[0], [1], []])
def test_layers_whose_frequencies_are_not_scaled(scaled: list[int], from_config: bool) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 1024}
    model = built("molmo2_text", rope_parameters=yarn, rope_scaling_layers=scaled)
    said = model.config.to_dict()
    assert check_moved_keys(model, from_config=from_config) == [0, 1]
    rotaries = [fact.rotary for fact in described(model, from_config=from_config)]
    assert (rotaries[0] == rotaries[1]) == (scaled == [])
    assert model.config.to_dict() == said


@pytest.mark.parametrize("from_config", [False, True])
def test_layers_whose_frequencies_are_not_scaled_do_not_follow_the_length(from_config: bool) -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}
    model = built("molmo2_text", rope_parameters=dynamic, rope_scaling_layers=[1])
    changes = [fact.change for fact in described(model, from_config=from_config)]
    assert changes == [None, Change("dynamic", model.config.max_position_embeddings - 1)]
