"""`kvcache-plugins import-locret`: retaining heads out of a checkpoint of Locret's authors."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..runs.options import check_filled, check_model
from .preparing import output_directory, prepare_transformers

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser(
        "import-locret",
        help="convert the retaining heads of Locret's authors",
        description="Convert heads with the authors' key names (model.layers.0.self_attn.fc1.weight, such as "
        "hyx21/Locret-llama-3.1-8B-instruct on the hub) to a directory for the backend locret.",
    )
    parser.add_argument("source", metavar="SOURCE", help="safetensors or torch file, directory, or hub id")
    parser.add_argument("--model", required=True, metavar="PATH_OR_HUB_ID", help="the model they belong to")
    parser.add_argument("--output", required=True, metavar="DIR", help="where the heads go")
    parser.add_argument("--revision", help="of the source on the hub")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the model's own code")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert, and say what was written."""
    output = output_directory(args)
    check_model(args.model)
    check_filled("revision", args.revision)
    if not args.source:
        raise ValueError(f"SOURCE must be a file, a directory or a hub id, got {args.source!r}.")
    if args.revision is not None and Path(args.source).exists():
        raise ValueError(
            f"--revision is for sources on the hub, {args.source!r} is here, got {args.revision!r}."
        )

    from ..models.pretrained import load_config
    from ..retaining.importing import import_heads

    prepare_transformers()
    config = load_config(args.model, trust_remote_code=args.trust_remote_code)
    heads = import_heads(args.source, config, output, revision=args.revision)
    layers, width = heads.config.num_hidden_layers, heads.config.hidden_dim
    from .display import show

    show([], [f"written to {output}: {layers} heads of width {width}"])
    return 0
