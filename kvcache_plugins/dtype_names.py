"""Names of the dtypes that a model computes in, as commands, files of options and results say them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["DTYPES", "floating_dtype"]

DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "fp32": "float32",
    "float32": "float32",
}
"""Accepted names of dtypes, and torch's."""


def floating_dtype(name: str, given: Any) -> torch.dtype:
    """Return a floating-point dtype, which is given as such or by any name: `"bf16"`, `"torch.bfloat16"`.

    Args:
        name (`str`): Of the option, for the message.
        given (`torch.dtype | str`): What was given.

    Raises:
        ValueError: Naming the option and what was given.
    """
    import torch

    found = given
    if isinstance(given, str):
        found = getattr(torch, DTYPES.get(given, given).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(
            f"{name} must be a floating-point dtype such as 'bf16' and torch.float32, got {given!r}."
        )
    return found
