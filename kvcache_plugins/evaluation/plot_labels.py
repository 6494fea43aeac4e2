"""Names beside the points of a scatter plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["LabelledPoint", "place_labels"]

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


class LabelledPoint(NamedTuple):
    """A point and its name.

    Args:
        x (`float`), y (`float`): In the data's units.
        label (`str`): Its name.
        colour (`str`): Of the text.
    """

    x: float
    y: float
    label: str
    colour: str = "black"


def place_labels(axes: Any, points: Sequence[LabelledPoint]) -> None:
    """Write each label beside its point, where it covers no point, no label and nothing outside of the axes.

    If there is no such side, where it covers least of them; if all lead outside, on the right. The layout of
    the figure must be fixed (`figure.draw_without_rendering()`), so that the room a label takes is known.

    Args:
        axes (`matplotlib.axes.Axes`): With the points in it.
        points (`Sequence[LabelledPoint]`): In the order in which they choose.
    """
    from matplotlib.transforms import Bbox

    centres = axes.transData.transform([(point.x, point.y) for point in points]) if points else []
    taken = [Bbox.from_bounds(x - _MARK / 2, y - _MARK / 2, _MARK, _MARK) for x, y in centres]
    inside = axes.get_window_extent()
    for index, point in enumerate(points):
        others = taken[:index] + taken[index + 1 :]
        note = axes.annotate(
            point.label,
            (point.x, point.y),
            textcoords="offset points",
            fontsize=9,
            color=point.colour,
            va="center",
            xytext=(0, 0),
        )

        def box_at(side: tuple[str, int, int], note: Any = note) -> Any:
            alignment, right, up = side
            note.set(ha=alignment, position=(right, up))
            return note.get_window_extent()

        boxes = {side: box_at(side) for side in _SIDES}
        within = [side for side, box in boxes.items() if inside.x0 <= box.x0 and box.x1 <= inside.x1]
        covered = {side: sum(boxes[side].overlaps(other) for other in others) for side in within}
        taken.append(box_at(min(covered, key=lambda side: covered[side], default=_SIDES[0])))
