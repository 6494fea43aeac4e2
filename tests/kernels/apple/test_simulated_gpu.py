"""Packed caches on GPUs that have no kernels here, no fp64 and no float8: simulated ones of Apple."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvcache_plugins.cli import main
from kvcache_plugins.kernels import compiler
from tests.kernels.apple import on_simulated_gpu, simulated_gpu
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
ROOT = Path(__file__).parents[3]
MODEL = str(ROOT / "examples" / "models" / "tiny-llama-books")
RUNS: dict[str, tuple[list[str], int]] = {
    "conformance": (["tests/backends/test_conformance.py", "-k", CONFORMANCE], 340),
    "latent": (["tests/models/test_latent_models.py", "-k", "test_evicting_by_attention"], 6),
}


@pytest.fixture(scope="module")
def builds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the devices are kept, if anything is."""
    return kept.folder(request.config, "emulated_cuda") or tmp_path_factory.mktemp("emulated_cuda")


def test_metal_lacks_what_it_lacks() -> None:
    have = simulated_gpu.operators()
    assert {"aten::mm", "aten::add.Tensor", "aten::add_.Tensor", "aten::topk", "aten::cumsum.out"} <= have
    assert have.isdisjoint({"aten::frexp.Tensor_out", "aten::linalg_eig"})


@pytest.mark.begun_first
@pytest.mark.in_depth
@pytest.mark.parametrize("name", RUNS)
def test_on_simulated_gpus(name: str, builds: Path) -> None:
    arguments, least = RUNS[name]
    environment = {"KVCACHE_SIMULATION": str(builds), "KVCACHE_SIMULATION_DEFAULT": "1"}
    plugged.run(simulated_gpu.__name__, arguments, environment, least)


def run(builds: Path, *arguments: str) -> None:
    """A command on the GPU, in a process of its own."""
    command = [sys.executable, "-m", on_simulated_gpu.__name__, str(builds), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-8000:]


@pytest.mark.in_depth
def test_perplexity_on_simulated_gpus(builds: Path, tmp_path: Path) -> None:
    options = [
        "--model",
        MODEL,
        "--dtype",
        "fp32",
        "--dataset",
        "text",
        "--text_files",
        str(ROOT / "README.md"),
    ]
    options += ["--context_length", "288", "--prefill_length", "256", "--max_windows", "1", "--no_plots"]
    options += ["--cache_config", '{"backend": "kivi", "nbits": 2, "kernel": "torch"}']

    def document(name: str) -> dict[str, Any]:
        return dict(json.loads((tmp_path / name / "results.json").read_text()))

    run(builds, "eval", "perplexity", *options, "--output", str(tmp_path / "gpu"))
    assert main(["eval", "perplexity", *options, "--output", str(tmp_path / "cpu")]) == 0
    gpu, cpu = document("gpu"), document("cpu")
    assert gpu["environment"]["device"] == cpu["environment"]["device"] + " (mps)"
    for there, here in zip(gpu["results"], cpu["results"], strict=True):
        for name in ("cache_config", "tokens", "kv_bytes"):
            assert there[name] == here[name]
        assert there["nll"] == pytest.approx(here["nll"], rel=1e-5)
        if here["cache_config"]["backend"] != "dense":
            assert there["kl_to_dense"] == pytest.approx(here["kl_to_dense"], rel=1e-3)


@pytest.mark.in_depth
def test_calibration_on_simulated_gpus(builds: Path, tmp_path: Path) -> None:
    """Without gradients, which the simulation does not have."""
    options = ["--model", MODEL, "--dtype", "fp32", "--text_files", str(ROOT / "README.md"), "--nbits", "4"]
    options += ["--num_samples", "2", "--sequence_length", "256", "--weight", "none"]
    run(builds, "calibrate", *options, "--output", str(tmp_path / "gpu"))
    assert main(["calibrate", *options, "--output", str(tmp_path / "cpu")]) == 0
    for name in ("kvquant.safetensors", "scales.safetensors"):
        there, here = load_file(tmp_path / "gpu" / name), load_file(tmp_path / "cpu" / name)
        torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-6)
