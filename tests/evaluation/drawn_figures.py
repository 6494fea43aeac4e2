"""Figures before they are written, and what must be true of each that shall be legible."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from kvcache_plugins.runs.plotting import pyplot

LONG: dict[str, Any] = {
    "backend": "locret",
    "heads": "examples/models/tiny-llama-books-locret",
    "budget": 128,
    "chunk_size": 64,
    "storage": {"backend": "int4", "key_bits": 8, "value_bits": 4},
}
"""A cache of the README, whose name is long."""


def draw(
    plot: Callable[[dict[str, Any], Path], None], document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Return the figure that `plot` would have written, with its layout fixed; a warning fails the test."""
    drawn: list[Any] = []
    monkeypatch.setitem(plot.__globals__, "save_figure", lambda figure, *_, **__: drawn.append(figure))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot(document, Path("not written"))
        drawn[0].draw_without_rendering()
    pyplot().close(drawn[0])
    return drawn[0]


def check_legible(figure: Any) -> None:
    """Check that no panel, with its title and names, leaves the picture or lies over another one."""
    panels = [axes for axes in figure.axes if axes.get_visible()]
    boxes = [axes.get_tightbbox() for axes in panels]
    boxes += [legend.get_window_extent() for legend in figure.legends]
    whole = figure.bbox
    if figure._suptitle is not None:
        boxes.append(figure._suptitle.get_window_extent())
    for box in boxes:
        assert whole.x0 - 1 <= box.x0 < box.x1 <= whole.x1 + 1
        assert whole.y0 - 1 <= box.y0 < box.y1 <= whole.y1 + 1
    for first, second in combinations(boxes, 2):
        assert not first.padded(-1).overlaps(second.padded(-1))
    for axes in panels:
        assert axes.get_window_extent().width > 100
        for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
            _check_apart([label for label in labels if label.get_visible() and label.get_text()])


def _check_apart(labels: list[Any]) -> None:
    """Check that no name of an axis lies over the next one, turned ones included."""
    for first, second in pairwise(labels):
        turned = first.get_rotation()
        if turned % 90:  # parallel lines: the distance of their ends is that of the lines, or more
            ends = [label.get_transform().transform(label.get_position()) for label in (first, second)]
            assert abs(ends[1][0] - ends[0][0]) > 1.2 * first.get_fontsize() * first.figure.dpi / 72
        else:
            assert not first.get_window_extent().overlaps(second.get_window_extent()), (first, second)
