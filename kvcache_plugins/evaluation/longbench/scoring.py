"""From answers to scores, as the benchmark's own `eval.py` takes the means and rounds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .metrics import METRICS
from .tasks import Task

__all__ = ["LENGTH_GROUPS", "average", "row_score", "score", "score_by_length"]

LENGTH_GROUPS = ("0-4k", "4-8k", "8k+")
"""Groups of LongBench-E: rows of less than 4000, of less than 8000, and of more words (characters in zh)."""

_Rows = Sequence[Mapping[str, Any]]


def row_score(task: Task, answer: str, references: Sequence[str], all_classes: Sequence[str] | None) -> float:
    """Return the score of one answer in [0, 1]: the best over the references, 0 without any."""
    if task.first_line_only:
        answer = answer.lstrip("\n").split("\n")[0]
    metric = METRICS[task.metric]
    return max([0.0, *(metric(answer, reference, all_classes) for reference in references)])


def score(task: Task, rows: _Rows) -> float:
    """Return the score of a task: 100 times the mean over the rows, rounded to two decimals.

    Args:
        task (`Task`): The task.
        rows (`Sequence[Mapping]`): At least one, each with `pred`, `answers` and `all_classes`. The classes
            of the last row hold for all, as in the original (they are the same in all published rows).

    Raises:
        ValueError: If a row cannot be scored.
    """
    return round(100 * sum(_row_scores(task, rows)) / len(rows), 2)


def score_by_length(task: Task, rows: _Rows) -> dict[str, float | None]:
    """Return the scores of LongBench-E, one for every group of lengths; None where a group has no rows.

    Args:
        task (`Task`): The task.
        rows (`Sequence[Mapping]`): As for [`score`]; they also have `length`.
    """
    groups: dict[str, list[float]] = {name: [] for name in LENGTH_GROUPS}
    for row, value in zip(rows, _row_scores(task, rows), strict=True):
        groups[LENGTH_GROUPS[(row["length"] >= 4000) + (row["length"] >= 8000)]].append(value)
    # numpy's mean and numpy's rounding, as in the original
    return {
        name: float(round(100 * np.mean(values), 2)) if values else None for name, values in groups.items()
    }


def average(scores: Mapping[str, float]) -> float:
    """Return the mean over the tasks, rounded to two decimals."""
    return round(sum(scores.values()) / len(scores), 2)


def _row_scores(task: Task, rows: _Rows) -> list[float]:
    all_classes = rows[-1]["all_classes"]
    scores = []
    for number, row in enumerate(rows, 1):
        try:
            scores.append(row_score(task, row["pred"], row["answers"], all_classes))
        except ValueError as error:
            raise ValueError(f"Row {number} of {task.name} cannot be scored: {error}") from error
    return scores
