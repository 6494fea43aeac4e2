"""The examples do what they say."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache_plugins import list_backends, registry
from kvcache_plugins.testing import BackendConformance
from tests.launching import run_script

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def registered() -> Iterator[None]:
    spec = importlib.util.spec_from_file_location("add_a_backend", EXAMPLES / "add_a_backend.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert "mulaw" in list_backends()
    yield
    del registry._registered["mulaw"]  # the registry is for the whole process; other tests go over all of it


@pytest.mark.usefixtures("registered")
class TestAddABackend(BackendConformance):
    """The example's backend passes the suite every backend passes."""

    @pytest.fixture
    def cache_config(self) -> dict[str, Any]:
        return {"backend": "mulaw", "residual_length": 16}


def test_add_a_backend_runs_as_a_script() -> None:
    done = run_script(str(EXAMPLES / "add_a_backend.py"))
    assert done.returncode == 0, done.stderr
    assert "backend               mulaw" in done.stdout
    assert "bits per value" in done.stdout
