"""`kvcache-plugins eval perplexity`: the perplexity of a text read through caches."""

from __future__ import annotations

import argparse

from ..evaluation.perplexity.options import DATASETS, PG19, PerplexityOptions
from .display import show_failures, show_results
from .model_arguments import add_evaluation_arguments
from .options import RESUMED, options_of
from .preparing import output_directory, prepare_transformers, will_draw

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser(
        "perplexity",
        argument_default=argparse.SUPPRESS,
        help="perplexity of a text, read through the cache",
        description="Perplexity of a text: windows of tokens, each with a fresh cache; every token after the "
        "prefill is predicted exactly once, reading the cache block by block. An interrupted run goes on "
        "where it ended.",
    )
    add_evaluation_arguments(parser)
    parser.add_argument("--dataset", help=f"one of {', '.join(DATASETS)} (default: pg19)")
    parser.add_argument(
        "--dataset_path", metavar="PATH_OR_HUB_ID", help=f"of documents instead of {PG19}, with a column text"
    )
    parser.add_argument("--text_files", nargs="+", metavar="FILE", help="UTF-8 texts, for --dataset text")
    parser.add_argument("--context_length", type=int, metavar="N", help="tokens of a window (default: 2048)")
    parser.add_argument(
        "--prefill_length",
        type=int,
        metavar="N",
        help="of them read before the first prediction (default: half)",
    )
    parser.add_argument(
        "--block_length",
        type=int,
        metavar="N",
        help="most tokens read at once after that (default: 1); cut where it would change what is read",
    )
    parser.add_argument(
        "--approximate_blocks", action="store_true", help="never cut a block; the results say so"
    )
    parser.add_argument(
        "--stride", type=int, metavar="N", help="tokens between windows (default: no overlap)"
    )
    parser.add_argument("--max_windows", type=int, metavar="N", help="stop after so many (default: all)")
    parser.add_argument(
        "--max_windows_per_text", type=int, metavar="N", help="of one text at most (default: all)"
    )
    parser.add_argument("--no_kl", action="store_true", help="leave out divergence and agreement")
    parser.add_argument(
        "--max_reference_gb", type=float, metavar="GB", help="for the dense logits of a window (default: 8)"
    )
    parser.set_defaults(run=run, interrupted=RESUMED)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write `results.json` and `perplexity.png`; 1 if a cache broke down."""
    options = PerplexityOptions.from_dict(options_of(args))
    output = output_directory(args)
    draws = will_draw(args)

    from ..evaluation.perplexity.run import measure_perplexity
    from ..runs.progress import progress_bar

    prepare_transformers()
    document = measure_perplexity(options, output, progress_bar)
    if document is not None:  # this is the first process
        from ..evaluation.perplexity.plots import plot_perplexity
        from ..evaluation.perplexity.tables import footnotes, perplexity_table

        plot = plot_perplexity if draws else None
        show_results(document, output, [perplexity_table(document)], footnotes(document), plot)
        return show_failures(document)
    return 0
