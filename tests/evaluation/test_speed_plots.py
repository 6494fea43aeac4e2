"""Pictures of the speed benchmarks with names as long as those of the README's caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcache_plugins.evaluation.speed import plots as speed_plots
from kvcache_plugins.runs.labels import cache_label
from tests.evaluation.drawn_figures import LONG, check_legible, draw

RESULTS = Path(__file__).resolve().parents[2] / "examples" / "results"
CACHES = [LONG, {"backend": "knorm", "budget": 100, "chunk_size": 128}]


def _with_long_names(name: str, *, most: int | None = None) -> dict[str, Any]:
    """A recorded run, of its first caches alone if so many are named, with two more."""
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    results = []
    for length in dict.fromkeys(row["length"] for row in document["results"]):
        rows = [row for row in document["results"] if row["length"] == length]
        more = [rows[-1] | {"cache_config": cache, "label": cache_label(cache)} for cache in CACHES]
        results += [*rows[:most], *more]
    return document | {"results": results}


def _with_contexts(document: dict[str, Any]) -> dict[str, Any]:
    document["largest_context"] = [
        row | {"tokens": None if place == 2 else 10**place, "note": "any length fits"}
        for place, row in enumerate(document["results"])
        if row["length"] == document["results"][0]["length"]
    ]
    document["settings"] |= {"memory_gb": 0.125}
    return document


@pytest.mark.parametrize("name", ["bench_generate", "bench_windows"])
@pytest.mark.parametrize("most", [1, None])
@pytest.mark.parametrize("has_contexts", [False, True])
def test_long_names_leave_room_for_bars(
    name: str, most: int | None, has_contexts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = _with_long_names(name, most=most)
    figure = draw(
        speed_plots.plot_generation, _with_contexts(document) if has_contexts else document, monkeypatch
    )
    assert len(figure.axes) == 3 + has_contexts
    check_legible(figure)
    names = [label.get_text().replace("\n", " ") for label in figure.axes[0].get_yticklabels()]
    assert names == list(dict.fromkeys(row["label"] for row in document["results"]))


@pytest.mark.parametrize("tokens", [0, None])
def test_a_memory_in_which_nothing_fits_has_no_scale(
    tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = _with_contexts(_with_long_names("bench_generate"))
    document["largest_context"] = [row | {"tokens": tokens} for row in document["largest_context"]]
    axes = draw(speed_plots.plot_generation, document, monkeypatch).axes[-1]
    assert axes.get_title().startswith("Largest context")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0"] and axes.get_xlim() == (0, 1)


def test_long_names_of_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    document = _with_contexts(_with_long_names("bench_windows"))
    for key in ("results", "largest_context"):
        document[key] = [row | {"batch_size": size} for size in (1, 16) for row in document[key]]
    document["settings"]["model"] = "/a/directory/" + "with/many/folders/" * 20 + "model"
    figure = draw(speed_plots.plot_generation, document, monkeypatch)
    assert len(figure.axes) == 8
    check_legible(figure)


def test_long_names_beside_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    check_legible(draw(speed_plots.plot_attention, _with_long_names("bench_attention"), monkeypatch))
