"""What a call of `generate()` asks for, and whether its model and what comes with it can meet that.

Nothing of transformers is imported at the top, because importing this package costs next to nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from .models.cache_argument import cache_name, given_cache
from .prompt_chunks import soft_prompt_kind
from .registry import (
    LEGACY_OPTIONS,
    TRANSFORMERS_BACKENDS,
    get_backend,
    list_backends,
    suggest,
    without_legacy,
)

__all__ = [
    "asks_for_ours",
    "check_batching",
    "check_request",
    "check_speech",
    "check_use",
    "is_ours",
    "names_ours",
    "own_choice",
]

_DEFAULT_BACKEND = "quanto"
"""What transformers takes where a `cache_config` names no backend."""
_ORDINARY = "dynamic"
"""The `cache_implementation` that turns any other choice off, that of a saved configuration too."""
_SOFT_PROMPT_CACHES = ("PREFIX_TUNING", "CARTRIDGE")


def check_request(model: Any, generation_config: Any, model_kwargs: Mapping[str, Any]) -> None:
    """Refuse what would fail later and less clearly, before anything is built.

    Args:
        model (`PreTrainedModel`): What generates.
        generation_config (`GenerationConfig`): With `cache_implementation` and `cache_config`.
        model_kwargs (`dict`): The call's arguments.

    Raises:
        ValueError: Naming the option, what was given and what is allowed.
    """
    implementation = getattr(generation_config, "cache_implementation", None)
    cache_config = getattr(generation_config, "cache_config", None)
    is_dict = isinstance(cache_config, Mapping)
    if cache_config is not None and not is_dict and implementation != _ORDINARY:
        raise ValueError(
            "`cache_config` must be a plain dict such as {'backend': 'kivi', 'nbits': 4}, got "
            f"{cache_config!r} ({type(cache_config).__name__})."
        )
    if (kv_cache := given_cache(model_kwargs)) is not None:
        _check_one_cache(model, generation_config, kv_cache)
    elif implementation not in ("quantized", _ORDINARY):
        _check_looked_at(model, implementation, cache_config)
    if implementation != "quantized" or cache_config is None:
        return
    if str(cache_config.get("backend", _DEFAULT_BACKEND)).lower() in TRANSFORMERS_BACKENDS:
        _check_names_of_transformers(cache_config)
        return
    backend = cache_config["backend"]
    own = {name: value for name, value in without_legacy(cache_config).items() if name != "backend"}
    get_backend(backend).config_class.check_names(own)
    if not model._supports_default_dynamic_cache():  # transformers then ignores `cache_implementation`
        raise ValueError(
            f"{type(model).__name__} keeps its past in a class of its own, which transformers cannot "
            f"exchange: cache_implementation='quantized' with backend={backend!r} would be ignored. Allowed "
            "for this model is no cache_implementation at all."
        )
    from .models.decoder import WITHOUT_CACHE
    from .models.origins import is_of_family

    if is_of_family(model.config, WITHOUT_CACHE):
        raise ValueError(
            f"{type(model).__name__} takes no cache and reads its whole text at every step: "
            f"cache_implementation='quantized' with backend={backend!r} would be ignored. Allowed for this "
            "model is no cache_implementation at all."
        )
    check_use(model, generation_config, f"cache_implementation='quantized' with backend={backend!r}")


def _check_names_of_transformers(cache_config: Mapping[Any, Any]) -> None:
    """Refuse options that no cache of transformers' own has; one without a backend may misspell its name."""
    from transformers.cache_utils import QuantizedCache

    parameters = list(inspect.signature(QuantizedCache.__init__).parameters)
    known = [name for name in parameters if name not in ("self", "backend", "config")]
    for name in cache_config:
        if name in (*known, "backend", "config", *LEGACY_OPTIONS):
            continue
        if "backend" in cache_config:
            raise ValueError(
                f"cache_config: {name!r} is no option of transformers' own cache, the backend "
                f"{cache_config['backend']!r}.{suggest(str(name), known)} Its options are {known}, got "
                f"{name}={cache_config[name]!r}."
            )
        raise ValueError(
            f"cache_config names no 'backend', and {name!r} is no option of transformers' default, "
            f"{_DEFAULT_BACKEND!r}, which are {known}.{suggest(str(name), ['backend'])} Got "
            f"{dict(cache_config)!r}; allowed is a 'backend' of {[*list_backends(), *TRANSFORMERS_BACKENDS]}."
        )


def check_batching(model: Any, generation_config: Any, options: Mapping[str, Any] | None = None) -> None:
    """Refuse a cache of ours for continuous batching, which has paged ones of its own.

    Args:
        model (`PreTrainedModel`): What generates.
        generation_config (`GenerationConfig`, *optional*): The call's; the model's own if not given.
        options (`dict`, *optional*): The call's other arguments, of which transformers looks at few.

    Raises:
        ValueError: Naming the backend that would be ignored, or is none.
    """
    refused = _named_in_vain(model, generation_config, options or {})
    if refused is not None:
        what, allowed = refused
        raise ValueError(
            f"Continuous batching (generate_batch) has paged caches of transformers' own: {what} would be "
            f"ignored. Allowed there is {allowed}; generate() uses it."
        )


def check_speech(model: Any, options: Mapping[str, Any]) -> None:
    """Refuse a cache of ours for a loop that speaks, and takes whatever it is given without looking at it.

    Args:
        model (`PreTrainedModel`): What speaks (SpeechT5).
        options (`dict`): The call's arguments by name.

    Raises:
        ValueError: Naming the backend that would be ignored, or is none.
    """
    refused = _named_in_vain(model, options.get("generation_config"), options)
    if refused is not None:
        what, allowed = refused
        raise ValueError(
            f"{type(model).__name__}.generate() makes speech in a loop of its own, over a dense cache: "
            f"{what} would be ignored. Allowed there is {allowed}; a loop of your own may give its calls of "
            "the model a cache of `build_cache`."
        )


def _named_in_vain(model: Any, generation_config: Any, options: Mapping[str, Any]) -> tuple[str, str] | None:
    """What a call names that would be ignored, and what is allowed instead; `None` if nothing.

    Raises:
        ValueError: For a backend that there is not.
    """
    chosen = getattr(model, "generation_config", None) if generation_config is None else generation_config
    cache_config: Any = options.get("cache_config", getattr(chosen, "cache_config", None))
    kv_cache = given_cache(options)
    if kv_cache is not None and is_ours(kv_cache):
        return f"a cache of the backend {kv_cache.backend!r}", f"{cache_name()}=None"
    if _names_another(cache_config):
        get_backend(cache_config["backend"])  # an unknown name fails here, naming the closest
        return f"cache_config with backend={cache_config['backend']!r}", "cache_config=None"
    return None


def _names_another(cache_config: Any) -> bool:
    """Whether a `cache_config` names a backend that transformers does not have itself."""
    backend = cache_config.get("backend") if isinstance(cache_config, Mapping) else None
    return backend is not None and str(backend).lower() not in TRANSFORMERS_BACKENDS


def _is_own_choice(model: Any, cache_config: Mapping[Any, Any]) -> bool:
    """Whether a `cache_config` is that of the model's own configuration, and not of the call."""
    own: Any = own_choice(model)[1]  # in copies of a configuration, dtypes are words
    return isinstance(own, Mapping) and without_legacy(own) == without_legacy(cache_config)


def _check_one_cache(model: Any, generation_config: Any, kv_cache: Any) -> None:
    """Refuse options of one cache beside another, which transformers would use without them.

    Those of the model's own configuration are of the caches that are not given.
    """
    cache_config: Any = getattr(generation_config, "cache_config", None)
    is_given = isinstance(cache_config, Mapping) and not _is_own_choice(model, cache_config)
    if not is_given or getattr(generation_config, "is_assistant", False):
        return
    if is_ours(kv_cache):
        what = f"a cache of the backend {kv_cache.backend!r}"
    elif _names_another(cache_config) and not _names_dense(cache_config):
        what = f"a {type(kv_cache).__name__}"
    else:
        return
    options = without_legacy(cache_config)
    backend = options.pop("backend", None)
    is_same = is_ours(kv_cache) and str(backend).lower() == kv_cache.backend
    if not is_same or type(kv_cache.config).from_dict(options) != kv_cache.config:
        raise ValueError(
            f"generate() was given {what}, and another one's options, which would be ignored: cache_config="
            f"{dict(cache_config)!r}. Allowed is one of the two, {cache_name()} or cache_config."
        )


def _check_looked_at(model: Any, implementation: str | None, cache_config: Mapping[Any, Any] | None) -> None:
    """Refuse a backend without the word that has transformers look at `cache_config` at all."""
    if cache_config is None or not _names_another(cache_config):
        return
    if own_choice(model)[0] == "quantized" and _is_own_choice(model, cache_config):
        return  # another implementation was given to turn that off
    if implementation is None and _names_dense(cache_config):
        return  # that is what it will be
    get_backend(cache_config["backend"])  # an unknown name fails here, naming the closest
    others = "cache_implementation is None, or 'hybrid', which transformers takes for that"
    also = ""
    if implementation is not None:
        others = f"cache_implementation={implementation!r} is another cache, of transformers' own"
        also = f", or {implementation!r} with cache_config=None"
    raise ValueError(
        f"cache_config names the backend {cache_config['backend']!r}, which would be ignored: {others}. "
        f"Allowed is cache_implementation='quantized'{also}."
    )


def _names_dense(cache_config: Mapping[Any, Any]) -> bool:
    """Whether a `cache_config` means the ordinary cache, as those of tables and result files may."""
    return str(cache_config["backend"]).lower() == "dense"


def names_ours(cache_config: Any) -> bool:
    """Whether a `cache_config` names a backend of the registry."""
    backend = cache_config.get("backend") if isinstance(cache_config, Mapping) else None
    return str(backend).lower() in list_backends()


def asks_for_ours(generation_config: Any) -> bool:
    """Whether a generation configuration asks for a cache of the registry."""
    implementation = getattr(generation_config, "cache_implementation", None)
    return implementation == "quantized" and names_ours(getattr(generation_config, "cache_config", None))


def own_choice(model: Any) -> tuple[Any, Any]:
    """Return `cache_implementation` and `cache_config` of a model's own generation configuration."""
    own = getattr(model, "generation_config", None)
    return getattr(own, "cache_implementation", None), getattr(own, "cache_config", None)


def is_ours(value: Any) -> bool:
    """Whether a cache is a `KVCache`; asked by name, so that a run without one never imports them."""
    return any(base.__module__.startswith(f"{__package__}.") for base in type(value).__mro__)


def check_use(model: Any, generation_config: Any, what: str) -> None:
    """Refuse a cache for generation that reads its whole text at every step, or brings another one.

    Args:
        model (`PreTrainedModel`): What generates.
        generation_config (`GenerationConfig`): The call's own copy.
        what (`str`): What would be ignored, for the message.

    Raises:
        ValueError: Naming what was given and what is allowed.
    """
    if (soft_prompt := soft_prompt_kind(model)) in _SOFT_PROMPT_CACHES:
        raise ValueError(
            f"PEFT's {soft_prompt} puts a dense cache that holds its prefix in the place of every other: "
            f"{what} would be ignored. Allowed are adapters that leave the cache alone, such as LORA and "
            "PROMPT_TUNING."
        )
    if getattr(generation_config, "use_cache", None) is False:
        raise ValueError(
            "use_cache is False, by what generate() was given or by the configuration of "
            f"{type(model).__name__}: {what} would be of no use. Allowed is use_cache=True."
        )
