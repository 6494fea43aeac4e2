"""The scores as a table and as bars. rich and matplotlib are imported when something is shown."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...runs.footnotes import origin, skipped
from ...runs.plot_labels import folded, inches
from ...runs.plotting import pyplot, save_figure
from .scoring import LENGTH_GROUPS
from .tasks import TASKS

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["footnotes", "longbench_table", "plot_longbench"]

_LINE_WIDTH = 13.0  # inches of a panel, at most
_BAR_WIDTH = 0.19  # inches, room for its number
_LEAST_GROUP, _MOST_GROUP = 0.35, 3.0  # inches of the bars of a task: a turned name, a quarter of a panel
_FONT = 8
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
    """Draw the score of every task and their average, one bar for each cache; of LongBench-E also by length.

    Args:
        document (`dict`): Of `measure_longbench` or `score_directory`.
        path (`Path`): Where the PNG goes.
    """
    plt = pyplot()
    results, settings, tasks = document["results"], document["settings"], _tasks(document)
    group_width = min(max(_BAR_WIDTH * len(results) + 0.15, _LEAST_GROUP), _MOST_GROUP)
    panels = {"": [*tasks, "average"]}
    if settings["longbench_e"]:
        panels |= dict.fromkeys(LENGTH_GROUPS, tasks)
    longest = len(tasks) + 1
    most = math.ceil(longest / math.ceil(longest * group_width / _LINE_WIDTH))  # lines of one length
    lines = [
        (length, groups[start : start + most])
        for length, groups in panels.items()
        for start in range(0, len(groups), most)
    ]
    # names that are wider than the bars above them are turned
    turns = inches([*tasks, "average"], _FONT)[0] + 0.1 > group_width
    height = (4.2 if turns else 3.6) * len(lines) + 1.2
    labels = [folded(result["label"]) for result in results]
    names_width = inches(labels, _FONT)[0] + 0.6
    columns = math.ceil(0.17 * sum(label.count("\n") + 1 for label in labels) / (height - 1.2))
    figure, grid = plt.subplots(
        len(lines),
        1,
        figsize=(max(most * group_width, 2.5) + 1.2 + columns * names_width, height),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    colors = plt.get_cmap("tab20" if len(results) > 10 else "tab10")
    for axes, (length, of_line) in zip(grid[:, 0], lines, strict=True):
        _draw_line(axes, results, length, of_line, colors)
        for bars in axes.containers if _BAR_WIDTH * len(results) < group_width else ():
            axes.bar_label(bars, fmt="%.1f", fontsize=7, rotation=90, padding=2)
        turned = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if turns else {}
        axes.set_xticks(range(len(of_line)), of_line, **turned)
        axes.set_xlim(-0.6, most - 0.4)  # bars of one width in all lines
        if settings["longbench_e"]:
            axes.set_title(f"rows of {length} words" if length else "all rows", fontsize=10)
    title = f"LongBench{'-E' if settings['longbench_e'] else ''}: {_subject(settings)}"
    letters = int(9 * (figure.get_figwidth() - columns * names_width))
    figure.suptitle(folded(title, letters), x=0.02, ha="left")  # the names of the caches are on the right
    handles = grid[0, 0].containers
    figure.legend(handles, labels, frameon=False, fontsize=_FONT, loc="outside right upper", ncols=columns)
    save_figure(figure, path)


def _heights(result: dict[str, Any], length: str) -> dict[str, float]:
    """Return the scores of a cache by task: of rows of a group of lengths, or of all, and their average."""
    if not length:
        return {**result["scores"], "average": result["average"]}
    by_task = {task: scores.get(length) for task, scores in result["scores_by_length"].items()}
    return {task: score for task, score in by_task.items() if score is not None}


def _draw_line(axes: Any, results: list[dict[str, Any]], length: str, groups: list[str], colors: Any) -> None:
    """Draw some of the groups of bars, one bar of each for every cache."""
    width, highest = 0.84 / len(results), 1.0
    for index, result in enumerate(results):
        heights = _heights(result, length)
        drawn = [(place, heights[name]) for place, name in enumerate(groups) if name in heights]
        axes.bar(
            [place + (index - (len(results) - 1) / 2) * width for place, _ in drawn],
            [height for _, height in drawn],
            width,
            color="#333333" if result["cache_config"]["backend"] == "dense" else colors(index % colors.N),
        )
        highest = max([highest, *heights.values()])
    if groups[-1] == "average" and len(groups) > 1:
        axes.axvline(len(groups) - 1.5, color="#bbbbbb", linewidth=0.8)
    axes.set_ylim(0, max(axes.get_ylim()[1], 1.15 * highest))
    axes.tick_params(axis="x", labelsize=_FONT, length=0)
    axes.set_ylabel("score, 0 to 100")
    axes.spines[["top", "right"]].set_visible(False)


def _subject(settings: dict[str, Any]) -> str:
    return str(settings["directory"]) if settings["score_only"] else Path(settings["model"]).name


def _tasks(document: dict[str, Any]) -> list[str]:
    """Return all tasks that any cache has a score of, in the order of the benchmark."""
    return [task for task in TASKS if any(task in result["scores"] for result in document["results"])]


def _cell(score: float | None) -> str:
    return "-" if score is None else f"{score:.2f}"
