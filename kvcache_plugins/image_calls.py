"""One call of `generate()` that makes an image, which Janus does in a loop of its own, over a static cache.

Nothing of transformers is imported at the top, because importing this package costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .cache_requests import asks_for_ours, check_request, is_ours
from .generation_calls import bind_cache
from .models.cache_argument import as_argument, given_cache

__all__ = ["cache_for_image"]

_TEXT = "text"
"""The `generation_mode` of calls that the `generate()` of transformers serves."""


def cache_for_image(model: Any, attention_mask: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Build the cache of ours that a call asks for, or take the one it was given, and tell it of the call.

    Args:
        model (`PreTrainedModel`): What generates.
        attention_mask (`torch.Tensor` of shape `(B, T)`, *optional*): Of the prompt.
        options (`dict`): The call's other arguments.

    Returns:
        `dict`: The cache that was built, as an argument of the call; empty if there is none to be added.

    Raises:
        ValueError: On a wrong option, for a backend that does not serve, or if the cache has seen a text.
    """
    if options.get("generation_mode", _TEXT) == _TEXT:
        return {}
    others = {name: value for name, value in options.items() if name != "generation_config"}
    config, others = model._prepare_generation_config(options.get("generation_config"), **others)
    check_request(model, config, others)
    kv_cache, added = given_cache(others), {}
    if kv_cache is None and asks_for_ours(config):
        from .building import build_cache

        kv_cache = build_cache(model, config.cache_config)
        added = as_argument(kv_cache)
    if kv_cache is None or not is_ours(kv_cache):
        return {}
    if seen := kv_cache.get_seq_length():
        raise ValueError(
            f"generation_mode={options['generation_mode']!r} reads its prompt from the beginning, and this "
            f"cache of the backend {kv_cache.backend!r} has seen {seen} tokens. Allowed are a new one, and "
            "this one after its `reset()`."
        )
    rows = attention_mask
    if rows is not None:  # every image has a row of the prompt, and all have another to be compared with
        rows = rows.repeat_interleave(config.num_return_sequences or 1, dim=0).repeat(2, 1)
    bind_cache(model, config, {**as_argument(kv_cache), "attention_mask": rows}, None, None)
    wanted = config.prefill_chunk_size
    if wanted is not None and rows is not None and rows.shape[1] > wanted:
        kv_cache.whole_prompt_reason = "images are made in a loop of the model's own, which reads it whole"
    return added
