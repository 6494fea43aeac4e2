"""Options of the two speed benchmarks, checked when they are made. Nothing heavy is imported."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...models.presets import PRESETS
from ...runs.model_options import COMPARISON, OURS
from ...runs.options import (
    DTYPES,
    MOST_GB,
    MOST_THREADS,
    Options,
    check_amount,
    check_choice,
    check_count,
    check_counts,
    check_model,
)

__all__ = ["COMPILE_MODES", "DTYPES", "AttentionOptions", "GenerationOptions", "SpeedOptions"]

_ROTATED: tuple[dict[str, Any], ...] = (
    {"backend": "kivi", "nbits": 4, "rope_mode": "block"},
    {"backend": "kivi", "nbits": 2, "rope_mode": "block"},
    {"backend": "kvquant", "nbits": 4, "calibration": "normal_float"},
)
"""Keys that attention has to rotate."""
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""Modes of `torch.compile`."""
_MOST_LAYERS = 1000
"""Far beyond any model; the configuration of a preset lists its layers one by one."""
_MOST_SECONDS = 10**7
"""Some months."""


@dataclass(frozen=True, kw_only=True)
class SpeedOptions(Options):
    """What both benchmarks are told.

    Args:
        cache_config (`Sequence[dict]`): The caches to measure, beside the dense one.
        lengths (`Sequence[int]`): Tokens in the cache.
        batch_sizes (`Sequence[int]`): Rows.
        dtype (`str`): Of the model and its states, one of `DTYPES`.
        threads (`int`, *optional*): CPU threads, whatever the device; torch's choice by default.
        model (`str`, *optional*): Path or hub id of a model.
        preset (`str`, *optional*): A name of `models.presets.PRESETS` in place of a model.
        device (`str`): `"cpu"`, `"cuda"`, `"cuda:N"`, or `"auto"`, a GPU where there is one.
    """

    lengths: Sequence[int]
    batch_sizes: Sequence[int] = (1,)
    dtype: str = "bf16"
    threads: int | None = None
    model: str | None = None
    preset: str | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        check_counts("lengths", self.lengths)
        check_counts("batch_sizes", self.batch_sizes)
        check_choice("dtype", self.dtype, DTYPES)
        if self.threads is not None:
            check_count("threads", self.threads, most=MOST_THREADS)
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"--device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {self.device!r}.")
        if self.model is not None:
            check_model(self.model)
        if self.preset is not None:
            check_choice("preset", self.preset, PRESETS)
            if self.model is not None:
                raise ValueError(
                    f"--preset and --model exclude each other, got {self.preset!r} and {self.model!r}."
                )

    def settings(self) -> dict[str, Any]:
        """Return the merged options for the result file."""
        return super().settings() | {"dtype": DTYPES[self.dtype]}


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(SpeedOptions):
    """Options of `bench attention`. The preset is Llama 3 8B, unless another or a `model` is named.

    Args:
        repeats (`int`): Timed rounds.
        warm_up (`int`): Rounds before them.
    """

    cache_config: Sequence[dict[str, Any]] = field(default=(*OURS, *_ROTATED))
    lengths: Sequence[int] = (4096, 32768)
    repeats: int = 30
    warm_up: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("repeats", self.repeats)
        check_count("warm_up", self.warm_up, least=0)
        if self.preset is None and self.model is None:
            object.__setattr__(self, "preset", "llama3-8b")


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(SpeedOptions):
    """Options of `bench generate`. With neither a `model` nor a preset: a random Llama of 50M parameters.

    Args:
        num_layers (`int`, *optional*): Layers of a preset; all of them by default.
        max_new_tokens (`int`): Tokens to generate.
        compile (`str`, *optional*): Compile the model, for every cache, one of `COMPILE_MODES`. Two
            generations go before the one that is measured, so that it makes no graphs.
        repeats (`int`): Processes per point, in rounds over all caches.
        time_limit (`float`, *optional*): Seconds that a process may take; a cache that takes longer failed.
        memory_gb (`float`, *optional*): Memory in units of 10^9 bytes; the largest context whose model and
            cache fit it is predicted for every cache.
        verify_memory (`bool`): Generate at those lengths too, and report the peak.
    """

    cache_config: Sequence[dict[str, Any]] = field(default=COMPARISON)
    lengths: Sequence[int] = (4096,)
    max_new_tokens: int = 64
    compile: str | None = None
    repeats: int = 1
    num_layers: int | None = None
    time_limit: float | None = None
    memory_gb: float | None = None
    verify_memory: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("max_new_tokens", self.max_new_tokens, least=8)
        if self.compile is not None:
            check_choice("compile", self.compile, COMPILE_MODES)
        check_count("repeats", self.repeats)
        if self.num_layers is not None:
            check_count("num_layers", self.num_layers)
            if self.num_layers > _MOST_LAYERS:
                raise ValueError(f"--num_layers must be at most {_MOST_LAYERS}, got {self.num_layers}.")
            if self.preset is None:
                raise ValueError("--num_layers needs --preset, whose layers it counts.")
        for name, most in (("time_limit", _MOST_SECONDS), ("memory_gb", MOST_GB)):
            if (given := getattr(self, name)) is not None:
                check_amount(name, given, most)
        if self.verify_memory and self.memory_gb is None:
            raise ValueError("--verify_memory needs --memory_gb, the memory to verify.")
