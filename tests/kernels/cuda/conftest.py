"""What the tests of the CUDA kernels share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache_plugins.kernels import cuda_loader
from kvcache_plugins.kernels.cuda_toolkit import Toolkit
from tests.kernels.cuda import emulation, kept


@pytest.fixture(autouse=True)
def _without_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are not tried in a process of their own first."""
    monkeypatch.setenv("KVCACHE_CUDA_KERNELS", "1")


@pytest.fixture(scope="session")
def builds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels built for a machine without a GPU are kept, if anything is."""
    return kept.folder(request.config, "emulated_cuda") or tmp_path_factory.mktemp("emulated_cuda")


@pytest.fixture(scope="session")
def emulated(builds: Path) -> Path:
    """The kernels as the emulated GPU runs them, built once."""
    library = emulation.build(emulation.SOURCES, builds)
    emulation.load(library)
    return library


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine without a GPU that builds into an empty cache; returns what torch was told to build for."""
    from torch.utils import cpp_extension

    told: list[str] = []

    def build(*, name: str, build_directory: str, **options: Any) -> None:
        told.append(os.environ["TORCH_CUDA_ARCH_LIST"])
        (Path(build_directory) / f"{name}.so").write_bytes(b"machine code")

    monkeypatch.setenv("KVCACHE_KERNEL_CACHE", str(tmp_path))
    for name in ("KVCACHE_CUDA_KERNELS", "KVCACHE_NO_BUILD"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"_path": None, "_failure": None, "_checked": set(), "_faults": {}}.items():
        monkeypatch.setattr(cuda_loader, name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cuda_loader, "find_toolkit", lambda: Toolkit("nvcc", "release 13.0, V13.0.48", None))
    monkeypatch.setattr(cuda_loader, "find_ninja", lambda: "ninja")
    monkeypatch.setattr(cpp_extension, "load", build)
    return told
