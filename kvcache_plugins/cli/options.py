"""Command-line options shared by several sub-commands and scripts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any

from ..registry import TRANSFORMERS_BACKENDS, get_backend
from ..runs.option_files import read_option_file

__all__ = [
    "OUTPUT",
    "RESUMED",
    "add_cache_config_option",
    "merge_options",
    "options_of",
    "parse_cache_configs",
]

# What the command line knows and the work need not.
_NOT_OPTIONS = (
    "command", "benchmark", "evaluation", "run", "interrupted", "config", "output", "no_plots", "push_to_hub",
)  # fmt: skip
RESUMED = "the same command goes on where this one ended."
"""What the user of a command is told who has interrupted it."""
OUTPUT = "default: current directory; what another run has left there is kept under another name"
"""What the help text says of where results go."""
_EXAMPLE = '{"backend": "kivi", "nbits": 2}'


def add_cache_config_option(
    parser: argparse.ArgumentParser, default: str, more: str = "may be repeated"
) -> None:
    """Add `--cache_config JSON ...`, which takes several objects and may be repeated.

    Args:
        parser (`argparse.ArgumentParser`): Parser to add to.
        default (`str`): What happens without the option, for the help text.
        more (`str`): What else the help text says.
    """
    parser.add_argument(
        "--cache_config",
        action="append",
        nargs="+",
        metavar="JSON",
        help=f"cache options as JSON, for example '{_EXAMPLE}'; {more} (default: {default})",
    )


def parse_cache_configs(given: Iterable[Iterable[str]]) -> list[dict[str, Any]]:
    """Turn the values of `--cache_config` into dictionaries, the name of the backend known and in lower case.

    Args:
        given (`Iterable[Iterable[str]]`): The option as `argparse` collects it.

    Raises:
        ValueError: If a value is not a JSON object, names no backend, or names an unknown one.
    """
    return [_parse(text) for group in given for text in group]


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a command that takes `--config`, of which those not given are absent."""
    given = {name: value for name, value in vars(args).items() if name not in _NOT_OPTIONS}
    return merge_options(given, getattr(args, "config", None))


def merge_options(given: dict[str, Any], config_file: str | None) -> dict[str, Any]:
    """Return the options of a file, overridden by those given on the command line.

    Args:
        given (`dict`): Options of the command line, without those that were left out; `cache_config` as
            `argparse` collects it.
        config_file (`str`, *optional*): A YAML file with options by name; its `cache_config` is a list of
            mappings.

    Raises:
        ValueError: If the file cannot be read or is no mapping, or a cache option is wrong.
    """
    merged = {} if config_file is None else read_option_file(config_file)
    for name in _NOT_OPTIONS:
        if name in merged:
            raise ValueError(f"{name!r} in {config_file!r}: it is given on the command line alone.")
    if "cache_config" in merged:
        caches = merged["cache_config"]
        caches = caches if isinstance(caches, list) else [caches]
        merged["cache_config"] = parse_cache_configs([[_as_json(cache) for cache in caches]])
    merged |= given
    if "cache_config" in given:
        merged["cache_config"] = parse_cache_configs(given["cache_config"])
    return merged


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
            f"--cache_config must be a JSON object such as '{_EXAMPLE}', got {text!r} ({error})."
        ) from error
    if not isinstance(options, dict) or not isinstance(options.get("backend"), str):
        raise ValueError(
            f"--cache_config must be a JSON object naming a backend: '{_EXAMPLE}', got {text!r}."
        )
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
