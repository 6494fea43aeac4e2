"""Static scales of 8-bit caches: one file of tensors, one of facts.

A directory (or hub repository) with

    scales.safetensors   "layers.{i}.key_absmax", "layers.{i}.value_absmax": fp32 of shape
                         (num_key_value_heads,), the largest magnitude seen per kv head
    scales.json          {"format_version": 1, "kind": "kv_scales", "model": {...}, "num_layers": ..., ...}

Magnitudes rather than scales are stored, so that one artifact serves every format (448 for e4m3, 57344 for
e5m2, 127 for int8) and both the per-head and the per-tensor scheme (their maximum).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import ArtifactError
from ..quantizers.affine import SMALLEST_SCALE
from ..quantizers.float8 import FLOAT8_MAX
from .files import read_json, read_tensors, write_json, write_tensors
from .folders import check_finite, check_kind, locate, stamps
from .model_facts import check_model

__all__ = ["FORMAT_VERSION", "Scales", "load_scales", "save_scales"]

FORMAT_VERSION = 1
_TENSORS, _FACTS = "scales.safetensors", "scales.json"
_NAME = re.compile(r"layers\.(?P<layer_idx>\d+)\.(?P<side>key|value)_absmax")


@dataclass(frozen=True)
class Scales:
    """Largest magnitudes per layer and kv head.

    Args:
        key_absmax (`dict[int, torch.Tensor]`), value_absmax (`dict[int, torch.Tensor]`): fp32 `(H,)` by layer
            index.
        facts (`dict`): What the artifact was made from; `model`, if it says so, describes the only model it
            serves.
        source (`str`): How messages name the artifact.
    """

    key_absmax: dict[int, Tensor]
    value_absmax: dict[int, Tensor]
    facts: dict[str, Any] = field(default_factory=dict)
    source: str = "The scales artifact"

    def check_model(self, config: Any) -> None:
        """Check that it belongs to the model of a configuration, if it says to which.

        Raises:
            ArtifactError: Naming both models.
        """
        if "model" in self.facts:
            check_model(self.source, self.facts["model"], config)

    def for_layer(self, layer_idx: int, num_heads: int, side: str, scheme: str, format: str) -> Tensor:
        """Return fp32 scales of shape `(1, H, 1, 1)` (`scheme="head"`) or `(1, 1, 1, 1)` (`"tensor"`).

        Args:
            layer_idx (`int`): Layer of the model.
            num_heads (`int`): Its kv heads.
            side (`str`): `"key"` or `"value"`.
            scheme (`str`): `"head"` or `"tensor"`.
            format (`str`): `"e4m3"`, `"e5m2"` or `"int8"`.

        Raises:
            ArtifactError: If the artifact has no such layer, or one of another number of heads.
        """
        by_layer = self.key_absmax if side == "key" else self.value_absmax
        if layer_idx not in by_layer:
            raise ArtifactError(
                f"{self.source} has layers {sorted(by_layer)}, but layer {layer_idx} needs one."
            )
        largest = 127.0 if format == "int8" else FLOAT8_MAX[format]
        absmax = by_layer[layer_idx]
        if absmax.shape != (num_heads,):
            raise ArtifactError(
                f"{self.source} was made for {absmax.numel()} kv heads in layer {layer_idx}, "
                f"which has {num_heads}."
            )
        absmax = absmax if scheme == "head" else absmax.max()[None]
        return (absmax / largest).clamp_min(SMALLEST_SCALE).view(1, -1, 1, 1)


def save_scales(directory: str | os.PathLike[str], scales: Scales) -> None:
    """Write an artifact; each file appears whole or not at all."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"layers.{i}.key_absmax": t.float().contiguous().clone() for i, t in scales.key_absmax.items()}
    tensors |= {
        f"layers.{i}.value_absmax": t.float().contiguous().clone() for i, t in scales.value_absmax.items()
    }
    facts = {"format_version": FORMAT_VERSION, "kind": "kv_scales", **scales.facts}
    write_tensors(folder / _TENSORS, tensors)
    write_json(folder / _FACTS, facts)


def load_scales(name_or_path: str) -> Scales:
    """Read an artifact from a directory or a hub repository.

    Raises:
        ArtifactError: If it is missing, damaged or of another kind; the message names the file.
    """
    folder = locate(name_or_path, (_TENSORS, _FACTS))
    return _read(folder, stamps(folder, (_TENSORS, _FACTS)))


@lru_cache(maxsize=8)
def _read(folder: Path, written: tuple[int, ...]) -> Scales:
    """Read the files; cached until they change, because every layer of a cache asks."""
    del written
    facts, tensors = read_json(folder / _FACTS), read_tensors(folder / _TENSORS)
    check_kind(folder / _FACTS, facts, "kv_scales", FORMAT_VERSION)
    check_finite(folder / _TENSORS, tensors)
    sides: dict[str, dict[int, Tensor]] = {"key": {}, "value": {}}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise ArtifactError(
                f"{folder / _TENSORS}: expected names like 'layers.0.key_absmax', got {name!r}."
            )
        if tensor.dim() != 1 or not tensor.is_floating_point() or bool((tensor < 0).any()):
            raise ArtifactError(
                f"{folder / _TENSORS}: {name} must be a magnitude for each kv head, got "
                f"{tensor.tolist()!r:.80}."
            )
        sides[match["side"]][int(match["layer_idx"])] = tensor.float()
    return Scales(sides["key"], sides["value"], facts, str(folder))
