"""`kvcache-plugins bench`: the speed of attention over packed codes, and of `generate()`, against dense."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..evaluation.speed.options import COMPILE_MODES, DTYPES, AttentionOptions, GenerationOptions
from ..models.presets import PRESETS
from .display import show_failures, show_results
from .options import OUTPUT, add_cache_config_option, options_of
from .preparing import output_directory, prepare_transformers, will_draw

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser(
        "bench",
        help="measure the speed of caches",
        description="Measure the speed of caches against dense ones in the same run.",
    )
    kinds = parser.add_subparsers(dest="benchmark", required=True, metavar="attention|generate")
    # An option that is not given stays out of the namespace, so that a file of options may set it.
    attention = kinds.add_parser(
        "attention",
        argument_default=argparse.SUPPRESS,
        help="one decode step of one layer",
        description="Time one decode step of one layer (append, encode, attend) against dense attention. "
        "On a GPU: the device's time, as part of a CUDA graph, also as a fraction of a copy's bandwidth.",
    )
    _add_common(
        attention,
        "int8, int4, kivi 4- and 2-bit (also block rope), float8",
        "tokens in the cache",
        "4096 32768",
        "llama3-8b",
    )
    attention.add_argument("--repeats", type=int, metavar="N", help="timed rounds (default: 30)")
    attention.add_argument("--warm_up", type=int, metavar="N", help="rounds before them (default: 3)")
    attention.set_defaults(interrupted="the same command goes on behind the last length and batch size.")
    generate = kinds.add_parser(
        "generate",
        argument_default=argparse.SUPPRESS,
        help="prefill, time per token and memory of generate()",
        description="Measure generate() with every cache, each point in a fresh process: the time to the "
        "first token, the time per token, the bytes of the cache beside their estimate, and the peak memory. "
        "A preset has random weights, made on the device.",
    )
    _add_common(
        generate,
        "int8, int4, kivi 4- and 2-bit, float8, and transformers' own",
        "tokens of the prompt",
        "4096",
        "a random Llama of 50 million parameters",
    )
    generate.add_argument("--num_layers", type=int, metavar="N", help="layers of the preset (default: all)")
    generate.add_argument("--max_new_tokens", type=int, metavar="N", help="tokens to generate (default: 64)")
    generate.add_argument(
        "--compile",
        nargs="?",
        const="default",
        metavar="MODE",
        help=f"compile the model for every cache, one of {', '.join(COMPILE_MODES)} (alone: default)",
    )
    generate.add_argument("--repeats", type=int, metavar="N", help="processes per point (default: 1)")
    generate.add_argument(
        "--time_limit",
        type=float,
        metavar="S",
        help="seconds a process may take; a cache that takes longer counts as failed (default: none)",
    )
    generate.add_argument(
        "--memory_gb",
        type=float,
        metavar="X",
        help="also estimate the largest context of every cache whose model and cache fit X * 10^9 bytes",
    )
    generate.add_argument(
        "--verify_memory", action="store_true", help="generate at that length too and report the peak"
    )
    generate.set_defaults(interrupted="the same command goes on behind the last round over all caches.")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, write `results.json`, print the table and draw a picture; 1 if a cache of ours failed."""
    kind: Any = AttentionOptions if args.benchmark == "attention" else GenerationOptions
    options = kind.from_dict(options_of(args))
    output = output_directory(args)
    draws = will_draw(args)
    document = _measure(args.benchmark, options, output)

    from ..evaluation.speed.plots import plot_attention, plot_generation

    plot = plot_attention if args.benchmark == "attention" else plot_generation
    show_results(document, output, *_tables(document), plot if draws else None)
    return show_failures(document)


def _add_common(parser: argparse.ArgumentParser, caches: str, what: str, lengths: str, preset: str) -> None:
    parser.add_argument("--config", metavar="FILE.yaml", help="options of this command, by name")
    parser.add_argument("--model", metavar="PATH_OR_HUB_ID", help="instead of a preset")
    parser.add_argument("--preset", help=f"one of {', '.join(sorted(PRESETS))} (default: {preset})")
    parser.add_argument(
        "--device", help="auto, cpu, cuda or cuda:N (default: auto, a GPU where there is one)"
    )
    add_cache_config_option(parser, caches)
    parser.add_argument("--lengths", nargs="+", type=int, metavar="N", help=f"{what} (default: {lengths})")
    parser.add_argument("--batch_sizes", nargs="+", type=int, metavar="B", help="rows (default: 1)")
    parser.add_argument("--dtype", help=f"one of {', '.join(DTYPES)} (default: bf16)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument("--output", metavar="DIR", help=OUTPUT)
    parser.add_argument("--no_plots", action="store_true", help="draw no picture")


def _measure(benchmark: str, options: Any, output: Path) -> dict[str, Any]:
    """Measure and write `results.json`."""
    from ..runs.progress import progress_bar

    prepare_transformers()
    points = len(options.lengths) * len(options.batch_sizes)
    caches = len(options.cache_configs)
    if benchmark == "attention":
        from ..evaluation.speed.attention.run import measure_attention

        with progress_bar(points * (caches - 1 + options.repeats + options.warm_up)) as progress:
            return measure_attention(options, progress, output)
    from ..evaluation.speed.generation.process import WorkerError
    from ..evaluation.speed.generation.run import measure_generation

    verified = len(options.batch_sizes) * caches if options.verify_memory else 0
    with progress_bar(points * caches * options.repeats + verified) as progress:
        try:
            return measure_generation(options, progress, output)
        except WorkerError as error:  # of the dense cache, without which nothing is compared
            raise ValueError(str(error)) from error


def _tables(document: dict[str, Any]) -> tuple[list[Any], list[str]]:
    """Return the tables of a benchmark, and the lines below them."""
    from ..evaluation.speed import tables as speed_tables

    is_attention = document["task"] == "bench attention"
    tables = [(speed_tables.attention_table if is_attention else speed_tables.generation_table)(document)]
    if "largest_context" in document:
        tables.append(speed_tables.context_table(document))
    return tables, speed_tables.footnotes(document)
