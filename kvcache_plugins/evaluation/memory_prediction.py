"""Bytes of caches before anything runs: at a length, at their peak, and the tokens that some bytes hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..estimation import estimate
from ..models.decoder import decoder_config
from ..models.layer_plan import key_value_heads, plan_layers
from ..registry import TRANSFORMERS_BACKENDS

__all__ = ["LONGEST", "most_tokens", "predicted_bytes", "predicted_peak_bytes"]

LONGEST = 2**30
"""Tokens beyond which a context counts as unlimited, such as a cache that evicts."""


def predicted_bytes(
    config: Any,
    cache_config: Mapping[str, Any],
    tokens: int,
    batch_size: int,
    dtype: torch.dtype,
    encoder_tokens: int | None = None,
) -> int | None:
    """Predict the bytes of a cache.

    Args:
        config (`PreTrainedConfig`): The model's.
        cache_config (`Mapping`): `"backend"` in lower case and its options.
        tokens (`int`): Tokens held per row.
        batch_size (`int`): Rows.
        dtype (`torch.dtype`): Of the states.
        encoder_tokens (`int`, *optional*): Tokens per row that an encoder has read, where there is one.

    Returns:
        `int | None`: bytes; None for transformers' own caches, whose size can be measured only.
    """
    if cache_config["backend"] in TRANSFORMERS_BACKENDS:
        return None
    # as in `generate()`, which knows how long the text will be
    return estimate(
        config,
        dict(cache_config),
        tokens,
        batch_size,
        dtype=dtype,
        max_cache_length=tokens,
        encoder_tokens=encoder_tokens,
    )


def predicted_peak_bytes(
    config: Any,
    cache_config: Mapping[str, Any],
    prompt_tokens: int,
    tokens: int,
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
        tokens (`int`): Tokens held in the end, per row; by the decoder.
        batch_size (`int`): Rows.
        dtype (`torch.dtype`): Of the states.

    Returns:
        `int | None`: bytes; None for transformers' own caches, and for offloaded ones, which lie in two
        memories.
    """
    if cache_config.get("offload"):
        return None
    encoder_tokens = prompt_tokens if config.is_encoder_decoder else None
    held = predicted_bytes(config, cache_config, tokens, batch_size, dtype, encoder_tokens)
    if held is None:
        return None
    decoder = decoder_config(config)
    widest = 0
    for layer_idx in range(len(plan_layers(decoder))):
        heads, key_dim, value_dim = key_value_heads(decoder, layer_idx)
        widest = max(widest, heads * (key_dim + value_dim))
    return held + batch_size * prompt_tokens * widest * dtype.itemsize


def most_tokens(
    config: Any, cache_config: Mapping[str, Any], available_bytes: int, batch_size: int, dtype: torch.dtype
) -> int | None:
    """Find the most tokens per row that a cache holds in so many bytes.

    Args:
        config (`PreTrainedConfig`): The model's.
        cache_config (`Mapping`): `"backend"` in lower case and its options; not one of transformers' own.
        available_bytes (`int`): What the cache may take.
        batch_size (`int`): Rows.
        dtype (`torch.dtype`): Of the states.

    Returns:
        `int | None`: tokens, 0 if not even one fits; None if `LONGEST` fit.
    """

    def fits(tokens: int) -> bool:
        needed = predicted_bytes(config, cache_config, tokens, batch_size, dtype)
        return needed is not None and needed <= available_bytes

    if not fits(1):
        return 0
    if fits(LONGEST):
        return None
    low, high = 1, LONGEST  # fits, does not; more tokens never take fewer bytes
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
