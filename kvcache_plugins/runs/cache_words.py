"""Caches as users write them, in JSON on a command line or in YAML. Nothing heavy is imported."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from ..registry import TRANSFORMERS_BACKENDS, get_backend
from .number_words import with_numbers

__all__ = ["EXAMPLE", "parse_cache_configs", "read_cache_configs"]

EXAMPLE = '{"backend": "kivi", "nbits": 2}'
"""What help texts and messages show."""


def parse_cache_configs(given: Iterable[Iterable[str]]) -> list[dict[str, Any]]:
    """Turn the values of `--cache_config` into dictionaries, the name of the backend known and in lower case.

    Args:
        given (`Iterable[Iterable[str]]`): The option as `argparse` collects it.

    Raises:
        ValueError: If a value is not a JSON object, names no backend, or names an unknown one.
    """
    return [_parse(text) for group in given for text in group]


def read_cache_configs(given: Any) -> list[dict[str, Any]]:
    """Turn the `cache_config` of a file, a mapping or a list of them, into such dictionaries.

    Args:
        given (`Any`): What YAML has made of it.

    Raises:
        ValueError: If it is anything else, or as for [`parse_cache_configs`].
    """
    caches = with_numbers(given if isinstance(given, list) else [given])
    return parse_cache_configs([[_as_json(cache) for cache in caches]])


def _as_json(cache: Any) -> str:
    try:
        # a value that json has not, such as a date, is told of as the wrong option that it is
        return json.dumps(cache, default=str)
    except TypeError as error:  # of a name that is a date, say
        raise ValueError(f"--cache_config must hold options by name, got {cache!r} ({error}).") from error


def _parse(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text, object_pairs_hook=_unique)
    except ValueError as error:
        raise ValueError(
            f"--cache_config must be a JSON object such as '{EXAMPLE}', got {text!r} ({error})."
        ) from error
    if not isinstance(options, dict) or not isinstance(options.get("backend"), str):
        raise ValueError(f"--cache_config must be a JSON object naming a backend: '{EXAMPLE}', got {text!r}.")
    backend = options["backend"].lower()
    if backend == "dense" and len(options) > 1:
        raise ValueError(f"--cache_config: 'dense' takes no options, got {text!r}.")
    if backend != "dense" and backend not in TRANSFORMERS_BACKENDS:
        get_backend(backend)  # raises and suggests the closest name
    return {**options, "backend": backend}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its keys and values; json itself would take the last of a key that stands twice."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} stands there twice")
    return dict(pairs)
