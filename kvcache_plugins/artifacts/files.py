"""Writing files that appear whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

__all__ = ["write_json", "write_tensors"]


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file under a temporary name, then rename it."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    save_file(tensors, unfinished)
    unfinished.replace(path)


def write_json(path: Path, facts: dict[str, Any]) -> None:
    """Write a json file under a temporary name, then rename it."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")
    unfinished.replace(path)
