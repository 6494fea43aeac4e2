"""How many tokens so many bytes hold, predicted without a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .config import check_count
from .estimation import estimate

__all__ = ["GIGABYTE", "LONGEST", "most_tokens"]

GIGABYTE = 10**9
"""Bytes of one unit of `--memory_gb`."""

LONGEST = 2**30
"""Tokens beyond which a context counts as unlimited, such as that of a cache that evicts."""


def most_tokens(
    model_or_config: Any,
    cache_config: Mapping[str, Any],
    memory_bytes: int,
    batch_size: int = 1,
    *,
    dtype: torch.dtype | str | None = None,
    encoder_tokens: int | None = None,
    new_tokens: int = 1,
) -> int | None:
    """Find the longest prompt whose cache takes no more than so many bytes, by [`estimate`].

    ```python
    >>> most_tokens(model, {"backend": "kivi", "nbits": 2}, memory_bytes=8 * 10**9, new_tokens=500)
    ```

    The bytes are those of the cache alone, once `generate()` has read the prompt and until it has written
    `new_tokens`: what the model's weights take, and what it computes on the way, come on top.

    Args:
        model_or_config (`PreTrainedModel | PreTrainedConfig`): The model.
        cache_config (`dict`): As for `generate`; `{"backend": "dense"}` is transformers' own cache.
        memory_bytes (`int`): What the cache may take.
        batch_size (`int`): Rows.
        dtype (`torch.dtype | str`, *optional*): Of the states, also by a name such as `"bf16"`; the model's,
            else the configuration's, else bf16.
        encoder_tokens (`int`, *optional*): States per row that the encoder hands to the decoder, where there
            is one; the prompt is then the decoder's.
        new_tokens (`int`): Tokens generated after the prompt.

    Returns:
        `int | None`: tokens per row, 0 if not even one fits; None if 2^30 do.

    Raises:
        ValueError: On a wrong option, number of bytes, or count; or with `offload`, whose codes rest in the
            host's memory.
    """
    given = check_count("most_tokens: memory_bytes", memory_bytes)
    if isinstance(cache_config, Mapping) and cache_config.get("offload"):
        raise ValueError(
            "most_tokens: offload=True keeps codes in the host's memory; allowed are caches that lie in one."
        )

    def needed(tokens: int) -> int:
        return estimate(
            model_or_config,
            cache_config,
            tokens,
            batch_size,
            dtype=dtype,
            max_cache_length=tokens + new_tokens - 1,  # `generate()` knows how long the text will be
            encoder_tokens=encoder_tokens,
            new_tokens=new_tokens,
            at_peak=True,
        )

    if needed(1) > given:
        return 0
    if needed(LONGEST) <= given:
        return None
    low, high = 1, LONGEST  # fits, does not; more tokens never take fewer bytes
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= given else (low, middle)
    return low
