"""From a plain `cache_config` to a cache: of one half where a model has no encoder, else of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .cache import KVCache
from .config import drop_legacy_keys
from .encoder_decoder import KVEncoderDecoderCache, build_both
from .models.decoder import has_encoder, split_model_or_config
from .registry import get_backend

__all__ = ["build_cache"]


def build_cache(
    model_or_config: Any, cache_config: Mapping[str, Any], *, max_cache_length: int | None = None
) -> KVCache | KVEncoderDecoderCache:
    """Build the cache that `generate(cache_implementation="quantized", cache_config=cache_config)` would.

    Args:
        model_or_config (`PreTrainedModel | PreTrainedConfig`): What the cache is for.
        cache_config (`dict`): `"backend"` and its options, plain values only.
        max_cache_length (`int`, *optional*): Tokens the cache will hold in the end, if known.

    Returns:
        `KVCache | KVEncoderDecoderCache`: For `generate()`, or an own loop; the latter for encoder-decoder
        models.

    Raises:
        ValueError: On an unknown backend or a wrong option; the message names the option, the value and the
            allowed.
    """
    if not isinstance(cache_config, Mapping):
        raise ValueError(
            f"`cache_config` must be a dict such as {{'backend': 'kivi', 'nbits': 4}}, got {cache_config!r} "
            f"({type(cache_config).__name__})."
        )
    options = drop_legacy_keys(cache_config)
    if "backend" not in options:
        raise ValueError(f"`cache_config` needs a 'backend', got only {sorted(options, key=str)}.")
    cache_class = get_backend(options.pop("backend"))
    cache_class.config_class.from_dict(options)  # refuses names that Python would, or would take for its own
    _, config = split_model_or_config(model_or_config)
    build = build_both if has_encoder(config) else _build_one
    return build(cache_class, model_or_config, options, max_cache_length)


def _build_one(
    cache_class: type[KVCache], model_or_config: Any, options: dict[str, Any], max_cache_length: int | None
) -> KVCache:
    return cache_class(model_or_config, max_cache_length=max_cache_length, **options)
