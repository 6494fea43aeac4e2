"""One call of `generate()`: what it asks for, whether that can be met, and what its cache is told.

Nothing of transformers is imported at the top, because importing this package costs next to nothing.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from .registry import TRANSFORMERS_BACKENDS, get_backend

__all__ = ["bind_cache", "check_request", "kept_whole", "let_assistant_keep_its_cache"]

_SPLIT_WITH_THE_TEXT = frozenset(
    {"attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}
)
"""Inputs of which transformers gives each chunk of a prompt its part."""
_SPLIT_FEATURES = frozenset(
    {"last_hidden_state", "pooler_output", "deepstack_features", "hidden_states", "attentions"}
)
"""What an encoded image has if each chunk can be given its part; models that encode more read more of it."""
_READ_BEFORE = frozenset({"cache_position", "second_per_grid_ts", "video_second_per_grid"})
"""Inputs that number tokens, which has been done for the whole prompt."""
_READ_WHOLE = frozenset({"jamba", "kosmos_2_5_text_model"})
"""Families that compute something else in chunks, with transformers' caches too: recurrent layers of Jamba
start anew in each, and Kosmos-2.5 numbers tokens of padded rows by other rules in the first than later."""
_WITHOUT_CACHE = ("flaubert", "openai-gpt", "xlm")
"""Families that read their whole text at every step. Their signatures do not tell: others take `**kwargs`."""
_SOFT_PROMPT_CACHES = ("PREFIX_TUNING", "CARTRIDGE")


def check_request(model: Any, generation_config: Any) -> None:
    """Refuse what would fail later and less clearly, before anything is built.

    Args:
        model (`PreTrainedModel`): What generates.
        generation_config (`GenerationConfig`): With `cache_implementation` and `cache_config`.

    Raises:
        ValueError: Naming the option, what was given and what is allowed.
    """
    if getattr(generation_config, "cache_implementation", None) != "quantized":
        return
    cache_config = getattr(generation_config, "cache_config", None)
    if cache_config is None:
        return
    if not isinstance(cache_config, Mapping):
        raise ValueError(
            "`cache_config` must be a plain dict such as {'backend': 'kivi', 'nbits': 4}, got "
            f"{cache_config!r} ({type(cache_config).__name__})."
        )
    backend = cache_config.get("backend", "quanto")
    if str(backend).lower() in TRANSFORMERS_BACKENDS:
        return
    get_backend(backend)
    if getattr(model.config, "is_encoder_decoder", False):
        from .models.facts import decoder_config

        decoder_config(model.config)
    if not model._supports_default_dynamic_cache():  # transformers then ignores `cache_implementation`
        raise ValueError(
            f"{type(model).__name__} keeps its past in a class of its own, which transformers cannot "
            f"exchange: cache_implementation='quantized' with backend={backend!r} would be ignored. Allowed "
            "for this model is no cache_implementation at all."
        )
    if model.config.model_type in _WITHOUT_CACHE:
        raise ValueError(
            f"{type(model).__name__} takes no cache and reads its whole text at every step: "
            f"cache_implementation='quantized' with backend={backend!r} would be ignored. Allowed for this "
            "model is no cache_implementation at all."
        )
    if (soft_prompt := _soft_prompt(model)) in _SOFT_PROMPT_CACHES:
        raise ValueError(
            f"PEFT's {soft_prompt} puts a dense cache that holds its prefix in the place of every other: "
            f"cache_implementation='quantized' with backend={backend!r} would be ignored. Allowed are "
            "adapters that leave the cache alone, such as LORA and PROMPT_TUNING."
        )
    if getattr(generation_config, "use_cache", None) is False:
        raise ValueError(
            "use_cache is False, by what generate() was given or by the configuration of "
            f"{type(model).__name__}: cache_implementation='quantized' with backend={backend!r} would be "
            "ignored. Allowed is use_cache=True."
        )


def _soft_prompt(model: Any) -> str | None:
    """The kind of soft prompt that PEFT, which then speaks for the model, puts before every prompt."""
    owner = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    config: Any = getattr(owner, "active_peft_config", None)
    if not getattr(config, "is_prompt_learning", False):
        return None
    return str(getattr(config.peft_type, "value", config.peft_type))


def let_assistant_keep_its_cache(generation_config: Any, model_kwargs: dict[str, Any]) -> None:
    """Let a drafting model go on with the cache of its last round.

    It runs with a copy of the target's configuration, so from the second round on it is given both
    `cache_implementation` and the cache that came of it, which transformers refuses.
    """
    if getattr(generation_config, "is_assistant", False) and _is_ours(model_kwargs.get("past_key_values")):
        generation_config.cache_implementation = None  # this object is the call's own copy


@contextmanager
def kept_whole(generation_config: Any) -> Iterator[None]:
    """Keep `cache_config` as the user wrote it: some releases of transformers consume its keys."""
    cache_config = getattr(generation_config, "cache_config", None)
    if isinstance(cache_config, Mapping):
        generation_config.cache_config = dict(cache_config)
    try:
        yield
    finally:
        generation_config.cache_config = cache_config


def _is_ours(value: Any) -> bool:
    """Whether a cache is a `KVCache`; asked by name, so that a run without one never imports them."""
    return any(base.__module__.startswith(f"{__package__}.") for base in type(value).__mro__)


def bind_cache(
    model: Any, generation_config: Any, model_kwargs: dict[str, Any], max_cache_length: int | None
) -> None:
    """Tell the cache of a call, if it is one of ours, what `update` is never told, and how to read a prompt.

    Args:
        model (`PreTrainedModel`): What generates.
        generation_config (`GenerationConfig`): The call's own copy; may be given a `prefill_chunk_size`.
        model_kwargs (`dict`): The call's arguments, `past_key_values` and masks among them.
        max_cache_length (`int`, *optional*): Tokens the cache will hold in the end.

    Raises:
        ValueError: If the prompt is to be read in larger chunks than the model can take, or cannot be split.
    """
    kv_cache = model_kwargs.get("past_key_values")
    if kv_cache is None or not _is_ours(kv_cache):
        return
    prompt_length = _prompt_length(generation_config, model_kwargs)
    kv_cache.bind(
        model,
        attention_mask=model_kwargs.get("attention_mask"),
        max_cache_length=max_cache_length,
        prompt_length=prompt_length,
    )
    given = getattr(generation_config, "prefill_chunk_size", None)
    if given is not None and kv_cache.reads_long_text and given > kv_cache.longest_call:
        raise ValueError(
            f"prefill_chunk_size must be at most {kv_cache.longest_call} for {type(model).__name__} and a "
            f"prompt of {prompt_length} tokens, or the model discards the cache; got {given}."
        )
    if given is None and _may_read_in_chunks(model, kv_cache, model_kwargs):
        # this object is the call's own copy
        generation_config.prefill_chunk_size = kv_cache.prefill_chunk_size
    elif given is None:
        _check_whole(model, kv_cache, prompt_length, model_kwargs)


def _check_whole(model: Any, kv_cache: Any, prompt_length: int | None, model_kwargs: dict[str, Any]) -> None:
    """Refuse a prompt that cannot be split, and is longer than what the model reads in one call."""
    most = kv_cache.longest_call if kv_cache.reads_long_text else None
    if most is None or model_kwargs.get("inputs_embeds") is not None or kv_cache.get_seq_length() > most:
        return  # the model counts the tokens it is given
    reasons = ", ".join(_given(model_kwargs)) or "a soft prompt"
    raise ValueError(
        f"{type(model).__name__} discards its cache when it reads more than {most} tokens in one call, and "
        f"this prompt of {prompt_length} cannot be split, because of {reasons}. "
        f"Allowed are prompts of at most {most} tokens, and text alone."
    )


def _prompt_length(generation_config: Any, model_kwargs: dict[str, Any]) -> int | None:
    """Tokens of the prompt, those of earlier turns included; `None` if nothing tells."""
    for name in ("attention_mask", "position_ids"):
        tensor = model_kwargs.get(name)
        if tensor is not None and hasattr(tensor, "shape"):
            return int(tensor.shape[-1])
    found = getattr(generation_config, "_mask_length", None)
    return found if isinstance(found, int) and found > 0 else None


def _may_read_in_chunks(model: Any, kv_cache: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether transformers can split this prompt, and what it computes stays what it is.

    Not one with a soft prompt: PEFT takes every call but the first for a step of one token. Nor one whose
    tokens see later ones, or of a model that reads chunks otherwise. Nor one with sounds, images that the
    model does not encode beforehand, or anything else that is given with it and would reach every chunk
    whole, as encoded images do in older releases. Nor a later turn, in releases that would read it all again.
    """
    if _soft_prompt(model) is not None or _sees_ahead(model, model_kwargs):
        return False
    if model.config.get_text_config(decoder=True).model_type in _READ_WHOLE:
        return False
    if _given(model_kwargs):
        return False
    encoded = model_kwargs.get("mm_encoder_outputs") or {}
    if not all(_splits_features(model.config, *item) for item in encoded.items() if item[1] is not None):
        return False
    if model_kwargs.get("mm_encoder_outputs") and "mm_encoder_outputs" not in _how_prompts_are_read():
        return False
    return kv_cache.get_seq_length() == 0 or "input_ids[:, -next_sequence_length:]" in _how_prompts_are_read()


def _given(model_kwargs: dict[str, Any]) -> list[str]:
    """Names of what comes with a prompt, as a tensor or several, and would reach every chunk whole."""
    others = model_kwargs.keys() - _SPLIT_WITH_THE_TEXT - _READ_BEFORE
    values = {name: model_kwargs[name] for name in others}
    return sorted(n for n, v in values.items() if isinstance(v, (list, tuple)) or hasattr(v, "shape"))


def _splits_features(config: Any, modality: str, encoded: Any) -> bool:
    """Whether each chunk of a prompt gets what it needs of images, or videos, that were encoded before."""
    if not isinstance(encoded, Mapping):
        return False
    names = {name for name, value in encoded.items() if value is not None}
    finds_tokens = isinstance(getattr(config, f"{modality}_token_id", None), int)
    return finds_tokens and "pooler_output" in names and names <= _SPLIT_FEATURES


def _sees_ahead(model: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether tokens of this prompt attend to later ones, which must then be in the same call.

    Those of one image do in Gemma 3 and 4, those of the whole prompt in PaliGemma. Such models mark them by
    types of tokens, which others need for other things.
    """
    if not _masks_blocks(type(model).__module__):
        return False
    types = (model_kwargs.get(name) for name in ("token_type_ids", "mm_token_type_ids"))
    return bool(model_kwargs.get("mm_encoder_outputs")) or any(t is not None and bool(t.any()) for t in types)


@cache
def _masks_blocks(module_name: str) -> bool:
    """Whether a modelling file makes masks of blocks whose tokens all see one another."""
    source = sys.modules.get(module_name)
    return source is not None and "block_sequence_ids" in inspect.getsource(source)


@cache
def _how_prompts_are_read() -> str:
    """The source that splits a prompt into chunks, which tells what it can split in this release."""
    from transformers.generation.utils import GenerationMixin

    return inspect.getsource(GenerationMixin._prefill)
