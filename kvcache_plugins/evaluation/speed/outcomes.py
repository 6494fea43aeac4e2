"""What an interrupted benchmark has measured, which the same command goes on with."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...runs.cache_names import CacheNames
from ...runs.code_versions import code_settings
from ...runs.file_digests import model_settings
from ...runs.journal import Journal
from ...runs.results import machine_names
from .options import SpeedOptions

__all__ = ["Outcomes"]

# What is told of the run by the points themselves, by the model's digest and by the machine's names.
_TOLD_OTHERWISE = ("lengths", "batch_sizes", "model", "device")


class Outcomes:
    """What measurements ended with, by cache and point. Those of a failure hold its reason as `failed`.

    Args:
        output (`Path`, *optional*): Directory that keeps them until the run is finished.
        options (`SpeedOptions`): Of the run.
        config (`PreTrainedConfig`): The model's.
        device (`torch.device`): Where it is measured.
        cache_configs (`Sequence[dict]`): The caches.
        independent_of (`Collection[str]`): Options that no outcome depends on.

    Raises:
        ValueError: If the directory holds an unfinished run with other settings, or of another machine.
    """

    def __init__(
        self,
        output: Path | None,
        options: SpeedOptions,
        config: Any,
        device: torch.device,
        cache_configs: Sequence[dict[str, Any]],
        independent_of: Collection[str] = (),
    ) -> None:
        self._names = CacheNames(cache_configs)
        self._journal: Journal | None = None
        if output is not None:
            left_out = {*_TOLD_OTHERWISE, *independent_of}
            told = {k: v for k, v in options.settings().items() if k not in left_out}
            told["threads"] = options.threads or torch.get_num_threads()  # which the environment may choose
            model = {} if options.model is None else model_settings(options.model, config)
            settings = told | model | machine_names(device) | code_settings()
            self._journal = Journal(output, settings)
            self._names.tell_outdated(self._journal)

    @property
    def artifacts(self) -> dict[str, str]:
        """Digests of the artifacts that caches name."""
        return self._names.artifacts

    def find(self, cache_configs: Sequence[dict[str, Any]], point: str) -> list[dict[str, Any]] | None:
        """Return what was kept of some caches; None unless it is there of all of them, and of no failure."""
        keys = [self._key(cache_config, point) for cache_config in cache_configs]
        if self._journal is None or not all(map(self._journal.is_done, keys)):
            return None
        return [self._journal[key] for key in keys]

    def keep(self, cache_config: dict[str, Any], point: str, outcome: Mapping[str, Any]) -> None:
        """Keep an outcome, if there is a directory for it."""
        if self._journal is not None:
            self._journal.add(self._key(cache_config, point), outcome)

    def finish(self) -> None:
        """Delete what was kept: the results are written, or there are none."""
        if self._journal is not None:
            self._journal.remove(self._names.is_outdated)

    def _key(self, cache_config: Mapping[str, Any], point: str) -> str:
        return f"{self._names[cache_config]}|{point}"
