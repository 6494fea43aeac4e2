"""Values as text, and tables of them: the dense cache first, transformers' own caches marked."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from ...registry import TRANSFORMERS_BACKENDS
from .documents import label_of, number
from .markup import Markup, element

__all__ = [
    "FORMATS",
    "Column",
    "backend_of",
    "cache_name",
    "heat_table",
    "plain",
    "result_table",
    "row_class",
    "table",
]

Column = tuple[str, str, str]
"""Key of a result, title of its column, and name of its format in `FORMATS`."""

_DASH = "-"
_LONGEST = 400


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


FORMATS: dict[str, Callable[[float], str]] = {
    "bytes": _bytes,
    "count": lambda value: f"{value:,.0f}",
    "one": lambda value: f"{value:,.1f}",
    "two": lambda value: f"{value:,.2f}",
    "three": lambda value: f"{value:,.3f}",
    "small": lambda value: f"{value:.5f}" if value == 0 or abs(value) >= 1e-4 else f"{value:.1e}",
    "power": lambda value: f"{value:.1e}",
    "percent": lambda value: f"{100 * value:.1f} %",
    "any": lambda value: f"{value:,.0f}" if value == round(value) and abs(value) < 1e15 else f"{value:,.5g}",
}
"""Ways to write a finite number."""


def plain(value: Any, form: str = "any") -> str:
    """Write any value of a result: a number in a format of `FORMATS`, a list with commas, None as a dash."""
    finite = number(value)
    if finite is not None:
        return FORMATS[form](finite)
    if value is None:
        return _DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list) and all(isinstance(entry, (str, int, float)) for entry in value):
        text = ", ".join(str(entry) for entry in value)
    elif isinstance(value, (list, dict)):
        text = json.dumps(value, ensure_ascii=False)
    else:
        text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"


def backend_of(row: Mapping[str, Any]) -> str:
    """Return the name of the backend a result was measured with."""
    return str(row["cache_config"]["backend"])


def cache_name(row: Mapping[str, Any]) -> Markup:
    """Name a result's cache, with a note beside the ones that are transformers' own."""
    name = element("span", label_of(row), title=json.dumps(row["cache_config"], ensure_ascii=False))
    if backend_of(row) in TRANSFORMERS_BACKENDS:
        return element("span", name, " ", element("span", "transformers", class_="badge"))
    return name


def table(
    heads: Sequence[str], body: Iterable[Markup], *, numeric: Container[int] = (), is_sortable: bool = True
) -> Markup:
    """Put rows (`tr`) under heads, in a frame that scrolls by itself where the page is narrow.

    Args:
        heads (`Sequence[str]`): One per column.
        body (`Iterable[Markup]`): The rows.
        numeric (`Container[int]`): Columns whose heads stand to the right, as their numbers do.
        is_sortable (`bool`): Whether a click on a head sorts the rows.
    """
    kinds = ["number" if index in numeric else None for index in range(len(heads))]
    row = element(
        "tr",
        *(element("th", head, scope="col", class_=kind) for head, kind in zip(heads, kinds, strict=True)),
    )
    return element(
        "div",
        element(
            "table",
            element("thead", row),
            element("tbody", *body),
            class_="sortable" if is_sortable else None,
        ),
        class_="scroll",
    )


def result_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> Markup:
    """Show results, one row each, with those of the columns that any of them has a value for."""
    shown = [column for column in columns if any(row.get(column[0]) is not None for row in rows)]
    numeric = {
        index + 1
        for index, (key, _, _) in enumerate(shown)
        if any(number(row.get(key)) is not None for row in rows)
    }
    body = []
    for row in rows:
        cells = [element("th", cache_name(row), scope="row")]
        for index, (key, _, form) in enumerate(shown):
            value = row.get(key)
            finite = number(value)
            cells.append(
                element(
                    "td",
                    plain(value, form),
                    class_="number" if index + 1 in numeric else None,
                    data_value=None if finite is None else repr(finite),
                    title=f"{value:,}" if form == "bytes" and finite is not None else None,
                )
            )
        body.append(element("tr", *cells, class_=row_class(row)))
    return table(["cache", *(title for _, title, _ in shown)], body, numeric=numeric)


def heat_table(
    rows: Sequence[tuple[Markup, str | None, Mapping[str, Any]]], corner: str, highest: float, form: str
) -> Markup:
    """Show a grid of values with a background that is stronger the higher they are.

    Args:
        rows (`Sequence[tuple[Markup, str | None, Mapping]]`): Name of a row, its class, and its values by
            column.
        corner (`str`): What the rows are.
        highest (`float`): The value with the strongest background; zero has none.
        form (`str`): How values are written.
    """
    keys = list(dict.fromkeys(key for _, _, values in rows for key in values))
    if all(number(_as_number(key)) is not None for key in keys):
        keys.sort(key=lambda key: float(key))
    body = []
    for name, row_class, values in rows:
        cells = [element("th", name, scope="row")]
        for key in keys:
            finite = number(values.get(key))
            share = 0.0 if finite is None else min(max(finite / highest, 0.0), 1.0)
            cells.append(
                element(
                    "td",
                    plain(values.get(key), form),
                    class_="number heat",
                    data_value=None if finite is None else repr(finite),
                    style=f"--share:{60 * share:.0f}%",
                )
            )
        body.append(element("tr", *cells, class_=row_class))
    return table([corner, *keys], body, numeric=range(1, len(keys) + 1))


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def row_class(row: Mapping[str, Any]) -> str | None:
    """Return the class of a result's row in the style sheet: `dense`, `foreign` or none."""
    backend = backend_of(row)
    if backend == "dense":
        return "dense"
    return "foreign" if backend in TRANSFORMERS_BACKENDS else None
