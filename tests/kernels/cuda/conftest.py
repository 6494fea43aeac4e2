"""What the tests of the CUDA kernels share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.cuda import emulation


@pytest.fixture(autouse=True)
def _without_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are not tried in a process of their own first."""
    monkeypatch.setenv("KVCACHE_CUDA_KERNELS", "1")


@pytest.fixture(scope="session")
def emulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels as the emulated GPU runs them, built once and kept in pytest's cache, if there is one."""
    cache = getattr(request.config, "cache", None)
    folder = cache.mkdir("emulated_cuda") if cache is not None else tmp_path_factory.mktemp("emulated_cuda")
    library = emulation.build(emulation.SOURCES, folder)
    emulation.load(library)
    return library
