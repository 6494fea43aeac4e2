"""Names beside points: inside of the axes, and over neither a point nor another name."""

from __future__ import annotations

from itertools import combinations

import pytest

from kvcache_plugins.runs.plot_labels import LabeledPoint, folded, inches, place_labels

pytest.importorskip("matplotlib").use("Agg")


def drawn(points: list[LabeledPoint]):  # type: ignore[no-untyped-def]  # matplotlib is not typed
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 5), layout="constrained")
    axes.scatter([point.x for point in points], [point.y for point in points], s=50)
    axes.margins(x=0.2, y=0.2)
    figure.draw_without_rendering()
    place_labels(axes, points)
    boxes = [note.get_window_extent() for note in axes.texts]
    centers = axes.transData.transform([point[:2] for point in points])
    window = axes.get_window_extent()
    plt.close(figure)
    return boxes, centers, window


CROWDED = [
    LabeledPoint(2.0, 4.0, "a name that is too long for the left"),
    LabeledPoint(4.5, 4.0, "its neighbour on the right"),
    LabeledPoint(3.0, 4.3, "above"),
    LabeledPoint(8.0, 1.0, "the last one, far to the right"),
    LabeledPoint(8.0, 1.2, "and one upon it"),
]


def test_labels_cover_nothing() -> None:
    boxes, centers, window = drawn(CROWDED)
    assert len(boxes) == len(CROWDED)
    for box in boxes:
        assert window.x0 <= box.x0 and box.x1 <= window.x1
        assert not any(box.contains(*center) for center in centers)
    assert not any(first.overlaps(second) for first, second in combinations(boxes, 2))


def test_no_points_and_names_longer_than_the_picture() -> None:
    assert drawn([])[0] == []
    boxes, centers, _ = drawn([LabeledPoint(1.0, 1.0, "x" * 400), LabeledPoint(2.0, 2.0, "y")])
    assert len(boxes) == 2 and boxes[0].x0 > centers[0][0], "on the right, where everything leads outside"


def test_names_of_several_lines_stay_inside() -> None:
    name = "locret budget=128\nheads=tiny\nchunk_size=64\nover int4"
    boxes, centers, window = drawn([LabeledPoint(1.0, 2.0, name), LabeledPoint(2.0, 1.0, name)])
    for box in boxes:
        assert window.y0 <= box.y0 and box.y1 <= window.y1
        assert not any(box.contains(*center) for center in centers)


@pytest.mark.parametrize(
    ("label", "lines"),
    [
        ("int8", ["int8"]),
        ("knorm budget=100 chunk_size=128", ["knorm budget=100", "chunk_size=128"]),
        ("kvquant 3-bit calibration=tiny-llama-books-kvquant3", None),
        (f"heads={'x' * 70}", [f"heads={'x' * 24}", "x" * 30, "x" * 16]),
    ],
)
def test_folded_names(label: str, lines: list[str] | None) -> None:
    lines = lines or ["kvquant 3-bit calibration=", "tiny-llama-books-kvquant3"]
    assert folded(label).split("\n") == lines


def test_room_for_names() -> None:
    assert inches([], 9) == (0, 0)
    narrow, wide = inches(["abc", "ab\nabc"], 9), inches(["abcdef"], 9)
    assert wide[0] == pytest.approx(2 * narrow[0])
    assert narrow[1] == pytest.approx(2 * wide[1])
