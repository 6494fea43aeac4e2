"""The whole page: a head that allows nothing from outside, contents, a section per task, what is left out."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

from .cells import plain, table
from .documents import Refused, ResultFile
from .markup import Markup, element, join
from .sections import file_section
from .styles import StyleBook
from .stylesheet import SCRIPT, STYLE
from .tasks import TASKS, view_of

__all__ = ["render_page"]

_TITLE = "kvcache_plugins: results"
_READING = (
    "Dense is Transformers' ordinary cache, measured in the same run. Transformers' own quantized caches are "
    "marked in tables and drawn hollow or dashed. Bytes are those of every live tensor of a cache; bits per "
    "value include all metadata."
)


def render_page(files: Sequence[ResultFile], refused: Sequence[Refused], name: str) -> str:
    """Return the page as HTML that needs nothing but itself.

    Args:
        files (`Sequence[ResultFile]`): At least one.
        refused (`Sequence[Refused]`): Json files to list with their reasons.
        name (`str`): Of the directory, for the title.
    """
    # Known kinds of evaluation in the order they are listed in, then the others by name.
    order = {task: place for place, task in enumerate(TASKS)}
    files = sorted(files, key=lambda f: (order.get(f.task, len(order)), f.task, f.path.as_posix()))
    anchors = {id(file): f"file-{index}" for index, file in enumerate(files)}
    book = StyleBook()
    parts = [element("h1", f"Results in {name}"), element("p", _READING, class_="explanation")]
    if len(files) > 1:
        parts.append(_contents(files, anchors))
    for index, task in enumerate(dict.fromkeys(file.task for file in files)):
        view = view_of(task)
        parts.append(element("h2", task if view is None else view.title, id=f"task-{index}"))
        explanation = "An evaluation this page knows no pictures for." if view is None else view.explanation
        parts.append(element("p", explanation, class_="explanation"))
        parts += [file_section(file, anchors[id(file)], book) for file in files if file.task == task]
    if refused:
        parts.append(_left_out(refused))
    return f"<!DOCTYPE html>\n{_document(join(parts))}\n"


def _document(body: Markup) -> Markup:
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        element("title", _TITLE),
        element("style", Markup(STYLE)),
    )
    return element("html", head, element("body", body, element("script", Markup(SCRIPT))), lang="en")


def _contents(files: Sequence[ResultFile], anchors: dict[int, str]) -> Markup:
    rows = []
    for file in files:
        place = file.document["environment"]
        view = view_of(file.task)
        model = file.settings.get("model") or file.settings.get("preset")
        code = str(place["commit"])[:10] if place["commit"] else None
        cells = (
            element("a", file.path.as_posix(), href=f"#{anchors[id(file)]}"),
            file.task if view is None else view.title,
            plain(model),
            plain(len({str(row["cache_config"]) for row in file.rows})),
            plain(place["device"]),
            f"{plain(code)}, dirty" if place["dirty"] else plain(code),
        )
        rows.append(element("tr", *(element("td", cell) for cell in cells)))
    heads = ("file", "evaluation", "model", "caches", "device", "commit")
    return element("nav", element("h4", "Contents"), table(heads, rows))


def _left_out(refused: Sequence[Refused]) -> Markup:
    entries = [element("li", element("b", entry.path.as_posix()), ": ", entry.reason) for entry in refused]
    count = f"{len(entries)} json file{'' if len(entries) == 1 else 's'} left out"
    return element(
        "section",
        element("h2", "Left out"),
        element(
            "details",
            element("summary", count),
            element("ul", *entries, class_="skipped"),
            open="" if len(entries) <= 5 else None,
        ),
    )
