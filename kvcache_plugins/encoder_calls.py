"""One call of `generate()` of an encoder-decoder model, for which transformers builds no quantized cache.

Nothing of transformers is imported at the top, because importing this package costs next to nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .models.cache_argument import cache_name, given_cache

__all__ = ["begin_text", "bind_both", "placed"]


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

    Raises:
        ValueError: If the cache is of another text, or of another model.
    """
    kv_cache = given_cache(model_kwargs)
    _check_encoder(kv_cache, model_kwargs.get("encoder_outputs"))
    kv_cache.bind(
        model,
        attention_mask=model_kwargs.get("decoder_attention_mask"),
        max_cache_length=max_cache_length,
        encoder_attention_mask=model_kwargs.get("attention_mask"),
    )
    kv_cache.is_bound_by_call = True
    if getattr(generation_config, "is_assistant", False):
        kv_cache.activate_past_recording()


def begin_text(model: Any, kv_cache: Any, input_ids: Any, model_kwargs: dict[str, Any]) -> int | None:
    """Begin to read a decoder's text with a cache that a call has bound.

    A text that goes on is given its mask if it has none: transformers goes by that to leave out what has been
    read, and without one reads it again.

    Args:
        model (`PreTrainedModel`): What generates.
        kv_cache (`KVEncoderDecoderCache`): Its cache.
        input_ids (`torch.Tensor` of shape `(B, T)`): The decoder's text.
        model_kwargs (`dict`): The call's arguments, to which a mask may be added.

    Returns:
        `int | None`: Tokens of the text, those of earlier calls included; `None` if nothing was read before.
    """
    seen, mask = kv_cache.get_seq_length(), model_kwargs.get("decoder_attention_mask")
    is_bound, kv_cache.is_bound_by_call = kv_cache.is_bound_by_call, False
    if seen == 0 or not is_bound:  # MusicGen binds none, and has read a token by now
        return None
    if mask is not None:
        return int(mask.shape[-1])
    if input_ids.shape[1] > seen and "decoder_attention_mask" in inspect.signature(model.forward).parameters:
        model_kwargs["decoder_attention_mask"] = input_ids.new_ones(input_ids.shape)
    return int(input_ids.shape[1])


def _check_encoder(kv_cache: Any, encoder_outputs: Any) -> None:
    """Refuse to go on with what has been read of another text, as far as its length tells."""
    held = kv_cache.cross_attention_cache.get_seq_length()
    states = encoder_outputs[0] if encoder_outputs is not None else None
    if held > 0 and states is not None and states.shape[1] != held:
        raise ValueError(
            f"The encoder has read {states.shape[1]} tokens, and this cache of the backend "
            f"{kv_cache.backend!r} holds {held} of what it has read before. Allowed are the same input, and "
            "for another a new cache, or this one after its `reset()`."
        )
