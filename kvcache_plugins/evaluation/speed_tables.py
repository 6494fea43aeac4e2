"""The results of the speed benchmarks as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["attention_table", "footnotes", "generation_table"]

_Column = tuple[str, Callable[[dict[str, Any]], str]]

_ATTENTION_COLUMNS: tuple[_Column, ...] = (
    ("median\nms", lambda row: f"{row['median_ms']:.3f}"),
    ("p20 - p80", lambda row: f"{row['p20_ms']:.3f} - {row['p80_ms']:.3f}"),
    ("of best\ndense", lambda row: f"{row['ratio_to_best_dense']:.2f}"),
    ("of sdpa\ngqa", lambda row: f"{row['ratio_to_sdpa_gqa']:.3f}"),
    ("GB/s", lambda row: _or_dash(row, "gb_per_s", ".1f")),
    ("bytes", lambda row: _or_dash(row, "kv_bytes", ",")),
    ("bits per\nvalue", lambda row: _or_dash(row, "bits_per_value", ".2f")),
    ("kernel\nerror", lambda row: _or_dash(row, "max_rel_error", ".1e")),
    ("kernel", lambda row: row["kernel"]),
)
_GENERATION_COLUMNS: tuple[_Column, ...] = (
    ("prefill\nms", lambda row: f"{row['prefill_ms']:.0f}"),
    ("of\ndense", lambda row: f"{row['prefill_ratio_to_dense']:.2f}"),
    ("ms per\ntoken", lambda row: f"{row['ms_per_token']:.1f}"),
    ("mean", lambda row: f"{row['ms_per_token_mean']:.1f}"),
    ("of\ndense", lambda row: f"{row['ratio_to_dense']:.2f}"),
    ("of\nquanto", lambda row: _or_dash(row, "ratio_to_quanto", ".3f")),
    ("cache\nbytes", lambda row: f"{row['kv_bytes']:,}"),
    ("bits per\nvalue", lambda row: f"{row['bits_per_value']:.2f}"),
    ("peak\nMiB", lambda row: f"{row['peak_memory_bytes'] / 2**20:.0f}"),
    ("kernel", lambda row: ", ".join(row["kernel"] or ["-"])),
)


def attention_table(document: dict[str, Any]) -> Table:
    """Show each length: the dense ways first, then the caches."""
    rows = []
    for row in document["results"]:
        if row["cache_config"] != {"backend": "dense"}:
            rows.append(row)
            continue
        for name, ms in row["baseline_ms"].items():
            if name == row["kernel"]:
                rows.append(row | {"label": f"dense {name}", "kernel": "best dense"})
                continue
            ratios = {
                "ratio_to_best_dense": ms / row["median_ms"],
                "ratio_to_sdpa_gqa": ms / row["baseline_ms"]["sdpa_enable_gqa"],
            }
            point = {"length": row["length"], "batch_size": row["batch_size"], "median_ms": ms}
            spread = dict(zip(("p20_ms", "p80_ms"), row["baseline_spread_ms"][name], strict=True))
            rows.append(point | ratios | spread | {"label": f"dense {name}", "kernel": "-"})
    settings = document["settings"]
    title = (
        f"one decode step of one layer, {settings['model'] or settings['preset']}: "
        f"{settings['num_attention_heads']} query and {settings['num_key_value_heads']} key-value heads "
        f"of {settings['key_dim']}, {settings['dtype']}"
    )
    return _table(title, _ATTENTION_COLUMNS, rows)


def generation_table(document: dict[str, Any]) -> Table:
    """Show each length: the dense cache first, then the others."""
    settings = document["settings"]
    name = settings["model"] or "random Llama"
    title = (
        f"generate(), {name} of {settings['parameters'] / 1e6:.0f}M parameters, {settings['dtype']}, "
        f"{settings['max_new_tokens']} new tokens"
    )
    return _table(title, _GENERATION_COLUMNS, document["results"])


def footnotes(document: dict[str, Any]) -> list[str]:
    """Return what was skipped, and where the numbers come from."""
    place = document["environment"]
    threads = f"{place['threads']} thread{'' if place['threads'] == 1 else 's'}"
    notes = [f"skipped {_label(entry)}: {entry['reason']}" for entry in document["skipped"]]
    return [*notes, f"{place['device']}, {threads}, torch {place['versions']['torch']}"]


def _label(entry: dict[str, Any]) -> str:
    from .labels import cache_label

    return cache_label(entry["cache_config"])


def _table(title: str, columns: Iterable[_Column], rows: list[dict[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns = list(columns)
    shows_batch = any(row["batch_size"] != 1 for row in rows)
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("tokens", justify="right")
    if shows_batch:
        table.add_column("batch", justify="right")
    table.add_column("cache", no_wrap=True)
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        point = (row["length"], row["batch_size"])
        if previous not in (None, point):
            table.add_section()
        is_new = point != previous
        place = [str(count) if is_new else "" for count in point[: 2 if shows_batch else 1]]
        table.add_row(*place, Text(row["label"]), *(Text(show(row)) for _, show in columns))
        previous = point
    return table


def _or_dash(row: dict[str, Any], name: str, spec: str) -> str:
    value = row.get(name)
    return "-" if value is None else format(value, spec)
