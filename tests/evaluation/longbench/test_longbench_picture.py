"""The picture of any number of tasks and caches is legible; that of LongBench-E has the groups of lengths."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache_plugins.evaluation.longbench import display
from kvcache_plugins.evaluation.longbench.scoring import LENGTH_GROUPS
from kvcache_plugins.evaluation.longbench.tasks import TASKS, find_tasks
from kvcache_plugins.runs.labels import cache_label
from tests.evaluation.drawn_figures import LONG, check_legible, draw


def _document(tasks: list[str], caches: int, *, longbench_e: bool = False) -> dict[str, Any]:
    kivi = [{"backend": "kivi", "nbits": 4, "residual_length": 32 * count} for count in range(1, caches)]
    results = []
    for place, cache_config in enumerate([{"backend": "dense"}, LONG, *kivi][:caches]):
        scores = {task: 1.0 + place + 4.5 * index for index, task in enumerate(tasks)}
        by_length = {
            task: {group: score + index for index, group in enumerate(LENGTH_GROUPS)}
            for task, score in scores.items()
        }
        by_length[tasks[0]]["8k+"] = None  # without a row
        label = cache_label(cache_config)
        average = sum(scores.values()) / len(scores)
        row = {"cache_config": cache_config, "label": label, "scores": scores, "average": average}
        results.append(row | {"scores_by_length": by_length})
    settings = {"longbench_e": longbench_e, "score_only": False, "model": "a/tiny-llama-books"}
    return {"results": results, "settings": settings}


@pytest.mark.parametrize("caches", [1, 2, 3, 6, 15, 40])
@pytest.mark.parametrize("tasks", [["multi_news", "passage_retrieval_zh", "vcsum"], ["trec"], list(TASKS)])
def test_names_of_tasks_do_not_overlap(
    tasks: list[str], caches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = draw(display.plot_longbench, _document(tasks, caches), monkeypatch)
    check_legible(figure)
    names = [label.get_text() for axes in figure.axes for label in axes.get_xticklabels()]
    assert names == [task for task in TASKS if task in tasks] + ["average"]
    assert len(figure.legends[0].get_texts()) == caches
    if caches <= 15:
        numbers = [text.get_text() for text in figure.axes[0].texts]
        assert numbers[0] == "1.0"


@pytest.mark.parametrize("caches", [1, 4, 15])
def test_scores_by_length_are_drawn(caches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [task.name for task in find_tasks(None, longbench_e=True)]
    figure = draw(display.plot_longbench, _document(tasks, caches, longbench_e=True), monkeypatch)
    check_legible(figure)
    titles = list(dict.fromkeys(axes.get_title() for axes in figure.axes))
    assert titles == ["all rows", *(f"rows of {group} words" for group in LENGTH_GROUPS)]
    drawn = {title: [axes for axes in figure.axes if axes.get_title() == title] for title in titles}
    heights = {
        title: [bar.get_height() for axes in panels for bar in axes.containers[0]]
        for title, panels in drawn.items()
    }
    scores = [1.0 + 4.5 * index for index in range(len(tasks))]
    assert heights["all rows"][:-1] == scores
    assert heights["rows of 4-8k words"] == [score + 1 for score in scores]
    assert heights["rows of 8k+ words"] == [score + 2 for score in scores[1:]]


def test_without_groups_of_lengths_there_is_one_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    (axes,) = draw(display.plot_longbench, _document(["trec"], 2), monkeypatch).axes
    assert axes.get_title() == ""
