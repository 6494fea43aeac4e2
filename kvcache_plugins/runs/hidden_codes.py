"""A text with something in it that is worth keeping: what the examples let a model read."""

from __future__ import annotations

__all__ = ["CODES", "QUESTION", "hide_codes"]

CODES = {"Alice": "48213", "Oliver": "90574", "Kate": "17362"}
"""Of whom the text tells a code, in their order."""
QUESTION = " What is the code of {name}? The code of {name} is"
"""In words that the bundled model has learnt."""
_NEEDLE = " The code of {name} is {code}. Remember it. {code} is the code of {name}."
_SPACING = 1300  # characters between two codes


def hide_codes(text: str) -> str:
    """Return the beginning of a text with `CODES` in it, evenly spaced."""
    parts = []
    for index, (name, code) in enumerate(CODES.items()):
        parts += [text[index * _SPACING : (index + 1) * _SPACING], _NEEDLE.format(name=name, code=code)]
    return "".join([*parts, text[len(CODES) * _SPACING : (len(CODES) + 1) * _SPACING]])
