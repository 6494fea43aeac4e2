"""What the tests of the CUDA kernels share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.cuda import emulation, kept


@pytest.fixture(autouse=True)
def _without_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are not tried in a process of their own first."""
    monkeypatch.setenv("KVCACHE_CUDA_KERNELS", "1")


@pytest.fixture(scope="session")
def builds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels built for a machine without a GPU are kept: in pytest's cache, if there is one."""
    return kept.folder(request.config, "emulated_cuda") or tmp_path_factory.mktemp("emulated_cuda")


@pytest.fixture(scope="session")
def emulated(builds: Path) -> Path:
    """The kernels as the emulated GPU runs them, built once."""
    library = emulation.build(emulation.SOURCES, builds)
    emulation.load(library)
    return library
