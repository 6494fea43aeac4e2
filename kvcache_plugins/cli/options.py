"""Command-line options shared by several sub-commands and scripts."""

from __future__ import annotations

import argparse
from typing import Any

from ..runs.cache_words import EXAMPLE, parse_cache_configs, read_cache_configs
from ..runs.option_files import read_option_file

__all__ = [
    "OUTPUT",
    "RESUMED",
    "add_cache_config_option",
    "merge_options",
    "options_of",
]

# What the command line knows and the work need not.
_NOT_OPTIONS = (
    "command", "benchmark", "evaluation", "run", "interrupted", "config", "output", "no_plots", "push_to_hub",
)  # fmt: skip
_EXCLUSIVE = (
    ("data_dir", "dataset"),
    ("filler_files", "filler_text"),
    ("model", "preset"),
    ("device_map", "tp_plan"),
)
"""Options of which a run takes one."""
RESUMED = "the same command goes on where this one ended."
"""What the user of a command is told who has interrupted it."""
OUTPUT = "default: current directory; what another run has left there is kept under another name"
"""What the help text says of where results go."""


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
        help=f"cache options as JSON, for example '{EXAMPLE}'; {more} (default: {default})",
    )


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a command that takes `--config`, of which those not given are absent."""
    given = {name: value for name, value in vars(args).items() if name not in _NOT_OPTIONS}
    return merge_options(given, getattr(args, "config", None))


def merge_options(given: dict[str, Any], config_file: str | None) -> dict[str, Any]:
    """Return the options of a file, overridden by those given on the command line.

    One that is given there also takes the place of one in the file that excludes it, such as `--data_dir` of
    a `dataset`.

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
        merged["cache_config"] = read_cache_configs(merged["cache_config"])
    for pair in _EXCLUSIVE:
        for name, other in (pair, pair[::-1]):
            if name in given and other not in given:
                merged.pop(other, None)
    merged |= given
    if "cache_config" in given:
        merged["cache_config"] = parse_cache_configs(given["cache_config"])
    return merged
