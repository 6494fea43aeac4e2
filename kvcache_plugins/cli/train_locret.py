"""`kvcache-plugins train-locret`: retaining heads of a model, with any option of transformers' Trainer."""

from __future__ import annotations

import argparse
from typing import Any

from .preparing import prepare_transformers

__all__ = ["add_parser", "run"]

_INTERRUPTED = (
    "--resume_from_checkpoint true goes on from the newest checkpoint in --output, if there is one, and if "
    "--save_only_model has not left out the optimizer."
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the sub-command.

    Its hundred options are those of a class of transformers, which is imported when the command runs: until
    then they are words like any other, `--help` among them, which the prefix that nobody types is for.
    """
    parser = subparsers.add_parser(
        "train-locret", help="train retaining heads for the backend locret", prefix_chars="\0", add_help=False
    )
    parser.add_argument("arguments", nargs="*")
    parser.set_defaults(run=run, interrupted=_INTERRUPTED)


def run(args: argparse.Namespace) -> int:
    """Train, print what was measured, and write heads, card, `results.json` and `training.png`."""
    from ..training.parsing import parse_arguments

    options, training = parse_arguments(args.arguments)
    if not options.no_plots:
        from ..runs.plotting import check_plotting

        check_plotting()  # before the training, not after it

    from ..runs.progress import progress_bar
    from ..training.job import train_locret

    prepare_transformers()
    document = train_locret(options, training, progress_bar)
    if document is not None:
        _show(document, str(training.output_dir))
    return 0


def _show(document: dict[str, Any], output: str) -> None:
    from ..runs.footnotes import skipped
    from ..training.tables import answers_table, recall_table
    from .display import show

    tables = [table for table in (recall_table(document), answers_table(document)) if table is not None]
    show(tables, [*skipped(document), f"written to {output}"])
