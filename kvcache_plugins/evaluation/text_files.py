"""Text files that a user names."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["read_text_file"]


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
        text = Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} must be UTF-8 text, {str(name)!r} is not ({error}).") from error
    except OSError as error:
        raise ValueError(
            f"{option} must be a file, {str(name)!r} cannot be read: {error.strerror}."
        ) from error
    if not text.strip():
        raise ValueError(f"{option} must hold text, {str(name)!r} is empty.")
    return text
