"""Options of evaluations: plain values from a file or the command line, checked before any work is done.

Nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from ..registry import suggest
from .labels import dense_first

__all__ = ["DTYPES", "Options", "check_choice", "check_count", "check_counts", "check_model"]

DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "fp32": "float32",
    "float32": "float32",
}
"""Accepted names of dtypes, and torch's."""

_Options = TypeVar("_Options", bound="Options")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every evaluation is told; each adds its own fields and checks them in `__post_init__`.

    Args:
        cache_config (`Sequence[dict]`): The caches to measure, beside the dense one.
    """

    cache_config: Sequence[dict[str, Any]]

    @classmethod
    def from_dict(cls: type[_Options], options: Mapping[str, Any]) -> _Options:
        """Build from plain values, as they come from a YAML file or the command line.

        Raises:
            ValueError: On an unknown option or a wrong value; the message names the allowed ones.
        """
        known = {option.name for option in fields(cls)}
        for name in options:
            if name not in known:
                raise ValueError(
                    f"Unknown option {name!r}.{suggest(name, known)} Allowed are {sorted(known)}."
                )
        return cls(**options)

    @property
    def cache_configs(self) -> list[dict[str, Any]]:
        """The caches to measure, the dense one first."""
        return dense_first(self.cache_config)

    def settings(self) -> dict[str, Any]:
        """Return the merged options for the result file."""
        settings = asdict(self)
        del settings["cache_config"]  # every result carries its own
        return settings


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Check that an option is an integer of at least `least`.

    Raises:
        ValueError: Naming the option, the value and what is allowed.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"--{name} must be an integer >= {least}, got {value!r}.")


def check_counts(name: str, values: Any) -> None:
    """Check that an option is a list of one or more integers of at least 1.

    Raises:
        ValueError: Naming the option, the value and what is allowed.
    """
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
        raise ValueError(f"--{name} must be one or more integers >= 1, got {values!r}.")
    for value in values:
        check_count(name, value)


def check_model(model: str) -> None:
    """Check that what looks like a path is one; a hub id never begins with a dot, a slash or a tilde.

    Raises:
        ValueError: Naming it.
    """
    if model.startswith((".", "/", "~", "\\")) and not Path(model).is_dir():
        raise ValueError(f"--model must be a directory or a hub id; there is no directory {model!r}.")


def check_choice(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Check that an option is one of `allowed`.

    Raises:
        ValueError: Naming the option, the value, what is allowed and the closest of it.
    """
    allowed = list(allowed)
    if value not in allowed:
        raise ValueError(
            f"--{name} must be one of {sorted(allowed)}, got {value!r}.{suggest(str(value), allowed)}"
        )
