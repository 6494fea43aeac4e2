"""A command of the package on a simulated GPU of Apple, which accelerate picks as it would a real one.

python -m tests.kernels.apple.on_simulated_gpu FOLDER eval perplexity --model ...
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.kernels.apple import simulated_gpu


def _pick() -> None:
    """Offer the GPU to accelerate, which asks `torch.backends.mps` and calls three functions of Metal."""
    torch.backends.mps.is_built = lambda: True
    for name in ("empty_cache", "synchronize"):
        setattr(torch.mps, name, lambda: None)
    torch.mps.manual_seed = lambda seed: None
    from accelerate import PartialState

    assert PartialState().device.type == "mps"


def main(folder: str, *arguments: str) -> int:
    """Run the command `arguments`; built devices are kept in `folder`."""
    simulated_gpu.install(Path(folder))
    _pick()
    from kvcache_plugins.cli import main as command

    return command(list(arguments))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
