"""What is written for GPUs, run on simulated ones: the tests marked `cuda`, and the conformance suite there.

Each in a process of its own, with a few parameter sets of every test; CONTRIBUTING says how to run them all.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kvcache_plugins.kernels import compiler
from tests.kernels.cuda import plugged, simulated_device

ROOT = Path(__file__).parents[3]
DEVICE_TESTS = (
    "tests/attention/test_unpacked.py",
    "tests/evaluation/test_benchmark_device.py",
    "tests/kernels/cuda/test_device.py",
    "tests/kernels/cuda/test_waiting.py",
    "tests/models/test_generation_on_a_gpu.py",
    "tests/models/test_generation_on_two_gpus.py",
    "tests/retaining/test_heads.py",
)
# What is run: arguments of pytest, the environment, and how many tests pass at least.
RUNS: dict[str, tuple[list[str], dict[str, str], int]] = {
    "device": (["-m", "cuda", *DEVICE_TESTS], {"KVCACHE_SIMULATION_MOST": "2"}, 40),
    "conformance": (
        ["tests/backends/test_conformance.py"],
        {"KVCACHE_SIMULATION_MOST": "4", "KVCACHE_SIMULATION_DEFAULT": "1"},
        80,
    ),
}


def test_every_device_test_is_run() -> None:
    marker = re.compile(r"^(@pytest\.mark\.cuda|pytestmark = pytest\.mark\.cuda)", re.MULTILINE)
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if marker.search(path.read_text())}
    assert marked == {ROOT / path for path in DEVICE_TESTS}


@pytest.mark.begun_first
@pytest.mark.in_depth
@pytest.mark.skipif(torch.version.cuda is not None, reason="a torch with CUDA cannot be given other devices")
@pytest.mark.skipif(compiler.find_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", RUNS)
def test_on_simulated_devices(name: str, builds: Path) -> None:
    arguments, environment, least = RUNS[name]
    plugged.run(
        simulated_device.__name__, arguments, environment | {"KVCACHE_SIMULATION": str(builds)}, least
    )
