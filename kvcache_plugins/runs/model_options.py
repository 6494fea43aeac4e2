"""Options of the evaluations that load a model. Nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .options import DTYPES, MOST_THREADS, Options, check_choice, check_count, check_model

__all__ = ["COMPARISON", "OURS", "ModelOptions"]

OURS: tuple[dict[str, Any], ...] = (
    {"backend": "int8"},
    {"backend": "int4"},
    {"backend": "kivi", "nbits": 4},
    {"backend": "kivi", "nbits": 2},
    {"backend": "float8"},
)
"""Caches of ours that need no artifact."""
COMPARISON: tuple[dict[str, Any], ...] = (
    *OURS,
    {"backend": "fp8"},
    {"backend": "quanto", "nbits": 4},
    # transformers' default axis is quanto's; its documentation recommends axis 1 for hqq
    {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1},
)
"""Caches compared where none are named: ours, and transformers' own."""

_ModelOptions = TypeVar("_ModelOptions", bound="ModelOptions")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """What every evaluation of a model is told.

    Args:
        model (`str`): Path or hub id.
        cache_config (`Sequence[dict]`): The caches to measure, beside the dense one.
        dtype (`str`): `"auto"` (the checkpoint's) or one of `DTYPES`.
        revision (`str`, *optional*): Of the model on the hub.
        trust_remote_code (`bool`): Run the code that comes with the model.
        attn_implementation (`str`, *optional*): As for `from_pretrained`.
        device_map (`str`, *optional*): `"auto"` spreads the model over the devices of one process.
        tp_plan (`str`, *optional*): `"auto"` spreads it over the processes of `torchrun`.
        threads (`int`, *optional*): CPU threads; torch's choice by default.
    """

    model: str
    cache_config: Sequence[dict[str, Any]] = field(default=COMPARISON)
    dtype: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    device_map: str | None = None
    tp_plan: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        check_model(self.model, self.revision)
        check_choice("dtype", self.dtype, ["auto", *DTYPES])
        if self.threads is not None:
            check_count("threads", self.threads, most=MOST_THREADS)
        if self.tp_plan is not None:
            check_choice("tp_plan", self.tp_plan, ["auto"])
        if self.tp_plan is not None and self.device_map is not None:
            raise ValueError(
                "--device_map spreads a model over the devices of one process and --tp_plan over processes; "
                f"they exclude each other, got {self.device_map!r} and {self.tp_plan!r}."
            )

    @classmethod
    def from_dict(cls: type[_ModelOptions], options: Mapping[str, Any]) -> _ModelOptions:
        """Build from plain values, as they come from a YAML file or the command line.

        Raises:
            ValueError: If no model is named, on an unknown option or a wrong value.
        """
        if not options.get("model"):
            raise ValueError("--model must name the model to evaluate, a path or a hub id.")
        return super().from_dict(options)

    @property
    def torch_dtype(self) -> str:
        """Name of the dtype for `from_pretrained`."""
        return DTYPES.get(self.dtype, "auto")
