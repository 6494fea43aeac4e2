"""Rounds of processes over all caches.

A round is kept when it is finished, and whole: what is compared has been measured one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ....runs.labels import DENSE, cache_label
from ....runs.progress import Progress
from ..devices import machine_bytes
from ..options import GenerationOptions
from ..outcomes import Outcomes
from .process import DidNotFitError, WorkerError, make_job, run_job

__all__ = ["Rounds"]


class Rounds:
    """Processes over all caches, one point after the other.

    Attributes:
        failures (`list[dict]`): Entries for `skipped`.
        too_large (`list[dict]`): Of every cache the points, length and batch size, that did not fit, and why.
        not_compiled (`dict`): Points at which the dense cache of a compiled model failed, and why.
    """

    def __init__(
        self,
        options: GenerationOptions,
        device: torch.device,
        cache_configs: list[dict[str, Any]],
        outcomes: Outcomes,
        progress: Progress,
    ) -> None:
        self._options, self._device, self._progress = options, device, progress
        self._cache_configs, self._outcomes = cache_configs, outcomes
        self.failures: list[dict[str, Any]] = []
        self.too_large: list[dict[tuple[int, int], str]] = [{} for _ in cache_configs]
        self.not_compiled: dict[tuple[int, int], str] = {}

    def reason(self, index: int, length: int, batch_size: int) -> str | None:
        """Why a cache has no answer at a point but a row."""
        point = length, batch_size
        if (reason := self.too_large[index].get(point)) is not None or self._cache_configs[index] != DENSE:
            return reason
        return self.not_compiled.get(point)

    def run(self, length: int, batch_size: int, peaks: list[int | None]) -> dict[int, list[dict[str, Any]]]:
        """Return the answers at a point, by the places of the caches; of those alone that always gave one.

        `peaks` are the bytes that each cache will take, where they can be predicted.
        """
        answers: dict[int, list[dict[str, Any]]] = {index: [] for index in range(len(self._cache_configs))}
        for number in range(self._options.repeats):
            point = f"{length} tokens, {batch_size} rows, round {number}"
            caches = [self._cache_configs[index] for index in answers]
            found = self._outcomes.find(caches, point)
            if found is None:
                outcomes = {i: self._outcome(i, length, batch_size, peaks[i]) for i in answers}
                for cache_config, outcome in zip(caches, outcomes.values(), strict=True):
                    self._outcomes.keep(cache_config, point, outcome)
            else:
                outcomes = dict(zip(answers, found, strict=True))
                self._progress("finished before", advance=len(caches))
            if (left_out := len(self._cache_configs) - len(caches)) > 0:  # they did not end the round before
                self._progress(f"{length} tokens", advance=left_out)
            for index, outcome in outcomes.items():
                if "answer" in outcome:
                    answers[index].append(outcome["answer"])
                else:
                    del answers[index]
                    self._note(index, length, batch_size, outcome)
        return answers

    def _outcome(self, index: int, length: int, batch_size: int, peak: int | None) -> dict[str, Any]:
        """What a process ends with: one of `answer`, `did_not_fit` and `failed`."""
        cache_config = self._cache_configs[index]
        self._progress(f"{length} tokens: {cache_label(cache_config)}")
        outcome: dict[str, Any]
        try:
            outcome = {"answer": self._answer(index, length, batch_size, peak)}
        except DidNotFitError as error:
            outcome = {"did_not_fit": str(error)}
        except WorkerError as error:
            # Without it there is nothing to compare with. But CUDA graphs, which `compile` may make, refuse
            # it: it keeps what they return.
            if cache_config == DENSE and self._options.compile is None:
                raise
            outcome = {"failed": f"failed at {length} tokens: {error}"}
        self._progress(f"{length} tokens", advance=1)
        return outcome

    def _note(self, index: int, length: int, batch_size: int, outcome: Mapping[str, Any]) -> None:
        """Remember why there is no answer."""
        cache_config = self._cache_configs[index]
        if (reason := outcome.get("did_not_fit")) is not None:
            self.too_large[index][length, batch_size] = reason
        elif cache_config == DENSE:
            self.not_compiled[length, batch_size] = outcome["failed"]
        else:
            entry = {"cache_config": cache_config, "reason": outcome["failed"], "is_failure": True}
            self.failures.append(entry)

    def _answer(self, index: int, length: int, batch_size: int, peak: int | None) -> dict[str, Any]:
        """Run a process, but spare the machine what it cannot hold, and more than what did not fit."""
        there, needed = machine_bytes(self._device), 8 * batch_size * length + (peak or 0)  # int64, the cache
        if needed > there:
            raise DidNotFitError(
                f"not tried: prompt and cache take {needed / 1e9:,.1f} GB, {self._device} has "
                f"{there / 1e9:,.1f} GB in all"
            )
        for tried_length, tried_batch_size in self.too_large[index]:
            if length >= tried_length and batch_size >= tried_batch_size:
                point = f"{tried_length} tokens with a batch of {tried_batch_size}"
                raise DidNotFitError(f"not tried: {point} did not fit")
        return run_job(make_job(self._options, self._cache_configs[index], length, batch_size, self._device))
