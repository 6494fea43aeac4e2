"""Names in pictures: folded where they are long, and beside the points of a scatter plot."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

__all__ = ["FOLDED_WIDTH", "LabeledPoint", "folded", "inches", "place_labels"]

FOLDED_WIDTH = 30
"""Letters a line of a folded name: the longest option of the caches in the README is one word of 29."""

_INCHES_A_LETTER = 0.62 / 72
"""Of a line, for each point of its type: letters of a sans-serif face are some six tenths as wide as high."""

_SIDES = (
    ("left", 8, 0),
    ("right", -8, 0),
    ("left", 6, 10),
    ("left", 6, -10),
    ("right", -6, 10),
    ("right", -6, -10),
    ("center", 0, 14),
    ("center", 0, -14),
    ("left", 0, 17),
    ("left", 0, -17),
)
"""Alignment of the text, and its offset from the point in points of type."""
_MARK = 14
"""Width and height of a mark, in pixels."""
_HALF_LINE = 6
"""Half the distance of two lines of a name, in points."""


def folded(label: str, width: int = FOLDED_WIDTH) -> str:
    """Return a name in lines of at most `width` letters, broken between words where that is possible.

    An option that is longer than a line is broken behind its `=`, if its value is not.
    """
    words = []
    for word in label.split():
        name, equals, value = word.partition("=")
        words += [name + equals, value] if len(value) <= width < len(word) else [word]
    return textwrap.fill(" ".join(words), width, break_on_hyphens=False)


def inches(labels: Iterable[str], font_size: float) -> tuple[float, float]:
    """Return the room for any of some names: the longest line of all, and the height of as many as one has.

    Args:
        labels (`Iterable[str]`): As [`folded`] returns them.
        font_size (`float`): In points.
    """
    lines = [label.split("\n") for label in labels]
    longest = max((len(line) for label in lines for line in label), default=0)
    return longest * font_size * _INCHES_A_LETTER, max(map(len, lines), default=0) * 1.3 * font_size / 72


class LabeledPoint(NamedTuple):
    """A point and its name.

    Args:
        x (`float`), y (`float`): In the data's units.
        label (`str`): Its name.
        color (`str`): Of the text.
    """

    x: float
    y: float
    label: str
    color: str = "black"


def place_labels(axes: Any, points: Sequence[LabeledPoint]) -> None:
    """Write each label beside its point, where it covers no point, no label and nothing outside of the axes.

    If there is no such side, where it covers least of them; if all lead outside, on the right. The layout of
    the figure must be fixed (`figure.draw_without_rendering()`), so that the room a label takes is known.

    Args:
        axes (`matplotlib.axes.Axes`): With the points in it.
        points (`Sequence[LabeledPoint]`): In the order in which they choose.
    """
    from matplotlib.transforms import Bbox

    centers = axes.transData.transform([(point.x, point.y) for point in points]) if points else []
    taken = [Bbox.from_bounds(x - _MARK / 2, y - _MARK / 2, _MARK, _MARK) for x, y in centers]
    inside = axes.get_window_extent()
    for index, point in enumerate(points):
        others = taken[:index] + taken[index + 1 :]
        note = axes.annotate(
            point.label,
            (point.x, point.y),
            textcoords="offset points",
            fontsize=9,
            color=point.color,
            va="center",
            xytext=(0, 0),
        )

        def box_at(side: tuple[str, int, int], note: Any = note) -> Any:
            alignment, right, up = side
            more = note.get_text().count("\n") * _HALF_LINE  # all lines of it are above the point, or below
            note.set(ha=alignment, position=(right, up + (more if up > 0 else -more if up < 0 else 0)))
            return note.get_window_extent()

        boxes = {side: box_at(side) for side in _SIDES}
        within = [
            side
            for side, box in boxes.items()
            if inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1
        ]
        covered = {side: sum(boxes[side].overlaps(other) for other in others) for side in within}
        taken.append(box_at(min(covered, key=lambda side: covered[side], default=_SIDES[0])))
