"""How each cache looks in every picture of a page: the same color and marker wherever it appears."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...registry import TRANSFORMERS_BACKENDS
from .markup import Markup, element

__all__ = ["COLORS", "Style", "StyleBook", "marker"]

COLORS = 8
"""Classes `s0` to `s7` of the style sheet; the class `ink` is the dense cache's."""

_SHAPES = ("circle", "square", "triangle", "diamond", "wedge", "bar")
_CORNERS = {"square": (4, 45), "triangle": (3, -90), "diamond": (4, 0), "wedge": (3, 90)}


@dataclass(frozen=True)
class Style:
    """How one cache is drawn.

    Args:
        color (`str`): Class of the style sheet.
        shape (`str`): Of the marker.
        is_foreign (`bool`): Whether it is one of transformers' own: hollow markers and dashed lines.
    """

    color: str
    shape: str
    is_foreign: bool = False

    @property
    def kind(self) -> str:
        """Classes of the style sheet for anything drawn in this style."""
        return f"{self.color} foreign" if self.is_foreign else self.color


class StyleBook:
    """Gives every cache a style of its own, one color per backend as long as there are enough of them."""

    def __init__(self) -> None:
        self._styles: dict[tuple[str, str], Style] = {}
        self._home: dict[str, int] = {}

    def style(self, backend: str, label: str) -> Style:
        """Return the style of a cache; the same for the same backend and label."""
        if (backend, label) not in self._styles:
            self._styles[backend, label] = self._new(backend)
        return self._styles[backend, label]

    def _new(self, backend: str) -> Style:
        taken = set(self._styles.values())
        if backend == "dense":
            # one, or several ways to attend to it
            dense = [Style("ink", shape) for shape in ("square", *_SHAPES)]
            return next((style for style in dense if style not in taken), dense[0])
        home = self._home.setdefault(backend, len(self._home))
        is_foreign = backend in TRANSFORMERS_BACKENDS
        choices = [
            Style(f"s{(home + step) % COLORS}", shape, is_foreign)
            for step in range(COLORS)
            for shape in _SHAPES
        ]
        # Beyond that many, a name in the picture's title text is what tells two apart.
        return next((style for style in choices if style not in taken), choices[len(taken) % len(choices)])


def marker(style: Style, x: float, y: float, name: str | None = None, radius: float = 4.5) -> Markup:
    """Draw a marker around a point, with a name that browsers show under the pointer."""
    title = element("title", name) if name else None
    classes = f"mark {style.kind}"
    if style.shape == "circle":
        return element("circle", title, class_=classes, cx=x, cy=y, r=radius)
    if style.shape == "bar":
        thick = radius / 2
        return element(
            "rect", title, class_=classes, x=x - radius, y=y - thick, width=2 * radius, height=2 * thick
        )
    corners, turn = _CORNERS[style.shape]
    reach = radius * (1.25 if corners == 4 else 1.35)
    angles = [math.radians(turn + 360 * corner / corners) for corner in range(corners)]
    points = " ".join(f"{x + reach * math.cos(a):.2f},{y + reach * math.sin(a):.2f}" for a in angles)
    return element("polygon", title, class_=classes, points=points)
