"""The pictures of one result file: quality against memory, speed against length, curves over positions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .cells import FORMATS, backend_of, plain
from .charts import Bar, Series, bars, legend, lines, scatter
from .documents import label_of, number
from .markup import Markup, element
from .styles import Style, StyleBook
from .tasks import TaskView

__all__ = ["context_pictures", "position_pictures", "quality_pictures", "speed_pictures"]

_Row = Mapping[str, Any]

_MOST_LINES = 10
"""Caches in one picture of lines, beside the dense one."""


def quality_pictures(rows: Sequence[_Row], view: TaskView, book: StyleBook) -> list[Markup]:
    """Draw every metric of quality against the bits per value, and the legend of all of them."""
    drawn: list[Markup] = []
    shown: dict[str, Style] = {}
    for key, description, axis in view.quality:
        series = []
        for row in rows:
            bits, value = number(row.get("bits_per_value")), number(row.get(key))
            # the dense cache is no distance from itself, which a logarithmic axis cannot show
            if bits is not None and value is not None and (axis == "linear" or value > 0):
                series.append(Series(label_of(row), _style(row, book), [(bits, value)]))
        if series:
            title = f"{description[0].upper()}{description[1:]}, against memory"
            drawn.append(scatter(title, "bits per value, all metadata included", description, series, axis))
            shown |= {entry.label: entry.style for entry in series}
    for key, description, form in view.bars:
        entries = [
            Bar(label_of(row), _style(row, book), value, plain(row[key], form))
            for row in rows
            if (value := number(row.get(key))) is not None and value >= 0
        ]
        if entries:
            drawn.append(bars(f"{description[0].upper()}{description[1:]}", description, entries))
    return _with_legend(drawn, shown)


def position_pictures(rows: Sequence[_Row], book: StyleBook) -> list[Markup]:
    """Draw the negative log-likelihood by position, and its difference to the dense cache's."""
    drawn: list[Markup] = []
    shown: dict[str, Style] = {}
    for key, title in (("nll", "Negative log-likelihood"), ("increase", "Difference to the dense cache")):
        curves = [
            Series(label_of(row), _style(row, book), points)
            for row in rows
            if len(points := _curve(row, key)) > 1
        ]
        if len(curves) > (key == "increase"):  # the dense cache alone has none
            drawn += _families(curves, f"{title}, by position", "position", "nats per token", "linear")
            shown |= {curve.label: curve.style for curve in curves}
    return _with_legend(drawn, shown)


def speed_pictures(rows: Sequence[_Row], view: TaskView, book: StyleBook) -> list[Markup]:
    """Draw every metric of speed, one picture per batch size.

    Against the length, or as bars where only one length was measured.
    """
    drawn: list[Markup] = []
    shown: dict[str, Style] = {}
    drawn_keys = [entry for entry in view.speed if any(number(row.get(entry[0])) for row in rows)]
    if any(key == "ttft_ms" for key, _ in drawn_keys):  # which all but repeats it
        drawn_keys = [entry for entry in drawn_keys if entry[0] != "prefill_ms"]
    for batch_size in dict.fromkeys(number(row.get("batch_size")) for row in rows):
        own = [row for row in rows if number(row.get("batch_size")) == batch_size]
        for key, description in drawn_keys:
            series: dict[str, Series] = {}
            for row in own:
                length, value = number(row.get("length")), number(row.get(key))
                if length is not None and value is not None and length > 0 and value > 0:
                    value /= 2**20 if key.endswith("_bytes") else 1
                    entry = Series(label_of(row), _style(row, book), [])
                    series.setdefault(entry.label, entry)
                    series[entry.label] = Series(
                        entry.label, entry.style, sorted([*series[entry.label].points, (length, value)])
                    )
            if not series:
                continue
            title = f"{description[0].upper()}{description[1:]}"
            title += "" if batch_size is None else f", batch of {batch_size:,.0f}"
            lengths = {length for entry in series.values() for length, _ in entry.points}
            if len(lengths) == 1:
                title += f", {lengths.pop():,.0f} tokens"
                form = "three" if "ratio" in key else "two"
                entries = [
                    Bar(entry.label, entry.style, entry.points[0][1], FORMATS[form](entry.points[0][1]))
                    for entry in series.values()
                ]
                drawn.append(bars(title, description, entries))
                continue
            drawn += _families([*series.values()], title, "tokens", description, "log")
            shown |= {entry.label: entry.style for entry in series.values()}
    return _with_legend(drawn, shown)


def context_pictures(entries: Sequence[_Row], memory_gb: float | None, book: StyleBook) -> list[Markup]:
    """Draw the largest context of every cache, one picture per batch size.

    Args:
        entries (`Sequence[Mapping]`): Of `largest_context` in the results of `bench generate`.
        memory_gb (`float`, *optional*): What model and cache had to fit.
        book (`StyleBook`): Styles of the page.
    """
    drawn = []
    for batch_size in dict.fromkeys(number(entry.get("batch_size")) for entry in entries):
        own = [entry for entry in entries if number(entry.get("batch_size")) == batch_size]
        shown = [
            Bar(label_of(entry), _style(entry, book), tokens, f"{tokens:,.0f}")
            for entry in own
            if (tokens := number(entry.get("tokens"))) is not None and tokens >= 0
        ]
        if shown:
            title = "Largest context that fits" + ("" if memory_gb is None else f" {memory_gb:g} GB")
            title += "" if batch_size is None else f", batch of {batch_size:,.0f}"
            drawn.append(bars(title, "tokens per row, model and cache counted", shown))
    return _with_legend(drawn, {})


def _families(series: list[Series], title: str, x_title: str, y_title: str, axis: Any) -> list[Markup]:
    """Draw lines in as many pictures as their number asks for, each with the dense ones, on common axes."""
    values = [y for entry in series for _, y in entry.points]
    places = [x for entry in series for x, _ in entry.points]
    base = [entry for entry in series if entry.style.color == "ink"]
    others = [entry for entry in series if entry.style.color != "ink"]
    count = max(1, math.ceil(len(others) / _MOST_LINES))
    each = math.ceil(len(others) / count)
    return [
        lines(
            title if count == 1 else f"{title} ({index + 1} of {count})",
            x_title,
            y_title,
            [*base, *others[index * each : (index + 1) * each]],
            axis=axis,
            spanned=(places, values),
        )
        for index in range(count)
    ]


def _with_legend(drawn: list[Markup], shown: Mapping[str, Style]) -> list[Markup]:
    if not drawn:
        return []
    parts = [element("div", *drawn, class_="pictures")]
    return [*parts, legend([*shown.items()])] if shown else parts


def _style(row: _Row, book: StyleBook) -> Style:
    return book.style(backend_of(row), label_of(row))


def _curve(row: _Row, key: str) -> list[tuple[float, float]]:
    """Return what `nll_by_position` has under a key, at the middle of each range of positions."""
    parts = row.get("nll_by_position")
    points = []
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, dict):
            start, stop, value = (number(part.get(name)) for name in ("start", "stop", key))
            if start is not None and stop is not None and value is not None:
                points.append(((start + stop) / 2, value))
    return points
