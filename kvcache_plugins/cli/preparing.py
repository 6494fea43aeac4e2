"""What commands do before they load a model."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ..runs.options import check_directory

__all__ = ["output_directory", "prepare_transformers", "will_draw"]


def output_directory(args: argparse.Namespace) -> Path:
    """Return `--output`, the current directory by default.

    Raises:
        ValueError: If it is a file or no name at all, or nothing can be written there.
    """
    given = getattr(args, "output", ".")
    if not given:
        raise ValueError(f"--output must be a directory, got {given!r}.")
    output = Path(given).expanduser()
    check_directory("output", output)
    return output


def prepare_transformers() -> None:
    """Import transformers, keep it quiet, and let its caches find what they compile with."""
    # quanto compiles an extension with ninja, installed beside the interpreter and often not on the PATH
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def will_draw(args: argparse.Namespace) -> bool:
    """Whether pictures are wanted; that they cannot be drawn is told before the measurement, not after it."""
    if hasattr(args, "no_plots"):
        return False
    from ..runs.plotting import check_plotting

    check_plotting()
    return True
