"""Evaluations over several processes, and models spread over devices or processes: the same numbers.

The processes are started by `torchrun`, or as it starts them, and talk through gloo.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launching import run_script

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "models" / "tiny-llama-books"
KIVI = {"backend": "kivi", "residual_length": 32, "kernel": "torch"}
PERPLEXITY = ("--dataset", "pydoc", "--context_length", "72", "--prefill_length", "40", "--dtype", "fp32")


def torchrun(script: str, *arguments: str, processes: int) -> subprocess.CompletedProcess[str]:
    """As `run_script`."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*start, "--nproc_per_node", str(processes), str(ROOT / "scripts" / script), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def perplexity(
    output: Path,
    *arguments: str,
    processes: int = 1,
    launch: Callable[..., subprocess.CompletedProcess[str]] = run_script,
) -> dict[str, Any]:
    """Run the evaluation in so many processes and return its `results.json`."""
    caches = ("--model", str(MODEL), "--max_windows", "3", "--cache_config", json.dumps(KIVI))
    more = (*arguments, "--no_plots", "--output", str(output))
    done = launch("eval_perplexity.py", *caches, *PERPLEXITY, *more, processes=processes)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("numbers:") == 1, "one process, and only one, shows the results"
    document: dict[str, Any] = json.loads((output / "results.json").read_text(encoding="utf-8"))
    return document


def measured(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in document["results"]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return perplexity(tmp_path_factory.mktemp("alone"))


def test_two_processes_give_the_numbers_of_one_to_the_last_bit(alone: dict[str, Any], tmp_path: Path) -> None:
    document = perplexity(tmp_path, processes=2, launch=torchrun)
    assert (alone["settings"]["processes"], document["settings"]["processes"]) == (1, 2)
    assert measured(document) == measured(alone)
    assert document["results"][1]["kl_to_dense"] > 0
    assert not (tmp_path / "progress").exists()


def test_a_device_map_gives_the_same_numbers(alone: dict[str, Any], tmp_path: Path) -> None:
    document = perplexity(tmp_path, "--device_map", "auto")
    assert measured(document) == measured(alone)


def test_a_tensor_parallel_model_gives_the_same_numbers(alone: dict[str, Any], tmp_path: Path) -> None:
    document = perplexity(tmp_path, "--tp_plan", "auto", processes=2)
    assert document["settings"]["processes"] == 2
    for got, expected in zip(document["results"], alone["results"], strict=True):
        # Sums over heads are taken in another order, and a value on the edge between two codes may fall to
        # the other side.
        assert got["nll"] == pytest.approx(expected["nll"], abs=1e-3)
        assert got["packed_read_fraction"] == expected["packed_read_fraction"]
        assert got["tokens"] == expected["tokens"] == 96
        # each process holds the half of the heads
        assert got["kv_bytes"] == expected["kv_bytes"]
