"""`kvcache-plugins estimate`: predicted memory of caches, without loading a model."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from ..models.presets import PRESETS, preset_config
from ..registry import TRANSFORMERS_BACKENDS
from ..runs.labels import cache_label, dense_first
from ..runs.model_options import OURS
from ..runs.options import DTYPES, check_count, check_model
from .display import show
from .options import add_cache_config_option, parse_cache_configs

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

__all__ = ["add_parser", "run"]

_DEFAULT_PRESET = "llama3-8b"
_MOST = 2**31 - 1  # positions have 32 bits


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser(
        "estimate",
        help="predict the memory of caches",
        description="Predict the memory of caches for a model, all metadata and exact tokens included.",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="PATH_OR_HUB_ID", help="only its configuration is read")
    source.add_argument(
        "--preset", choices=sorted(PRESETS), help=f"a known model (default: {_DEFAULT_PRESET})"
    )
    add_cache_config_option(parser, "int8, int4, kivi 4- and 2-bit, float8")
    parser.add_argument(
        "--tokens",
        nargs="+",
        type=int,
        default=[4096, 32768],
        metavar="N",
        help="in the cache (default: 4096 32768)",
    )
    parser.add_argument(
        "--encoder_tokens", type=int, metavar="N", help="that an encoder reads, of a model which has one"
    )
    parser.add_argument(
        "--new_tokens", type=int, default=1, metavar="N", help="generated after those (default: 1)"
    )
    parser.add_argument("--batch_size", type=int, default=1, metavar="B", help="rows (default: 1)")
    parser.add_argument("--dtype", help="of the model, such as bf16 (default: the configuration's)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one row per number of tokens and cache, the dense cache first."""
    from ..estimation import MOST_NEW_TOKENS, estimate

    for tokens in args.tokens:
        check_count("tokens", tokens, most=_MOST)
    check_count("batch_size", args.batch_size, most=_MOST)
    check_count("new_tokens", args.new_tokens, most=MOST_NEW_TOKENS)
    if args.encoder_tokens is not None:
        check_count("encoder_tokens", args.encoder_tokens, most=_MOST)
    chosen = list(OURS) if args.cache_config is None else parse_cache_configs(args.cache_config)
    cache_configs = dense_first(chosen)
    for cache_config in cache_configs:
        if cache_config["backend"] in TRANSFORMERS_BACKENDS:
            raise ValueError(
                f"{cache_config['backend']!r} is transformers' own cache, whose size can be measured "
                "(examples/quickstart.py) but not predicted."
            )
    config = _model_config(args)
    dtype = _dtype(args.dtype, config)

    rows: list[dict[str, Any]] = []
    for tokens in args.tokens:
        dense_bytes = 0
        for cache_config in cache_configs:
            kv_bytes = estimate(
                config,
                dict(cache_config),
                tokens,
                args.batch_size,
                dtype=dtype,
                encoder_tokens=args.encoder_tokens,
                new_tokens=args.new_tokens,
            )
            dense_bytes = dense_bytes or kv_bytes  # the dense cache comes first
            fraction = kv_bytes / dense_bytes
            rows.append(
                {
                    "cache_config": cache_config,
                    "tokens": tokens,
                    "new_tokens": args.new_tokens,
                    "batch_size": args.batch_size,
                    "kv_bytes": kv_bytes,
                    "memory_fraction": fraction,
                    "bits_per_value": 8 * dtype.itemsize * fraction,
                }
            )
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        _print_table(args, dtype, rows)
    return 0


def _model_config(args: argparse.Namespace) -> PreTrainedConfig:
    from ..models.pretrained import load_config

    config: PreTrainedConfig
    if args.model is not None:
        check_model(args.model)
        config = load_config(args.model)
    else:
        config = preset_config(args.preset or _DEFAULT_PRESET)
    return config


def _dtype(name: str | None, config: PreTrainedConfig) -> torch.dtype:
    """Return the dtype that was asked for, else the configuration's, else bfloat16."""
    import torch

    if name is None:
        name = str(config.get_text_config(decoder=True).dtype or config.dtype or "bfloat16")
    dtype = getattr(torch, DTYPES.get(name, name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"--dtype must be a floating-point dtype such as 'bf16', got {name!r}.")
    return dtype


def _print_table(args: argparse.Namespace, dtype: torch.dtype, rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from ..evaluation.pages.cells import FORMATS

    name = args.model or args.preset or _DEFAULT_PRESET
    title = f"{name}, {str(dtype).removeprefix('torch.')}, batch of {args.batch_size}"
    if args.encoder_tokens is not None:
        title += f", {args.encoder_tokens} tokens of the encoder"
    if args.new_tokens > 1:
        title += f", {args.new_tokens} generated"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("tokens", justify="right")
    table.add_column("cache", overflow="fold")
    for column in ("memory", "of dense", "bits per value"):
        table.add_column(column, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        if previous not in (None, row["tokens"]):
            table.add_section()
        table.add_row(
            f"{row['tokens']}" if row["tokens"] != previous else "",
            Text(cache_label(row["cache_config"])),
            FORMATS["bytes"](row["kv_bytes"]),
            f"{row['memory_fraction']:.3f}",
            f"{row['bits_per_value']:.2f}",
        )
        previous = row["tokens"]
    show([table])
