"""One result file as a section: pictures, tables, what was skipped, and where the numbers come from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...runs.labels import DENSE
from .cells import Column, cache_name, heat_table, plain, result_table, row_class, table
from .documents import ResultFile, label_of, number
from .markup import Markup, element, join
from .pictures import context_pictures, position_pictures, quality_pictures, speed_pictures
from .styles import StyleBook
from .tasks import view_of

__all__ = ["file_section"]

_CONTEXT_COLUMNS: tuple[Column, ...] = (
    ("batch_size", "batch", "count"),
    ("tokens", "tokens that fit", "count"),
    ("of_dense", "of dense", "two"),
    ("kv_bytes", "cache at that length, estimated", "bytes"),
    ("model_bytes", "model", "bytes"),
    ("peak_memory_bytes", "measured peak of the process", "bytes"),
    ("peak_above_model_bytes", "of it above the model", "bytes"),
    ("note", "note", "any"),
)
_GRIDS = {"scores": ("Scores", 100.0, "two"), "by_length": ("By length, in tokens", 1.0, "percent")}


def file_section(file: ResultFile, anchor: str, book: StyleBook) -> Markup:
    """Show one result file.

    Args:
        file (`ResultFile`): What to show.
        anchor (`str`): Identifier of the section, for links to it.
        book (`StyleBook`): Styles of the page.
    """
    view = view_of(file.task)
    rows = _with_baselines(file.rows)
    parts: list[Markup] = [element("h3", file.path.as_posix()), _origin(file)]
    if view is None:
        parts += [result_table(rows, _generic_columns(rows)), *_grids(file.rows)]
    else:
        parts += quality_pictures(rows, view, book) + speed_pictures(rows, view, book)
        parts += [result_table(rows, view.columns), *_grids(file.rows), *_scores_by_length(file.rows)]
        parts += position_pictures(rows, book)
    parts += [*_largest_context(file, book), *_skipped(file)]
    parts += [_everything(file.rows), _details("Settings of the run", _facts(file.settings))]
    parts.append(_details("Environment", _facts(_flat_environment(file))))
    return element("section", *parts, id=anchor)


def _origin(file: ResultFile) -> Markup:
    """Say in a line what was measured and where."""
    place = file.document["environment"]
    words = []
    model = file.settings.get("model") or file.settings.get("preset")
    if isinstance(model, str):
        words.append(model)
    threads = place["threads"]
    if place["device"] is not None:
        words.append(f"{place['device']}, {plain(threads)} thread{'' if threads == 1 else 's'}")
    words.append(_code(place))
    return element("p", " · ".join(words), class_="origin")


def _code(place: Mapping[str, Any]) -> str:
    code = f"commit {str(place['commit'])[:10]}" if place["commit"] else "code without a commit"
    return f"{code} with uncommitted changes" if place["dirty"] else code


def _with_baselines(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give every dense way of `bench attention` a row of its own, beside the best, which is the result."""
    found = []
    for row in rows:
        baselines = row.get("baseline_ms")
        if row["cache_config"] != DENSE or not isinstance(baselines, dict):
            found.append(row)
            continue
        best = row.get("kernel")
        found.append(row | {"label": f"dense {best}" if isinstance(best, str) else "dense"})
        point = {key: row.get(key) for key in ("length", "batch_size")}
        spreads = row.get("baseline_spread_ms")
        gqa = number(baselines.get("sdpa_enable_gqa"))
        attention = row.get("baseline_attention_ms")
        for name, ms in baselines.items():
            if name == best or (value := number(ms)) is None:
                continue
            spread = spreads.get(name) if isinstance(spreads, dict) else None
            low, high = spread if isinstance(spread, list) and len(spread) == 2 else (None, None)
            fastest = number(row.get("median_ms"))
            found.append(
                {"cache_config": DENSE, "label": f"dense {name}", **point, "median_ms": value}
                | {"p20_ms": low, "p80_ms": high}
                | {"attention_ms": attention.get(name) if isinstance(attention, dict) else None}
                | {"ratio_to_best_dense": value / fastest if fastest else None}
                | {"ratio_to_sdpa_gqa": value / gqa if gqa else None}
            )
    return found


def _generic_columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    keys = dict.fromkeys(key for row in rows for key in row)
    hidden = {"cache_config", "label"} | {key for row in rows for key in row if isinstance(row[key], dict)}
    return [(key, key, "bytes" if key.endswith("_bytes") else "any") for key in keys if key not in hidden]


def _grids(rows: Sequence[Mapping[str, Any]]) -> list[Markup]:
    """Show every metric that is given by something: `scores` by task, `by_length`, `by_...`."""
    parts = []
    for key in dict.fromkeys(key for row in rows for key in row if key in _GRIDS or key.startswith("by_")):
        title, highest, form = _GRIDS.get(key, (key.replace("_", " ").capitalize(), 1.0, "percent"))
        own = [row for row in rows if isinstance(row.get(key), dict) and row[key]]
        flat = [row for row in own if not any(isinstance(value, dict) for value in row[key].values())]
        if flat:
            parts.append(element("h4", title))
            named = [(cache_name(row), row_class(row), row[key]) for row in flat]
            parts.append(heat_table(named, "cache", highest, form))
        grids = []
        for row in (row for row in own if row not in flat):  # a grid of its own, such as depth by length
            lines = [
                (join([name]), None, values if isinstance(values, dict) else {"": values})
                for name, values in row[key].items()
            ]
            grid = heat_table(lines, "", highest, form)
            grids.append(element("div", element("h4", cache_name(row)), grid))
        if grids:
            parts.append(_details(f"{title}, cache by cache", element("div", *grids, class_="pictures")))
    return parts


def _scores_by_length(rows: Sequence[Mapping[str, Any]]) -> list[Markup]:
    """Show the scores of LongBench-E, one table for each group of lengths that has any."""
    found = [
        (row, {task: groups for task, groups in row["scores_by_length"].items() if isinstance(groups, dict)})
        for row in rows
        if isinstance(row.get("scores_by_length"), dict)
    ]
    parts = []
    for group in dict.fromkeys(group for _, tasks in found for groups in tasks.values() for group in groups):
        lines = [
            (cache_name(row), row_class(row), {task: groups.get(group) for task, groups in tasks.items()})
            for row, tasks in found
        ]
        if any(number(score) is not None for _, _, scores in lines for score in scores.values()):
            parts.append(element("h4", f"Scores of texts of {group} words (characters of Chinese)"))
            parts.append(heat_table(lines, "cache", _GRIDS["scores"][1], _GRIDS["scores"][2]))
    return parts


def _largest_context(file: ResultFile, book: StyleBook) -> list[Markup]:
    given = file.document.get("largest_context")
    entries = [
        entry
        for entry in (given if isinstance(given, list) else [])
        if isinstance(entry, dict)
        and isinstance(entry.get("cache_config"), dict)
        and isinstance(entry["cache_config"].get("backend"), str)
    ]
    if not entries:
        return []
    return [
        element("h4", "Largest context"),
        *context_pictures(entries, number(file.settings.get("memory_gb")), book),
        result_table(entries, _CONTEXT_COLUMNS),
    ]


def _skipped(file: ResultFile) -> list[Markup]:
    entries = [element("li", element("b", label), ": ", reason) for label, reason in file.skipped]
    for row in file.rows:
        if row.get("fits") is False:
            point = f", {plain(row.get('length'))} tokens, batch of {plain(row.get('batch_size'))}: "
            reason = plain(row.get("reason"))
            entries.append(element("li", element("b", label_of(row)), point, reason))
        ways = row.get("baselines_not_run")
        for name, why in ways.items() if isinstance(ways, dict) else ():
            point = f", {plain(row.get('length'))} tokens, batch of {plain(row.get('batch_size'))}: "
            entries.append(element("li", element("b", f"dense {name}"), point, plain(why)))
    if not entries:
        return []
    return [element("h4", "Not measured"), element("ul", *entries, class_="skipped")]


def _everything(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Show every value as it stands in the file, for whoever needs more digits or what has no column."""
    body = []
    for row in rows:
        for index, (key, value) in enumerate(row.items()):
            name = element("th", label_of(row) if index == 0 else "", scope="row")
            written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            shown = written if len(written) <= 2000 else f"{written[:2000]}… ({len(written):,} characters)"
            body.append(element("tr", name, element("td", key), element("td", shown, class_="raw")))
    heads = ("cache", "key", "value")
    return _details("All values, as they stand in the file", table(heads, body, is_sortable=False))


def _flat_environment(file: ResultFile) -> dict[str, Any]:
    place = dict(file.document["environment"])
    versions = place.pop("versions")
    if isinstance(versions, dict):
        place |= {f"{name} version": version for name, version in versions.items()}
    else:
        place["versions"] = versions
    return place


def _facts(facts: Mapping[str, Any]) -> Markup:
    rows = [
        element("tr", element("th", name, scope="row"), element("td", _fact(value), class_="raw"))
        for name, value in facts.items()
    ]
    return table(("", ""), rows, is_sortable=False)


def _fact(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _details(title: str, content: Markup) -> Markup:
    return element("details", element("summary", title), content)
