"""Caches of every origin under one roof: ours, the dense one, and transformers' own quantized ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import CompileConfig
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from ..building import build_cache
from ..cache import KVCache
from ..encoder_decoder import KVEncoderDecoderCache, layers_of
from ..errors import UnavailableCacheError
from ..layers.counting import passing_bytes, tensors_in
from ..models.cache_argument import as_argument
from ..models.decoder import decoder_config, decoder_only_config, split_model_or_config
from ..prompt_chunks import why_read_whole
from ..runs.labels import DENSE
from ..transformers_caches import build_quantized_cache, names_quantized_cache

__all__ = [
    "cache_bytes",
    "generate",
    "generation_options",
    "new_cache",
    "prefill",
    "split_available",
    "why_unavailable",
]


def generate(
    model: Any,
    prompt: torch.Tensor,
    cache_config: Mapping[str, Any],
    new_tokens: int,
    streamer: Any = None,
    compile_config: CompileConfig | None = None,
) -> Any:
    """Call `model.generate()` the way any user would; only the cache differs.

    Args:
        model (`PreTrainedModel`): The model.
        prompt (`torch.Tensor` of shape `(B, T)`): Token ids without padding.
        cache_config (`Mapping`): As for [`new_cache`].
        new_tokens (`int`): Exactly so many are generated, greedily.
        streamer (`BaseStreamer`, *optional*): Told of every token, such as a timer.
        compile_config (`CompileConfig`, *optional*): How to compile what decodes.

    Returns:
        `GenerateDecoderOnlyOutput`: With `sequences` and the cache ([`cache_of`]); of an encoder-decoder
        model, whose encoder reads the prompt, a `GenerateEncoderDecoderOutput`.
    """
    return model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,  # every cache is timed over the same number of steps
        streamer=streamer,
        compile_config=compile_config,
        return_dict_in_generate=True,
        **generation_options(cache_config),
    )


def generation_options(cache_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what makes `generate()` build a cache; nothing for the dense one."""
    if cache_config == DENSE:
        return {}
    return {"cache_implementation": "quantized", "cache_config": dict(cache_config)}


def new_cache(
    model_or_config: Any, cache_config: Mapping[str, Any], *, max_cache_length: int | None = None
) -> Cache:
    """Build an empty cache, ours or one of transformers' own.

    Args:
        model_or_config (`PreTrainedModel | PreTrainedConfig`): What the cache is for.
        cache_config (`Mapping`): `"backend"` in lower case and its options; `"dense"` is the ordinary cache.
        max_cache_length (`int`, *optional*): Tokens the cache will hold in the end; for ours.

    Raises:
        UnavailableCacheError: If there is no such cache of transformers' here.
        ValueError: On a wrong option.
    """
    whole = split_model_or_config(model_or_config)[1]
    if names_quantized_cache(cache_config):
        return build_quantized_cache(whole, cache_config)
    if cache_config["backend"] != "dense":
        return build_cache(model_or_config, dict(cache_config), max_cache_length=max_cache_length)
    own = DynamicCache(config=decoder_config(whole))
    return EncoderDecoderCache(own, DynamicCache()) if whole.is_encoder_decoder else own


def prefill(model: Any, prompt: torch.Tensor, cache: Cache, final_length: int, **arguments: Any) -> Any:
    """Read a prompt into an empty cache as `generate()` does: bound, and in chunks if cache and model can.

    Args:
        model (`PreTrainedModel`): The model.
        prompt (`torch.Tensor` of shape `(B, T)`): Token ids without padding.
        cache (`Cache`): Empty.
        final_length (`int`): Tokens the cache will have been given in the end.
        arguments: Passed on to the model.

    Returns:
        `ModelOutput`: Of the last call.

    Raises:
        ValueError: For an encoder-decoder model, whose decoder begins with another text.
    """
    decoder_only_config(model.config)
    chunk_size = None
    if isinstance(cache, KVCache):
        length = prompt.shape[1]
        cache.bind(model, torch.ones_like(prompt), max_cache_length=final_length, prompt_length=length)
        rotated = cache.rotated_length(length)
        if why_read_whole(model, {}, is_first=True, rotated_length=rotated) is None:
            chunk_size = cache.prefill_chunk_size
    output = None
    for chunk in prompt.split(chunk_size or prompt.shape[1], dim=1):
        output = model(input_ids=chunk, **as_argument(cache), use_cache=True, **arguments)
    return output


def split_available(
    model_config: Any, cache_configs: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the caches that can be had here, and for each other one its entry under `skipped`.

    Raises:
        ValueError: On a wrong option.
    """
    reasons = [(cache_config, why_unavailable(model_config, cache_config)) for cache_config in cache_configs]
    skipped = [
        {"cache_config": cache_config, "reason": why} for cache_config, why in reasons if why is not None
    ]
    return [cache_config for cache_config, why in reasons if why is None], skipped


def why_unavailable(model_config: Any, cache_config: Mapping[str, Any]) -> str | None:
    """Build the cache once without a model: a wrong option raises, what cannot be here is returned."""
    try:
        new_cache(model_config, cache_config)
    except UnavailableCacheError as error:
        return error.reason
    return None


def cache_bytes(cache: Any) -> int:
    """Return the bytes of every tensor a cache, or a list of its layers, keeps alive while it generates.

    For our caches that is `kv_bytes()`. For any other it is the sum over the storages of all tensors of its
    layers (see [`tensors_in`]). A storage shared by several tensors counts once, and whole; but what windows
    of transformers' own let go with the next token ([`passing_bytes`]) does not count: it depends on how many
    tokens the last call has read, and is gone when generation goes on.
    """
    if isinstance(cache, (KVCache, KVEncoderDecoderCache)):
        return cache.kv_bytes() - passing_bytes(layers_of(cache))
    if isinstance(cache, EncoderDecoderCache):
        return cache_bytes(cache.self_attention_cache) + cache_bytes(cache.cross_attention_cache)
    layers = cache.layers if isinstance(cache, Cache) else cache
    storages = [tensor.untyped_storage() for layer in layers for tensor in tensors_in(vars(layer))]
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    return held - passing_bytes(layers)
