"""The results of the speed benchmarks as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...runs.footnotes import origin, other_work, skipped
from ...runs.labels import DENSE

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["attention_table", "context_table", "footnotes", "generation_table", "model_name"]

_NOTE_WIDTH = 60
"""Characters a line of what is said of a row."""

_Column = tuple[str, Callable[[dict[str, Any]], str]]

_ATTENTION_COLUMNS: tuple[_Column, ...] = (
    ("median\nms", lambda row: f"{row['median_ms']:.3f}"),
    ("p20 - p80", lambda row: f"{row['p20_ms']:.3f} - {row['p80_ms']:.3f}"),
    ("attend\nms", lambda row: _or_dash(row, "attention_ms", ".4f")),
    ("append\nms", lambda row: _or_dash(row, "append_ms", ".4f")),
    ("launched\nby CPU ms", lambda row: _or_dash(row, "host_ms", ".3f")),
    ("of best\ndense", lambda row: f"{row['ratio_to_best_dense']:.2f}"),
    ("of sdpa\ngqa", lambda row: _or_dash(row, "ratio_to_sdpa_gqa", ".3f")),
    ("GB/s", lambda row: _or_dash(row, "gb_per_s", ".1f")),
    ("of copy", lambda row: _or_dash(row, "fraction_of_copy", ".0%")),
    ("bytes", lambda row: _or_dash(row, "kv_bytes", ",")),
    ("bits per\nvalue", lambda row: _or_dash(row, "bits_per_value", ".2f")),
    ("kernel\nerror", lambda row: _or_dash(row, "max_rel_error", ".1e")),
    ("kernel", lambda row: row["kernel"]),
)
_GENERATION_COLUMNS: tuple[_Column, ...] = (
    ("first\ntoken ms", lambda row: _or_dash(row, "ttft_ms", ".0f") if row["fits"] else "did not fit"),
    ("prefill\nms", lambda row: _or_dash(row, "prefill_ms", ".0f")),
    ("of\ndense", lambda row: _or_dash(row, "prefill_ratio_to_dense", ".2f")),
    ("ms per\ntoken", lambda row: _or_dash(row, "ms_per_token", ".1f")),
    ("of\ndense", lambda row: _or_dash(row, "ratio_to_dense", ".2f")),
    ("of\nquanto", lambda row: _or_dash(row, "ratio_to_quanto", ".3f")),
    ("cache", lambda row: _mebibytes(row, "kv_bytes")),
    ("esti-\nmate", lambda row: _mebibytes(row, "estimated_kv_bytes")),
    ("bits per\nvalue", lambda row: _or_dash(row, "bits_per_value", ".2f")),
    ("its peak,\nestimate", lambda row: _mebibytes(row, "estimated_peak_bytes")),
    ("peak over\nmodel", lambda row: _mebibytes(row, "peak_above_model_bytes")),
    ("process\npeak", lambda row: _mebibytes(row, "peak_memory_bytes")),
    ("device\npeak", lambda row: _mebibytes(row, "device_peak_bytes")),
    ("kernel", lambda row: ", ".join(row["kernel"] or ["-"])),
)
_CONTEXT_COLUMNS: tuple[_Column, ...] = (
    ("tokens\nthat fit", lambda row: _or_dash(row, "tokens", ",")),
    ("of\ndense", lambda row: _or_dash(row, "of_dense", ".2f")),
    ("cache,\nestimate", lambda row: _mebibytes(row, "kv_bytes")),
    ("cache", lambda row: _mebibytes(row, "measured_kv_bytes")),
    ("peak over\nmodel", lambda row: _mebibytes(row, "peak_above_model_bytes")),
    ("process\npeak", lambda row: _mebibytes(row, "peak_memory_bytes")),
    ("device\npeak", lambda row: _mebibytes(row, "device_peak_bytes")),
    ("", lambda row: row["note"] or ""),
)


def attention_table(document: dict[str, Any]) -> Table:
    """Show each length: the dense ways first, then the caches."""
    rows = []
    for row in document["results"]:
        if row["cache_config"] != DENSE:
            rows.append(row)
            continue
        for name, ms in row["baseline_ms"].items():
            if name == row["kernel"]:
                rows.append(row | {"label": f"dense {name}", "kernel": "best dense"})
                continue
            gqa = row["baseline_ms"].get("sdpa_enable_gqa")
            ratios = {
                "ratio_to_best_dense": ms / row["median_ms"],
                "ratio_to_sdpa_gqa": None if gqa is None else ms / gqa,
                "attention_ms": row.get("baseline_attention_ms", {}).get(name),
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
    title = (
        f"generate(), {model_name(settings)} of {settings['parameters'] / 1e6:.0f}M parameters, "
        f"{settings['dtype']}, {settings['max_new_tokens']} new tokens; memory in MiB"
    )
    return _table(title, _GENERATION_COLUMNS, document["results"])


def model_name(settings: Mapping[str, Any]) -> str:
    """Return the name of the model that generated, from the settings of a run, and how it was compiled."""
    preset, mode = settings.get("preset"), settings.get("compile")
    name = str(settings["model"] or f"random {preset or 'Llama'}")
    return name if mode is None else f"{name}, compiled ({mode}),"


def context_table(document: dict[str, Any]) -> Table:
    """Show the largest context of every cache, the dense one first."""
    settings = document["settings"]
    title = (
        f"largest context: model ({settings['model_bytes'] / 2**20:,.0f} MiB) and cache in "
        f"{settings['memory_gb']:g} GB; what the model computes on the way comes on top; memory in MiB"
    )
    return _table(title, _CONTEXT_COLUMNS, document["largest_context"])


def footnotes(document: dict[str, Any]) -> list[str]:
    """Return what was skipped, and where the numbers come from."""
    notes = skipped(document)
    notes += [
        f"{row['label']}, {row['length']} tokens, batch of {row['batch_size']}: {row['reason']}"
        for row in document["results"]
        if row.get("fits") is False
    ]
    for row in document["results"]:
        point = f"{row.get('length')} tokens, batch of {row.get('batch_size')}"
        if row.get("note"):
            notes.append(f"{row['label']}, {point}: {row['note']}")
        for name, reason in row.get("baselines_not_run", {}).items():
            notes.append(f"dense {name}, {point}: not run: {reason}")
    where = origin(document)
    settings = document["settings"]
    if settings.get("copy_gb_per_s") is not None:
        where += f", copy {settings['copy_gb_per_s']:,.0f} GB/s"
    for device in ("cpu", "cuda"):
        if settings.get(f"{device}_kernels") is not None:
            where += f", {device.upper()} kernels {settings[f'{device}_kernels'].splitlines()[0]}"
    return [*notes, *other_work(document), where]


def _table(title: str, columns: Iterable[_Column], rows: list[dict[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    # A column without a single value, such as a GPU's memory or a part of its time on a CPU, only takes room.
    columns = [(name, show) for name, show in columns if any(show(row) not in ("-", "") for row in rows)]
    places = [("tokens", "length")] if "length" in rows[0] else []
    if any(row["batch_size"] != 1 for row in rows):
        places.append(("batch", "batch_size"))
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for name, _ in places:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("cache")
    for name, _ in columns:
        if name:
            table.add_column(name, justify="right", no_wrap=True)
        else:
            table.add_column(max_width=_NOTE_WIDTH)
    previous = None
    for row in rows:
        point = tuple(str(row[key]) for _, key in places)
        if previous not in (None, point):
            table.add_section()
        shown = point if point != previous else ("",) * len(point)
        table.add_row(*shown, Text(row["label"]), *(Text(show(row)) for _, show in columns))
        previous = point
    return table


def _mebibytes(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    return "-" if value is None else f"{value / 2**20:,.1f}"


def _or_dash(row: dict[str, Any], name: str, spec: str) -> str:
    value = row.get(name)
    return "-" if value is None else format(value, spec)
