"""What a training has measured as tables for a terminal. rich is imported when they are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["answers_table", "recall_table"]


def recall_table(document: dict[str, Any]) -> Table:
    """Show the recall@10 % of heads, untrained heads and `knorm`: of all layers that evict, then of each.

    Args:
        document (`dict`): Of `train_locret`.
    """
    from rich import box
    from rich.table import Table

    rows = [row for row in document["results"] if "recall_by_layer" in row]
    table = Table(box=box.SIMPLE_HEAD, title="recall@10 % on unseen text")
    table.add_column("keys scored by")
    layers = range(len(rows[0]["recall_by_layer"]))
    mean = "all layers" if rows[0].get("recall_layers", [*layers]) == [*layers] else "all that evict"
    for layer in (mean, *layers):
        table.add_column(str(layer), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row["label"], *(f"{value:.3f}" for value in (row["recall"], *row["recall_by_layer"])))
    return table


def answers_table(document: dict[str, Any]) -> Table | None:
    """Show what caches make of answers; `None` if none was asked for.

    Args:
        document (`dict`): Of `train_locret`.
    """
    rows = [row for row in document["results"] if "nll" in row]
    if not rows:
        return None
    from rich import box
    from rich.table import Table
    from rich.text import Text

    dense = rows[0]
    title = f"{dense['tokens']} tokens that follow {dense['windows']} prompts of unseen text, in nats a token"
    table = Table(box=box.SIMPLE_HEAD, title=title)
    table.add_column("cache")
    for name in ("nll", "increase", "cache\nbytes", "of\ndense"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        increase = f"{row['nll_increase']:+.4f} ±{row['nll_increase_stderr']:.4f}"
        memory = f"{row['kv_bytes']:,}", f"{row['memory_fraction']:.3f}"
        table.add_row(Text(row["label"]), f"{row['nll']:.4f}", increase, *memory)
    return table
