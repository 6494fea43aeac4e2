"""Packed caches on GPUs that have no kernels here, no fp64 and no float8: simulated ones of Apple."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvcache_plugins.kernels import compiler
from tests.kernels.apple import simulated_gpu
from tests.kernels.cuda import kept, plugged

pytestmark = [
    pytest.mark.skipif(
        torch.version.cuda is not None or torch.backends.mps.is_built(),
        reason="a torch for GPUs cannot be given others",
    ),
    pytest.mark.skipif(compiler.find_compiler() is None, reason="no C++ compiler"),
]
# What is run, and how many tests pass at least: all backends encode, decode, attend, evict and generate.
CONFORMANCE = "error_is_small or crop_keeps or pads_do_not_touch or saved_and_loaded"
RUNS: dict[str, tuple[list[str], int]] = {
    "conformance": (["tests/backends/test_conformance.py", "-k", CONFORMANCE], 340),
    "latent": (["tests/models/test_latent_models.py", "-k", "test_evicting_by_attention"], 6),
}


@pytest.fixture(scope="module")
def builds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the devices are kept: in pytest's cache, if there is one."""
    return kept.folder(request.config, "simulated_apple") or tmp_path_factory.mktemp("simulated_apple")


def test_metal_lacks_what_it_lacks() -> None:
    have = simulated_gpu.operators()
    assert {"aten::mm", "aten::add.Tensor", "aten::add_.Tensor", "aten::topk", "aten::cumsum.out"} <= have
    assert have.isdisjoint({"aten::frexp.Tensor_out", "aten::linalg_eig"})


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_on_simulated_gpus(name: str, builds: Path) -> None:
    arguments, least = RUNS[name]
    environment = {"KVCACHE_SIMULATION": str(builds), "KVCACHE_SIMULATION_DEFAULT": "1"}
    plugged.run(simulated_gpu.__name__, arguments, environment, least)
