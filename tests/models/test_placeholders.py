"""What of a call is no text, by the names of its arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcache_plugins.models.placeholders import find_features


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"pixel_values": torch.ones(1)}, "pixel_values"),
        ({"pixel_values_videos": [torch.ones(1)]}, "pixel_values_videos"),
        (
            {"input_features": torch.ones(1), "input_features_mask": torch.ones(1)},
            "input_features, input_features_mask",
        ),
        ({"mm_encoder_outputs": {"image": {"pooler_output": torch.ones(1)}}}, "mm_encoder_outputs"),
        ({"encoder_inputs_embeds": torch.ones(1)}, "encoder_inputs_embeds"),
        ({"perceiver_embeddings": torch.ones(1)}, "perceiver_embeddings"),
        ({"flattened_patches": torch.ones(1)}, "flattened_patches"),
        ({"pixel_values": None, "mm_encoder_outputs": {"image": None}}, None),
        (
            {"token_type_ids": torch.ones(1), "logits_to_keep": 1, "encoder_hidden_states": torch.ones(1)},
            None,
        ),
    ],
)
def test_what_shows_images_or_sounds(arguments: dict[str, Any], found: str | None) -> None:
    assert find_features(arguments) == found
