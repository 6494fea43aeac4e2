"""Options of the LongBench evaluation. Nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...runs.model_options import ModelOptions
from ...runs.options import check_count
from .tasks import find_tasks

__all__ = ["MARGIN", "LongBenchOptions"]

MARGIN = 500
"""Tokens kept free by default for the chat template: about what the benchmark's own limits leave (3500 tokens
of prompt for a model of 4096 positions, 31500 for 32768)."""


@dataclass(frozen=True, kw_only=True)
class LongBenchOptions(ModelOptions):
    """What the LongBench evaluation is told.

    Args:
        tasks (`Sequence[str]`, *optional*): Names of tasks; by default all, or with `data_dir` all that have
            a file there.
        data_dir (`str`, *optional*): Holds `<task>.jsonl` as published, `<task>_e.jsonl` for LongBench-E.
        dataset (`str`, *optional*): Hub id with one configuration for each task, instead of `data_dir`.
        prompts (`str`, *optional*): A json file of templates by task, the published `dataset2prompt.json`.
            Not for data whose rows carry their prompts, in the columns `question` and `answer_prefix`.
        max_length (`int`, *optional*): Tokens of a prompt; a longer one loses its middle. By default the
            model's positions less the task's new tokens less `MARGIN`. The chat template comes to it.
        limit (`int`, *optional*): Only so many rows of each task, from its beginning.
        longbench_e (`bool`): LongBench-E: the tasks with evenly spread lengths, scored by group of lengths.
        no_chat_template (`bool`): Use none. By default it is used where the tokenizer has one, except in the
            few-shot and code tasks.
        query_agnostic (`bool`): Read the context into the cache before the question is known, then ask.

    Raises:
        ValueError: If an option is out of range, or none or both of `data_dir` and `dataset` are given.
    """

    tasks: Sequence[str] | None = None
    data_dir: str | None = None
    dataset: str | None = None
    prompts: str | None = None
    max_length: int | None = None
    limit: int | None = None
    longbench_e: bool = False
    no_chat_template: bool = False
    query_agnostic: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data_dir is None and self.dataset is None:
            raise ValueError(
                "LongBench needs its data: --data_dir DIR with <task>.jsonl files as published, or --dataset "
                "with a hub id such as THUDM/LongBench; got neither."
            )
        if self.data_dir is not None and self.dataset is not None:
            raise ValueError(
                f"--data_dir and --dataset exclude each other, got {self.data_dir!r} and {self.dataset!r}."
            )
        if self.data_dir is not None and not Path(self.data_dir).is_dir():
            raise ValueError(f"--data_dir must be a directory, got {self.data_dir!r}.")
        if self.tasks is not None and (isinstance(self.tasks, str) or not self.tasks):
            raise ValueError(f"--tasks must be one or more names, got {self.tasks!r}.")
        try:
            find_tasks(self.tasks, longbench_e=self.longbench_e)
        except ValueError as error:
            raise ValueError(f"--tasks: {error}") from error
        if self.max_length is not None:
            check_count("max_length", self.max_length, 2)  # each half keeps a token
        if self.limit is not None:
            check_count("limit", self.limit)
