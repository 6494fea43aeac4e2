"""Options of a calibration. Nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..runs.model_options import ModelOptions
from ..runs.options import check_choice, check_count, check_unused

__all__ = ["BACKENDS", "DATASET", "PYDOC", "WEIGHTS", "CalibrationOptions"]

DATASET = "Salesforce/wikitext:wikitext-2-raw-v1"
"""The text of the paper: WikiText-2, its train split."""
PYDOC = "pydoc"
"""The text every Python carries, which needs no download."""
_MOST_TOKENS = 10**7
"""Three hundred times the tokens of the paper; all samples are in memory, and what their tails need."""
WEIGHTS = ("fisher_scale", "fisher", "none")
BACKENDS: dict[str, tuple[int, ...]] = {"kvquant": (2, 3, 4), "kivi": (2, 3, 4, 8)}
"""Backends whose precision can be chosen automatically, and the bits they have."""


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions(ModelOptions):
    """What a calibration is told.

    Args:
        cache_config (`Sequence[dict]`): At most one: further options of the cache whose precision is chosen.
        nbits (`Sequence[int]`): Numbers of bits to fit levels for: 2, 3, 4.
        outlier_fraction (`float`): Share of each vector that is kept exact, in `[0, 0.1]`.
        sink_length (`int`): First tokens of a sample that take no part.
        num_samples (`int`): Samples of text.
        sequence_length (`int`): Tokens of a sample.
        dataset (`str`): Data set with a column `text`: a hub id or local directory, with `:NAME` where it has
            several configurations; its split `train`. `"pydoc"` is the language reference of this Python.
            WikiText-2 by default, where there are no text files.
        text_files (`Sequence[str]`, *optional*): UTF-8 files, instead of a data set.
        weight (`str`): What an error counts: `"fisher_scale"` (squared gradient times squared scale),
            `"fisher"` (squared gradient) or `"none"`.
        q_norm (`bool`): Also fit levels to decode with that keep mean and deviation (Q-Norm).
        seed (`int`): Of the places of the samples.
        target_bits (`float`, *optional*): Choose the precision of every layer so that keys and values of all
            packed layers have this many bits on average; one with a window counts as much as one without.
        backend (`str`): For which backend: one of `BACKENDS`.
        precision_samples (`int`): Samples on which a precision is judged.
    """

    cache_config: Sequence[dict[str, Any]] = ()
    nbits: Sequence[int] | None = None
    outlier_fraction: float = 0.01
    sink_length: int = 1
    num_samples: int = 16
    sequence_length: int = 2048
    dataset: str = None  # type: ignore[assignment]  # becomes DATASET, unless there are text files
    text_files: Sequence[str] | None = None
    weight: str = "fisher_scale"
    q_norm: bool = False
    seed: int = 0
    target_bits: float | None = None
    backend: str = "kvquant"
    precision_samples: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_samples", "precision_samples"):
            check_count(name, getattr(self, name))
        check_count("sequence_length", self.sequence_length, least=2)
        most = max(1, _MOST_TOKENS // self.sequence_length)
        if self.num_samples > most:
            raise ValueError(
                f"--num_samples must be at most {most:,} with --sequence_length {self.sequence_length}, "
                f"{_MOST_TOKENS:,} tokens in all, got {self.num_samples}."
            )
        check_count("sink_length", self.sink_length, least=0)
        check_count("seed", self.seed, least=0)
        if self.sink_length > self.sequence_length - 2:
            raise ValueError(
                f"--sink_length must leave at least 2 of the {self.sequence_length} tokens of a sample, got "
                f"{self.sink_length!r}."
            )
        self._check_numbers()
        check_choice("weight", self.weight, WEIGHTS)
        check_choice("backend", self.backend, BACKENDS)
        given: object = self.dataset
        if self.text_files is not None:
            check_unused(self, ("dataset",), "is not for --text_files, which take its place")
        elif given is None:
            object.__setattr__(self, "dataset", DATASET)
        if self.text_files is not None and (isinstance(self.text_files, str) or not self.text_files):
            raise ValueError(f"--text_files must be one or more files, got {self.text_files!r}.")
        if self.tp_plan is not None:
            raise ValueError(
                "A calibration sees all heads of a layer in one process, so --tp_plan is not possible, got "
                f"{self.tp_plan!r}; --device_map auto spreads a model over several devices."
            )
        self._check_precision()

    def _check_numbers(self) -> None:
        given = self.nbits
        if given is not None:
            numbers = [] if isinstance(given, (int, str, bytes)) else list(given)
            known = [bits for bits in BACKENDS["kvquant"] if bits in numbers]
            if not numbers or len(known) != len(numbers):
                raise ValueError(f"--nbits must be one or more different numbers of 2, 3, 4, got {given!r}.")
        fraction: object = self.outlier_fraction  # whatever a file held
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 <= fraction <= 0.1:
            raise ValueError(f"--outlier_fraction must be a number in [0, 0.1], got {fraction!r}.")

    def _check_precision(self) -> None:
        if len(self.cache_config) > 1 or (self.cache_config and self.target_bits is None):
            raise ValueError(
                "--cache_config gives further options of the one cache whose precision --target_bits "
                f"chooses; got {list(self.cache_config)!r} with --target_bits {self.target_bits!r}."
            )
        for config in self.cache_config:
            if config["backend"] != self.backend:
                raise ValueError(
                    f"--cache_config must be for --backend {self.backend!r}, got {config['backend']!r}."
                )
            self._check_own_artifact(config)
        if self.target_bits is None:
            check_unused(self, ("backend", "precision_samples"), "is for --target_bits, which is not given")
            return
        if not self.needs_codebooks:
            levels = ("nbits", "outlier_fraction", "q_norm", "weight")
            check_unused(self, levels, f"is for the levels of kvquant, --backend is {self.backend!r}")
        target: object = self.target_bits
        bits = self.candidate_bits
        if isinstance(target, bool) or not isinstance(target, (int, float)):
            raise ValueError(f"--target_bits must be a number, got {target!r}.")
        if not min(bits) <= target <= max(bits):
            raise ValueError(
                f"--target_bits must be within [{min(bits)}, {max(bits)}], the bits of {self.backend!r} "
                f"there is a choice of, got {target!r}."
            )

    def _check_own_artifact(self, config: dict[str, Any]) -> None:
        """A precision of kvquant is one of the artifact that is made with it."""
        if not self.needs_codebooks:
            return
        if "calibration" in config:
            raise ValueError(
                "--target_bits is for the artifact that is made with it, so --cache_config must not set "
                f"'calibration', got {config['calibration']!r}."
            )
        if config.get("outlier_fraction", self.outlier_fraction) != self.outlier_fraction:
            raise ValueError(
                f"--cache_config must have the 'outlier_fraction' {self.outlier_fraction} of "
                f"--outlier_fraction, or none, got {config['outlier_fraction']!r}."
            )

    @property
    def fitted_bits(self) -> tuple[int, ...]:
        """Numbers of bits to fit levels for."""
        if self.nbits is not None:
            return tuple(sorted(self.nbits))
        return (3,) if self.target_bits is None else BACKENDS["kvquant"]

    @property
    def candidate_bits(self) -> tuple[int, ...]:
        """Numbers of bits among which the precision of a layer is chosen."""
        return self.fitted_bits if self.backend == "kvquant" else BACKENDS[self.backend]

    @property
    def needs_codebooks(self) -> bool:
        """Whether levels are fitted: not for a precision of a backend that needs none."""
        return self.target_bits is None or self.backend == "kvquant"

    def settings(self) -> dict[str, Any]:
        settings = super().settings()
        del settings["threads"]  # has no influence on what is computed
        return settings
