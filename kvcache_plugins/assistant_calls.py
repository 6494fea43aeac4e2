"""Which cache a model has that drafts tokens for another: its own, one like its target's, or a dense one.

Nothing of transformers is imported at the top, because importing this package costs next to nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from .cache_requests import asks_for_ours, check_request, names_ours, own_choice
from .models.cache_argument import given_cache

__all__ = ["choose_cache_of_assistant"]

_DENSE_AFTERWARDS = "as its generate() hands back one, with which its next drafts go on."


def choose_cache_of_assistant(model: Any, generation_config: Any, model_kwargs: Mapping[str, Any]) -> None:
    """Give a drafting model the cache its own configuration names, else one like its target's if that fits.

    It runs with a copy of the target's configuration, whose `cache_config` may name layers and artifacts of
    the target alone, and of which some releases of transformers take `cache_implementation` away. From the
    second round on it is given the cache of the last one as well, which transformers refuses beside that.

    Args:
        model (`PreTrainedModel`): What generates; nothing is done to others than assistants.
        generation_config (`GenerationConfig`): The call's own copy, which is written to.
        model_kwargs (`dict`): The call's arguments.
    """
    cache_config = getattr(generation_config, "cache_config", None)
    if not getattr(generation_config, "is_assistant", False) or not names_ours(cache_config):
        return
    implementation, own_config = own_choice(model)
    if given_cache(model_kwargs) is not None:
        generation_config.cache_implementation = None
        return
    if implementation is not None:
        generation_config.cache_implementation = implementation
        generation_config.cache_config = own_config
        if asks_for_ours(generation_config) and _returns_dense(model):
            _choose_dense(model, generation_config, _DENSE_AFTERWARDS)
        return
    generation_config.cache_implementation = "quantized"
    if _returns_dense(model):
        _choose_dense(model, generation_config, _DENSE_AFTERWARDS)
    elif (reason := _why_not(model, generation_config, model_kwargs)) is not None:
        another = "The assistant's own generation_config may name another."
        _choose_dense(model, generation_config, f"as its target's does not fit: {reason} {another}")


def _choose_dense(model: Any, generation_config: Any, reason: str) -> None:
    """Take a cache that was asked for away, and say so."""
    warnings.warn(
        f"The assistant {type(model).__name__} drafts with a dense cache, {reason}",
        stacklevel=4,
    )
    generation_config.cache_implementation = generation_config.cache_config = None


def _returns_dense(model: Any) -> bool:
    """Whether a model's own `generate()` hands back a dense cache, whatever it was given (Whisper)."""
    from .models.origins import is_of_family

    is_own = not type(model).generate.__qualname__.startswith("GenerationMixin.")
    return is_own and is_of_family(model.config, {"whisper"})


def _why_not(model: Any, generation_config: Any, model_kwargs: Mapping[str, Any]) -> str | None:
    """Why a model cannot have the cache that is asked for; `None` if it can."""
    from .building import build_cache

    if not model.config.is_encoder_decoder and model_kwargs.get("encoder_outputs") is not None:
        return (
            f"{type(model).__name__} is a decoder alone, and reads its target's encoder beside its own text."
        )
    try:
        check_request(model, generation_config, model_kwargs)
        build_cache(model.config, generation_config.cache_config).bind(model)
    except ValueError as error:
        return str(error)
    except Exception as error:  # passing through, it would leave a model that drafts by its first layers so
        return f"{type(error).__name__}: {error}"
    return None
