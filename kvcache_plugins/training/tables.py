"""The recall of retaining heads as a table for a terminal. rich is imported when it is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["recall_table"]


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
