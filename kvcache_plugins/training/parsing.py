"""The command line of a training: our options and every flag of `TrainingArguments`, from a file or typed."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, get_type_hints

from transformers import HfArgumentParser, TrainingArguments

from ..registry import suggest
from ..runs.cache_words import parse_cache_configs, read_cache_configs
from ..runs.option_files import read_option_file
from ..runs.options import as_given, check_choice, check_type
from .arguments import WITHOUT_USE, LocretTrainingArguments
from .options import OF_A_DATA_SET, OF_SYNTHETIC, SYNTHETIC, LocretOptions

__all__ = ["parse_arguments"]

_DESCRIPTION = """Train Locret's retaining heads for a model: small networks that score every key and value of
a prompt, for the backend locret. --output DIR (or --output_dir) gets the heads, their card, results.json with
the recall of every layer, and training.png. --config FILE.yaml holds any of the options below by name. An
interrupted training is continued with --resume_from_checkpoint true."""


class _Parser(HfArgumentParser):
    """Tells what is wrong in one line instead of printing hundreds of options."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.replace("argument ", "", 1) if message.startswith("argument ") else message)


def parse_arguments(arguments: Sequence[str]) -> tuple[LocretOptions, LocretTrainingArguments]:
    """Parse a command line; options typed there take precedence over those of `--config FILE.yaml`.

    A data set that is typed also takes the place of what the file says of another kind of data set.

    Args:
        arguments (`Sequence[str]`): Without the name of the program.

    Raises:
        ValueError: If an option is unknown, lacks its value or has a wrong one, or a file cannot be read.
    """
    parser = _Parser(
        (LocretOptions, LocretTrainingArguments),  # type: ignore[arg-type]  # typed as a list of types
        prog="kvcache-plugins train-locret",
        description=_DESCRIPTION,
        allow_abbrev=False,
    )
    _complete_help(parser)
    names = {name for action in parser._actions for name in action.option_strings}
    typed = ["--output_dir" + word[8:] if word.split("=")[0] == "--output" else word for word in arguments]
    typed, config = _take_config(typed)
    typed, caches = _take_caches(typed)
    known = {action.dest: action for action in parser._actions}
    given = {} if config is None else _read_config(config, known)
    for name in _excluded_by_data_set(typed):
        given.pop(name, None)
    if caches is not None:
        given["cache_config"] = parse_cache_configs([caches])
    for name in given:
        known[name].required = False
    parser.set_defaults(**given)
    named = {word.split("=")[0].lstrip("-").replace("-", "_") for word in typed if word.startswith("--")}
    named |= given.keys()
    if "num_train_epochs" in named and "max_steps" not in named:
        parser.set_defaults(max_steps=-1)  # ours would be the end of it
    try:
        options, training, rest = parser.parse_args_into_dataclasses(
            typed, return_remaining_strings=True, look_for_args_file=False
        )
    except (ImportError, OSError, TypeError) as error:  # a package, a file or a key that is not there
        raise ValueError(f"The Trainer cannot have these options: {error}") from error
    for word in rest:
        name = word.split("=")[0]
        raise ValueError(f"Unknown option {name!r}.{suggest(name, names)} --help lists all options.")
    if not training.output_dir or "output_dir" not in named:
        raise ValueError("--output_dir (or --output) is needed: the directory the heads go to.")
    return options, training


def _complete_help(parser: argparse.ArgumentParser) -> None:
    """Describe the options that have other defaults here, and leave out those that are refused."""
    inherited = {
        field.name: field.metadata.get("help", "") for field in dataclasses.fields(TrainingArguments)
    }
    for action in parser._actions:
        if action.dest == "cache_config":
            action.metavar = "JSON"
        if action.dest in WITHOUT_USE:
            action.help = argparse.SUPPRESS
        elif action.help is None:
            action.help = inherited.get(action.dest, "").replace("%", "%%")


def _take_config(words: list[str]) -> tuple[list[str], str | None]:
    """Take `--config FILE` out of a command line."""
    kept, config = [], None
    rest = iter(words)
    for word in rest:
        if word == "--config":
            config = next(rest, None)
            if config is None:
                raise ValueError("--config must name a YAML file.")
        elif word.startswith("--config="):
            config = word.partition("=")[2]
        else:
            kept.append(word)
    return kept, config


def _excluded_by_data_set(words: Sequence[str]) -> tuple[str, ...]:
    """Options that a file may hold of its own data set, in whose place another kind of data set is typed."""
    typed = None
    for index, word in enumerate(words):
        if word == "--dataset":
            typed = words[index + 1] if index + 1 < len(words) else None
        elif word.startswith("--dataset="):
            typed = word.partition("=")[2]
    if typed is None:
        return ()
    return OF_A_DATA_SET if typed == SYNTHETIC else OF_SYNTHETIC


def _take_caches(words: list[str]) -> tuple[list[str], list[str] | None]:
    """Take every `--cache_config JSON ...` out of a command line, of which argparse would keep the last."""
    kept: list[str] = []
    caches: list[str] | None = None
    is_cache = False
    for word in words:
        name, _, value = word.partition("=")
        if name in ("--cache_config", "--cache-config"):
            is_cache, caches = True, [*(caches or ()), *([value] if "=" in word else ())]
        elif is_cache and not word.startswith("--"):
            assert caches is not None
            caches.append(word)
        else:
            is_cache = False
            kept.append(word)
    if caches == []:
        raise ValueError("--cache_config must be followed by one or more JSON objects.")
    return kept, caches


def _read_config(name: str, known: Mapping[str, argparse.Action]) -> dict[str, Any]:
    given = read_option_file(name)
    if "output" in given:
        given["output_dir"] = given.pop("output")
    kinds = get_type_hints(LocretOptions) | get_type_hints(LocretTrainingArguments)
    if given.get("cache_config") is not None:
        given["cache_config"] = read_cache_configs(given["cache_config"])
    for option, value in given.items():
        if option not in known:
            raise ValueError(f"Unknown option {option!r} in {name!r}.{suggest(str(option), known)}")
        if value is None or isinstance(value, (list, dict)) or known[option].nargs == "+":
            given[option] = as_given(value, kinds[option])
            check_type(option, given[option], kinds[option])
            continue
        is_none = value is False and option.endswith("_strategy")  # `no`, which YAML takes for false
        given[option] = "no" if is_none else str(value)  # read by argparse, as on the command line
        choices = known[option].choices
        if choices is not None:  # which argparse compares with typed values alone
            check_choice(option, given[option], choices)
    return given
