"""The results of the perplexity evaluation as a picture. matplotlib is imported when one is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...runs.labels import DENSE
from ...runs.plot_labels import LabeledPoint, folded, inches, place_labels
from ...runs.plotting import pyplot, save_figure, scale_divergences

__all__ = ["plot_perplexity"]

_GREY = "#222222"
_DIVERGENCE = "KL divergence from the dense run (nats per token)"
_INCREASE = "increase over the dense run (nats per token)"
_WIDTH = 19.0
"""Inches of the picture."""
_MARKERS = "osD^vP*X<>p"  # one more than colors, so that no two of many lines look alike


def plot_perplexity(document: dict[str, Any], path: Path) -> None:
    """Draw the log-perplexity by position, the distance to the dense run, and quality against memory.

    Log-perplexities of good caches cover each other and the dense one, which is why the distance has axes of
    its own.

    Args:
        document (`dict`): Of `measure_perplexity`.
        path (`Path`): Where the PNG goes.
    """
    rows, settings = document["results"], document["settings"]
    packed = [row for row in rows if row["cache_config"] != DENSE]
    width, height = inches([folded(row["label"]) for row in rows], 10)
    columns = min(len(rows), 6, int(_WIDTH / (width + 0.8)))
    height = 5.2 + math.ceil(len(rows) / columns) * (height + 0.1)
    figure, axes = pyplot().subplots(1, 3, figsize=(_WIDTH, height), layout="constrained")
    _draw_positions(axes[0], rows)
    _draw_distance(axes[1], packed)
    points = _draw_quality(axes[2], packed, rows[0]["bits_per_value"])
    title = (
        f"{settings['model']}, {settings['dtype']}: {rows[0]['tokens']:,} tokens of {settings['dataset']} "
        f"in {rows[0]['windows']} windows of {settings['context_length']}"
    )
    figure.suptitle(folded(title, int(9 * _WIDTH)))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    figure.draw_without_rendering()  # fixes the layout, so that the space a label takes is known
    place_labels(axes[2], points)
    save_figure(figure, path, axes, dpi=110)


def _draw_positions(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Log-perplexity by position, the dense run in front of the others."""
    for index, row in enumerate(rows):
        style = {"color": _GREY, "linewidth": 2.2, "zorder": 5} if index == 0 else _style(index - 1)
        axes.plot(*_curve(row, "nll"), label=folded(row["label"]), **style)
    axes.set_xlabel("position in the window (tokens)")
    axes.set_ylabel("log-perplexity (nats per token)")
    axes.set_title("Log-perplexity by position")


def _draw_distance(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """The distance to the dense run: the divergence, or the increase where that was not measured."""
    has_divergence = _has_divergence(rows)
    curves = [_curve(row, "kl" if has_divergence else "increase") for row in rows]
    for index, (positions, heights) in enumerate(curves):
        axes.plot(positions, heights, **_style(index))
    if has_divergence and rows:
        scale_divergences(axes, (height for _, heights in curves for height in heights))
    else:
        axes.axhline(0, color=_GREY, linewidth=1.2)
    axes.set_xlabel("position in the window (tokens)")
    axes.set_ylabel(_DIVERGENCE if has_divergence else _INCREASE)
    axes.set_title("Distance to the dense run by position")


def _draw_quality(axes: Any, rows: Sequence[dict[str, Any]], dense_bits: float) -> list[LabeledPoint]:
    """Divergence, or the increase where it was not measured, against bits per value; return the points."""
    has_divergence = _has_divergence(rows)
    metric = "kl_to_dense" if has_divergence else "nll_increase"
    points = [(row["bits_per_value"], row[metric]) for row in rows]
    for index, point in enumerate(points):
        style = _style(index)
        axes.scatter(*point, s=70, color=style["color"], marker=style["marker"])
    axes.margins(x=0.25, y=0.12)
    if has_divergence and rows:
        scale_divergences(axes, (height for _, height in points))
    axes.set_xlabel(f"bits per value, metadata and exact recent tokens included (dense: {dense_bits:.0f})")
    axes.set_ylabel(_DIVERGENCE if has_divergence else _INCREASE)
    axes.set_title("Quality against memory (lower left is better)")
    return [LabeledPoint(*point, folded(row["label"])) for point, row in zip(points, rows, strict=True)]


def _has_divergence(rows: Sequence[dict[str, Any]]) -> bool:
    return all("kl_to_dense" in row for row in rows)


def _curve(row: dict[str, Any], name: str) -> tuple[list[float], list[float]]:
    points = row["nll_by_position"]
    return [(point["start"] + point["stop"]) / 2 for point in points], [point[name] for point in points]


def _style(index: int) -> dict[str, Any]:
    return {
        "color": f"C{index % 10}",
        "marker": _MARKERS[index % len(_MARKERS)],
        "markersize": 4,
        "linewidth": 1.2,
    }
