"""Which kernel reads a layer's packed codes."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ..errors import KernelUnavailableError
from . import cuda_loader, loader

__all__ = ["UNREADABLE", "native_is_unavailable", "select_kernel", "why_no_kernels"]

UNREADABLE = "no native kernel reads these codecs or head sizes"
"""Why a layer reports `"torch"` whose codes none of the kernels that are there can read."""


def select_kernel(requested: str, backend: str, devices: Collection[torch.device] = ()) -> str:
    """Return what a layer reports as its kernel until it has attended for the first time.

    `"native"` is met by the CUDA kernels where the model is on a GPU, or a part of it, and by the CPU library
    elsewhere. Where that is not known (a configuration without a model, and a machine with a GPU) nothing is
    asked for here, and attention raises where there is no kernel.

    Args:
        requested (`str`): `"auto"` (native where possible, built at the first decode), `"torch"` or
            `"native"`.
        backend (`str`): Registry name.
        devices (`Collection[torch.device]`): Where the model's parameters are; none if there is no model.

    Raises:
        KernelUnavailableError: If `"native"` is asked for and there are no kernels for a device.
    """
    if requested != "native":
        return "torch"
    kinds = {device.type for device in devices} - {"meta"}  # that of weights which are loaded when needed
    try:
        if "cuda" in kinds:  # to which weights are moved that wait elsewhere for their turn
            for device in sorted((device for device in devices if device.type == "cuda"), key=str):
                cuda_loader.check(device)
            return "cuda"
        if kinds - {"cpu"}:
            raise KernelUnavailableError(f"there are none for {', '.join(sorted(kinds - {'cpu'}))}.")
        if kinds or not (devices or torch.cuda.is_available()):
            loader.build()
            return "cpu"
    except KernelUnavailableError as error:
        raise native_is_unavailable(f"the backend {backend!r}", str(error)) from error
    return "torch"


def why_no_kernels(device: torch.device) -> str | None:
    """Return why there are no kernels for a CPU or a GPU, which are built at the first call; else `None`."""
    if device.type == "cpu":
        return None if loader.try_load() else f"there are no CPU kernels: {loader.status().reason}"
    is_there = cuda_loader.try_load(device)
    return None if is_there else f"there are no CUDA kernels: {cuda_loader.why_not(device)}"


def native_is_unavailable(what: str, reason: str) -> KernelUnavailableError:
    """The error where `kernel="native"` cannot be met.

    Args:
        what (`str`): What no native kernel serves.
        reason (`str`): Why not.
    """
    return KernelUnavailableError(
        f"kernel='native' was given, but no native kernel serves {what} here; kernel='auto' and "
        f"kernel='torch' work without. Reason: {reason}"
    )
