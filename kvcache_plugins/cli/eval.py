"""`kvcache-plugins eval`: the quality of caches, one file per evaluation."""

from __future__ import annotations

import argparse
import importlib

__all__ = ["add_parser"]

_EVALUATIONS: tuple[str, ...] = ("longbench", "passkey", "perplexity")
"""Modules `eval_<name>` of this package, each with `add_parser(subparsers)` that sets `run`."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser(
        "eval",
        help="measure the quality of caches",
        description="Measure the quality of caches against the dense one in the same run.",
    )
    kinds = parser.add_subparsers(dest="evaluation", required=True, metavar="EVALUATION")
    for name in _EVALUATIONS:
        importlib.import_module(f".eval_{name}", __package__).add_parser(kinds)
