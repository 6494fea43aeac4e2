"""Models that read a prompt in chunks otherwise than whole: evicting caches have them read it whole."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from kvcache_plugins.testing import tiny_model
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


def test_an_adapter_that_serves_from_some_token_on_is_given_all_of_them() -> None:
    """PEFT tells the layers of an aLoRA how far from the end of a prompt it begins, and no more."""

    class Adapted(nn.Module):
        def __init__(self, base_layer: nn.Module) -> None:
            super().__init__()
            self.base_layer = base_layer

        def forward(self, states: Tensor) -> Tensor:
            result: Tensor = self.base_layer(states)
            return torch.cat((result[:, :-20], 2 * result[:, -20:]), dim=1)

    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.k_proj = Adapted(layer.self_attn.k_proj)
    model.peft_config = {"default": SimpleNamespace(alora_invocation_tokens=[7, 8])}
    _, expected, _ = greedy(model, (44,), 1)
    _, logits, cache = greedy(model, (44,), 1, {"backend": "knorm", "budget": 43, "chunk_size": 16})
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert "aLoRA" in str(cache.report().whole_prompt_reason)
