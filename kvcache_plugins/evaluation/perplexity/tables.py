"""The results of the perplexity evaluation as a table for a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...runs.footnotes import origin, skipped

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["footnotes", "perplexity_table"]

_COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("perplexity", lambda row: f"{row['perplexity']:.4f}"),
    ("nll", lambda row: f"{row['nll']:.4f}"),
    ("increase", lambda row: _with_error(row, "nll_increase", "nll_increase_stderr")),
    ("KL to\ndense", lambda row: f"{row['kl_to_dense']:.2e}" if "kl_to_dense" in row else "-"),
    ("same\ntop-1", lambda row: f"{row['top1_agreement']:.4f}" if "top1_agreement" in row else "-"),
    ("read from\ncodes", lambda row: f"{row['packed_read_fraction']:.3f}"),
    ("cache\nbytes", lambda row: f"{row['kv_bytes']:,}"),
    ("of\ndense", lambda row: f"{row['memory_fraction']:.3f}"),
    ("bits per\nvalue", lambda row: f"{row['bits_per_value']:.2f}"),
    ("blocks", lambda row: str(row["blocks"])),
    ("seconds", lambda row: f"{row['seconds']:.1f}"),
)


def perplexity_table(document: dict[str, Any]) -> Table:
    """Show one row per cache, the dense one first."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    settings, dense = document["settings"], document["results"][0]
    windows = f"{dense['windows']} window{'' if dense['windows'] == 1 else 's'}"
    title = (
        f"{settings['model']}, {settings['dtype']}: {dense['tokens']:,} tokens of {settings['dataset']} "
        f"predicted, after {settings['prefill_length']} of {settings['context_length']} in {windows}"
    )
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("cache")
    for name, _ in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in document["results"]:
        table.add_row(Text(row["label"]), *(Text(show(row)) for _, show in _COLUMNS))
    return table


def footnotes(document: dict[str, Any]) -> list[str]:
    """Return what the columns mean, what was skipped, and where the numbers come from."""
    dense = document["results"][0]
    return [
        f"nll in nats per token, standard error {dense['nll_stderr']:.4f} over {dense['stderr_over']}; "
        "increase over the dense run on the same tokens, with its own",
        *_beyond_numbers(document),
        *skipped(document),
        origin(document),
    ]


def _beyond_numbers(document: dict[str, Any]) -> list[str]:
    """Return a line for caches whose perplexity is infinite, which `results.json` cannot hold."""
    labels = [row["label"] for row in document["results"] if math.isinf(row["perplexity"])]
    if not labels:
        return []
    return [f"no number is as high as the perplexity of {', '.join(labels)} (null in the results): see nll"]


def _with_error(row: dict[str, Any], name: str, error: str) -> str:
    return f"{row[name]:+.4f} ±{row[error]:.4f}"
