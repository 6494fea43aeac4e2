"""Command-line options shared by several sub-commands and scripts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any

from ..registry import TRANSFORMERS_BACKENDS, get_backend

__all__ = ["add_cache_config_option", "cache_label", "parse_cache_configs"]

_EXAMPLE = '{"backend": "kivi", "nbits": 2}'


def add_cache_config_option(parser: argparse.ArgumentParser, default: str) -> None:
    """Add `--cache_config JSON ...`, which takes several objects and may be repeated.

    Args:
        parser (`argparse.ArgumentParser`): Parser to add to.
        default (`str`): What happens without the option, for the help text.
    """
    parser.add_argument(
        "--cache_config",
        action="append",
        nargs="+",
        metavar="JSON",
        help=f"cache options as JSON, for example '{_EXAMPLE}'; may be repeated (default: {default})",
    )


def parse_cache_configs(given: Iterable[Iterable[str]]) -> list[dict[str, Any]]:
    """Turn the values of `--cache_config` into dictionaries, the name of the backend known and in lower case.

    Args:
        given (`Iterable[Iterable[str]]`): The option as `argparse` collects it.

    Raises:
        ValueError: If a value is not a JSON object, names no backend, or names an unknown one.
    """
    return [_parse(text) for group in given for text in group]


def cache_label(cache_config: dict[str, Any]) -> str:
    """Return a short name of a cache for tables and plots, such as `kivi 2-bit` or `hqq 4-bit axis 1`."""
    options = dict(cache_config)
    words = [str(options.pop("backend"))]
    if "nbits" in options:
        words.append(f"{options.pop('nbits')}-bit")
    if "axis_key" in options and options["axis_key"] == options.get("axis_value"):
        words.append(f"axis {options.pop('axis_key')}")
        del options["axis_value"]
    words += [f"{key}={value}" for key, value in options.items()]
    return " ".join(words)


def _parse(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"--cache_config must be a JSON object such as '{_EXAMPLE}', got {text!r} ({error})."
        ) from error
    if not isinstance(options, dict) or not isinstance(options.get("backend"), str):
        raise ValueError(
            f"--cache_config must be a JSON object naming a backend: '{_EXAMPLE}', got {text!r}."
        )
    backend = options["backend"].lower()
    if backend != "dense" and backend not in TRANSFORMERS_BACKENDS:
        get_backend(backend)  # raises and suggests the closest name
    return {**options, "backend": backend}
