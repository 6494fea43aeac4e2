"""LongBench's scores as a metric of the package `evaluate`, loaded from this folder, without a network.

```python
import evaluate
from kvcache_plugins.evaluation.longbench import longbench_score

metric = evaluate.load(longbench_score.__path__[0], "trec")  # one configuration for each task
metric.compute(predictions=["..."], references=[["...", "..."]], all_classes=["...", ...])
```

`all_classes` is for trec and lsht; `lengths` asks for the scores of LongBench-E too, by group of lengths.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

__all__: list[str] = []

# `evaluate` copies this file into a cache of its own and imports it there: nothing stands beside it.
_PACKAGE = "kvcache_plugins.evaluation.longbench"

_DESCRIPTION = "Scores of the tasks of LongBench v1, as the benchmark's own scorer computes them."
_CITATION = (
    "Bai et al.: LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding (2308.14508)"
)
_INPUTS = """
Args:
    predictions (`list[str]`): The answers.
    references (`list[list[str]]`): The references of each answer; the best one counts.
    all_classes (`list[str]`, *optional*): Names of the classes, for trec and lsht.
    lengths (`list[int]`, *optional*): Lengths of the rows in words, for LongBench-E.

Returns:
    `dict`: `score`, 0 to 100, and `score_by_length` if lengths are given.
"""

# The package `evaluate` is optional, and this file is part of a package that must not need it.
if importlib.util.find_spec("evaluate") is not None:
    import datasets
    import evaluate

    class LongBenchScore(evaluate.Metric):  # type: ignore[misc]  # evaluate has no type information
        """Score of one task of LongBench, which is the name of the configuration."""

        def _info(self) -> Any:
            self._task()  # an unknown name is an error now
            features = {
                "predictions": datasets.Value("string"),
                "references": datasets.Sequence(datasets.Value("string")),
            }
            return evaluate.MetricInfo(
                description=_DESCRIPTION,
                citation=_CITATION,
                inputs_description=_INPUTS,
                features=datasets.Features(features),
            )

        def _compute(
            self,
            predictions: list[str],
            references: list[list[str]],
            all_classes: list[str] | None = None,
            lengths: list[int] | None = None,
        ) -> dict[str, Any]:
            scoring = importlib.import_module(f"{_PACKAGE}.scoring")
            task = self._task()
            rows: list[dict[str, Any]] = [
                {"pred": prediction, "answers": answers, "all_classes": all_classes}
                for prediction, answers in zip(predictions, references, strict=True)
            ]
            result = {"score": scoring.score(task, rows)}
            if lengths is not None:
                rows = [row | {"length": length} for row, length in zip(rows, lengths, strict=True)]
                result["score_by_length"] = scoring.score_by_length(task, rows)
            return result

        def _task(self) -> Any:
            return importlib.import_module(f"{_PACKAGE}.tasks").find_tasks([self.config_name])[0]
