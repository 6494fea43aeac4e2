"""The scores as a table and as bars. rich and matplotlib are imported when something is shown."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..footnotes import origin, skipped
from ..plotting import pyplot, save_figure
from .scoring import LENGTH_GROUPS
from .tasks import TASKS

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["footnotes", "longbench_table", "plot_longbench"]

_BARS_A_LINE = 63  # of bars, in one panel: as many as have room for their numbers
_GROUPS_A_LINE = 4  # at least, and then without numbers
_MEASURED = (
    ("cache bytes", "kv_bytes", ","),
    ("bits per value", "bits_per_value", ".2f"),
    ("of dense", "memory_fraction", ".3f"),
    ("seconds", "seconds", ".1f"),
)


def longbench_table(document: dict[str, Any]) -> Table:
    """Show one line for each task, the average, and what the caches cost; one column for each cache."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    results = document["results"]
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("task")
    table.add_column("rows", justify="right", no_wrap=True)
    for result in results:
        table.add_column(Text(result["label"].replace(" ", "\n")), justify="right", no_wrap=True)
    for task in _tasks(document):
        counts = sorted({result["rows"][task] for result in results if task in result["rows"]})
        rows = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
        table.add_row(task, rows, *(_cell(r["scores"].get(task)) for r in results))
        for group in LENGTH_GROUPS if document["settings"]["longbench_e"] else ():
            by_length = (result["scores_by_length"].get(task, {}) for result in results)
            table.add_row(f"  {group}", "", *(_cell(scores.get(group)) for scores in by_length))
    table.add_section()
    table.add_row("average", "", *(_cell(result["average"]) for result in results))
    for title, name, form in _MEASURED:
        if all(name in result for result in results):
            table.add_row(title, "", *(format(result[name], form) for result in results))
    return table


def footnotes(document: dict[str, Any]) -> list[str]:
    """Return what was asked how, what was skipped, and where the numbers come from."""
    settings, results = document["settings"], document["results"]
    if settings["score_only"]:
        lines = [f"scores of the predictions in {settings['directory']}; nothing was run"]
        if any(len({r["rows"][task] for r in results if task in r["rows"]}) > 1 for task in _tasks(document)):
            lines.append("caches have different numbers of rows: their scores are not of the same questions")
        return lines
    rows, truncated = sum(results[0]["rows"].values()), sum(results[0]["truncated"].values())
    limits = sorted(set(settings["max_lengths"].values()))
    lengths = str(limits[0]) if len(limits) == 1 else f"{limits[0]} to {limits[-1]} (by task)"
    order = (
        "the context was read into the cache before the question was known"
        if settings["query_agnostic"]
        else "context and question were read together"
    )
    template = "the tokenizer's chat template" if settings["uses_chat_template"] else "no chat template"
    return [
        f"{settings['model']}: {rows} rows, {truncated} of them cut in the middle to {lengths} tokens; "
        + template,
        f"{order}; greedy; cache bytes: the largest of all rows; bits and share of dense: mean over the rows",
        *skipped(document),
        origin(document),
    ]


def plot_longbench(document: dict[str, Any], path: Path) -> None:
    """Draw the score of every task and their average, one bar for each cache.

    Args:
        document (`dict`): Of `measure_longbench` or `score_directory`.
        path (`Path`): Where the PNG goes.
    """
    plt = pyplot()
    results = document["results"]
    groups = [*_tasks(document), "average"]
    per_line = max(_GROUPS_A_LINE, _BARS_A_LINE // len(results))
    per_line = math.ceil(len(groups) / math.ceil(len(groups) / per_line))  # lines of one length
    lines = [groups[start : start + per_line] for start in range(0, len(groups), per_line)]
    bars = max(map(len, lines)) * len(results)
    figure, grid = plt.subplots(
        len(lines),
        1,
        figsize=(min(16.0, max(7.0, 0.2 * bars + 4.5)), 3.6 * len(lines) + 1.2),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    for axes, of_line in zip(grid[:, 0], lines, strict=True):
        _draw_line(axes, results, of_line, plt.get_cmap("tab20" if len(results) > 10 else "tab10"))
        axes.set_xlim(-0.6, max(map(len, lines)) - 0.4)  # bars of one width in all lines
    highest = max([*(max(result["scores"].values()) for result in results), 1.0])
    axes.set_ylim(0, 1.15 * highest)
    settings = document["settings"]
    figure.suptitle(f"LongBench{'-E' if settings['longbench_e'] else ''}: {_subject(settings)}")
    columns = 1 + len(results) // 25
    grid[0, 0].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), ncols=columns)
    save_figure(figure, path)


def _draw_line(axes: Any, results: list[dict[str, Any]], groups: list[str], colours: Any) -> None:
    """Draw some of the groups of bars, one bar of each for every cache."""
    width = 0.84 / len(results)
    for index, result in enumerate(results):
        heights = {**result["scores"], "average": result["average"]}
        drawn = [(place, heights[name]) for place, name in enumerate(groups) if name in heights]
        bars = axes.bar(
            [place + (index - (len(results) - 1) / 2) * width for place, _ in drawn],
            [height for _, height in drawn],
            width,
            label=result["label"],
            color="#333333" if result["cache_config"]["backend"] == "dense" else colours(index % colours.N),
        )
        if len(groups) * len(results) <= _BARS_A_LINE:
            axes.bar_label(bars, fmt="%.1f", fontsize=7, rotation=90, padding=2)
    if groups[-1] == "average" and len(groups) > 1:
        axes.axvline(len(groups) - 1.5, color="#bbbbbb", linewidth=0.8)
    axes.set_xticks(range(len(groups)), groups)
    axes.tick_params(axis="x", labelsize=8, length=0)
    axes.set_ylabel("score, 0 to 100")
    axes.spines[["top", "right"]].set_visible(False)


def _subject(settings: dict[str, Any]) -> str:
    return str(settings["directory"]) if settings["score_only"] else Path(settings["model"]).name


def _tasks(document: dict[str, Any]) -> list[str]:
    """Return all tasks that any cache has a score of, in the order of the benchmark."""
    return [task for task in TASKS if any(task in result["scores"] for result in document["results"])]


def _cell(score: float | None) -> str:
    return "-" if score is None else f"{score:.2f}"
