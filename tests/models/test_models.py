"""The zoo of tiny models: every family builds, says something, and has the kinds of layer it stands for."""

from __future__ import annotations

import pytest
import torch

from kvcache_plugins.testing.generation import padded_prompt
from kvcache_plugins.testing.models import ARCHITECTURES, tiny_model

HYBRID = {
    "exaone4": "sliding_attention",
    "gemma2": "sliding_attention",
    "gemma3_text": "sliding_attention",
    "gemma4_text": "sliding_attention",
    "gpt_oss": "sliding_attention",
    "qwen3_next": "linear_attention",
}
REQUIRED = """
    bloom cohere deepseek_v3 exaone4 gemma gemma2 gemma3_text glm4 gpt2 gpt_neox gpt_oss granite llama mistral
    mixtral mpt olmo2 opt phi phi3 qwen2 qwen3 qwen3_moe qwen3_next smollm3 stablelm starcoder2
"""


def test_names_are_sorted_and_complete() -> None:
    assert list(ARCHITECTURES) == sorted(set(ARCHITECTURES))
    assert set(ARCHITECTURES).issuperset(REQUIRED.split())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_generates_varied_text_with_clear_choices(name: str) -> None:
    model = tiny_model(name)
    assert not model.training
    assert model.config.model_type == name
    output = model.generate(
        **padded_prompt((21, 13)),
        max_new_tokens=24,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    assert output.sequences.shape == (2, 45)
    best = torch.stack(output.logits).topk(2, dim=-1).values  # [T, B, 2]
    # Comparing tokens is sound only if no choice is close to a tie, and telling only if the tokens vary.
    assert (best[..., 0] - best[..., 1]).min() > 1e-4
    assert max(len(set(row.tolist())) for row in output.sequences[:, 21:]) >= 8


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_attention_over_the_whole_past_decides(name: str) -> None:
    # If the logits did not depend on old tokens, equal output would prove nothing about a cache.
    model = tiny_model(name)
    input_ids = padded_prompt((45,))["input_ids"]
    changed = input_ids.clone()
    changed[0, 3] = (changed[0, 3] + 1) % 125 + 3
    with torch.no_grad():
        difference = model(input_ids).logits[0, -1] - model(changed).logits[0, -1]
    assert difference.abs().max() > 1e-2


@pytest.mark.parametrize(("name", "other_kind"), HYBRID.items())
@pytest.mark.parametrize("num_hidden_layers", [2, 4])
def test_hybrid_families_have_both_kinds_of_layer(name: str, other_kind: str, num_hidden_layers: int) -> None:
    config = tiny_model(name, num_hidden_layers=num_hidden_layers).config
    assert set(config.layer_types) == {other_kind, "full_attention"}
    assert len(config.layer_types) == num_hidden_layers
    if other_kind == "sliding_attention":
        assert config.sliding_window == 16


def test_sliding_window_as_long_as_the_context_is_covered() -> None:
    config = tiny_model("phi3").config
    assert config.sliding_window == config.max_position_embeddings
    assert tiny_model("mistral").config.sliding_window is None


def test_weights_depend_on_the_seed_only() -> None:
    torch.manual_seed(1)
    first = tiny_model("llama")
    state = torch.get_rng_state()
    second = tiny_model("llama", dtype=torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), state)
    other = tiny_model("llama", seed=1)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight.to(torch.bfloat16), second.state_dict()[name])
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_overrides_use_common_or_own_names() -> None:
    assert tiny_model("gpt2", num_hidden_layers=3).config.n_layer == 3
    assert tiny_model("gpt2", n_layer=3).config.n_layer == 3


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"name must be one of bloom, .*got 'lama'"):
        tiny_model("lama")
