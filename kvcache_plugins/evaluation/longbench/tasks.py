"""The 21 tasks of LongBench v1 as data. Nothing heavy is imported.

Paper: LongBench (arXiv 2308.14508), table 1; generation limits, tasks without a chat template and tasks of
which only the first line counts as in the benchmark's own `dataset2maxlen.json`, `pred.py` and `eval.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...registry import suggest

__all__ = ["TASKS", "Task", "find_tasks"]


@dataclass(frozen=True)
class Task:
    """One task.

    Args:
        name (`str`): As the benchmark's files are called.
        metric (`str`): Name in `METRICS`.
        max_new_tokens (`int`): Length of an answer at most.
        has_chat_template (`bool`): Whether the prompt is put into the model's chat template. Few-shot and
            code prompts are not: they are to be continued.
        first_line_only (`bool`): Whether only the first line of an answer counts.
        in_longbench_e (`bool`): Whether the task has a file of evenly spread lengths, `<name>_e.jsonl`.
    """

    name: str
    metric: str
    max_new_tokens: int
    has_chat_template: bool
    first_line_only: bool
    in_longbench_e: bool


_ROWS = (
    # name, metric, new tokens, chat template, first line only, LongBench-E
    ("narrativeqa", "qa_f1", 128, True, False, False),
    ("qasper", "qa_f1", 128, True, False, True),
    ("multifieldqa_en", "qa_f1", 64, True, False, True),
    ("multifieldqa_zh", "qa_f1_zh", 64, True, False, False),
    ("hotpotqa", "qa_f1", 32, True, False, True),
    ("2wikimqa", "qa_f1", 32, True, False, True),
    ("musique", "qa_f1", 32, True, False, False),
    ("dureader", "rouge_zh", 128, True, False, False),
    ("gov_report", "rouge", 512, True, False, True),
    ("qmsum", "rouge", 512, True, False, False),
    ("multi_news", "rouge", 512, True, False, True),
    ("vcsum", "rouge_zh", 512, True, False, False),
    ("trec", "classification", 64, False, True, True),
    ("triviaqa", "qa_f1", 32, False, True, True),
    ("samsum", "rouge", 128, False, True, True),
    ("lsht", "classification", 64, False, True, False),
    ("passage_count", "count", 32, True, False, True),
    ("passage_retrieval_en", "retrieval", 32, True, False, True),
    ("passage_retrieval_zh", "retrieval_zh", 32, True, False, False),
    ("lcc", "code_similarity", 64, False, False, True),
    ("repobench-p", "code_similarity", 64, False, False, True),
)

TASKS: dict[str, Task] = {row[0]: Task(*row) for row in _ROWS}
"""All tasks by name, in the order of the benchmark."""


def find_tasks(names: Iterable[str] | None, *, longbench_e: bool = False) -> list[Task]:
    """Return the tasks of these names, in the order of the benchmark.

    Args:
        names (`Iterable[str]`, *optional*): All of them by default.
        longbench_e (`bool`): Only those with evenly spread lengths.

    Raises:
        ValueError: On an unknown name, with the closest one, or one that LongBench-E does not have.
    """
    allowed = {name: task for name, task in TASKS.items() if task.in_longbench_e or not longbench_e}
    if names is None:
        return list(allowed.values())
    wanted = set()
    for name in names:
        if name in TASKS and name not in allowed:
            raise ValueError(f"LongBench-E has no task {name!r}; it has {', '.join(allowed)}.")
        if name not in allowed:
            raise ValueError(
                f"Unknown LongBench task {name!r}.{suggest(str(name), allowed)} Allowed are "
                f"{', '.join(allowed)}."
            )
        wanted.add(name)
    return [task for name, task in allowed.items() if name in wanted]
