"""GPUs of Apple played by main memory: what torch cannot do there fails here as well.

`install` gives a torch without Metal tensors of the MPS device type (`simulated_device.cpp`) that refuse fp64
and float8, and every operator of which torch's own list (`native_functions.yaml`, which it brings along) says
that Metal has none. Nothing is undone, so it is for a process of its own. As a plugin of pytest,

    KVCACHE_SIMULATION_DEFAULT=1 python -m pytest -p tests.kernels.apple.simulated_gpu FILE

makes tensors on such a GPU where nothing else is said. It shows that what runs has its operators and dtypes
there; neither what they compute nor how fast.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
from torchgen.gen import get_grouped_native_functions, parse_native_yaml
from torchgen.model import DispatchKey, NativeFunctionsGroup

from kvcache_plugins.kernels import compiler
from tests.kernels.cuda import kept, simulated_device

_OTHERWISE = ("aten::scaled_dot_product_attention", "aten::convolution_overrideable")
"""Operators that Metal has by other names."""
_installed: list[ctypes.CDLL] = []

pytest_collection_modifyitems = simulated_device.pytest_collection_modifyitems


def operators() -> set[str]:
    """Names of the operators that torch implements for Metal, with their overloads."""
    folder = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"
    parsed = parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
    metal = parsed.backend_indices[DispatchKey.MPS]
    found = set(_OTHERWISE)
    for entry in get_grouped_native_functions(parsed.native_functions):
        variants = list(entry.functions()) if isinstance(entry, NativeFunctionsGroup) else [entry]
        if isinstance(entry, NativeFunctionsGroup) and entry.structured:  # one implementation serves all
            served = variants if metal.has_kernel(entry.out) else []
        else:
            served = [variant for variant in variants if metal.has_kernel(variant)]
        found |= {f"aten::{variant.func.name}" for variant in served}
    return found


def install(folder: Path | None = None) -> None:
    """Make the GPUs those of this process."""
    if _installed:
        return
    if torch.backends.mps.is_built() or torch.version.cuda is not None:
        raise RuntimeError("simulated GPUs need a torch without any")
    folder = folder or Path(tempfile.mkdtemp(prefix="kvcache-simulation-"))
    library = ctypes.CDLL(str(simulated_device.build_devices(folder)))
    library.kvcache_simulate(True)
    library.kvcache_simulate_only("\n".join(sorted(operators())).encode())
    _installed.append(library)
    torch.backends.mps.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("mps")
    for name in ("synchronize", "empty_cache"):
        setattr(torch.accelerator, name, lambda device=None: None)
    torch.Generator = simulated_device._Generator  # type: ignore[misc]
    torch.UntypedStorage.clone = simulated_device._cloned  # type: ignore[method-assign]
    torch.Event = _Event  # type: ignore[misc]


class _Event(simulated_device._Event):
    """A moment, for whoever asks whether it has passed."""

    def __init__(self, device: Any = None, **options: Any) -> None:
        super().__init__()

    def query(self) -> bool:
        return True


def pytest_configure(config: pytest.Config) -> None:
    if compiler.find_compiler() is None:
        raise pytest.UsageError("simulated GPUs need a C++ compiler")
    given = os.environ.get(simulated_device._FOLDER)
    install(Path(given) if given else kept.folder(config, "emulated_cuda"))
    if os.environ.get(simulated_device._DEFAULT) == "1":
        torch.set_default_device("mps")
