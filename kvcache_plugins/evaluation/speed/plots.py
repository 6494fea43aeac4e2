"""The results of the speed benchmarks as pictures. matplotlib is imported when one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...runs.footnotes import machine
from ...runs.labels import DENSE
from ...runs.plot_labels import folded, inches
from ...runs.plotting import pyplot, save_figure
from .tables import model_name

__all__ = ["plot_attention", "plot_generation"]

_GREYS = ("#222222", "#777777", "#aaaaaa")
_DASHES = ("-", "--", ":")
_FONT = 9
"""Points of the type of names."""
_BARS_WIDTH = 4.4
"""Inches of a panel without the names of its bars."""


def plot_attention(document: dict[str, Any], path: Path) -> None:
    """Draw, for every batch size, the time against the length and the ratio to the best dense way.

    Args:
        document (`dict`): Of `measure_attention`.
        path (`Path`): Where the PNG goes.
    """
    plt = pyplot()
    results, settings = document["results"], document["settings"]
    batch_sizes = list(dict.fromkeys(row["batch_size"] for row in results))
    names = [folded(row["label"]) for row in results]
    bars = len({row["length"] for row in results})
    width, height = 2 * (inches(names, _FONT)[0] + 5.6), max(5.2, _height(names, bars))
    figure, grid = plt.subplots(
        len(batch_sizes), 2, figsize=(width, height * len(batch_sizes)), layout="constrained", squeeze=False
    )
    for (times, ratios), batch_size in zip(grid, batch_sizes, strict=True):
        rows = [row for row in results if row["batch_size"] == batch_size]
        dense = [row for row in rows if row["cache_config"] == DENSE]
        lengths = [row["length"] for row in dense]
        for name, color, dash in zip(_fastest(dense), _GREYS, _DASHES, strict=False):
            heights = [row["baseline_ms"][name] for row in dense]
            times.plot(lengths, heights, dash, color=color, marker="s", markersize=4, label=f"dense {name}")
        labels = _labels(rows)
        for index, label in enumerate(labels):
            own = [row for row in rows if row["label"] == label]
            x, y = [row["length"] for row in own], [row["median_ms"] for row in own]
            times.plot(x, y, color=f"C{index}", marker="o", markersize=4, label=folded(label))
            low, high = [row["p20_ms"] for row in own], [row["p80_ms"] for row in own]
            times.fill_between(x, low, high, color=f"C{index}", alpha=0.15, linewidth=0)
        times.set_xscale("log", base=2)
        times.set_yscale("log")
        times.set_xticks(sorted(set(lengths)), [str(length) for length in sorted(set(lengths))])
        times.minorticks_off()
        _label_times(times)
        times.set_xlabel("tokens held")
        times.set_ylabel("milliseconds (median, band: p20 to p80)")
        times.set_title(f"One decode step of one layer, batch of {batch_size}")
        times.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
        _bars(ratios, rows, labels, "ratio_to_best_dense")
        ratios.set_xlabel("time, of the fastest dense way (lower is better)")
        ratios.set_title(f"Against dense, batch of {batch_size}")
    name = settings["model"] or settings["preset"]
    _head(figure, f"{name}, {settings['dtype']}: {machine(document)}")
    save_figure(figure, path, grid.flat)


def plot_generation(document: dict[str, Any], path: Path) -> None:
    """Draw the time per token, the time to the first token and the bytes of every cache, one row per batch.

    A last picture shows the largest contexts, where a memory was given.

    Args:
        document (`dict`): Of `measure_generation`.
        path (`Path`): Where the PNG goes.
    """
    plt = pyplot()
    results, settings = document["results"], document["settings"]
    contexts = document.get("largest_context")
    batch_sizes = list(dict.fromkeys(row["batch_size"] for row in results))
    panels = (
        ("ms_per_token", "milliseconds per token (median)", "Decoding"),
        ("prefill_ratio_to_dense", "time of prefill, of dense", "Prefill"),
        ("memory_fraction", "bytes, of dense", "Cache"),
    )
    columns = len(panels) + (contexts is not None)
    names = [folded(row["label"]) for row in (*results, *(contexts or ()))]
    lengths = list(dict.fromkeys(row["length"] for row in results))
    # names stand beside the first panel, and beside the contexts, which may be of more caches
    names_width = inches(names, _FONT)[0] * (1 if contexts is None else 2)
    figure, grid = plt.subplots(
        len(batch_sizes),
        columns,
        figsize=(names_width + 1.2 + _BARS_WIDTH * columns, _height(names, len(lengths)) * len(batch_sizes)),
        layout="constrained",
        squeeze=False,
    )
    for line, batch_size in zip(grid, batch_sizes, strict=True):
        rows = [row for row in results if row["batch_size"] == batch_size]
        for axes, (metric, description, title) in zip(line, panels, strict=False):
            _bars(axes, rows, ["dense", *_labels(rows)], metric, has_legend=metric == panels[-1][0])
            axes.set_xlabel(description)
            said = " and ".join(f"{length:,}" for length in lengths)
            axes.set_title(folded(f"{title}, batch of {batch_size}, {said} tokens", 42), fontsize=11)
            if axes is not line[0]:
                axes.tick_params(labelleft=False)
        if contexts is not None:
            entries = [entry for entry in contexts if entry["batch_size"] == batch_size]
            _context_bars(line[-1], entries, settings["memory_gb"], batch_size)
    _head(
        figure,
        f"{model_name(settings)} of {settings['parameters'] / 1e6:.0f}M parameters, "
        f"{settings['dtype']}: {document['environment']['device']}",
    )
    save_figure(figure, path, grid.flat)


def _height(names: list[str], lengths: int) -> float:
    """Return the inches of a panel in which a cache has a bar of each length, beside its name."""
    caches = len(set(names))
    return 1.6 + caches * max(0.28, 0.19 * lengths, inches(names, _FONT)[1] + 0.06)


def _head(figure: Any, title: str) -> None:
    """Write the title of a whole picture in as many lines as it takes."""
    figure.suptitle(folded(title, int(9 * figure.get_figwidth())))


def _label_times(axes: Any) -> None:
    """Write numbers beside a logarithmic axis that may be shorter than from one power of ten to the next."""
    from matplotlib import ticker

    low, high = axes.get_ylim()
    steps = (1, 2, 5) if high / low > 10 else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=steps))
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))


def _fastest(dense: list[dict[str, Any]]) -> list[str]:
    """Dense ways that ran at every length, those first that are fastest at the last one; a GPU has many."""
    common = [name for name in dense[-1]["baseline_ms"] if all(name in row["baseline_ms"] for row in dense)]
    return sorted(common, key=lambda name: dense[-1]["baseline_ms"][name])


def _context_bars(axes: Any, entries: list[dict[str, Any]], memory_gb: float, batch_size: int) -> None:
    """Draw the tokens that fit; a cache whose number is not known has a word in place of a bar."""
    from matplotlib import ticker

    known = [(place, entry["tokens"]) for place, entry in enumerate(entries) if entry["tokens"] is not None]
    bars = axes.barh([place for place, _ in known], [tokens for _, tokens in known], color="C2", height=0.7)
    axes.bar_label(bars, labels=[f"{tokens:,}" for _, tokens in known], padding=3, fontsize=8)
    for place, entry in enumerate(entries):
        if entry["tokens"] is None:
            word = "any" if entry["note"] == "any length fits" else "not predicted"
            axes.annotate(word, (0, place), (3, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(entries)), [folded(entry["label"]) for entry in entries], fontsize=_FONT)
    axes.set_ylim(len(entries) - 0.4, -0.6)
    axes.margins(x=0.18)
    if not any(tokens for _, tokens in known):  # where nothing fits there are no lengths to scale by
        axes.set_xlim(0, 1)
        axes.set_xticks([0])
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    axes.set_xlabel("tokens per row, model and cache counted")
    axes.set_title(folded(f"Largest context in {memory_gb:g} GB, batch of {batch_size}", 42), fontsize=11)


def _bars(
    axes: Any, rows: list[dict[str, Any]], labels: list[str], metric: str, *, has_legend: bool = True
) -> None:
    """Draw one group of horizontal bars per label, one bar per length."""
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    height = 0.8 / len(lengths)
    for index, length in enumerate(lengths):
        found = {row["label"]: row for row in rows if row["length"] == length and row["label"] in labels}
        level = {label: labels.index(label) + (index - (len(lengths) - 1) / 2) * height for label in found}
        known = [label for label, row in found.items() if row[metric] is not None]
        bars = axes.barh(
            [level[label] for label in known],
            [found[label][metric] for label in known],
            height=0.9 * height,
            color=f"C{index}",
            label=f"{length} tokens",
        )
        axes.bar_label(bars, fmt="%.2f" if "ms" not in metric else "%.1f", padding=3, fontsize=8)
        for label, row in found.items():
            if row.get("fits") is False:
                place = (0, level[label])
                axes.annotate(
                    "did not fit", place, (3, 0), textcoords="offset points", va="center", fontsize=8
                )
    if "ms" not in metric:
        axes.axvline(1, color=_GREYS[1], linestyle=":", linewidth=1)
    axes.set_yticks(range(len(labels)), [folded(label) for label in labels], fontsize=_FONT)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.margins(x=0.12)
    if has_legend and len(lengths) > 1:
        # beside the bars, which are as long as the picture is wide
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _labels(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["label"] for row in rows if row["cache_config"] != DENSE))
