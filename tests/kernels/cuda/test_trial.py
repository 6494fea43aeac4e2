"""The first run of the CUDA kernels on a GPU, in a process of its own: verdicts, and what is remembered."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache_plugins.errors import KernelUnavailableError
from kvcache_plugins.kernels import cuda_check, cuda_loader, cuda_trial
from kvcache_plugins.kernels.verdicts import VerdictFile
from tests.kernels.cuda.test_verdicts import close

DEVICE = torch.device("cuda", 1)
DEVIATION = "2 bit, 64 tokens: attention deviates by 0.3"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A build that is a file, and a GPU that is a name."""
    gpu(monkeypatch, "H200")
    monkeypatch.setattr(cuda_trial, "_driver", lambda: "580")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    path = tmp_path / "cuda-0.so"
    path.write_bytes(b"machine code")
    return path


def gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    properties = types.SimpleNamespace(name=name, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def play(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> Path:
    """Let a shell script stand in for Python; returns the file to which it writes how it was called."""
    python, calls = folder / "python", folder / "calls"
    python.write_text(f'#!/bin/bash\necho "$3 $4" >> {calls}\n{script}\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    return calls


PASS = "echo begun; echo H200, capability 9.0, driver 580"


def test_a_pass_is_remembered(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = play(monkeypatch, library.parent, PASS)
    assert not cuda_trial.passed(library, DEVICE)
    assert cuda_trial.find_fault(library, DEVICE) is None
    assert cuda_trial.find_fault(library, DEVICE) is None
    assert cuda_trial.passed(library, DEVICE)
    assert calls.read_text() == f"{library} 1\n"


@pytest.mark.parametrize(("status", "said"), [(0, "for CUDA 13010"), (999, "unknown"), (None, "unknown")])
def test_the_driver_is_asked_where_the_system_tells_none(
    status: int | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> Any:
        if status is None:
            raise OSError(f"{name}: cannot open shared object file")

        def ask(version: Any) -> int:
            version._obj.value = 13010
            return status

        return types.SimpleNamespace(cuDriverGetVersion=ask)

    monkeypatch.setattr(cuda_trial.ctypes, "CDLL", load)
    monkeypatch.setattr(cuda_trial, "Path", lambda name: Path("/nowhere"))
    assert cuda_trial._driver() == said


def test_other_bytes_gpus_and_drivers_are_other_trials(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = play(monkeypatch, library.parent, PASS)
    assert cuda_trial.find_fault(library, DEVICE) is None
    library.write_bytes(b"other machine code")
    assert not cuda_trial.passed(library, DEVICE)
    assert cuda_trial.find_fault(library, DEVICE) is None
    monkeypatch.setattr(cuda_trial, "_driver", lambda: "590")
    assert not cuda_trial.passed(library, DEVICE)
    gpu(monkeypatch, "A100")
    fault = cuda_trial.find_fault(library, DEVICE)
    assert fault == "not they were tried, but H200, capability 9.0, driver 580"
    assert len(calls.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo CUDA error: an illegal memory access >&2; exit 1", "ended with status 1: CUDA error: an ill"),
        ("kill -SEGV $$", "ended with status -11"),
        ("echo CUDA out of memory >&2; exit 1", "`kvcache-plugins kernels build` tries them, while nothing"),
        ("printf '\\xff'; exit 4", "ended with status 4"),
        ("exit 0", "not they were tried, but nothing"),
        ("echo begun; exit 0", "not they were tried, but nothing"),
        ("exec sleep 60", "a process that was to try them had not begun after 1 s"),
    ],
)
def test_what_may_be_no_fault_of_the_kernels_is_tried_again(
    script: str, said: str, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = play(monkeypatch, library.parent, script)
    monkeypatch.setattr(cuda_trial, "_SECONDS", 1 if "sleep" in script else 3)
    for _ in range(2):
        fault = cuda_trial.find_fault(library, DEVICE)
        assert fault is not None and said in fault
    assert len(calls.read_text().splitlines()) == 2
    assert not cuda_trial.passed(library, DEVICE)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f"echo begun; echo '{DEVIATION}'; exit 3", DEVIATION),
        ("exit 3", "they deviate, and nothing says how"),
    ],
    ids=["deviates", "says nothing"],
)
def test_a_fault_is_remembered(
    script: str, said: str, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = play(monkeypatch, library.parent, script)
    for _ in range(2):
        fault = cuda_trial.find_fault(library, DEVICE)
        assert fault is not None and said in fault
    assert len(calls.read_text().splitlines()) == 1


def test_what_has_not_ended_is_tried_once_more(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the driver first had to translate the kernels, which it goes on with."""
    once = f'[ "$(wc -l < {library.parent}/calls)" -gt 1 ] || {{ echo begun; exec sleep 60; }}; {PASS}'
    play(monkeypatch, library.parent, once)
    monkeypatch.setattr(cuda_trial, "_SECONDS", 2)
    fault = cuda_trial.find_fault(library, DEVICE)
    assert fault is not None and "not ended after 2 s in a process of their own; the next process" in fault
    assert not cuda_trial.passed(library, DEVICE)
    assert cuda_trial.find_fault(library, DEVICE) is None
    assert cuda_trial.passed(library, DEVICE)


@pytest.mark.parametrize(
    "earlier",
    [None, {"device": "H200", "fault": "busy", "is_final": False}],
    ids=["no verdict", "a verdict that does not tell"],
)
def test_what_never_ends_is_found_out_twice(
    earlier: dict[str, Any] | None, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    def never(command: Any, timeout: float, **options: Any) -> None:
        given.append(timeout)
        raise subprocess.TimeoutExpired(command, timeout, output=b"begun\n")

    monkeypatch.setattr(subprocess, "run", never)
    if earlier is not None:
        file = library.parent / cuda_trial._verdict_file(library, DEVICE)._name
        file.write_text(json.dumps(earlier))
        os.utime(file, (0, 0))
    faults = [cuda_trial.find_fault(library, DEVICE) for _ in range(3)]
    assert given == [120, 480]
    assert "had not ended after 120 s" in str(faults[0]) and "tries them for 480 s" in str(faults[0])
    assert faults[1] == faults[2] == "they had not ended after 480 s in a process of their own, nor earlier"


def test_who_waits_takes_the_verdict(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the process it has waited for, whatever it is: eight of them do not find eight times the same."""
    calls = play(monkeypatch, library.parent, "sleep 1; echo busy >&2; exit 1")
    with ThreadPoolExecutor(4) as pool:
        faults = list(pool.map(lambda _: cuda_trial.find_fault(library, DEVICE), range(4)))
    assert {fault is not None and "status 1: busy" in fault for fault in faults} == {True}
    assert len(calls.read_text().splitlines()) == 1


@pytest.mark.parametrize("python", ["/no/such/python", "", None])
def test_no_process_can_be_started(
    python: str | None, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", python)
    assert re.search("no (process|Python)", cuda_trial.find_fault(library, DEVICE) or "")


def test_a_directory_of_somebody_else(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of an image: the verdict is kept in one of the user's own."""
    calls = play(monkeypatch, library.parent, PASS)
    close(library.parent / "image", monkeypatch)
    (library.parent / "image").mkdir()
    library = library.rename(library.parent / "image" / library.name)
    assert not cuda_trial.passed(library, DEVICE)
    assert cuda_trial.find_fault(library, DEVICE) is None
    assert cuda_trial.find_fault(library, DEVICE) is None
    assert cuda_trial.passed(library, DEVICE)
    assert len(calls.read_text().splitlines()) == 1


def test_a_process_imports_what_this_one_does(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not what lies in the current directory by chance. It finds no GPU here, or no library."""
    for name in ("random", "typing", "kvcache_plugins"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path)
    library.unlink()
    monkeypatch.setattr(cuda_trial, "_verdict_file", lambda library, device: VerdictFile(library, "0"))
    fault = cuda_trial.find_fault(library, DEVICE)
    assert fault is not None and "FileNotFoundError: There is no library" in fault


@pytest.mark.parametrize(("deviation", "status"), [(None, 0), (DEVIATION, 3)])
def test_what_a_process_tells(
    deviation: str | None,
    status: int,
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(cuda_trial.ctypes, "CDLL", loaded.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(cuda_check, "find_deviation", lambda device: deviation)
    assert cuda_trial.main([str(library), "1"]) == status
    assert capsys.readouterr().out.split("\n", 1) == [
        "begun",
        (deviation or "H200, capability 9.0, driver 580") + "\n",
    ]
    assert loaded == [str(library)]


# ---- what the loader makes of it


@pytest.fixture
def built(library: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The build, as the one this process has loaded; nothing has been checked."""
    monkeypatch.delenv("KVCACHE_CUDA_KERNELS", raising=False)
    monkeypatch.setattr(cuda_loader, "_path", library)
    monkeypatch.setattr(cuda_loader, "_failure", None)
    monkeypatch.setattr(cuda_loader, "_checked", set())
    monkeypatch.setattr(cuda_loader, "_faults", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda_check, "find_deviation", lambda device: None)
    return library


def test_kernels_that_passed_serve(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = play(monkeypatch, built.parent, PASS)
    assert cuda_loader.try_load(DEVICE)
    assert calls.exists()
    assert cuda_loader.status().state == "loaded"


@pytest.mark.parametrize("script", ["kill -SEGV $$", "exit 3"])
def test_kernels_that_failed_do_not_reach_this_process(
    script: str, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def touch(device: torch.device) -> None:
        raise AssertionError("the process must not touch kernels that failed")

    monkeypatch.setattr(cuda_check, "find_deviation", touch)
    calls = play(monkeypatch, built.parent, script)
    with pytest.warns(RuntimeWarning, match=r"plain torch.*failed their check on cuda:1: (a process|they)"):
        assert not cuda_loader.try_load(DEVICE)
    status = cuda_loader.status()
    assert status.state == "unavailable" and "failed their check" in (status.reason or "")
    assert cuda_loader.why_not(DEVICE) == status.reason
    with pytest.raises(KernelUnavailableError, match="failed their check"):
        cuda_loader.check(DEVICE)
    assert len(calls.read_text().splitlines()) == 1


def test_one_device_that_fails_leaves_the_others(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, built.parent, PASS)
    found = {0: None, 1: DEVIATION}
    monkeypatch.setattr(cuda_check, "find_deviation", lambda device: found[device.index])
    assert cuda_loader.try_load(torch.device("cuda", 0))
    with pytest.warns(RuntimeWarning, match="on cuda:1"):
        assert not cuda_loader.try_load(DEVICE)
    assert cuda_loader.try_load(torch.device("cuda", 0))
    status = cuda_loader.status()
    assert status.state == "loaded" and "on cuda:1" in (status.reason or "")


def test_an_old_gpu_beside_a_new_one(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, built.parent, PASS)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (6, 1) if i == DEVICE else (9, 0))
    with pytest.warns(RuntimeWarning, match=r"need compute capability 8\.0, and here is 6\.1"):
        assert not cuda_loader.try_load(DEVICE)
    assert cuda_loader.try_load(torch.device("cuda", 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_builds_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert cuda_loader._why_no_device() == "torch sees no GPU."
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert cuda_loader._why_no_device() is None


def test_no_check_while_a_graph_is_recorded(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not cuda_loader.try_load(DEVICE)
    assert "run a step before" in cuda_loader.why_not(DEVICE)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("0", "KVCACHE_CUDA_KERNELS=0 leaves them out."),
        ("off", "KVCACHE_CUDA_KERNELS must be 0 or 1, got 'off'."),
    ],
)
def test_kernels_that_are_not_wanted(
    value: str, reason: str, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = play(monkeypatch, built.parent, PASS)
    monkeypatch.setenv("KVCACHE_CUDA_KERNELS", value)
    assert not cuda_loader.try_load(DEVICE)
    assert cuda_loader.why_not(DEVICE) == cuda_loader.status().reason == reason
    assert not calls.exists()


def test_kernels_that_are_wanted_untried(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = play(monkeypatch, built.parent, "exit 3")
    monkeypatch.setenv("KVCACHE_CUDA_KERNELS", "1")
    assert cuda_loader.try_load(DEVICE)
    assert not calls.exists()
