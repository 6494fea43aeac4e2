"""`scripts/check_cuda.sh` with a Python, a sanitizer and a GPU that are played: what it runs and what not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.kernels.cuda.test_simulated_device import DEVICE_TESTS

ROOT = Path(__file__).parents[3]
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
STAGES = ("build", "attention", "heads", "generate", "compiled", "tests", "sanitize")
PYTHON = """#!/bin/bash
echo "$*" | head -n 2 | tr '\\n' ' ' >> "$PLAYED/calls"
echo >> "$PLAYED/calls"
case "$*" in
  *try_load*) echo "2 bit: deviates"; exit "$PLAYED_STATUS" ;;
  *cuda_loader.build*) echo "$PLAYED/calls" ;;
esac
"""
SANITIZER = """#!/bin/bash
echo "sanitizer $*" >> "$PLAYED/calls"
for _ in {1..200}; do
  [ "$(grep -c ^sanitizer "$PLAYED/calls")" -ge "$PLAYED_TOOLS" ] && break
  sleep 0.05
done
[ "$(grep -c ^sanitizer "$PLAYED/calls")" -ge "$PLAYED_TOOLS" ] || exit 8 # it was alone
case "$*" in *"$PLAYED_FAULT"*) echo "1 error"; exit 9 ;; esac
"""

pytestmark = pytest.mark.skipif(os.name != "posix", reason="a script of the shell")


def run(
    tmp_path: Path, *stages: str, status: int = 0, tools: int = 4, fault: str = "none"
) -> subprocess.CompletedProcess[str]:
    for name, text in {"python": PYTHON, "compute-sanitizer": SANITIZER, "nvidia-smi": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "PYTHON": str(tmp_path / "python"),
        "OUT": str(tmp_path / "out"),
        "CUDA_HOME": str(tmp_path),
        "PLAYED": str(tmp_path),
        "PLAYED_STATUS": str(status),
        "PLAYED_TOOLS": str(tools),
        "PLAYED_FAULT": fault,
    }
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "check_cuda.sh"), *stages],
        cwd=ROOT, capture_output=True, text=True, env=environment,
    )  # fmt: skip


def calls(tmp_path: Path, word: str) -> list[str]:
    return [line for line in (tmp_path / "calls").read_text().splitlines() if word in line]


def test_an_unknown_stage_is_told_the_known_ones(tmp_path: Path) -> None:
    done = run(tmp_path, "bench")
    assert done.returncode == 2
    assert all(stage in done.stderr for stage in ("bench", *STAGES))


def test_every_stage(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    layers = ("attention_1", "attention_8", "heads_llama3.2-1b", "heads_gemma2-9b")
    assert [
        f"--output {tmp_path}/out/{name} " in c
        for name, c in zip(layers, calls(tmp_path, "benchmark.py attention"), strict=True)
    ] == [True] * 4
    assert [
        (f"--output {tmp_path}/out/{name} " in c, "--compile" in c)
        for name, c in zip(("generate", "compiled"), calls(tmp_path, "benchmark.py generate"), strict=True)
    ] == [(True, False), (True, True)]
    (tests,) = calls(tmp_path, "-m pytest -m cuda")
    assert "-n 4" in tests
    assert sorted(word for word in tests.split() if word.startswith("tests/")) == sorted(DEVICE_TESTS)
    assert not calls(tmp_path, "kvcache_unchecked")
    assert sorted(line.split("--tool ")[1].split()[0] for line in calls(tmp_path, "sanitizer")) == sorted(
        TOOLS
    )
    assert "== tests: status 0" in (tmp_path / "out" / "check.log").read_text()


def test_the_sanitizers_run_at_once_and_are_told_in_order(tmp_path: Path) -> None:
    done = run(tmp_path, "sanitize", fault="racecheck")
    assert done.returncode == 1
    for told in (done.stdout, (tmp_path / "out" / "check.log").read_text()):
        lines = [line.split(", ")[0] for line in told.splitlines() if "check: status" in line]
        assert lines == [f"== {tool}: status {9 if tool == 'racecheck' else 0}" for tool in TOOLS]
        assert told.count("1 error") == 1


def test_formats_that_are_right_are_measured_beside_some_that_deviate(tmp_path: Path) -> None:
    done = run(tmp_path, "build", "attention", "generate", "tests", status=3)
    assert done.returncode == 1
    assert "2 bit: deviates" in done.stdout
    assert len(calls(tmp_path, "-m kvcache_unchecked scripts/benchmark.py attention")) == 2
    assert "-p kvcache_unchecked" in calls(tmp_path, "-m pytest")[0]
    assert not calls(tmp_path, "benchmark.py generate")
    assert "generate: not run, as the kernels deviate" in done.stdout


def test_a_kernel_that_breaks_is_looked_at_and_nothing_else_is_run(tmp_path: Path) -> None:
    done = run(tmp_path, "build", "attention", "generate", "tests", status=1, tools=1)
    assert done.returncode == 1
    assert ["--tool memcheck" in line for line in calls(tmp_path, "sanitizer")] == [True]
    assert not calls(tmp_path, "benchmark.py") + calls(tmp_path, "-m pytest")
    assert done.stdout.count("not run, as the kernels are broken") == 3


def test_nothing_is_run_or_built_again_where_nothing_was_built(tmp_path: Path) -> None:
    done = run(tmp_path, *STAGES, status=4)
    assert done.returncode == 1
    assert len(calls(tmp_path, "cuda_loader.build") + calls(tmp_path, "try_load")) <= 1
    assert not calls(tmp_path, "sanitizer") + calls(tmp_path, "benchmark.py") + calls(tmp_path, "-m pytest")
    assert done.stdout.count("not run, as the kernels are missing") == len(STAGES) - 1


def test_no_stage_is_begun_without_time(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", "LIMIT=10 exec bash scripts/check_cuda.sh tests"],
        cwd=ROOT, capture_output=True, text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": "true", "OUT": str(tmp_path / "out")},
    )  # fmt: skip
    assert done.returncode == 1
    assert "== tests: no time left" in done.stdout
