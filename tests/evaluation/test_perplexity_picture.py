"""A divergence of exactly 0 is drawn as what it is, and long names are whole."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvcache_plugins.evaluation.perplexity import plots as perplexity_plots
from kvcache_plugins.runs.labels import DENSE, cache_label
from tests.evaluation.drawn_figures import LONG, check_legible, draw

RECORDED = Path(__file__).resolve().parents[2] / "examples" / "results" / "perplexity.json"


def _document(zeros: int, caches: int = 5) -> dict[str, Any]:
    """A recorded run of some caches, of which the last `zeros` do not differ from the dense one."""
    document: dict[str, Any] = json.loads(RECORDED.read_text())
    rows = document["results"][: 1 + caches]
    for row in rows[1 + caches - zeros :]:
        row["kl_to_dense"] = 0.0
        for point in row["nll_by_position"]:
            point["kl"] = 0.0
    return document | {"results": rows}


def _panels(document: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    figure = draw(perplexity_plots.plot_perplexity, document, monkeypatch)
    check_legible(figure)
    return list(figure.axes)


def _heights(axes: Any) -> list[float]:
    """Where the points of a scatter plot are, in the data's units."""
    return [float(points.get_offsets()[0][1]) for points in axes.collections]


def _shown(axes: Any) -> dict[float, str]:
    """The numbers beside the vertical axis that are in the picture."""
    low, high = axes.get_ylim()
    places, labels = axes.get_yticks(), axes.get_yticklabels()
    return {
        place: label.get_text() for place, label in zip(places, labels, strict=True) if low <= place <= high
    }


@pytest.mark.parametrize("zeros", [1, 2])
def test_a_divergence_of_zero_is_drawn_at_zero(zeros: int, monkeypatch: pytest.MonkeyPatch) -> None:
    document = _document(zeros)
    expected = [row["kl_to_dense"] for row in document["results"][1:]]
    _, distance, quality = _panels(document, monkeypatch)
    assert _heights(quality) == expected
    for axes in (distance, quality):
        assert _shown(axes)[0.0] in ("0", "$\\mathdefault{0}$")
        places = [axes.transData.transform((1.0, height))[1] for height in (0.0, *sorted(expected)[zeros:])]
        assert all(high - low > 5 for low, high in pairwise(places)), "apart, in pixels"
        assert places[0] > axes.get_window_extent().y0
    assert [list(line.get_ydata()) for line in distance.lines[-zeros:]] == [
        [0.0] * len(document["results"][-1]["nll_by_position"])
    ] * zeros


def test_divergences_of_zero_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _, distance, quality = _panels(_document(2, caches=2), monkeypatch)
    assert _heights(quality) == [0.0, 0.0]
    for axes in (distance, quality):
        assert axes.get_yscale() == "linear"
        assert _shown(axes) == {0.0: "0"}


def test_without_zeros_the_axis_is_logarithmic(monkeypatch: pytest.MonkeyPatch) -> None:
    _, distance, quality = _panels(_document(0), monkeypatch)
    assert [axes.get_yscale() for axes in (distance, quality)] == ["log", "log"]


@pytest.mark.parametrize("caches", [1, 5, 11])
def test_long_names(caches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    document = _document(0, caches)
    row = document["results"][-1]
    document["results"].append(
        row | {"cache_config": LONG, "label": cache_label(LONG), "bits_per_value": 2.0, "kl_to_dense": 1.0}
    )
    figure = draw(perplexity_plots.plot_perplexity, document, monkeypatch)
    check_legible(figure)
    names = [text.get_text().replace("=\n", "=").replace("\n", " ") for text in figure.legends[0].get_texts()]
    assert names == [row["label"] for row in document["results"]]


def test_no_two_caches_look_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    document = _document(0, 11)
    dense, *rows = document["results"]
    rows += [row | {"label": f"another {row['label']}"} for row in rows]
    figure = draw(perplexity_plots.plot_perplexity, document | {"results": [dense, *rows]}, monkeypatch)
    looks = [(line.get_color(), line.get_marker()) for line in figure.legends[0].get_lines()]
    assert len(set(looks)) == len(looks) == 23


def test_a_run_of_the_dense_cache_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    document = _document(0, 0)
    assert [row["cache_config"] for row in document["results"]] == [DENSE]
    _panels(document, monkeypatch)
