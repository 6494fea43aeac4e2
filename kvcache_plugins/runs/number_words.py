"""Numbers that a file of options holds as text."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["with_numbers"]

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


def with_numbers(value: Any) -> Any:
    """Return the value of an option with numbers in place of texts such as `1e-2`.

    For YAML 1.1 they are texts, unless they have a dot and the exponent a sign. So are some that are none, as
    the name of a commit may be: this is for options that numbers are wanted of.

    Args:
        value (`Any`): What YAML has made of it; lists and mappings are gone through.
    """
    if isinstance(value, str):
        return float(value) if _NUMBER.fullmatch(value) else value
    if isinstance(value, list):
        return [with_numbers(entry) for entry in value]
    if isinstance(value, dict):
        return {name: with_numbers(entry) for name, entry in value.items()}
    return value
