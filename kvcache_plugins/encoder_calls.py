"""One call of `generate()` of an encoder-decoder model, for which transformers builds no quantized cache.

Nothing of transformers is imported at the top, because importing this package costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .models.cache_argument import cache_name, given_cache

__all__ = ["bind_both", "placed"]


@contextmanager
def placed(model: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> Iterator[None]:
    """Put the cache of an encoder-decoder model in its place, as if the user had given it.

    Args:
        model (`PreTrainedModel`): What generates.
        generation_config (`GenerationConfig`): The call's own copy, which asks for a cache of ours.
        model_kwargs (`dict`): The call's arguments, which are written to.

    Raises:
        ValueError: On a wrong option, or for a model or backend that is not served.
    """
    from .building import build_cache

    implementation = generation_config.cache_implementation
    kv_cache = build_cache(model.config, generation_config.cache_config)
    model_kwargs[cache_name()] = kv_cache
    generation_config.cache_implementation = None  # which transformers refuses beside a cache
    try:
        yield
    finally:
        generation_config.cache_implementation = implementation
        vars(kv_cache).pop("_is_user_defined", None)


def bind_both(
    model: Any, generation_config: Any, model_kwargs: Mapping[str, Any], max_cache_length: int | None
) -> None:
    """Tell both halves of a cache what `update` is never told.

    Args:
        model (`PreTrainedModel`): What generates.
        generation_config (`GenerationConfig`): The call's own copy.
        model_kwargs (`dict`): The call's arguments, cache and masks among them.
        max_cache_length (`int`, *optional*): Tokens of the decoder the cache will hold in the end.
    """
    kv_cache = given_cache(model_kwargs)
    kv_cache.bind(
        model,
        attention_mask=model_kwargs.get("decoder_attention_mask"),
        max_cache_length=max_cache_length,
        encoder_attention_mask=model_kwargs.get("attention_mask"),
    )
    if getattr(generation_config, "is_assistant", False):
        kv_cache.activate_past_recording()
