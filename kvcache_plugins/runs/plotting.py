"""What all pictures of results have in common. matplotlib is imported when one is drawn."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["check_plotting", "pyplot", "save_figure", "scale_divergences"]


def check_plotting() -> None:
    """Make sure that pictures can be drawn.

    Raises:
        ValueError: If matplotlib is not installed; the message names the extra.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "Pictures need matplotlib, which is not installed: pip install 'kvcache-plugins[plots]', "
            "or leave them out with --no_plots."
        )


def pyplot() -> Any:
    """Return `matplotlib.pyplot`, which draws into files alone.

    Raises:
        ValueError: If matplotlib is not installed.
    """
    check_plotting()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def scale_divergences(axes: Any, values: Iterable[float]) -> None:
    """Make the vertical axis logarithmic, with a place for 0 where a divergence is exactly that.

    Below the power of ten under the least positive one the axis is linear, down to 0; where all are 0, there
    is that tick alone.

    Args:
        axes (`matplotlib.axes.Axes`): With everything drawn, and its margins set.
        values (`Iterable[float]`): The divergences drawn in it.
    """
    values = list(values)
    least = min((value for value in values if value > 0), default=None)
    if least is None:
        axes.set_ylim(-0.06, 1)
        axes.set_yticks([0])
    elif min(values) > 0:
        axes.set_yscale("log")
    else:
        linear = 10.0 ** math.floor(math.log10(least))
        axes.set_yscale("symlog", linthresh=linear, linscale=0.5)
        axes.set_ylim(bottom=-0.2 * linear)


def save_figure(figure: Any, path: Path, panels: Iterable[Any] = (), *, dpi: int = 120) -> None:
    """Write a figure as a PNG, in a folder that is made if need be, and close it; whole or not at all.

    Args:
        figure (`Figure`): What was drawn.
        path (`Path`): Where it goes.
        panels (`Iterable[Axes]`): Parts of it that get a faint grid, and no frame above and on the right.
        dpi (`int`): Pixels an inch.

    Raises:
        OSError: If it cannot be written, for instance because the disk is full.
    """
    from ..artifacts.files import replaced  # which brings torch; whether pictures can be drawn needs none

    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replaced(path) as unfinished:
            try:
                figure.savefig(unfinished, dpi=dpi, format="png")
            except OSError as error:  # matplotlib's names no file
                raise OSError(f"The picture {path} cannot be written: {error}") from error
    finally:
        pyplot().close(figure)
