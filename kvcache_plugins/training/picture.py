"""The course of a training as a picture. matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..runs.plotting import pyplot, save_figure

__all__ = ["plot_training"]

_COLORS = {"trained": "#1b6ca8", "untrained": "#b8b8b8", "knorm": "#d9822b"}
_LABELS = {"trained": "trained heads", "untrained": "untrained heads", "knorm": "knorm"}


def plot_training(
    history: Sequence[Mapping[str, Any]], recalls: Mapping[str, Mapping[str, Any]], title: str, path: Path
) -> None:
    """Draw the loss by step, and the recall@10 % of every layer.

    Args:
        history (`Sequence[Mapping]`): The Trainer's log: entries with `step` and `loss` or `eval_loss`.
        recalls (`Mapping`): For each of `"trained"`, `"untrained"`, `"knorm"` its `recall_by_layer`.
        title (`str`): Of the picture.
        path (`Path`): Where the PNG goes.
    """
    figure, (losses, bars) = pyplot().subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "unseen text", "o")):
        points = [(entry["step"], entry[key]) for entry in history if key in entry]
        if points:
            losses.plot(
                *zip(*points, strict=True),
                style,
                color="#1b6ca8" if key == "loss" else "#222222",
                label=label,
            )
    losses.set(xlabel="step", ylabel="loss", ylim=(0, None), title="loss")
    losses.legend(frameon=False)
    for index, (name, recall) in enumerate(recalls.items()):
        values = recall["recall_by_layer"]
        places = [layer + (index - 1) * 0.27 for layer in range(len(values))]
        label = f"{_LABELS[name]}: {recall['recall']:.2f}"
        bars.bar(places, values, width=0.25, color=_COLORS[name], label=label)
    bars.set(xlabel="layer", ylim=(0, 1), title="recall@10 % on unseen text")
    bars.legend(frameon=False)
    figure.suptitle(title)
    save_figure(figure, path, (losses, bars), dpi=110)
