"""Bytes of caches before anything runs: at a length, at their peak, and the tokens that some bytes hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ....capacity import most_tokens
from ....estimation import MOST_NEW_TOKENS, estimate
from ....eviction.options import EvictingConfig
from ....models.decoder import decoder_config
from ....models.layer_plan import key_value_heads, plan_layers
from ....registry import get_backend
from ....runs.labels import DENSE
from ....transformers_caches import names_quantized_cache

__all__ = [
    "longest_context",
    "not_predicted",
    "predicted_bytes",
    "predicted_peak_bytes",
    "prompt_and_new_tokens",
]

_NEW_TOKENS = 8
"""Tokens generated at the end of a context: enough to read the cache, few enough to be quick."""


def predicted_bytes(
    config: Any,
    cache_config: Mapping[str, Any],
    tokens: int,
    batch_size: int,
    dtype: torch.dtype,
    encoder_tokens: int | None = None,
    new_tokens: int = 1,
    at_peak: bool = False,
) -> int | None:
    """Predict the bytes of a cache after `generate()`, or the most there are while tokens are generated.

    Args:
        config (`PreTrainedConfig`): The model's.
        cache_config (`Mapping`): `"backend"` in lower case and its options.
        tokens (`int`): First given to the decoder, per row: the prompt unless an encoder reads it.
        batch_size (`int`): Rows.
        dtype (`torch.dtype`): Of the states.
        encoder_tokens (`int`, *optional*): Tokens per row that an encoder has read, where there is one.
        new_tokens (`int`): Tokens generated after those; the last one is never given to the cache.
        at_peak (`bool`): Whether to predict the most.

    Returns:
        `int | None`: bytes; None after more than `estimation.MOST_NEW_TOKENS` generated tokens for caches
        that evict, and for transformers' own quantized ones.
    """
    if new_tokens > MOST_NEW_TOKENS:
        if _tells_generated_tokens_apart(cache_config):
            return None
        tokens, new_tokens = tokens + new_tokens - 1, 1
    return estimate(
        config,
        dict(cache_config),
        tokens,
        batch_size,
        dtype=dtype,
        max_cache_length=tokens + new_tokens - 1,  # `generate()` knows how long the text will be
        encoder_tokens=encoder_tokens,
        new_tokens=new_tokens,
        at_peak=at_peak,
    )


def _tells_generated_tokens_apart(cache_config: Mapping[str, Any]) -> bool:
    """Whether it takes other bytes for the same tokens if they are of the prompt."""
    if names_quantized_cache(cache_config):
        return True
    if cache_config["backend"] == DENSE["backend"]:
        return False
    return issubclass(get_backend(cache_config["backend"]).config_class, EvictingConfig)


def predicted_peak_bytes(
    config: Any,
    cache_config: Mapping[str, Any],
    prompt_tokens: int,
    new_tokens: int,
    batch_size: int,
    dtype: torch.dtype,
) -> int | None:
    """Predict the most bytes a cache has alive at once: itself, and one layer's exact states of the prompt.

    Prefill attends to the exact keys and values of a layer while their packed form is stored; the dense cache
    needs as much again when it grows by a token. What the model computes besides is not part of it.

    Args:
        config (`PreTrainedConfig`): The model's.
        cache_config (`Mapping`): `"backend"` in lower case and its options.
        prompt_tokens (`int`): Tokens of the prompt, per row; an encoder reads them if there is one.
        new_tokens (`int`): Tokens generated after them, per row.
        batch_size (`int`): Rows.
        dtype (`torch.dtype`): Of the states.

    Returns:
        `int | None`: bytes; None where [`predicted_bytes`] has none, for offloaded caches, which lie in two
        memories, and for transformers' own quantized ones, which decode and encode all of a layer at once.
    """
    if cache_config.get("offload") or names_quantized_cache(cache_config):
        return None
    # a decoder with an encoder begins with one token of its own
    tokens, encoder_tokens = (1, prompt_tokens) if config.is_encoder_decoder else (prompt_tokens, None)
    held = predicted_bytes(
        config, cache_config, tokens, batch_size, dtype, encoder_tokens, new_tokens, at_peak=True
    )
    if held is None:
        return None
    decoder = decoder_config(config)
    widest = 0
    for layer_idx in range(len(plan_layers(decoder))):
        heads, key_dim, value_dim = key_value_heads(decoder, layer_idx)
        widest = max(widest, heads * (key_dim + value_dim))
    return held + batch_size * prompt_tokens * widest * dtype.itemsize


def longest_context(
    config: Any, cache_config: Mapping[str, Any], available_bytes: int, batch_size: int, dtype: torch.dtype
) -> int | None:
    """Find the most tokens per row that a cache can be given and still take no more than so many bytes.

    The last few are taken to be generated, as [`prompt_and_new_tokens`] says.

    Args:
        config (`PreTrainedConfig`): The model's.
        cache_config (`Mapping`): `"backend"` in lower case and its options.
        available_bytes (`int`): What the cache may take.
        batch_size (`int`): Rows.
        dtype (`torch.dtype`): Of the states.

    Returns:
        `int | None`: tokens, 0 if not even those that are generated fit; None if any length does.
    """
    if available_bytes < 1:
        return 0
    prompt = most_tokens(
        config, cache_config, available_bytes, batch_size, dtype=dtype, new_tokens=_NEW_TOKENS
    )
    return prompt + _NEW_TOKENS - 1 if prompt else prompt


def prompt_and_new_tokens(tokens: int) -> tuple[int, int]:
    """Split a context: the tokens of a prompt, and those to generate for the cache to be given `tokens`."""
    new_tokens = min(_NEW_TOKENS, tokens)
    return tokens + 1 - new_tokens, new_tokens  # the last generated one is never given to it


def not_predicted(error: Exception) -> str:
    """Say in a note why there is no prediction; of what is no wrong option, its kind, too."""
    said = " ".join(str(error).split())
    kind = "" if isinstance(error, ValueError) and said else type(error).__name__
    return f"not predicted: {': '.join(filter(None, (kind, said)))}"
