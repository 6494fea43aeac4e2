"""Where a benchmark runs: the option `--device`, and what the results say of it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ...errors import KernelUnavailableError
from ...kernels import cuda_loader, loader
from ...kernels.builds import KernelStatus
from ...runs.memory import machine_memory

__all__ = ["check_fits", "choose_device", "device_settings", "machine_bytes"]


def choose_device(given: str) -> torch.device:
    """Return the device of an option.

    Args:
        given (`str`): `"cpu"`, `"cuda"` (the first GPU), `"cuda:N"`, or `"auto"`: the first GPU where torch
            sees one, the CPU elsewhere. Whether CUDA kernels serve there does not matter to `auto`: without
            them a GPU runs plain torch, which the results say.

    Raises:
        ValueError: If torch does not see that GPU.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if given == "auto":
        return torch.device("cuda", 0) if count else torch.device("cpu")
    device = torch.device(given)
    if device.type != "cuda":
        return device
    index = device.index or 0
    if index >= count:
        why = " (this build of torch has no CUDA)" if torch.version.cuda is None else ""
        raise ValueError(f"--device {given!r} is not there: torch sees {count} GPUs{why}.")
    return torch.device("cuda", index)


def check_fits(nbytes: int, device: torch.device, what: str) -> None:
    """Check that a device's whole memory could hold something, before any work is lost.

    Args:
        nbytes (`int`): What it takes.
        device (`torch.device`): The device.
        what (`str`): The options and what they ask for, for the message.

    Raises:
        ValueError: If it cannot; the message says how much there is.
    """
    there = machine_bytes(device)
    if nbytes > there:
        raise ValueError(f"{what} takes {nbytes / 1e9:,.1f} GB; {device} has {there / 1e9:,.1f} GB in all.")


def machine_bytes(device: torch.device) -> int:
    """Return the memory of a device: a GPU's own, or the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine_memory()


def device_settings(given: str, device: torch.device) -> dict[str, Any]:
    """Say for a result file where it was measured.

    Args:
        given (`str`): The option.
        device (`torch.device`): What it was understood as.

    Returns:
        `dict`: `device`, `requested_device`, and what this package's kernels are there: on a CPU
        `cpu_kernels`, the instruction set they use, on a GPU `cuda_kernels`, their state; where they do not
        serve, their state with the reason.
    """
    settings: dict[str, Any] = {"device": str(device), "requested_device": given}
    if device.type == "cuda":
        settings["cuda_kernels"] = _state(cuda_loader.status())
    elif device.type == "cpu":
        status = _status_once_loaded()
        settings["cpu_kernels"] = status.instruction_set or _state(status)
    return settings


def _status_once_loaded() -> KernelStatus:
    """The state of the CPU kernels, of which other processes may have made a build; none is made."""
    if loader.status().state == "cached":
        with contextlib.suppress(KernelUnavailableError):  # which the state tells
            loader.build()
    return loader.status()


def _state(status: KernelStatus) -> str:
    return status.state + (f": {status.reason}" if status.reason else "")
