"""One call of `generate()`: what its cache is told, and what is checked once there is one.

Nothing of transformers is imported at the top, because importing this package costs next to nothing.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

from .cache_requests import asks_for_ours, check_request, check_use, is_ours, own_choice
from .encoder_calls import begin_text, bind_both, placed
from .errors import IncompatibleTransformersError
from .models.cache_argument import CACHE_NAMES, cache_name, given_cache, holds_both
from .prompt_chunks import check_drafting, why_not_cut, why_not_filled, why_read_whole

__all__ = [
    "bind_cache",
    "check_before_encoder",
    "check_prepared",
    "ready_to_build",
]

_OF_FURTHER_CALLS = {
    "whisper": " Recordings longer than 30 seconds, other temperatures, and return_timestamps=True (what "
    "follows the last timestamp is heard again) are further calls of generate(), which makes a cache for "
    "each of them if it is given cache_implementation='quantized' instead."
}
"""What to say to users of models whose `generate()` makes several calls of that of transformers."""


@contextmanager
def ready_to_build(model: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> Iterator[None]:
    """Have transformers build what was asked for: it knows no quantized cache for encoder-decoder models.

    Nor does it take a cache, such as that of the last turn, for a model whose own configuration names one.
    `cache_config` stays as the user wrote it; some releases of transformers consume its keys.

    Args:
        model (`PreTrainedModel`): What generates.
        generation_config (`GenerationConfig`): The call's own copy.
        model_kwargs (`dict`): The call's arguments, to which a cache may be added.
    """
    cache_config = getattr(generation_config, "cache_config", None)
    if isinstance(cache_config, Mapping):
        generation_config.cache_config = dict(cache_config)
    has_encoder = getattr(model.config, "is_encoder_decoder", False)
    kv_cache, implementation = given_cache(model_kwargs), generation_config.cache_implementation
    is_ours_to_build = has_encoder and asks_for_ours(generation_config) and kv_cache is None
    if kv_cache is not None and is_ours(kv_cache) and (implementation, cache_config) == own_choice(model):
        generation_config.cache_implementation = None
    try:
        with placed(model, generation_config, model_kwargs) if is_ours_to_build else nullcontext():
            yield
    finally:
        generation_config.cache_implementation = implementation
        generation_config.cache_config = cache_config


def bind_cache(
    model: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    max_cache_length: int | None,
) -> None:
    """Tell the cache of a call, if it is one of ours, what `update` is never told, and how to read a prompt.

    Args:
        model (`PreTrainedModel`): What generates.
        generation_config (`GenerationConfig`): The call's own copy; may be given a `prefill_chunk_size`.
        model_kwargs (`dict`): The call's arguments, cache and masks among them.
        generation_mode (`GenerationMode`): What transformers calls this way of generating.
        max_cache_length (`int`, *optional*): Tokens the cache will hold in the end.

    Raises:
        ValueError: If the prompt is to be read in larger chunks than the model can take, or cannot be split;
            if it has nothing that the cache has not seen, or the cache would not be used.
        IncompatibleTransformersError: If the cache that was asked for is not among the arguments.
    """
    kv_cache = given_cache(model_kwargs)
    if kv_cache is None or not is_ours(kv_cache):
        _check_found(generation_config)
        return
    _check_given(model, generation_config, kv_cache)
    if _guides_by_a_second_pass(model, generation_config):
        warnings.warn(
            f"guidance_scale={generation_config.guidance_scale} keeps what it compares with in a second, "
            f"dense cache of transformers' own, which no report of this one ({kv_cache.backend!r}) counts.",
            stacklevel=3,
        )
    max_cache_length = _countable(max_cache_length)
    if holds_both(kv_cache):
        bind_both(model, generation_config, model_kwargs, max_cache_length)
        return
    kv_cache.check_outputs(with_attentions=bool(getattr(generation_config, "output_attentions", False)))
    prompt_length = _prompt_length(generation_config, model_kwargs)
    kv_cache.check_in_step()  # first: a forward that was interrupted has seen all in some layers
    _check_news(kv_cache, prompt_length)
    check_drafting(kv_cache.get_seq_length(), generation_mode)
    is_assistant = getattr(generation_config, "is_assistant", False)
    if is_assistant:
        _fill_holes(model_kwargs)
    kv_cache.bind(
        model,
        attention_mask=model_kwargs.get("attention_mask"),
        max_cache_length=max_cache_length,
        prompt_length=prompt_length or None,
    )
    kv_cache.is_bound_by_call = True
    kv_cache.is_compiled = getattr(generation_config, "compile_config", None) is not None
    if is_assistant:
        kv_cache.activate_past_recording()  # which transformers did before, and `bind` has undone
    _choose_chunks(model, generation_config, model_kwargs, generation_mode, kv_cache, prompt_length)


def _choose_chunks(
    model: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    kv_cache: Any,
    prompt_length: int | None,
) -> None:
    """Have a prompt read in chunks of the size that the cache wants, or whole where that changes the answer.

    Raises:
        ValueError: If the caller's chunks are larger than the model can take, or a prompt that has to be read
            whole cannot be.
    """
    given = getattr(generation_config, "prefill_chunk_size", None)
    if given is not None and kv_cache.reads_long_text and given > kv_cache.longest_call:
        raise ValueError(
            f"prefill_chunk_size must be at most {kv_cache.longest_call} for {type(model).__name__} and a "
            f"prompt of {prompt_length} tokens, or the model discards the cache; got {given}."
        )
    kv_cache.whole_prompt_reason = None
    wanted = kv_cache.prefill_chunk_size
    if given is not None or wanted is None:
        return
    reason = why_read_whole(
        model,
        model_kwargs,
        is_first=kv_cache.get_seq_length() == 0,
        rotated_length=kv_cache.rotated_length(prompt_length),
        generation_mode=generation_mode,
        returns_states=_returns_states(generation_config),
    )
    if reason is None:
        generation_config.prefill_chunk_size = wanted  # this object is the call's own copy
        return
    _check_whole(model, kv_cache, prompt_length, model_kwargs, reason)
    if prompt_length is None or prompt_length - kv_cache.get_seq_length() > wanted:
        kv_cache.whole_prompt_reason = reason


def _countable(length: Any) -> int | None:
    """What transformers makes of a `max_length`, which may be no integer, as a number of tokens."""
    is_count = length is not None and 1 <= length < math.inf
    return math.ceil(length) if is_count else None


def _returns_states(generation_config: Any) -> bool:
    """Whether a call hands out hidden states, those of the prompt first."""
    needed = ("output_hidden_states", "return_dict_in_generate")
    return all(getattr(generation_config, name, None) for name in needed)


def _guides_by_a_second_pass(model: Any, generation_config: Any) -> bool:
    """Whether transformers will read a second text beside; models of sounds double their batch instead."""
    is_asked = getattr(generation_config, "guidance_scale", None) not in (None, 1)
    return is_asked and type(model).generate.__qualname__.startswith("GenerationMixin.")


def _fill_holes(model_kwargs: dict[str, Any]) -> None:
    """Leave an assistant's mask the padding on the left alone.

    Transformers gives assistants no mask, for which each call makes one of its own: a padding token in the
    middle of the text, or one that was drafted, would be taken for padding.
    """
    mask: Any = model_kwargs.get("attention_mask")
    if getattr(mask, "ndim", 0) == 2:
        model_kwargs["attention_mask"] = mask.cummax(dim=1).values


def check_prepared(model: Any, input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> None:
    """Refuse to read a prompt without the cache of ours that was asked for, or with one that has seen it.

    Nor with one that nothing was told, by a model that prepares its caches in a method of its own.

    A prompt whose images its tokens do not match is read whole: its model says then what it thinks of that.
    So is one whose tokens are several codes each.

    Args:
        model (`PreTrainedModel`): What generates, and may have left out what prepares a cache.
        input_ids (`torch.Tensor` of shape `(B, T)`): The prompt; of a model with an encoder, its decoder's.
            `(B, T, codes)` where every token is several.
        generation_config (`GenerationConfig`): The call's own copy; may lose its `prefill_chunk_size`.
        model_kwargs (`dict`): The call's arguments; may be given a mask of the decoder's text.

    Raises:
        ValueError: Naming the backend that would be ignored, or what has been seen.
    """
    kv_cache = given_cache(model_kwargs)
    if kv_cache is not None and is_ours(kv_cache):
        _check_told(model, kv_cache)
    if kv_cache is not None and is_ours(kv_cache) and not getattr(generation_config, "is_assistant", False):
        if holds_both(kv_cache):
            length = begin_text(model, kv_cache, input_ids, model_kwargs)
            _check_news(kv_cache, length, _OF_FURTHER_CALLS.get(model.config.model_type, ""))
        else:
            kv_cache.is_bound_by_call = False
            _see_that_chunks_serve(model, kv_cache, input_ids, generation_config, model_kwargs)
    if asks_for_ours(generation_config) and kv_cache is None:
        raise ValueError(
            f"{type(model).__name__} prepares no cache before it generates: cache_config with "
            f"backend={generation_config.cache_config['backend']!r} would be ignored. Allowed is the cache "
            f"itself, as {cache_name()}=kvcache_plugins.build_cache(model, cache_config)."
        )


def _check_told(model: Any, kv_cache: Any) -> None:
    """Refuse a cache that a model has made, or taken, in a method of its own which told it nothing."""
    prepares = type(model)._prepare_cache_for_generation.__qualname__
    if not prepares.startswith("GenerationMixin.") and not kv_cache.is_bound_by_call:
        raise ValueError(
            f"{type(model).__name__} prepares its caches in a method of its own, so that this one of the "
            f"backend {kv_cache.backend!r} was not told of padding and much else. Allowed for this model's "
            "generate() are caches of transformers."
        )


def _see_that_chunks_serve(
    model: Any, kv_cache: Any, input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any]
) -> None:
    """Have a prompt read whole, whoever wanted chunks, if they would be of codes, or mistake its images."""
    wanted, encoded = generation_config.prefill_chunk_size, model_kwargs.get("mm_encoder_outputs")
    if wanted is None:
        return
    length = _prompt_length(generation_config, model_kwargs)
    is_whole_text = length == input_ids.shape[1]  # and not the new tokens alone
    unread = input_ids[:, kv_cache.get_seq_length() :] if is_whole_text else input_ids
    reason = why_not_cut(unread) or why_not_filled(model.config, unread, encoded or {})
    if reason is None:
        return
    _check_whole(model, kv_cache, length, model_kwargs, reason)
    generation_config.prefill_chunk_size = None  # this object is the call's own copy
    if unread.shape[1] > wanted:
        kv_cache.whole_prompt_reason = reason


def _check_found(generation_config: Any) -> None:
    """Refuse to go on with a cache of ours that was asked for and cannot be told anything."""
    if asks_for_ours(generation_config):
        import transformers

        raise IncompatibleTransformersError(
            f"transformers {transformers.__version__} knows caches by another name than any of "
            f"{CACHE_NAMES}, so that this one could not be told of padding and much else."
        )


def check_before_encoder(model: Any, generation_config: Any, model_kwargs: Mapping[str, Any]) -> None:
    """Refuse before an encoder reads, which may take long, what would be refused after it.

    Args:
        model (`PreTrainedModel`): What generates.
        generation_config (`GenerationConfig`): The call's own copy.
        model_kwargs (`dict`): The call's arguments.

    Raises:
        ValueError: On a wrong option, or for a model, backend or cache that does not serve.
        KernelUnavailableError: If `kernel="native"` cannot be met.
    """
    if not model.config.is_encoder_decoder or getattr(generation_config, "is_assistant", False):
        return
    check_request(model, generation_config, model_kwargs)
    kv_cache = given_cache(model_kwargs)
    if kv_cache is None and asks_for_ours(generation_config):
        from .building import build_cache

        build_cache(model.config, generation_config.cache_config)
    elif kv_cache is not None and is_ours(kv_cache):
        _check_given(model, generation_config, kv_cache)


def _check_given(model: Any, generation_config: Any, kv_cache: Any) -> None:
    """Refuse a cache of ours that a call would not use, or not as it is meant."""
    check_use(model, generation_config, f"a cache of the backend {kv_cache.backend!r}")
    _check_checkpointing(model, kv_cache)
    if getattr(model.config, "is_encoder_decoder", False) and not holds_both(kv_cache):
        raise ValueError(
            f"{type(model).__name__} has an encoder, and this cache of the backend {kv_cache.backend!r} is "
            "for the decoder's own text alone. Allowed are cache_implementation='quantized' with a "
            "cache_config, and what `kvcache_plugins.build_cache(model, cache_config)` returns."
        )


def _check_checkpointing(model: Any, kv_cache: Any) -> None:
    """Refuse a model whose layers, told to save memory for a backward pass, are called without a cache."""
    if _keeps_caches_without_gradients():
        return  # `generate()` asks for none
    checkpointing = (getattr(module, "gradient_checkpointing", False) for module in model.modules())
    if model.training and any(checkpointing):
        raise ValueError(
            f"{type(model).__name__} is in training mode with gradient checkpointing, which keeps the cache "
            f"from its layers: the backend {kv_cache.backend!r} would be ignored. Allowed is model.eval()."
        )


@cache
def _keeps_caches_without_gradients() -> bool:
    """Whether layers that save memory for a backward pass have a cache where there will be none (5.24)."""
    from transformers import modeling_layers

    return "torch.is_grad_enabled()" in inspect.getsource(modeling_layers)


def _check_news(kv_cache: Any, prompt_length: int | None, further: str = "") -> None:
    """Refuse a prompt of which the cache has seen all, so that there is nothing to go on from."""
    seen = kv_cache.get_seq_length()
    if prompt_length is not None and 0 < prompt_length <= seen:
        stopped = (
            ""  # what has been evicted depends on where a prompt ended
            if hasattr(kv_cache, "evicting_layers")
            else "to go on with a text where a call was stopped, this cache after its "
            f"`crop({prompt_length - seen - 1})`; "
        )
        raise ValueError(
            f"The prompt has {prompt_length} tokens, and its cache has seen {seen} before. Allowed are a "
            f"next turn, given with all that came before it; {stopped}and for another text a new one, or "
            f"this one after its `reset()`.{further}"
        )


def _check_whole(
    model: Any, kv_cache: Any, prompt_length: int | None, model_kwargs: dict[str, Any], reason: str
) -> None:
    """Refuse a prompt that cannot be split, and is longer than what the model reads in one call."""
    most = kv_cache.longest_call if kv_cache.reads_long_text else None
    if most is None or model_kwargs.get("inputs_embeds") is not None or kv_cache.get_seq_length() > most:
        return  # the model counts the tokens it is given
    raise ValueError(
        f"{type(model).__name__} discards its cache when it reads more than {most} tokens in one call, and "
        f"this prompt of {prompt_length} cannot be split: {reason}. Allowed are prompts of at most {most} "
        "tokens, and those that can be split."
    )


def _prompt_length(generation_config: Any, model_kwargs: dict[str, Any]) -> int | None:
    """Tokens of the prompt, those of earlier turns included; `None` if nothing tells."""
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if mask is not None and hasattr(mask, "shape"):
        return int(mask.shape[-1])
    found = getattr(generation_config, "_mask_length", None)  # of a mask without zeros, which is not kept
    if isinstance(found, int) and found > 0:
        return found
    return int(positions.shape[-1]) if positions is not None and hasattr(positions, "shape") else None
