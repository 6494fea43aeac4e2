"""KVQuant's calibration: ranges of the keys' channels, and levels of keys and values.

A directory (or hub repository) with

    kvquant.safetensors   for every calibrated layer i, fp32:
                          "layers.{i}.key_lower", "layers.{i}.key_upper"   (num_key_value_heads, head_dim)
                              percentiles of each channel of the keys before the rotary embedding
                          "layers.{i}.key_codebook_{b}", "layers.{i}.value_codebook_{b}"   (2 ** b,)
                              increasing levels in [-1, 1], for every number of bits b
                          "layers.{i}.key_levels_{b}", "layers.{i}.value_levels_{b}"   (2 ** b,), optional
                              levels to decode with where they differ (Q-Norm)
    kvquant.json          {"format_version": 1, "kind": "kvquant", "nbits": [...], "outlier_fraction": ...,
                           "sink_length": ..., "model": {...}, "rope": {i: ...}, "tensors_sha256": ..., ...}
    README.md             model card
    scales.safetensors, scales.json   static scales, see `artifacts.scales`
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ArtifactError
from ..models.rotary import Rotary
from .card import model_card
from .files import read_json, read_tensors, write_json, write_tensors
from .folders import check_finite, check_kind, locate, push, replacing, stamps
from .model_facts import check_model, check_rotary
from .scales import Scales, save_scales

__all__ = [
    "FORMAT_VERSION",
    "Codebooks",
    "LayerCodebooks",
    "load_codebooks",
    "push_to_hub",
    "save_codebooks",
]

FORMAT_VERSION = 1
_KIND = "kvquant"
_TENSORS, _FACTS, _CARD = "kvquant.safetensors", "kvquant.json", "README.md"
_UPLOADED = (_TENSORS, _FACTS, _CARD, "scales.safetensors", "scales.json")
_NAME = re.compile(r"layers\.\d+\.(key_(lower|upper)|(key|value)_(codebook|levels)_(?P<nbits>\d))")
_NEEDED = {
    "nbits": list,
    "outlier_fraction": float | int,
    "sink_length": int,
    "model": dict,
    "rope": dict,
    "tensors_sha256": str,
}
"""Facts an artifact cannot do without, and what they are."""


@dataclass(frozen=True)
class LayerCodebooks:
    """What one layer encodes and decodes with.

    Args:
        key_lower (`torch.Tensor`), key_upper (`torch.Tensor`): fp32 `(H, D)`: the range of each channel of
            the keys before the rotary embedding.
        key_codebook (`torch.Tensor`), value_codebook (`torch.Tensor`): fp32 `(2 ** nbits,)`, increasing, in
            `[-1, 1]`: the levels to encode with.
        key_levels (`torch.Tensor`, *optional*), value_levels (`torch.Tensor`, *optional*): fp32
            `(2 ** nbits,)`: the levels to decode with, where they are others (Q-Norm).
    """

    key_lower: Tensor
    key_upper: Tensor
    key_codebook: Tensor
    value_codebook: Tensor
    key_levels: Tensor | None = None
    value_levels: Tensor | None = None


@dataclass(frozen=True)
class Codebooks:
    """A calibration of a whole model.

    Args:
        tensors (`dict[str, torch.Tensor]`): As in the file, see the top of this module.
        facts (`dict`): `nbits`, `outlier_fraction`, `sink_length`, `model`, `rope` and what the artifact was
            made from.
        source (`str`): How messages name the artifact.
    """

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)
    source: str = "The calibration"

    @property
    def nbits(self) -> list[int]:
        """The numbers of bits it has levels for."""
        return sorted(self.facts["nbits"])

    @property
    def outlier_fraction(self) -> float:
        """Share of numbers outside of the ranges; as many are kept as outliers."""
        return float(self.facts["outlier_fraction"])

    @property
    def sink_length(self) -> int:
        """First tokens that took no part; a cache may keep others exact."""
        return int(self.facts["sink_length"])

    def check_model(self, config: Any) -> None:
        """Check that it belongs to the model of a configuration.

        Raises:
            ArtifactError: Naming both models.
        """
        check_model(self.source, self.facts["model"], config)

    def for_layer(
        self,
        layer_idx: int,
        num_heads: int,
        head_dim: int,
        *,
        key_bits: int,
        value_bits: int,
        rotary: Rotary | None,
    ) -> LayerCodebooks:
        """Return what a layer needs.

        Args:
            layer_idx (`int`): Layer of the model.
            num_heads (`int`): Its kv heads.
            head_dim (`int`): Channels of its keys.
            key_bits (`int`): Bits of a key's code.
            value_bits (`int`): Bits of a value's code.
            rotary (`Rotary`, *optional*): How its keys are rotated.

        Raises:
            ArtifactError: If the artifact has no such layer or bits, or was made for another shape or
                rotation of keys.
        """
        for bits in (key_bits, value_bits):
            if bits not in self.nbits:
                raise ArtifactError(f"{self.source} has levels for nbits {self.nbits}, not for {bits}.")
        lower, upper = (self._tensor(layer_idx, f"key_{end}") for end in ("lower", "upper"))
        if lower.shape != (num_heads, head_dim):
            raise ArtifactError(
                f"{self.source} was made for keys of {tuple(lower.shape)} (heads, channels) in layer "
                f"{layer_idx}, which has {(num_heads, head_dim)}."
            )
        rope = self.facts["rope"].get(str(layer_idx))
        check_rotary(self.source, layer_idx, rope, rotary)
        return LayerCodebooks(
            lower,
            upper,
            self._tensor(layer_idx, f"key_codebook_{key_bits}"),
            self._tensor(layer_idx, f"value_codebook_{value_bits}"),
            self.tensors.get(f"layers.{layer_idx}.key_levels_{key_bits}"),
            self.tensors.get(f"layers.{layer_idx}.value_levels_{value_bits}"),
        )

    def _tensor(self, layer_idx: int, name: str) -> Tensor:
        full = f"layers.{layer_idx}.{name}"
        if full not in self.tensors:
            layers = sorted({int(key.split(".")[1]) for key in self.tensors})
            raise ArtifactError(
                f"{self.source} has layers {layers}, but layer {layer_idx} needs one: {full!r} is missing."
            )
        return self.tensors[full]


def save_codebooks(
    directory: str | os.PathLike[str], codebooks: Codebooks, scales: Scales | None = None
) -> None:
    """Write an artifact: all of its files appear, or none.

    Args:
        directory (`str`): Made if need be; files of the same names are replaced, others stay.
        codebooks (`Codebooks`): What to write.
        scales (`Scales`, *optional*): Static scales to write beside it.

    Raises:
        ArtifactError: If the tensors are not what such an artifact holds; nothing is written.
        OSError: If it cannot be written.
    """
    tensors = {name: t.float().contiguous().clone() for name, t in codebooks.tensors.items()}
    _check_tensors(Path(directory) / _TENSORS, tensors)
    with replacing(directory) as folder:
        write_tensors(folder / _TENSORS, tensors)
        facts = {"format_version": FORMAT_VERSION, "kind": _KIND, **codebooks.facts}
        facts["tensors_sha256"] = _digest(folder / _TENSORS)
        write_json(folder / _FACTS, facts)
        (folder / _CARD).write_text(model_card(facts), encoding="utf-8")
        if scales is not None:
            save_scales(folder, scales)


def load_codebooks(name_or_path: str) -> Codebooks:
    """Read an artifact from a directory or a hub repository.

    Raises:
        ArtifactError: If it is missing, damaged or of another kind; the message names the file.
    """
    files = (_TENSORS, _FACTS)
    folder = locate(name_or_path, files)
    return _read(folder, stamps(folder, files))


def push_to_hub(directory: str | os.PathLike[str], repo_id: str) -> str:
    """Upload a saved artifact to a hub repository, which is made if need be: one that exists may be private.

    Args:
        directory (`str`): Where it was saved.
        repo_id (`str`): Such as `"name/llama-3-8b-kvquant3"`.

    Returns:
        `str`: The address of the commit.

    Raises:
        ArtifactError: If there is no artifact in the directory.
        OSError: If the hub cannot be reached or refuses.
    """
    load_codebooks(str(directory))
    return push(directory, _UPLOADED, repo_id)


@lru_cache(maxsize=8)
def _read(folder: Path, written: tuple[int, ...]) -> Codebooks:
    """Read the files; cached until they change, because every layer of a cache asks."""
    del written
    facts, tensors = read_json(folder / _FACTS), read_tensors(folder / _TENSORS)
    check_kind(folder / _FACTS, facts, _KIND, FORMAT_VERSION)
    missing = [name for name in _NEEDED if name not in facts]
    if missing:
        raise ArtifactError(f"{folder / _FACTS} lacks {missing}.")
    for name, kind in _NEEDED.items():
        if not isinstance(facts[name], kind):
            expected = kind.__name__ if isinstance(kind, type) else str(kind)
            raise ArtifactError(f"{folder / _FACTS}: {name} must be of type {expected}, got {facts[name]!r}.")
    known = all(isinstance(bits, int) for bits in facts["nbits"])
    if not known or not 0 <= facts["outlier_fraction"] <= 0.1 or facts["sink_length"] < 0:
        raise ArtifactError(
            f"{folder / _FACTS}: nbits must be integers, outlier_fraction within [0, 0.1] and sink_length at "
            f"least 0, got {[facts[name] for name in ('nbits', 'outlier_fraction', 'sink_length')]}."
        )
    if _digest(folder / _TENSORS) != facts["tensors_sha256"]:
        raise ArtifactError(
            f"{folder / _TENSORS} is not the file that {_FACTS} belongs to (its sha256 is another)."
        )
    _check_tensors(folder / _TENSORS, tensors)
    return Codebooks(tensors, facts, str(folder))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _check_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    check_finite(path, tensors)
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or tensor.dtype != torch.float32:
            raise ArtifactError(
                f"{path}: expected fp32 tensors named like 'layers.0.key_codebook_3', got {name!r} "
                f"({tensor.dtype})."
            )
        nbits = match["nbits"]
        if nbits is not None and tensor.shape != (2 ** int(nbits),):
            raise ArtifactError(
                f"{path}: {name} must be {2 ** int(nbits)} levels, got {tuple(tensor.shape)}."
            )
        if "codebook" in name and not _is_codebook(tensor):
            raise ArtifactError(
                f"{path}: {name} must be increasing numbers in [-1, 1], got {tensor.tolist()}."
            )
        if name.endswith("key_upper") and not _is_range(tensors.get(name[:-5] + "lower"), tensor):
            raise ArtifactError(f"{path}: {name} must be of the shape of, and nowhere below, its key_lower.")


def _is_codebook(levels: Tensor) -> bool:
    return bool((levels.diff() >= 0).all()) and bool((levels.abs() <= 1).all())


def _is_range(lower: Tensor | None, upper: Tensor) -> bool:
    return (
        lower is not None and upper.dim() == 2 and lower.shape == upper.shape and bool((lower <= upper).all())
    )
