"""HTML and SVG from nested calls. Whatever is not markup already is escaped, so nothing can slip through."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

__all__ = ["Markup", "element", "join"]

_VOID = frozenset({"meta", "br"})


class Markup(str):
    """Text that is HTML already and must not be escaped again."""

    __slots__ = ()


def element(name: str, *children: Any, **attributes: Any) -> Markup:
    """Build an element.

    Args:
        name (`str`): Of the element.
        children (`Any`): Markup stays as it is, None is left out, anything else is escaped text.
        attributes (`Any`): `class_` is `class` and `stroke_width` is `stroke-width`; None leaves one out.
            Numbers are written with two digits at most, which is a hundredth of a pixel.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_attribute(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def join(children: Iterable[Any]) -> Markup:
    """Put children one after another: markup as it is, anything else escaped."""
    return Markup(
        "".join(
            child if isinstance(child, Markup) else html.escape(str(child))
            for child in children
            if child is not None
        )
    )


def _attribute(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(value)
