"""The first run of the CUDA kernels on a GPU, in a process of its own: verdicts, and what is remembered."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest
import torch

from kvcache_plugins.errors import KernelUnavailableError
from kvcache_plugins.kernels import cuda_check, cuda_loader, cuda_trial

DEVICE = torch.device("cuda", 1)
DEVIATION = "2 bit, 64 tokens: attention deviates by 0.3"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A build that is a file, and a GPU that is a name."""
    properties = types.SimpleNamespace(name="H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    path = tmp_path / "cuda-0.so"
    path.write_bytes(b"machine code")
    return path


def play(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> Path:
    """Let a shell script stand in for Python; returns the file to which it writes how it was called."""
    python, calls = folder / "python", folder / "calls"
    python.write_text(f'#!/bin/bash\necho "$@" >> {calls}\n{script}\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    return calls


def test_a_pass_is_remembered(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = play(monkeypatch, library.parent, "exit 0")
    assert cuda_trial.find_fault(library, DEVICE) is None
    assert cuda_trial.find_fault(library, DEVICE) is None
    assert calls.read_text() == f"-m kvcache_plugins.kernels.cuda_trial {library} 1\n"
    assert "H200" in cuda_trial.record(library, DEVICE).read_text()


def test_another_gpu_or_driver_is_another_trial(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = play(monkeypatch, library.parent, "exit 0")
    records = {cuda_trial.record(library, DEVICE)}
    assert cuda_trial.find_fault(library, DEVICE) is None
    monkeypatch.setattr(cuda_trial, "_driver", lambda: "580.65")
    records.add(cuda_trial.record(library, DEVICE))
    other = types.SimpleNamespace(name="A100", major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: other)
    records.add(cuda_trial.record(library, DEVICE))
    assert cuda_trial.find_fault(library, DEVICE) is None
    assert len(records) == 3
    assert len(calls.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f"echo '{DEVIATION}'; exit 3", DEVIATION),
        ("echo CUDA error: an illegal memory access >&2; exit 1", "ended with status 1: CUDA error: an ill"),
        ("kill -SEGV $$", "ended with status -11"),
        ("exec sleep 60", "had not ended after 0.5 s"),
    ],
    ids=["deviates", "raises", "crashes", "hangs"],
)
def test_a_fault_is_told_and_not_remembered(
    script: str, said: str, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = play(monkeypatch, library.parent, script)
    monkeypatch.setattr(cuda_trial, "_SECONDS", 0.5 if "60" in script else 60)
    for _ in range(2):
        fault = cuda_trial.find_fault(library, DEVICE)
        assert fault is not None and said in fault
    assert len(calls.read_text().splitlines()) == 2
    assert not cuda_trial.record(library, DEVICE).exists()


def test_no_process_can_be_started(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(library.parent / "none"))
    assert "no process could be started" in (cuda_trial.find_fault(library, DEVICE) or "")


def test_a_directory_of_somebody_else(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of an image: what cannot be remembered is tried by every process."""
    calls = play(monkeypatch, library.parent, "exit 0")

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(cuda_trial, "file_lock", refuse)
    monkeypatch.setattr(Path, "write_text", lambda self, text, **options: refuse(self))
    assert cuda_trial.find_fault(library, DEVICE) is None
    assert cuda_trial.find_fault(library, DEVICE) is None
    assert len(calls.read_text().splitlines()) == 2


def test_the_process_finds_this_package(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = play(monkeypatch, library.parent, f'echo "$PYTHONPATH" >> {library.parent}/path')
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    assert cuda_trial.find_fault(library, DEVICE) is None
    root = Path(cuda_trial.__file__).parents[2]
    assert (calls.parent / "path").read_text() == f"{root}{os.pathsep}/somewhere\n"


# ---- what the loader makes of it


@pytest.fixture
def built(library: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The build, as the one this process has loaded; nothing has been checked."""
    monkeypatch.delenv("KVCACHE_CUDA_KERNELS", raising=False)
    monkeypatch.setattr(cuda_loader, "_path", library)
    monkeypatch.setattr(cuda_loader, "_failure", None)
    monkeypatch.setattr(cuda_loader, "_checked", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda_check, "find_deviation", lambda device: None)
    return library


def test_kernels_that_passed_serve(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = play(monkeypatch, built.parent, "exit 0")
    assert cuda_loader.try_load(DEVICE)
    assert calls.exists()
    assert cuda_loader.status().state == "loaded"


def test_kernels_that_failed_do_not_reach_this_process(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def touch(device: torch.device) -> None:
        raise AssertionError("the process must not touch kernels that failed")

    monkeypatch.setattr(cuda_check, "find_deviation", touch)
    play(monkeypatch, built.parent, "kill -SEGV $$")
    with pytest.warns(RuntimeWarning, match=r"plain torch.* failed their check on cuda:1: .*status -11"):
        assert not cuda_loader.try_load(DEVICE)
    assert cuda_loader.status().state == "unavailable"
    with pytest.raises(KernelUnavailableError, match="status -11"):
        cuda_loader.check(DEVICE)


def test_switches(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = play(monkeypatch, built.parent, "exit 3")
    monkeypatch.setenv("KVCACHE_CUDA_KERNELS", "0")
    assert not cuda_loader.try_load(DEVICE)
    monkeypatch.setenv("KVCACHE_CUDA_KERNELS", "1")
    assert cuda_loader.try_load(DEVICE)
    assert not calls.exists()


def test_switched_off_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_loader, "_failure", None)
    monkeypatch.setattr(cuda_loader, "_path", None)
    monkeypatch.setenv("KVCACHE_CUDA_KERNELS", "0")
    assert cuda_loader.status().reason == "KVCACHE_CUDA_KERNELS=0 leaves them out."
