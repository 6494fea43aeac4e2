"""What the passes of a calibration accumulate, and its copy on the disk that an interrupted run continues."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..artifacts.files import write_tensors
from ..errors import ArtifactError
from ..runs.journal import check_settings, remove_progress
from .histograms import Histogram
from .percentiles import StreamingRange

__all__ = ["LayerStatistics", "Statistics"]

_FILE = "statistics.safetensors"


@dataclass
class LayerStatistics:
    """Of one layer.

    Args:
        key_range (`StreamingRange`): Of the channels of its keys before the rotary embedding.
        absmax (`dict[str, torch.Tensor]`): fp32 `(H,)` by `"key"` and `"value"`: largest magnitudes of keys
            after the rotary embedding, and of values.
        histograms (`dict[str, Histogram]`): Normalized keys and values by `"key"` and `"value"`.
    """

    key_range: StreamingRange
    absmax: dict[str, Tensor] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {"key": Histogram(), "value": Histogram()}
    )

    def add_magnitudes(self, side: str, states: Tensor) -> None:
        """Take keys or values `(B, H, T, D)` into `absmax`."""
        new = states.detach().abs().amax(dim=(0, 2, 3)).float().cpu()
        self.absmax[side] = new if side not in self.absmax else torch.maximum(self.absmax[side], new)

    def tensors(self) -> dict[str, Tensor]:
        """Everything accumulated so far, by name."""
        held = {f"{side}_absmax": absmax for side, absmax in self.absmax.items()}
        for name in ("largest", "smallest"):
            extremes = getattr(self.key_range, name)
            if extremes is not None:
                held[f"range_{name}"] = extremes.cpu().contiguous()
        for side, histogram in self.histograms.items():
            for part in fields(histogram):
                held[f"{side}_{part.name}"] = torch.from_numpy(getattr(histogram, part.name))
        return held

    def load(self, held: Mapping[str, Tensor], seen: int) -> None:
        """Take over what `tensors` returned, after `seen` tokens."""
        self.key_range.largest, self.key_range.smallest = held["range_largest"], held["range_smallest"]
        self.key_range.seen = seen
        self.absmax = {side: held[f"{side}_absmax"] for side in ("key", "value")}
        for side in self.histograms:
            parts = {part.name: held[f"{side}_{part.name}"].numpy().copy() for part in fields(Histogram)}
            self.histograms[side] = Histogram(**parts)


class Statistics:
    """Of all layers, with the number of finished steps; a step is one sample in one pass.

    Args:
        folder (`Path`): Where the copy is kept; made if need be.
        settings (`Mapping`): Plain values on which the statistics depend; those of an unfinished run with
            others are not continued.
        layers (`Iterable[int]`): Layers to observe.
        tokens (`int`): Tokens of a sample that count.
        num_samples (`int`): Samples of a pass.
        tail (`float`): Share of numbers beyond either end of a range.

    Raises:
        ValueError: If the folder holds an unfinished run with other settings.
        ArtifactError: If the copy cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        layers: Iterable[int],
        tokens: int,
        num_samples: int,
        tail: float,
    ) -> None:
        self._path = folder / _FILE
        self._settings = json.loads(json.dumps(settings))
        self._tokens, self._num_samples = tokens, num_samples
        self.layers = {index: LayerStatistics(StreamingRange(tokens * num_samples, tail)) for index in layers}
        self.steps = 0
        folder.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._load()

    def finish_step(self) -> None:
        """Count one step more; the copy holds it when this returns.

        Raises:
            OSError: If it cannot be written; the copy of the steps before stays.
        """
        self.steps += 1
        held = {
            f"{index}.{name}": tensor
            for index, layer in self.layers.items()
            for name, tensor in layer.tensors().items()
        }
        write_tensors(self._path, held, {"settings": json.dumps(self._settings), "steps": str(self.steps)})

    def remove(self) -> None:
        """Delete the copy, also what an interrupted writing left of it: the calibration is finished."""
        remove_progress(self._path.parent, f"{_FILE}*")

    def _load(self) -> None:
        try:
            with safe_open(self._path, framework="pt") as file:
                facts = file.metadata() or {}
                found, steps = json.loads(facts["settings"]), int(facts["steps"])
                held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            raise ArtifactError(f"{self._path} cannot be continued: {error}; remove it.") from error
        check_settings(found, self._settings, self._path.parents[1])
        for index, layer in self.layers.items():
            prefix = f"{index}."
            own = {name.removeprefix(prefix): t for name, t in held.items() if name.startswith(prefix)}
            layer.load(own, self._tokens * min(steps, self._num_samples))
        self.steps = steps
