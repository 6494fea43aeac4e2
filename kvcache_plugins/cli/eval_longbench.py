"""`kvcache-plugins eval longbench`: LongBench v1 through every cache, or the scores of predictions."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, get_type_hints

from ..evaluation.longbench.options import LongBenchOptions
from ..runs.options import check_filled, check_type
from .display import show_failures, show_results
from .model_arguments import add_evaluation_arguments
from .options import RESUMED, options_of
from .preparing import output_directory, prepare_transformers, will_draw

__all__ = ["add_parser", "run"]

_SCORING_OPTIONS = ("score_only", "tasks", "longbench_e")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the evaluation."""
    parser = subparsers.add_parser(
        "longbench",
        argument_default=argparse.SUPPRESS,
        help="the 21 tasks of LongBench v1",
        description="Answer the questions of LongBench v1 through every cache and score the answers with the "
        "benchmark's own metrics. An interrupted run goes on where it ended.",
    )
    add_evaluation_arguments(parser)
    parser.add_argument("--tasks", nargs="+", metavar="NAME", help="default: all, or all in --data_dir")
    parser.add_argument("--data_dir", metavar="DIR", help="<task>.jsonl files as published")
    parser.add_argument(
        "--dataset", metavar="HUB_ID", help="instead: THUDM/LongBench, Xnhyacinth/LongBench or the like"
    )
    parser.add_argument(
        "--prompts", metavar="FILE.json", help="templates by task: the benchmark's dataset2prompt.json"
    )
    parser.add_argument(
        "--max_length",
        type=int,
        metavar="N",
        help="tokens of a prompt, whose middle is cut out if it is longer (default: the model's positions "
        "less the new tokens less 500; more than fits them is refused)",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="rows of each task (default: all)")
    parser.add_argument(
        "--longbench_e",
        action="store_true",
        help="LongBench-E, whose lengths are evenly spread: data <task>_e, scores by length",
    )
    parser.add_argument(
        "--no_chat_template", action="store_true", help="use none, even if the tokenizer has one"
    )
    parser.add_argument(
        "--query_agnostic",
        action="store_true",
        help="read the context into the cache before the question is known",
    )
    parser.add_argument(
        "--score_only",
        metavar="DIR",
        help="score <task>.jsonl files with rows {pred, answers, all_classes, length}, in DIR or in its "
        "folders; no model is needed",
    )
    parser.set_defaults(run=run, interrupted=RESUMED)


def run(args: argparse.Namespace) -> int:
    """Measure or score, print the table, and write `results.json` and a picture; 1 if a cache broke down."""
    merged = options_of(args)
    output = output_directory(args)
    draws = will_draw(args)
    document = _score(merged, output) if "score_only" in merged else _measure(merged, output)
    if document is not None:  # this is the first process
        from ..evaluation.longbench.display import footnotes, longbench_table, plot_longbench

        plot = plot_longbench if draws else None
        show_results(document, output, [longbench_table(document)], footnotes(document), plot)
        return show_failures(document)
    return 0


def _score(merged: dict[str, Any], output: Path) -> dict[str, Any]:
    superfluous = sorted(set(merged).difference(_SCORING_OPTIONS))
    if superfluous:
        raise ValueError(
            f"--score_only runs no model: leave out {', '.join(f'--{name}' for name in superfluous)}."
        )
    kinds = get_type_hints(LongBenchOptions) | {"score_only": str}
    for name, value in merged.items():
        check_type(name, value, kinds[name])
        check_filled(name, value)
    from ..evaluation.longbench.summary import score_directory
    from ..runs.output_lock import writing_alone
    from ..runs.results import write_results

    with writing_alone(output):
        document = score_directory(
            Path(merged["score_only"]), merged.get("tasks"), longbench_e=merged.get("longbench_e", False)
        )
        write_results(output, document)
        return document


def _measure(merged: dict[str, Any], output: Path) -> dict[str, Any] | None:
    if "model" not in merged:
        raise ValueError("--model is missing: what to evaluate, as a path or hub id (or use --score_only).")
    options = LongBenchOptions.from_dict(merged)

    from ..evaluation.longbench.questions import load_questions

    questions = load_questions(options)  # all that is wrong with the data is told before anything is loaded
    from ..evaluation.longbench.run import measure_longbench
    from ..runs.progress import progress_bar

    prepare_transformers()
    return measure_longbench(options, questions, output, progress_bar)
