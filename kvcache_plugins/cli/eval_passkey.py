"""`kvcache-plugins eval passkey`: keys hidden in a long text, asked for through every cache."""

from __future__ import annotations

import argparse

from ..evaluation.passkey.options import FACT_NEEDLE, FACT_QUESTION, NEEDLE, QUESTION, PasskeyOptions
from .display import show_failures, show_results
from .model_arguments import add_evaluation_arguments
from .options import RESUMED, options_of
from .preparing import output_directory, prepare_transformers, will_draw

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the evaluation."""
    parser = subparsers.add_parser(
        "passkey",
        argument_default=argparse.SUPPRESS,
        help="keys hidden in a long text",
        description="Hide a key in a long text, ask for it at the end, and count the right answers: a grid "
        "of lengths and depths, with the same prompts for every cache. With several facts in a prompt, it is "
        "read without any question, and each fact is asked for on a copy of the cache. An interrupted run "
        "goes on where it ended.",
    )
    add_evaluation_arguments(parser)
    parser.add_argument(
        "--lengths", nargs="+", type=int, metavar="N", help="tokens of a prompt (default: 512 1024 2048)"
    )
    parser.add_argument(
        "--facts",
        type=int,
        metavar="N",
        help="keys in a prompt; above 1, asked for once it has been read (default: 1)",
    )
    parser.add_argument(
        "--depths", type=int, metavar="N", help="places of the key: 0, 1/N, ... of the filler (default: 5)"
    )
    parser.add_argument(
        "--trials",
        type=int,
        metavar="N",
        help="prompts for each length and depth, or for each length with several facts (default: 4)",
    )
    parser.add_argument(
        "--filler_files",
        nargs="+",
        metavar="FILE",
        help="UTF-8 texts to hide the key in (default: the language reference that comes with Python)",
    )
    parser.add_argument("--filler_text", metavar="TEXT", help="repeated as often as needed, instead of files")
    parser.add_argument("--introduction", metavar="TEXT", help="what a prompt begins with (default: nothing)")
    parser.add_argument(
        "--needle",
        metavar="TEMPLATE",
        help=f"with {{key}} (default: {NEEDLE!r}); with several facts also {{name}} (default: "
        f"{FACT_NEEDLE!r})",
    )
    parser.add_argument(
        "--question",
        metavar="TEXT",
        help=f"end of the prompt (default: {QUESTION!r}); with several facts, about {{name}} (default: "
        f"{FACT_QUESTION!r})",
    )
    parser.add_argument("--max_new_tokens", type=int, metavar="N", help="of an answer (default: 8)")
    parser.add_argument("--batch_size", type=int, metavar="N", help="prompts generated together (default: 1)")
    parser.add_argument("--seed", type=int, metavar="N", help="of keys and filler (default: 0)")
    parser.set_defaults(run=run, interrupted=RESUMED)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write `results.json` and `passkey.png`; 1 if a cache broke down."""
    options = PasskeyOptions.from_dict(options_of(args))
    output = output_directory(args)
    draws = will_draw(args)

    from ..evaluation.passkey.run import measure_passkey
    from ..runs.progress import progress_bar

    prepare_transformers()
    document = measure_passkey(options, output, progress_bar)
    if document is not None:  # this is the first process
        from ..evaluation.passkey.display import footnotes, passkey_table, plot_passkey

        plot = plot_passkey if draws else None
        show_results(document, output, [passkey_table(document)], footnotes(document), plot)
        return show_failures(document)
    return 0
