"""The results of the passkey evaluation as a table for a terminal, and as a heat map of lengths and depths.

rich and matplotlib are imported when something is shown.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...runs.footnotes import origin, skipped
from ...runs.plotting import pyplot, save_figure

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["footnotes", "passkey_table", "plot_passkey"]

_PANELS_PER_LINE = 5
_LABEL_WIDTH = 34  # letters over a panel
_MOST_CELLS_WITH_NUMBERS = 100  # in one panel; with more of them, the colors alone are legible


def passkey_table(document: dict[str, Any]) -> Table:
    """Show one row per cache: accuracy of all trials and at each length, then memory and time."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    results = document["results"]
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("cache")
    lengths = list(results[0]["by_length"])
    titles = ["found", "+-", *(f"{length}\ntokens" for length in lengths)]
    for title in (*titles, "cache\nbytes", "bits per\nvalue", "of\ndense", "seconds"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in results:
        cells = [f"{row['accuracy']:.3f}", f"{row['stderr']:.3f}"]
        cells += [f"{row['by_length'][length]:.2f}" for length in lengths]
        cells += [f"{row['kv_bytes']:,}", f"{row['bits_per_value']:.2f}", f"{row['memory_fraction']:.3f}"]
        table.add_row(Text(row["label"]), *cells, f"{row['seconds']:.1f}")
    return table


def footnotes(document: dict[str, Any]) -> list[str]:
    """Return what the columns mean, what was skipped, and where the numbers come from."""
    settings = document["settings"]
    return [
        f"{settings['model']}: {_trials(document)}",
        f"found: share of trials; +-: standard error; bytes: one prompt of {max(settings['lengths'])} tokens",
        *skipped(document),
        origin(document),
    ]


def _trials(document: dict[str, Any]) -> str:
    """Return how many trials there were, and of what."""
    settings = document["settings"]
    count, each, lengths = document["results"][0]["trials"], settings["trials"], len(settings["lengths"])
    if (facts := settings.get("facts", 1)) == 1:
        return f"{count} trials, {each} at each of {settings['depths']} depths and {lengths} lengths"
    return (
        f"{count} trials, {facts} facts in each of {each} prompts at {lengths} lengths, asked for on copies "
        "of the cache once the prompt has been read"
    )


def plot_passkey(document: dict[str, Any], path: Path) -> None:
    """Draw one panel per cache: the share of keys found, by length and depth.

    Args:
        document (`dict`): Of `measure_passkey`.
        path (`Path`): Where the PNG goes.
    """
    results, settings = document["results"], document["settings"]
    lengths = sorted({cell["length"] for cell in results[0]["grid"]})
    depths = sorted({cell["depth"] for cell in results[0]["grid"]})
    columns = min(len(results), _PANELS_PER_LINE)
    lines = math.ceil(len(results) / columns)
    width = max(2.9, 0.5 * len(lengths) + 1.2)
    height = max(2.9, 0.24 * len(depths) + 1.2)
    figure, grid = pyplot().subplots(
        lines,
        columns,
        figsize=(width * columns + 1.2, height * lines + 0.9),
        layout="constrained",
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    for axes, row in zip(grid.flat, results, strict=False):
        image = _draw_panel(axes, row, lengths, depths)
    for axes in grid.flat[len(results) :]:
        axes.set_visible(False)
    for index in range(len(results)):  # the lowest panel of each column carries the lengths
        if index + columns >= len(results):
            grid.flat[index].tick_params(labelbottom=True)
            grid.flat[index].set_xlabel("tokens of the prompt")
    for line in grid:
        line[0].set_ylabel("depth of the key")
    figure.colorbar(image, ax=grid, label="keys found", shrink=0.8, pad=0.01, format="{x:.0%}")
    trials = f"{settings['trials']} trial{'' if settings['trials'] == 1 else 's'} a cell"
    if (facts := settings.get("facts", 1)) > 1:
        trials = f"{facts} facts a prompt, {trials}, asked for afterwards"
    figure.suptitle(f"Pass keys found by {Path(settings['model']).name}, {trials}")
    save_figure(figure, path)


def _draw_panel(axes: Any, row: dict[str, Any], lengths: list[int], depths: list[float]) -> Any:
    """Draw one cache, and return what the scale of colors belongs to."""
    found = {(cell["depth"], cell["length"]): cell["accuracy"] for cell in row["grid"]}
    shares = [[found[depth, length] for length in lengths] for depth in depths]
    image = axes.imshow(shares, cmap="RdYlBu", vmin=0, vmax=1, aspect="auto")
    label = textwrap.fill(row["label"], _LABEL_WIDTH)
    axes.set_title(f"{label}\n{row['accuracy']:.0%} at {row['bits_per_value']:.1f} bits", fontsize=10)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    shown = range(0, len(depths), math.ceil(len(depths) / 10))
    axes.set_yticks(shown, [f"{depths[index]:.0%}" for index in shown])
    axes.tick_params(length=0, labelsize=9)
    axes.spines[:].set_visible(False)
    for x in range(1, len(lengths)):  # cells of one color stay apart
        axes.axvline(x - 0.5, color="white", linewidth=1)
    for y in range(1, len(depths)):
        axes.axhline(y - 0.5, color="white", linewidth=1)
    if len(lengths) * len(depths) <= _MOST_CELLS_WITH_NUMBERS:
        for y, line in enumerate(shares):
            for x, share in enumerate(line):
                axes.text(x, y, f"{share:.2g}", ha="center", va="center", fontsize=9, color=_ink(share))
    return image


def _ink(share: float) -> str:
    """Return the color of a number that is legible on its cell: the ends of the scale are dark."""
    return "white" if abs(share - 0.5) > 0.3 else "#222222"
