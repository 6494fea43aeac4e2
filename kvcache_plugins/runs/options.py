"""Options of evaluations: plain values from a file or the command line, checked before any work is done.

Nothing heavy is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..config import is_path, plain
from ..dtype_names import DTYPES
from ..registry import suggest
from .labels import dense_first
from .number_words import with_numbers

__all__ = [
    "DTYPES",
    "MOST_GB",
    "MOST_THREADS",
    "Options",
    "as_given",
    "check_amount",
    "check_choice",
    "check_count",
    "check_counts",
    "check_directory",
    "check_filled",
    "check_model",
    "check_type",
    "check_unused",
]

MOST_GB = 10**9
"""Far beyond any machine; as many bytes as 64 bits can count."""
MOST_THREADS = 1024
"""More than machines have; torch crashes where the system refuses it some."""
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", dict: "a mapping"}
_Options = TypeVar("_Options", bound="Options")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every evaluation is told; each adds its own fields and checks them in `__post_init__`.

    Args:
        cache_config (`Sequence[dict]`): The caches to measure, beside the dense one.
    """

    MAY_BE_EMPTY: ClassVar[tuple[str, ...]] = ()
    """Options that an empty string is a value of."""

    cache_config: Sequence[dict[str, Any]]

    @classmethod
    def from_dict(cls: type[_Options], options: Mapping[str, Any]) -> _Options:
        """Build from plain values, as they come from a YAML file or the command line.

        Raises:
            ValueError: On an unknown option or a wrong value; the message names the allowed ones.
        """
        known, kinds = {option.name: option for option in fields(cls)}, get_type_hints(cls)
        options = {name: as_given(plain(value), kinds.get(name)) for name, value in options.items()}
        for name, value in options.items():
            if name not in known:
                raise ValueError(
                    f"Unknown option {name!r}.{suggest(name, known)} Allowed are {sorted(known)}."
                )
            if value is not None or known[name].default is not None:
                check_type(name, value, kinds[name])
        built = cls(**options)
        for name in options.keys() - set(cls.MAY_BE_EMPTY):  # after checks that say what is allowed
            check_filled(name, options[name])
        return built

    @property
    def cache_configs(self) -> list[dict[str, Any]]:
        """The caches to measure, the dense one first."""
        return dense_first(self.cache_config)

    def settings(self) -> dict[str, Any]:
        """Return the merged options for the result file."""
        settings = asdict(self)
        del settings["cache_config"]  # every result carries its own
        return settings


def as_given(value: Any, kind: Any) -> Any:
    """Return what a command line makes of a value: a number of its text, a list of the one entry it has.

    Args:
        value (`Any`): What a file holds.
        kind (`Any`): The annotation of the option; `None` if it is not known.
    """
    if kind is None or _is_of(value, kind):
        return value
    number = with_numbers(value)
    return next((found for found in (number, [value], [number]) if _is_of(found, kind)), value)


def check_type(name: str, value: Any, kind: Any) -> None:
    """Check that the value of an option, which a file may hold of any kind, is of the annotated one.

    Raises:
        ValueError: Naming the option, the value and what is allowed.
    """
    if not _is_of(value, kind):
        raise ValueError(f"--{name} must be {_words(kind)}, got {value!r}.")


def _is_of(value: Any, kind: Any) -> bool:
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_is_of(value, part) for part in parts)
    if origin in (list, Sequence):
        return isinstance(value, (list, tuple)) and all(_is_of(item, parts[0]) for item in value)
    if origin is Literal:
        return value in parts
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else origin or kind)


def _words(kind: Any) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(_words(part) for part in parts if part is not NoneType)
    if origin in (list, Sequence):
        return f"a list, each {_words(parts[0])}"
    return _KINDS.get(origin or kind, getattr(kind, "__name__", str(kind)))


def check_filled(name: str, value: Any) -> None:
    """Check that neither a string nor one of a list is empty, as a shell's variable is that is not set.

    Raises:
        ValueError: Naming the option and the value.
    """
    if "" in (value if isinstance(value, (list, tuple)) else [value]):
        raise ValueError(f"--{name} must not be empty, got {value!r}.")


def check_count(name: str, value: Any, least: int = 1, most: int | None = None) -> None:
    """Check that an option is an integer of at least `least`, and at most `most` where that is given.

    Raises:
        ValueError: Naming the option, the value and what is allowed.
    """
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not is_count or (most is not None and value > most):
        rule = f"an integer >= {least}" + (f" and at most {most}" if is_count else "")
        raise ValueError(f"--{name} must be {rule}, got {value!r}.")


def check_amount(name: str, value: Any, most: float) -> None:
    """Raise `ValueError` unless `value` is a number above 0 and not above `most`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
        raise ValueError(f"--{name} must be a number above 0 and at most {most}, got {value!r}.")


def check_counts(name: str, values: Any) -> None:
    """Check that an option is a list of one or more integers of at least 1, none of them twice.

    Raises:
        ValueError: Naming the option, the value and what is allowed.
    """
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
        raise ValueError(f"--{name} must be one or more integers >= 1, got {values!r}.")
    for value in values:
        check_count(name, value)
    if len(set(values)) < len(values):
        raise ValueError(f"--{name} must differ from each other, got {list(values)}.")


def check_directory(name: str, directory: Path) -> None:
    """Check that a directory can be written to, or made, before there is anything to write.

    Raises:
        ValueError: Naming the option, the directory and what stands against it.
    """
    try:
        exists = _exists(directory)
    except OSError as error:  # too long a name, or links in a circle
        raise ValueError(
            f"--{name} must be a directory, got {str(directory)!r}: {error.strerror}."
        ) from error
    if (exists or directory.is_symlink()) and not directory.is_dir():
        what = "file" if exists else "link to nowhere"
        raise ValueError(f"--{name} must be a directory, got the {what} {str(directory)!r}.")
    there = next(place for place in (directory, *directory.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(
            f"--{name} must be a directory that can be written to, got {str(directory)!r}: nothing can be "
            f"written to {str(there)!r}."
        )


def _exists(path: Path) -> bool:
    """Whether there is such a path; `Path.exists` keeps quiet about other errors since Python 3.14."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def check_unused(options: Any, names: Iterable[str], why: str) -> None:
    """Check that options which would change nothing have their defaults.

    Args:
        options (`Any`): A dataclass of options.
        names (`Iterable[str]`): Which of them.
        why (`str`): What follows the name of an option in the message.

    Raises:
        ValueError: Naming the option, the reason and the value.
    """
    names = set(names)
    for option in fields(options):
        value = getattr(options, option.name)
        default = option.default if option.default_factory is MISSING else option.default_factory()
        # what was given as false changes nothing, whatever the default
        if option.name in names and value is not False and value != default:
            raise ValueError(f"--{option.name} {why}, got {value!r}.")


def check_model(model: str, revision: str | None = None) -> None:
    """Check that what can only be a path is one.

    Raises:
        ValueError: Naming it, or the revision of a directory, which has none.
    """
    if not model:
        raise ValueError(f"--model must be a directory or a hub id, got {model!r}.")
    if revision is not None and Path(model).is_dir():
        raise ValueError(f"--revision is for models on the hub, {model!r} is a directory, got {revision!r}.")
    if is_path(model) and not Path(model).is_dir():
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
