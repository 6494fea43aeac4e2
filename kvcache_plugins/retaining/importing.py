"""Heads of the authors' own checkpoints, whose layers are attributes `fc1` and `fc2` of attention modules."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..artifacts.files import read_tensors
from ..artifacts.folders import check_finite, check_no_model, locate, replacing
from ..errors import ArtifactError
from .configuration import RetainingHeadsConfig
from .heads import RetainingHeads

__all__ = ["import_heads"]

_KEY = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.(fc[12])\.weight$")
_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
_STATE = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")
"""How the names of files begin that the Trainer leaves beside weights."""


def import_heads(
    source: str, model_config: Any, output: Path, *, revision: str | None = None
) -> RetainingHeads:
    """Write heads of a checkpoint with the authors' key names as [`RetainingHeads`].

    The keys are `model.layers.{i}.self_attn.fc1.weight` `(hidden_dim, input_dim)` and `...fc2.weight`
    `(H_kv, hidden_dim)`; others of the checkpoint are passed over.

    Args:
        source (`str`): A safetensors or torch file, a directory of such, or a hub repository.
        model_config (`PreTrainedConfig`): Configuration of the model they belong to.
        output (`Path`): Directory to write to.
        revision (`str`, *optional*): Of the repository.

    Returns:
        `RetainingHeads`: What was written.

    Raises:
        ArtifactError: If there are no such keys, some are missing, or they do not fit the model or are not
            finite.
        ValueError: If the directory is that of a model.
    """
    check_no_model(output, own=RetainingHeadsConfig.model_type)
    tensors = _read(source, revision)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _KEY.search(name)
        if match is not None:
            found[f"layers.{match[1]}.{match[2]}.weight"] = tensor
    if not found:
        raise ArtifactError(
            f"{source} holds no key such as 'model.layers.0.self_attn.fc1.weight', but "
            f"{sorted(tensors)[:3]} and others."
        )
    check_finite(Path(source), found)
    first = found.get("layers.0.fc1.weight")
    config = RetainingHeadsConfig.from_model(
        model_config, hidden_dim=None if first is None or first.dim() != 2 else first.shape[0]
    )
    heads: Any = RetainingHeads(config)
    heads.to(next(iter(found.values())).dtype)
    wanted = {name: tuple(tensor.shape) for name, tensor in heads.state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in found.items()}
    wrong = sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name))
    if wrong:
        raise ArtifactError(
            f"{source} does not fit {config.base_model_name_or_path or 'the model'}: {wrong[0]} must be of "
            f"shape {wanted.get(wrong[0])}, got "
            f"{given.get(wrong[0])} ({len(wrong)} such weights; None is missing)."
        )
    heads.load_state_dict(found)
    with replacing(output) as folder:
        heads.save_pretrained(folder)
    result: RetainingHeads = heads.eval()
    return result


def _read(source: str, revision: str | None) -> dict[str, Tensor]:
    path = Path(source)
    if not path.is_file():
        path = locate(source, _PATTERNS, option="source", revision=revision)
    files = [path] if path.is_file() else _weight_files(path)
    if not files:
        raise ArtifactError(f"{source} holds no file of {', '.join(_PATTERNS)}.")
    tensors: dict[str, Tensor] = {}
    for file in files:
        if file.suffix == ".safetensors":
            tensors |= read_tensors(file)
            continue
        try:
            loaded = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged pickle raises errors of many kinds
            raise ArtifactError(f"{file} cannot be read: {error}") from error
        if not isinstance(loaded, dict):
            raise ArtifactError(f"{file} must hold weights by name, got {type(loaded).__name__}.")
        tensors |= {name: value for name, value in loaded.items() if isinstance(value, Tensor)}
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    """Weights of a folder, of one kind: several kinds are several copies."""
    for pattern in _PATTERNS:
        files = [file for file in sorted(folder.glob(pattern)) if not file.name.startswith(_STATE)]
        if files:
            return files
    return []
