"""Models that a user names, loaded with errors that name what is wrong with their files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.peft_utils import find_adapter_config_file

from ..registry import suggest
from .auto_class import auto_class

__all__ = ["check_attention", "load_config", "load_model", "load_tokenizer"]

_ATTENTION = re.compile(
    r"attn_implementation|attention implementation|(flash|flex).?attention|`kernels`", re.IGNORECASE
)
"""What an error of transformers says that is about a way of attending."""


def load_config(name: str, **source: Any) -> Any:
    """Return the configuration of a model.

    Args:
        name (`str`): Path or hub id.
        source: As for `AutoConfig.from_pretrained`: `revision`, `trust_remote_code`.

    Raises:
        OSError: If it cannot be found.
        ValueError: If it cannot be read, or is of an adapter, which is no model of its own.
    """
    with _named("configuration", name), _no_adapter(name, source.get("revision")):
        return AutoConfig.from_pretrained(name, **source)


def load_tokenizer(name: str, **source: Any) -> Any:
    """Return the tokenizer of a model; arguments and errors are those of [`load_config`]."""
    with _named("tokenizer", name):
        return AutoTokenizer.from_pretrained(name, **source)


def check_attention(name: str | None) -> None:
    """Check that transformers knows a way of attending, before anything is loaded.

    Args:
        name (`str`, *optional*): As `from_pretrained` takes it: a name, or the repository of a kernel. What
            is not given is transformers' choice.

    Raises:
        ValueError: If it does not; the message says which it knows.
    """
    known = ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    if name is None or name in known or "/" in name:
        return
    offered = sorted(other for other in known if "kvcache_plugins" not in other)  # ours choose themselves
    raise ValueError(
        f"--attn_implementation must be one of {', '.join(offered)}, or a kernel of the hub such as "
        f"'kernels-community/flash-attn2', got {name!r}.{suggest(name, offered)}"
    )


def load_model(name: str, config: Any, **options: Any) -> Any:
    """Return a model whose files hold all of its weights, and that generates with a dense cache by default.

    Args:
        name (`str`): Path or hub id.
        config (`PreTrainedConfig`): Of [`load_config`].
        options: As for `from_pretrained`: also `dtype`, `device_map` and the like.

    Raises:
        OSError: If it cannot be found.
        ValueError: If a file is damaged, or a weight is missing or has another shape than the configuration
            says; transformers itself would make up a missing one.
    """
    attention = options.get("attn_implementation")
    check_attention(attention)
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with _of_attention(attention, name), _named("weights", name):
        model, found = auto_class(config).from_pretrained(name, **options)
    wrong = [f"{weight} is missing" for weight in sorted(found["missing_keys"])]
    wrong += [
        f"{weight} has the shape {tuple(given)} instead of {tuple(expected)}"
        for weight, given, expected in sorted(found["mismatched_keys"])
    ]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"The weights of --model {name!r} are incomplete: {', '.join(wrong[:3])}{more}.")
    # What a checkpoint says of caches would take the place of the dense one, which nothing else asks for.
    if (generation := getattr(model, "generation_config", None)) is not None:
        generation.cache_implementation = generation.cache_config = None
        generation.use_cache = True
    return model


@contextmanager
def _of_attention(given: str | None, name: str) -> Iterator[None]:
    """Name the option in what transformers says of a way of attending that this model or machine has not."""
    try:
        yield
    except (ImportError, ValueError) as error:
        reason = error.__cause__ or error
        if given is None or _ATTENTION.search(str(reason)) is None:
            raise
        raise ValueError(
            f"--attn_implementation {given!r} cannot be used with --model {name!r}: {reason}"
        ) from error


@contextmanager
def _no_adapter(name: str, revision: str | None) -> Iterator[None]:
    """Say what to do with an adapter of PEFT, of which transformers says that it knows no such model."""
    try:
        yield
    except (OSError, ValueError) as error:
        try:
            is_adapter = find_adapter_config_file(name, revision=revision) is not None
        except Exception:  # it cannot be looked for, wherever the model should have been
            is_adapter = False
        if not is_adapter:
            raise
        raise ValueError(
            "it is an adapter of PEFT, not a model. Merge it into its model first, by `merge_and_unload()`, "
            "save that and its tokenizer with `save_pretrained(DIR)`, and name DIR"
        ) from error


@contextmanager
def _named(what: str, name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # of the system, which names the file
            raise
        raise OSError(f"The {what} of --model {name!r} cannot be found: {error}") from error
    except (ArithmeticError, KeyError, SafetensorError, StrictDataclassError, TypeError, ValueError) as error:
        reason = f"there is no {error} in it" if isinstance(error, KeyError) else error
        raise ValueError(f"The {what} of --model {name!r} cannot be loaded: {reason}") from error
