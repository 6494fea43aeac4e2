"""Models that read a prompt in chunks otherwise than whole: evicting caches have them read it whole."""

from __future__ import annotations

import torch
from transformers import CONFIG_MAPPING

from tests.models.families import greedy
from tests.models.showing import TEXT, TOWER, make


def test_rows_with_pads_are_numbered_as_one() -> None:
    """Kosmos-2.5 counts the tokens of a first call without the pads before them, and later ones with them."""
    text = {**TEXT, "embed_dim": 64, "layers": 2, "attention_heads": 4, "ffn_dim": 128}
    tower = {**TOWER, "patch_embed_hidden_size": 48, "max_num_patches": 16}
    model = make(CONFIG_MAPPING["kosmos-2.5"](text_config=text, vision_config=tower, latent_query_num=8))
    _, expected, _ = greedy(model, (44, 31), 1)
    _, logits, _ = greedy(model, (44, 31), 1, {"backend": "knorm", "budget": 43, "chunk_size": 16})
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
