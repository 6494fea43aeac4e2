"""Models that read a prompt in chunks otherwise than whole: evicting caches have them read it whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from kvcache_plugins import build_cache
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing import tiny_model
from kvcache_plugins.testing.generation import padded_prompt
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


def generated(model: Any, cache_config: dict[str, Any] | None = None, **options: Any) -> tuple[Any, str]:
    """What `generate()` returns for two rows of a prompt, and why it was read whole, if it was."""
    cache = None if cache_config is None else build_cache(model, cache_config)
    output = model.generate(
        **padded_prompt((44, 31)), **as_argument(cache), max_new_tokens=2, do_sample=False, **options
    )
    return output, "" if cache is None else str(cache.report().whole_prompt_reason)


@pytest.mark.parametrize("backend", ["h2o", "kvzip", "streaming_llm"])
def test_hidden_states_are_those_of_the_whole_prompt(backend: str) -> None:
    model = tiny_model("llama")
    asked = {"output_hidden_states": True, "return_dict_in_generate": True}
    expected, _ = generated(model, **asked)
    output, reason = generated(model, {"backend": backend, "budget": 20, "chunk_size": 16}, **asked)
    assert "output_hidden_states" in reason
    real = padded_prompt((44, 31))["attention_mask"].bool()
    for states, others in zip(output.hidden_states[0], expected.hidden_states[0], strict=True):
        torch.testing.assert_close(states[real], others[real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({"output_attentions": True, "return_dict_in_generate": True}, 12),
        ({"output_hidden_states": True}, None),
        ({"output_hidden_states": True, "return_dict_in_generate": True, "prefill_chunk_size": 20}, 4),
    ],
    ids=["attentions", "not handed out", "chunks of the call"],
)
def test_what_leaves_a_prompt_in_chunks(options: dict[str, Any], length: int | None) -> None:
    """Attention weights of a whole prompt grow with its square; states are not always handed out."""
    model = tiny_model("llama", attn_implementation="eager")
    output, reason = generated(model, {"backend": "knorm", "budget": 20, "chunk_size": 16}, **options)
    assert reason == "None"
    if "output_attentions" in options:
        assert output.attentions[0][0].shape[2] == length
    elif length is not None:
        assert output.hidden_states[0][0].shape[1] == length
