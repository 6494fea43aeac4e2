"""`kvcache-plugins calibrate`: KVQuant's artifact of a model, and the precision of every layer."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from ..calibration.options import BACKENDS, DATASET, PYDOC, WEIGHTS, CalibrationOptions
from .display import show
from .model_arguments import add_model_arguments
from .options import RESUMED, add_cache_config_option, options_of
from .preparing import output_directory, prepare_transformers

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the sub-command."""
    # An option that is not given stays out of the namespace, so that a file of options may set it.
    parser = subparsers.add_parser(
        "calibrate",
        argument_default=argparse.SUPPRESS,
        help="calibrate a model for kvquant and static int8 and float8",
        description="Observe a model on text, fit KVQuant's ranges and levels, and write them with static "
        "scales for int8 and float8. With --target_bits also choose the bits of every layer's keys and "
        "values. An interrupted calibration is continued by the same command.",
    )
    add_model_arguments(parser)
    add_cache_config_option(
        parser, "none", "with --target_bits: one, further options of the cache whose bits are chosen"
    )
    parser.add_argument("--output", metavar="DIR", help="where the artifact goes; needed")
    parser.add_argument(
        "--nbits",
        nargs="+",
        type=int,
        metavar="B",
        help="bits to fit levels for: 2, 3, 4 (default: 3; all with --target_bits)",
    )
    parser.add_argument(
        "--outlier_fraction", type=float, metavar="F", help="of each vector kept exact (default: 0.01)"
    )
    parser.add_argument(
        "--sink_length", type=int, metavar="N", help="first tokens of a sample left out (default: 1)"
    )
    parser.add_argument("--num_samples", type=int, metavar="N", help="samples of text (default: 16)")
    parser.add_argument("--sequence_length", type=int, metavar="N", help="tokens of each (default: 2048)")
    parser.add_argument(
        "--dataset", metavar="HUB_ID[:NAME]", help=f"with a column text, or {PYDOC} (default: {DATASET})"
    )
    parser.add_argument("--text_files", nargs="+", metavar="FILE", help="UTF-8 texts instead of a data set")
    parser.add_argument(
        "--weight", help=f"what an error counts: one of {', '.join(WEIGHTS)} (default: {WEIGHTS[0]})"
    )
    parser.add_argument(
        "--q_norm", action="store_true", help="decode with levels of matched mean and deviation"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of the samples' places (default: 0)")
    parser.add_argument(
        "--target_bits",
        type=float,
        metavar="X",
        help="choose every layer's bits, X on average, and write cache_config.json",
    )
    parser.add_argument(
        "--backend", help=f"for --target_bits: one of {', '.join(BACKENDS)} (default: kvquant)"
    )
    parser.add_argument(
        "--precision_samples", type=int, metavar="N", help="samples to judge bits on (default: 4)"
    )
    parser.add_argument("--push_to_hub", metavar="REPO", help="upload the artifact")
    parser.set_defaults(run=run, interrupted=RESUMED)


def run(args: argparse.Namespace) -> int:
    """Calibrate and say what was written."""
    merged = options_of(args)
    push_to = getattr(args, "push_to_hub", None)
    for name, found in (("model", "model" in merged), ("output", hasattr(args, "output"))):
        if not found:
            raise ValueError(f"--{name} is needed.")
    options = CalibrationOptions.from_dict(merged)
    if push_to is not None and not options.needs_codebooks:
        raise ValueError(f"--push_to_hub: a precision for {options.backend!r} has no artifact to upload.")
    output = output_directory(args)

    from ..artifacts.folders import check_card, check_no_model
    from ..calibration.calibrate import calibrate, steps_of
    from ..runs.progress import progress_bar

    if options.needs_codebooks:
        check_no_model(output)
        check_card(output)
    earlier = _files(output)
    prepare_transformers()
    with progress_bar(steps_of(options)) as progress:
        calibrate(options, output, progress, push_to=push_to)
    _say(output, options, earlier)
    return 0


def _files(output: Path) -> dict[str, int]:
    """Return when each file of the output was written."""
    if not output.is_dir():
        return {}
    return {path.name: path.stat().st_mtime_ns for path in output.iterdir() if path.is_file()}


def _say(output: Path, options: CalibrationOptions, earlier: dict[str, int]) -> None:
    there = _files(output)
    written = sorted(name for name, when in there.items() if earlier.get(name) != when)
    lines = [f"written to {output}: {', '.join(written)}"]
    if replaced := [name for name in written if name in earlier]:
        lines.append(f"replaced, of an earlier calibration: {', '.join(replaced)}")
    if options.target_bits is not None:
        chosen = shlex.quote(str(output / "cache_config.json"))
        lines.append(f'use: --cache_config "$(cat {chosen})"')
    show([], lines)
