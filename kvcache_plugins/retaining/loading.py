"""Heads by name, loaded once in a process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from ..artifacts.files import read_json, read_tensors
from ..artifacts.folders import check_finite, locate, stamps
from ..errors import ArtifactError
from .configuration import RetainingHeadsConfig
from .heads import RetainingHeads

__all__ = ["CONFIG_FILE", "WEIGHTS_FILE", "load_heads"]

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

_loaded: dict[str, tuple[tuple[int, ...], RetainingHeads]] = {}
_lock = threading.Lock()


def load_heads(name_or_path: str) -> RetainingHeads:
    """Return the heads of a directory or a hub repository, the same object for the same name.

    They are in evaluation mode, without gradients, on the CPU, in the dtype they were saved in:
    [`RetainingHeads.score`] copies a layer to where it is used. A directory whose files were written anew is
    read again.

    Args:
        name_or_path (`str`): Directory or hub id, which may end in the revision: `"org/name@revision"`.

    Raises:
        ArtifactError: If there is nothing of that name, or what is there are no retaining heads.
    """
    if not isinstance(name_or_path, str) or not name_or_path:
        raise ArtifactError(
            f"heads must be the directory or hub id of retaining heads, got {name_or_path!r}."
        )
    folder = Path(name_or_path)
    is_local = folder.is_dir()
    key = str(folder.resolve()) if is_local else name_or_path
    with _lock:
        known = _loaded.get(key)
        if known is not None and (not is_local or known[0] == _stamps(folder)):
            return known[1]
        if not is_local:
            folder = locate(name_or_path, (CONFIG_FILE, WEIGHTS_FILE), option="heads")
        heads = _load(folder, name_or_path)
        _loaded[key] = (_stamps(folder), heads)
        return heads


def _stamps(folder: Path) -> tuple[int, ...]:
    return stamps(folder, (CONFIG_FILE, WEIGHTS_FILE))


def _load(folder: Path, name: str) -> RetainingHeads:
    """Read heads without transformers' loader, which would show a bar in the middle of a generation."""
    if not (folder / CONFIG_FILE).is_file():
        raise ArtifactError(f"heads={name!r} holds no retaining heads: there is no {CONFIG_FILE}.")
    facts: dict[str, Any] = read_json(folder / CONFIG_FILE)
    if facts.get("model_type") != RetainingHeadsConfig.model_type:
        raise ArtifactError(
            f"heads={name!r} must hold retaining heads (model_type {RetainingHeadsConfig.model_type!r}), "
            f"got model_type {facts.get('model_type')!r}."
        )
    tensors = read_tensors(folder / WEIGHTS_FILE)
    check_finite(folder / WEIGHTS_FILE, tensors)
    try:
        with torch.device("meta"):  # random weights would be drawn from the generator that a user has seeded
            heads: Any = RetainingHeads(RetainingHeadsConfig.from_dict(facts))
        if tensors:
            heads.to(next(iter(tensors.values())).dtype)
        heads.to_empty(device="cpu").load_state_dict(tensors)
    except (RuntimeError, ValueError, TypeError) as error:  # keys or shapes that do not fit the configuration
        raise ArtifactError(f"heads={name!r} cannot be loaded: {error}") from error
    result: RetainingHeads = heads.requires_grad_(False).eval()
    return result
