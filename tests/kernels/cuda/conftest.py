"""What the tests of the CUDA kernels share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.cuda import emulation


@pytest.fixture(autouse=True)
def _asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels serve only where they are asked for."""
    monkeypatch.setenv("KVCACHE_CUDA_KERNELS", "1")


@pytest.fixture(scope="session")
def emulated(request: pytest.FixtureRequest) -> Path:
    """The kernels as the emulated GPU runs them, built once and kept in pytest's cache."""
    library = emulation.build(emulation.SOURCES, request.config.cache.mkdir("emulated_cuda"))
    emulation.load(library)
    return library
