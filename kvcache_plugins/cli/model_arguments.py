"""Command-line options shared by the commands that load a model."""

from __future__ import annotations

import argparse

from ..runs.options import DTYPES
from .options import OUTPUT, add_cache_config_option

__all__ = ["add_evaluation_arguments", "add_model_arguments"]


def add_evaluation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every evaluation of a model takes; the parser is as for [`add_model_arguments`]."""
    add_model_arguments(parser)
    add_cache_config_option(parser, "int8, int4, kivi 4- and 2-bit, float8, and transformers' own")
    parser.add_argument("--tp_plan", metavar="PLAN", help="auto: spread over the processes of torchrun")
    parser.add_argument("--output", metavar="DIR", help=OUTPUT)
    parser.add_argument("--no_plots", action="store_true", help="draw no picture")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which model is loaded, and how.

    An option that is not given must stay out of the namespace, so that a file of options may set it: the
    parser needs `argument_default=argparse.SUPPRESS`.
    """
    parser.add_argument("--config", metavar="FILE.yaml", help="options of this command, by name")
    parser.add_argument("--model", metavar="PATH_OR_HUB_ID", help="which model; needed, here or in FILE.yaml")
    parser.add_argument("--dtype", help=f"one of {', '.join(DTYPES)} (default: auto, the checkpoint's)")
    parser.add_argument("--revision", help="of the model on the hub")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the model's own code")
    parser.add_argument("--attn_implementation", metavar="NAME", help="as for from_pretrained, such as sdpa")
    parser.add_argument("--device_map", metavar="MAP", help="auto: spread over the devices of one process")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")
