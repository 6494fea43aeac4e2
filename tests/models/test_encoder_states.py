"""Decoders that attend to an encoder: their keys of it never come among those of the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, EncoderDecoderCache

import kvcache_plugins as kvp
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing.models import _initialize

INT8 = {"backend": "int8"}
BERT = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
BART = {"d_model": 64, "decoder_ffn_dim": 128, "decoder_attention_heads": 4, "decoder_layers": 2}
SIZES: dict[str, dict[str, Any]] = {
    "bert": {**BERT, "add_cross_attention": True},
    "bart": {**BART, "is_encoder_decoder": False},
    "big_bird": {**BERT, "add_cross_attention": True, "attention_type": "original_full"},
    "trocr": {**BART, "cross_attention_hidden_size": 64},
    "xglm": {**BART, "ffn_dim": 128, "attention_heads": 4, "num_layers": 2, "add_cross_attention": True},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 2, "add_cross_attention": True},
}  # fmt: skip
TOKENS = torch.randint(5, 100, (2, 40), generator=torch.Generator().manual_seed(0))
STATES = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(1))


def small(name: str) -> Any:
    """A decoder with cross-attention."""
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[name](vocab_size=128, is_decoder=True, **SIZES[name])
    )
    _initialize(model, 1)
    return model.eval()


@torch.no_grad()
def in_two_calls(model: Any, cache: Any, states: Any = STATES) -> torch.Tensor:
    """Logits `(B, T, V)` of all tokens, the second part of which is read through the cache."""
    parts = []
    for tokens in TOKENS.split(30, dim=1):
        output = model(input_ids=tokens, **as_argument(cache), encoder_hidden_states=states)
        parts.append(output.logits)
    return torch.cat(parts, dim=1)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error."""
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("is_bound_later", [False, True])
@pytest.mark.parametrize("name", [name for name in SIZES if name != "gpt2"])
def test_states_of_an_encoder_are_refused_before_anything_is_stored(name: str, is_bound_later: bool) -> None:
    model = small(name)
    cache = (
        kvp.build_cache(model.config, INT8).bind(model) if is_bound_later else kvp.build_cache(model, INT8)
    )
    with pytest.raises(
        ValueError, match=r"'int8' is for the text of a decoder alone; .* `encoder_hidden_states`"
    ):
        in_two_calls(model, cache)
    assert cache.get_seq_length() == 0
    expected = in_two_calls(model, DynamicCache(), None)
    assert error(in_two_calls(model, cache, None), expected) < 0.02


def test_generation_refuses_them_too() -> None:
    with pytest.raises(ValueError, match="BartDecoder was given `encoder_hidden_states`"):
        small("bart").generate(
            input_ids=TOKENS,
            encoder_hidden_states=STATES,
            cache_implementation="quantized",
            cache_config=INT8,
            max_new_tokens=2,
        )


def test_a_model_that_keeps_them_apart_is_served() -> None:
    model = small("gpt2")
    with torch.no_grad():
        expected = model(input_ids=TOKENS, encoder_hidden_states=STATES).logits
    cache = kvp.build_cache(model, INT8)
    assert 0 < error(in_two_calls(model, cache), expected) < 0.02
    assert cache.get_seq_length() == TOKENS.shape[1]


@pytest.mark.parametrize("name", ["bert", "bart"])
def test_what_the_error_allows_works(name: str) -> None:
    model = small(name)
    with torch.no_grad():
        expected = model(input_ids=TOKENS, encoder_hidden_states=STATES).logits
    cache = EncoderDecoderCache(kvp.build_cache(model, INT8), DynamicCache())
    assert 0 < error(in_two_calls(model, cache), expected) < 0.02
