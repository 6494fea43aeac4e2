"""Systems that are not POSIX, as Windows: what a user does first, without what Python has on POSIX only."""

from __future__ import annotations

import json
import mmap
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from kvcache_plugins import errors
from kvcache_plugins.kernels import compiler, cuda_loader, loader, verdicts
from kvcache_plugins.runs import memory

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "models" / "tiny-llama-books"

_USER = """
import importlib.abc, json, os, pkgutil, subprocess, sys

import psutil, torch  # what they themselves need of POSIX here, they need not there

MISSING = {"fcntl", "grp", "pwd", "resource"}


class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing())
for name in MISSING:
    sys.modules.pop(name, None)
for name in "geteuid getuid getgid getpgid killpg mkfifo sched_getaffinity setsid sysconf uname".split():
    delattr(os, name)

import kvcache_plugins
from kvcache_plugins import cli
from kvcache_plugins.evaluation.speed.generation import worker as generation_worker

for module in pkgutil.walk_packages(kvcache_plugins.__path__, "kvcache_plugins."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
model, text, output = sys.argv[1:]
options = "--dataset text --context_length 384 --prefill_length 256 --max_windows 1 --threads 1".split()
files = ["--model", model, "--text_files", text, "--output", output]
status = cli.main(["eval", "perplexity", *options, *files, "--cache_config", '{"backend": "int8"}'])
answer = generation_worker.measure(
    {"model": model, "preset": None, "num_layers": None, "compile": None, "dtype": "float32",
     "device": "cpu", "threads": 1, "cache_config": {"backend": "int8"}, "length": 300, "batch_size": 1,
     "max_new_tokens": 8}
)
print(json.dumps([status, answer["peak_memory_bytes"] >= answer["memory_before_bytes"] > 0]))
"""


@pytest.mark.in_depth
def test_evaluation_and_benchmarks_need_nothing_of_posix(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The rain fell in torrents, and the old captain went on. " * 200, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", _USER, str(MODEL), str(text), str(tmp_path / "output")],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [0, True]
    (dense, packed) = json.loads((tmp_path / "output" / "results.json").read_text())["results"]
    assert dense["perplexity"] > 1 and packed["perplexity"] == pytest.approx(dense["perplexity"], rel=0.01)


def test_kernels_are_not_built_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(loader, "_library", None)
    monkeypatch.setattr(loader, "_failure", None)
    monkeypatch.setattr(compiler, "find_compiler", lambda: compiler.Compiler("g++.exe", "g++.exe (14.2)"))
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    reason = "kernels are built on Linux and macOS only."
    assert (loader.status().state, loader.status().reason) == ("unavailable", reason)
    with pytest.raises(errors.KernelUnavailableError, match=reason):
        loader.build(force=True)
    assert cuda_loader._why_not_buildable() == reason


def test_verdicts_lie_only_beside_the_build_where_owners_are_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(verdicts, "os", SimpleNamespace(name="nt", getpid=lambda: 7))
    verdict = verdicts.Verdict("a GPU", None, is_final=True)
    beside = verdicts.VerdictFile(tmp_path / "cuda-0.so", "1a")
    beside.write(verdict)
    assert beside.read(0.0) == verdict
    nowhere = verdicts.VerdictFile(tmp_path / "not there" / "cuda-0.so", "1a")
    nowhere.write(verdict)
    assert nowhere.read(0.0) is None and "can be kept in none of" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["cuda-0.1a.trial"]


def test_memory_of_the_machine_and_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    before, size = memory.resident_bytes(), 256 * 1024**2
    # not of an allocator, which may have as much left of earlier tests
    with mmap.mmap(-1, size) as block:
        for start in range(0, size, 4096):
            block[start] = 1
        held = memory.resident_bytes()
    assert 0.9 * size < held - before < 1.5 * size
    assert memory.peak_resident_bytes() >= 0.95 * held
    assert held < memory.machine_memory()
    counts = SimpleNamespace(peak_wset=1234)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: counts))
    monkeypatch.setattr(memory.sys, "platform", "win32")
    assert memory.peak_resident_bytes() == 1234
