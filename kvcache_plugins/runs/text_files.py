"""Text files that a user names."""

from __future__ import annotations

import os
from pathlib import Path

from .memory import machine_memory

__all__ = ["check_characters", "check_tokenizable", "read_text_file"]

_BYTES = 160
"""That a tokenizer takes for a character of the text it is given."""


def read_text_file(name: str | os.PathLike[str], option: str) -> str:
    """Return all of a text file.

    Args:
        name (`str`): Its path.
        option (`str`): The option it was given with, for messages.

    Raises:
        ValueError: If there is no such file, or it cannot be read, is empty or no UTF-8 text.
    """
    if not str(name):
        raise ValueError(f"{option} must be a file, got {name!r}.")
    try:
        text = Path(name).read_text(encoding="utf-8-sig")  # without the mark that some editors put first
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} must be UTF-8 text, {str(name)!r} is not ({error}).") from error
    except OSError as error:
        raise ValueError(
            f"{option} must be a file, {str(name)!r} cannot be read: {error.strerror}."
        ) from error
    if not text.strip():
        raise ValueError(f"{option} must hold text, {str(name)!r} is empty.")
    return text


def check_characters(text: str, name: str) -> None:
    """Check that a text has characters alone, and no half of a pair that stands for one.

    Such halves come of json that was cut within an escaped pair, or of an argument that is no UTF-8. No
    tokenizer takes them.

    Args:
        text (`str`): The text.
        name (`str`): What the message begins with, such as an option or the place of a row.

    Raises:
        ValueError: Naming the first one.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"{text[error.start]!a} after {error.start:,} characters"
        raise ValueError(f"{name} must be text, got {found}, half of a character or none.") from error


def check_tokenizable(text: str) -> None:
    """Check that the machine could tokenize a text; a tokenizer that runs out of memory ends the process.

    Raises:
        ValueError: If it cannot; the message says how much it takes and how much there is. If the text has
            what is no character.
    """
    check_characters(text, "What a tokenizer is given")
    needed, there = _BYTES * len(text), machine_memory()
    if needed > there:
        raise ValueError(
            f"A text of {len(text):,} characters is too long: to tokenize it takes about {needed / 1e9:,.1f} "
            f"GB, and this machine has {there / 1e9:,.1f} GB in all. Give a part of it."
        )
