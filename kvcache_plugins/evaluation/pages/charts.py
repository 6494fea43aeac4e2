"""Pictures as inline SVG: points, lines and bars.

Colors come from the style sheet, so that they follow the reader's choice of a light or dark page; text stays
text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .markup import Markup, element, join
from .scales import Scale, linear, logarithmic
from .styles import Style, marker

__all__ = ["Bar", "Series", "bars", "legend", "lines", "scatter"]

_CHARACTER = 6.6  # pixels a character of 12-pixel text takes, rather too many than too few
_WIDTH, _HEIGHT = 540, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 12, 46
_LONGEST_LABEL = 38


@dataclass(frozen=True)
class Series:
    """One cache in a picture.

    Args:
        label (`str`): Its name.
        style (`Style`): Its looks.
        points (`Sequence[tuple[float, float]]`): Finite values, ascending in x; one for a scatter plot.
    """

    label: str
    style: Style
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Bar:
    """One bar.

    Args:
        label (`str`): What it stands for.
        style (`Style`): Its looks.
        value (`float`): Its length, not negative.
        text (`str`): What is written at its end.
    """

    label: str
    style: Style
    value: float
    text: str


def scatter(
    title: str, x_title: str, y_title: str, series: Sequence[Series], y_axis: Literal["linear", "log"]
) -> Markup:
    """Draw one point per cache, with its name beside it where there is room.

    Args:
        title (`str`): Of the picture.
        x_title (`str`): Of the horizontal axis, unit included.
        y_title (`str`): Of the vertical axis, unit included.
        series (`Sequence[Series]`): At least one, of one point each; with positive y for a `log` axis.
        y_axis (`str`): Kind of the vertical axis.
    """
    points = [entry.points[0] for entry in series]
    across = linear([x for x, _ in points])
    up = logarithmic([y for _, y in points]) if y_axis == "log" else linear([y for _, y in points])
    drawn: list[Markup | None] = [_frame(across, up, x_title, y_title)]
    taken = [(_x(across, x) - 6, _y(up, y) - 6, 12.0, 12.0) for x, y in points]
    for entry, (_, y) in zip(series, points, strict=True):
        if entry.style.color == "ink":
            top = _y(up, y)
            drawn.append(element("line", class_="base", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=top, y2=top))
            taken.append((_LEFT, top - 1, _WIDTH - _LEFT - _RIGHT, 2.0))
    for entry, (x, y) in zip(series, points, strict=True):
        left, top = _x(across, x), _y(up, y)
        drawn.append(marker(entry.style, left, top, f"{entry.label}: {x:.4g}, {y:.4g}"))
        drawn.append(_name_beside(entry.label, left, top, taken))
    return _figure(title, drawn)


def lines(
    title: str,
    x_title: str,
    y_title: str,
    series: Sequence[Series],
    *,
    axis: Literal["linear", "log"],
    spanned: tuple[Sequence[float], Sequence[float]],
) -> Markup:
    """Draw one line per cache.

    Args:
        title (`str`): Of the picture.
        x_title (`str`): Of the horizontal axis, unit included.
        y_title (`str`): Of the vertical axis, unit included.
        series (`Sequence[Series]`): At least one point in all; positive on an axis that is `log`.
        axis (`str`): Kind of both axes; a logarithmic horizontal one has its ticks at the measured places.
        spanned (`tuple[Sequence[float], Sequence[float]]`): Values that the axes span, those of `series`
            among them, so that several pictures share theirs.
    """
    across_values, up_values = sorted(set(spanned[0])), spanned[1]
    if axis == "log":
        across, up = logarithmic(across_values, ticks=_apart(across_values)), logarithmic(up_values)
    else:
        across, up = linear(across_values), linear(up_values)
    drawn = [_frame(across, up, x_title, y_title)]
    for entry in series:
        places = [(_x(across, x), _y(up, y)) for x, y in entry.points]
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in places)
        drawn.append(element("polyline", class_=f"line {entry.style.kind}", points=path))
        if len(places) <= 24:  # more would hide the line
            for (left, top), (x, y) in zip(places, entry.points, strict=True):
                drawn.append(marker(entry.style, left, top, f"{entry.label}: {x:,.6g}, {y:.4g}", 3.5))
    return _figure(title, drawn)


def bars(title: str, x_title: str, entries: Sequence[Bar]) -> Markup:
    """Draw one horizontal bar per entry, in the order given.

    Args:
        title (`str`): Of the picture.
        x_title (`str`): What the lengths mean, units included.
        entries (`Sequence[Bar]`): At least one.
    """
    thick, gap = 15, 7
    left = 14 + _CHARACTER * min(_LONGEST_LABEL, max(len(entry.label) for entry in entries))
    room = 12 + _CHARACTER * max(len(entry.text) for entry in entries)
    width = max(_WIDTH, left + room + 160)
    height = len(entries) * (thick + gap) + 44
    high = max(entry.value for entry in entries) or 1.0
    scale = (width - left - room) / high
    drawn = []
    for index, entry in enumerate(entries):
        top = 6 + index * (thick + gap)
        middle = top + thick / 2
        drawn += [
            element(
                "text", element("title", entry.label), _shortened(entry.label), class_="label end",
                x=left - 8, y=middle, dy="0.35em",
            ),
            element(
                "rect", element("title", f"{entry.label}: {entry.text}"), class_=f"fill {entry.style.kind}",
                x=left, y=top, width=max(entry.value * scale, 1.0), height=thick, rx=2,
            ),
            element(
                "text", entry.text, class_="label", x=left + entry.value * scale + 6, y=middle, dy="0.35em"
            ),
        ]  # fmt: skip
    drawn.append(element("line", class_="axis", x1=left, x2=left, y1=2, y2=height - 38))
    drawn.append(element("text", x_title, class_="title", x=left, y=height - 14))
    return _figure(title, drawn, width, height)


def legend(series: Sequence[tuple[str, Style]]) -> Markup:
    """Name the markers; the list wraps like text, so that any number of caches fits."""
    entries = [
        element(
            "li",
            element(
                "svg",
                element("line", class_=f"line {style.kind}", x1=1, x2=25, y1=8, y2=8),
                marker(style, 13, 8),
                width=26,
                height=16,
                aria_hidden="true",
            ),
            element("span", label),
        )
        for label, style in series
    ]
    return element("ul", *entries, class_="legend")


def _frame(across: Scale, up: Scale, x_title: str, y_title: str) -> Markup:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for tick, label in zip(up.ticks, up.labels(), strict=True):
        y = _y(up, tick)
        parts.append(element("line", class_="grid", x1=_LEFT, x2=right, y1=y, y2=y))
        parts.append(element("text", label, class_="tick end", x=_LEFT - 7, y=y, dy="0.35em"))
    for tick, label in zip(across.ticks, across.labels(), strict=True):
        x = _x(across, tick)
        parts.append(element("line", class_="grid", x1=x, x2=x, y1=_TOP, y2=bottom))
        parts.append(element("text", label, class_="tick middle", x=x, y=bottom + 16))
    middle = (_TOP + bottom) / 2
    parts.append(element("line", class_="axis", x1=_LEFT, x2=right, y1=bottom, y2=bottom))
    parts.append(element("line", class_="axis", x1=_LEFT, x2=_LEFT, y1=_TOP, y2=bottom))
    parts.append(element("text", x_title, class_="title middle", x=(_LEFT + right) / 2, y=_HEIGHT - 8))
    turned = f"translate(13 {middle:.1f}) rotate(-90)"
    parts.append(element("text", y_title, class_="title middle", transform=turned))
    return join(parts)


def _figure(
    title: str, drawn: Sequence[Markup | None], width: float = _WIDTH, height: float = _HEIGHT
) -> Markup:
    picture = element(
        "svg",
        *drawn,
        role="img",
        aria_label=title,
        width=width,
        height=height,
        viewBox=f"0 0 {width:.0f} {height:.0f}",
    )
    return element("figure", element("figcaption", title), picture)


def _x(across: Scale, value: float) -> float:
    return _LEFT + across.place(value) * (_WIDTH - _LEFT - _RIGHT)


def _y(up: Scale, value: float) -> float:
    bottom = _HEIGHT - _BOTTOM
    return bottom - up.place(value) * (bottom - _TOP)


def _name_beside(
    label: str, x: float, y: float, taken: list[tuple[float, float, float, float]]
) -> Markup | None:
    """Write a name where it covers nothing; without such a place the legend has to do."""
    text = _shortened(label)
    wide = _CHARACTER * len(text) * 11 / 12
    places = (
        (x + 9, y - 6), (x - 9 - wide, y - 6), (x - wide / 2, y - 21), (x - wide / 2, y + 9),
        (x + 7, y - 18), (x + 7, y + 6), (x - 7 - wide, y - 18), (x - 7 - wide, y + 6),
    )  # fmt: skip
    for left, top in places:
        if left < _LEFT + 2 or left + wide > _WIDTH - 2 or top < 0 or top + 12 > _HEIGHT - _BOTTOM - 1:
            continue
        if any(
            left < other_x + other_w
            and other_x < left + wide
            and top < other_y + other_h
            and other_y < top + 12
            for other_x, other_y, other_w, other_h in taken
        ):
            continue
        taken.append((left, top, wide, 12.0))
        return element("text", text, class_="name", x=left, y=top + 10)
    return None


def _apart(values: Sequence[float]) -> list[float]:
    """Leave out of ascending positive values those whose numbers would touch the one before."""
    if len(values) < 2:
        return list(values)
    span = logarithmic(values)
    kept: list[float] = []
    for value in values:
        need = _CHARACTER * len(f"{value:,.10g}") + 8
        if not kept or _x(span, value) - _x(span, kept[-1]) >= need:
            kept.append(value)
    return kept


def _shortened(label: str) -> str:
    return label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 1]}…"
