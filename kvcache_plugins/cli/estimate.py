"""`kvcache-plugins estimate`: predicted memory of caches, without loading a model."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from ..dtype_names import floating_dtype
from ..models.presets import PRESETS, preset_config
from ..runs.cache_words import parse_cache_configs
from ..runs.labels import cache_label, dense_first
from ..runs.model_options import OURS
from ..runs.options import MOST_GB, check_amount, check_count, check_model
from .display import show
from .options import add_cache_config_option

if TYPE_CHECKING:
    import torch
    from rich.table import Table
    from transformers import PreTrainedConfig

__all__ = ["add_parser", "run"]

_DEFAULT_PRESET = "llama3-8b"
_TOKENS = (4096, 32768)
_MOST = 2**31 - 1  # positions have 32 bits


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser(
        "estimate",
        help="predict the memory of caches",
        description="Predict the memory of caches for a model, all metadata and exact tokens included; or, "
        "with --memory_gb, how many tokens fit.",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="PATH_OR_HUB_ID", help="only its configuration is read")
    source.add_argument(
        "--preset", choices=sorted(PRESETS), help=f"a known model (default: {_DEFAULT_PRESET})"
    )
    add_cache_config_option(parser, "int8, int4, kivi 4- and 2-bit, float8")
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--tokens",
        nargs="+",
        type=int,
        metavar="N",
        help=f"in the cache (default: {' '.join(map(str, _TOKENS))})",
    )
    asked.add_argument(
        "--memory_gb",
        type=float,
        metavar="X",
        help="instead: how long a prompt may be whose cache takes X * 10^9 bytes; the model comes on top",
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
    """Print a row per number of tokens and cache, dense first; or, of some bytes, a row per cache."""
    from ..estimation import MOST_NEW_TOKENS
    from ..models.decoder import has_cross_attention

    for tokens in args.tokens or ():
        check_count("tokens", tokens, most=_MOST)
    if args.memory_gb is not None:
        check_amount("memory_gb", args.memory_gb, most=MOST_GB)
    check_count("batch_size", args.batch_size, most=_MOST)
    check_count("new_tokens", args.new_tokens, most=MOST_NEW_TOKENS)
    if args.encoder_tokens is not None:
        check_count("encoder_tokens", args.encoder_tokens, most=_MOST)
    chosen = list(OURS) if args.cache_config is None else parse_cache_configs(args.cache_config)
    cache_configs = dense_first(chosen)
    config = _model_config(args)
    if has_cross_attention(config) != (args.encoder_tokens is not None):
        kind = "needed for" if args.encoder_tokens is None else "not for"
        raise ValueError(f"--encoder_tokens is {kind} a model of type {config.model_type!r}.")
    dtype = _dtype(args.dtype, config)
    if args.memory_gb is None:
        rows = _sizes(args, config, dtype, cache_configs)
    else:
        rows = _lengths(args, config, dtype, cache_configs)
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        _print_table(args, dtype, rows)
    return 0


def _predicted(args: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    """What every prediction is told."""
    told = {"batch_size": args.batch_size, "dtype": dtype, "new_tokens": args.new_tokens}
    return told | {"encoder_tokens": args.encoder_tokens}


def _sizes(
    args: argparse.Namespace,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    cache_configs: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """The bytes of every cache at every number of tokens."""
    from ..estimation import estimate

    rows: list[dict[str, Any]] = []
    for tokens in args.tokens or _TOKENS:
        dense_bytes = 0
        for cache_config in cache_configs:
            kv_bytes = estimate(config, dict(cache_config), tokens, **_predicted(args, dtype))
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
    return rows


def _lengths(
    args: argparse.Namespace,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    cache_configs: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """The longest prompt of every cache that fits the memory; `tokens` is None where any does."""
    from ..capacity import GIGABYTE, most_tokens
    from ..models.decoder import decoder_config
    from ..runs.progress import progress_bar

    positions = getattr(decoder_config(config), "max_position_embeddings", None)
    memory_bytes = max(1, int(args.memory_gb * GIGABYTE))
    found: list[int | None] = []
    with progress_bar(len(cache_configs)) as progress:
        for cache_config in cache_configs:
            progress(cache_label(cache_config))
            found.append(most_tokens(config, cache_config, memory_bytes, **_predicted(args, dtype)))
            progress(cache_label(cache_config), advance=1)
    dense = found[0]
    rows: list[dict[str, Any]] = []
    for cache_config, tokens in zip(cache_configs, found, strict=True):
        note = None
        if positions and (tokens is None or tokens + args.new_tokens - 1 > positions):
            note = f"beyond the model's {positions:,} positions"
        rows.append(
            {
                "cache_config": cache_config,
                "memory_gb": args.memory_gb,
                "new_tokens": args.new_tokens,
                "batch_size": args.batch_size,
                "tokens": tokens,
                "of_dense": tokens / dense if dense and tokens is not None else None,
                "note": note,
            }
        )
    return rows


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
    if name is None:
        name = str(config.get_text_config(decoder=True).dtype or config.dtype or "bfloat16")
    return floating_dtype("--dtype", name)


def _print_table(args: argparse.Namespace, dtype: torch.dtype, rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    name = args.model or args.preset or _DEFAULT_PRESET
    title = f"{name}, {str(dtype).removeprefix('torch.')}, batch of {args.batch_size}"
    if args.encoder_tokens is not None:
        title += f", {args.encoder_tokens} tokens of the encoder"
    if args.new_tokens > 1:
        title += f", {args.new_tokens} generated"
    if args.memory_gb is not None:
        title += f", {args.memory_gb:g} GB for the cache"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    if args.memory_gb is not None:
        _fill_with_lengths(table, rows)
    else:
        _fill_with_sizes(table, rows)
    show([table])


def _fill_with_sizes(table: Table, rows: list[dict[str, Any]]) -> None:
    from rich.text import Text

    from ..evaluation.pages.cells import FORMATS

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


def _fill_with_lengths(table: Table, rows: list[dict[str, Any]]) -> None:
    from rich.text import Text

    table.add_column("cache", overflow="fold")
    for column in ("tokens", "of dense"):
        table.add_column(column, justify="right", no_wrap=True)
    if any(row["note"] for row in rows):
        table.add_column("")
    for row in rows:
        cells = [
            Text(cache_label(row["cache_config"])),
            "any number" if row["tokens"] is None else f"{row['tokens']}",
            "" if row["of_dense"] is None else f"{row['of_dense']:.2f}",
            row["note"] or "",
        ]
        table.add_row(*cells[: len(table.columns)])
