"""Names beside points: inside of the axes, and over neither a point nor another name."""

from __future__ import annotations

from itertools import combinations

import pytest

from kvcache_plugins.evaluation.plot_labels import LabelledPoint, place_labels

pytest.importorskip("matplotlib").use("Agg")


def drawn(points: list[LabelledPoint]):  # type: ignore[no-untyped-def]  # matplotlib is not typed
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 5), layout="constrained")
    axes.scatter([point.x for point in points], [point.y for point in points], s=50)
    axes.margins(x=0.2, y=0.2)
    figure.draw_without_rendering()
    place_labels(axes, points)
    boxes = [note.get_window_extent() for note in axes.texts]
    centres = axes.transData.transform([point[:2] for point in points])
    window = axes.get_window_extent()
    plt.close(figure)
    return boxes, centres, window


CROWDED = [
    LabelledPoint(2.0, 4.0, "a name that is too long for the left"),
    LabelledPoint(4.5, 4.0, "its neighbour on the right"),
    LabelledPoint(3.0, 4.3, "above"),
    LabelledPoint(8.0, 1.0, "the last one, far to the right"),
    LabelledPoint(8.0, 1.2, "and one upon it"),
]


def test_labels_cover_nothing() -> None:
    boxes, centres, window = drawn(CROWDED)
    assert len(boxes) == len(CROWDED)
    for box in boxes:
        assert window.x0 <= box.x0 and box.x1 <= window.x1
        assert not any(box.contains(*centre) for centre in centres)
    assert not any(first.overlaps(second) for first, second in combinations(boxes, 2))


def test_no_points_and_names_longer_than_the_picture() -> None:
    assert drawn([])[0] == []
    boxes, centres, _ = drawn([LabelledPoint(1.0, 1.0, "x" * 400), LabelledPoint(2.0, 2.0, "y")])
    assert len(boxes) == 2 and boxes[0].x0 > centres[0][0], "on the right, where everything leads outside"
