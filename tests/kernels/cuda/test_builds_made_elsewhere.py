"""CUDA kernels built on one machine and used on another, which has GPUs and no nvcc. Needs neither."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvcache_plugins.cli import main
from kvcache_plugins.errors import KernelUnavailableError
from kvcache_plugins.kernels import builds, cuda_loader
from kvcache_plugins.kernels.cuda_architectures import VARIABLE
from kvcache_plugins.kernels.cuda_toolkit import Toolkit

Build = Callable[[str], Path]


@pytest.fixture
def build(builder: list[str], monkeypatch: pytest.MonkeyPatch) -> Build:
    """Builds for a list of architectures."""

    def build(architectures: str) -> Path:
        monkeypatch.setattr(cuda_loader, "_path", None)
        monkeypatch.setenv(VARIABLE, architectures)
        return cuda_loader.build()

    return build


@pytest.fixture
def loaded(builder: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The libraries this process loads."""
    found: list[str] = []
    monkeypatch.setattr(builds.ctypes, "CDLL", found.append)
    return found


def move(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    """Go on where there are these GPUs, no nvcc, and nothing is said of architectures."""
    monkeypatch.setattr(cuda_loader, "_path", None)
    monkeypatch.setattr(cuda_loader, "_failure", None)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(cuda_loader, "find_toolkit", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)


@pytest.mark.parametrize(
    "capabilities",
    [[(9, 0)], [(8, 6)], [(8, 0), (9, 0)], [(6, 1), (9, 0)], [(12, 0)]],
    ids=["named", "a later one", "two", "and one that is too old", "by PTX"],
)
def test_a_build_serves_where_there_is_no_nvcc(
    capabilities: list[tuple[int, int]], build: Build, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build("8.0 9.0+PTX")
    move(monkeypatch, *capabilities)
    status = cuda_loader.status()
    assert (status.state, status.path, status.compiler) == ("cached", path, None)
    assert cuda_loader.build() == path and loaded == [str(path)]


@pytest.mark.parametrize("capabilities", [[(7, 5), (8, 0)], [(9, 0), (12, 0)], [(12, 0)]])
def test_a_build_for_other_gpus_does_not(
    capabilities: list[tuple[int, int]], build: Build, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build("8.6 9.0")
    move(monkeypatch, *capabilities)
    status, (major, minor) = cuda_loader.status(), capabilities[-1]
    assert status.state == "unavailable" and status.reason is not None
    assert (
        "no nvcc was found" in status.reason
        and f"{major}.{minor}, in {builds.cache_directory()}" in status.reason
    )
    with pytest.raises(KernelUnavailableError, match=r"no nvcc was found .* Nor is there an intact build"):
        cuda_loader.build()
    assert loaded == []


def test_nor_does_a_damaged_one_or_one_of_other_sources(
    build: Build, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build("9.0")
    content = path.read_bytes()
    path.write_bytes(content[1:])
    move(monkeypatch, (9, 0))
    assert cuda_loader.status().state == "unavailable"
    path.write_bytes(content)
    assert cuda_loader.status().state == "cached"
    monkeypatch.setattr(torch, "__version__", "2.0")
    assert cuda_loader.status().state == "unavailable"
    assert f"for torch {torch.__version__}" in (cuda_loader.status().reason or "")


def test_machine_code_comes_before_ptx(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [build(architectures) for architectures in ("9.0", "10.0", "9.0+PTX")]
    move(monkeypatch, (10, 0))
    assert cuda_loader.status().path == found[1]
    found[1].unlink()
    assert cuda_loader.status().path == found[2]
    found[2].unlink()
    assert cuda_loader.status().state == "unavailable"


@pytest.mark.parametrize("missing", ["ninja", "permission"])
def test_a_build_serves_where_nothing_can_be_built(
    missing: str, build: Build, builder: list[str], loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build("8.0;9.0")
    toolkit = cuda_loader.find_toolkit()
    move(monkeypatch, (9, 0))
    monkeypatch.setattr(cuda_loader, "find_toolkit", lambda: toolkit)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    assert cuda_loader.status().state == "missing"
    if missing == "ninja":
        monkeypatch.setattr(cuda_loader, "find_ninja", lambda: None)
    else:
        monkeypatch.setenv("KVCACHE_NO_BUILD", "1")
    assert (cuda_loader.status().state, cuda_loader.status().path) == ("cached", path)
    assert cuda_loader.build() == path and len(builder) == 1


def test_where_something_can_be_built_it_is(
    build: Build, builder: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {build("8.0;9.0"), build("9.0")}
    assert len(found) == 2 and builder == ["8.0;9.0", "9.0"]


def test_a_build_that_does_not_load_says_so(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise OSError("version `GLIBC_2.99' not found")

    build("9.0")
    move(monkeypatch, (9, 0))
    monkeypatch.setattr(builds.ctypes, "CDLL", refuse)
    with pytest.raises(KernelUnavailableError, match=r"-9\.0\.so does not load \(.*GLIBC.*\), and no nvcc"):
        cuda_loader.build()


def test_without_a_gpu_the_list_says_what_is_asked_for(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build("8.0 9.0")
    move(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    states = {}
    for given in ("9.0", "12.0", "7.5"):
        monkeypatch.setenv(VARIABLE, given)
        states[given] = cuda_loader.status()
    assert (states["9.0"].state, states["9.0"].path) == ("cached", path)
    assert "no nvcc" in (states["12.0"].reason or "") and "none in" in (states["7.5"].reason or "")


def test_a_build_is_named_after_what_decides_it(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after where nvcc is."""
    first = build("8.0 9.0a+PTX")
    assert first.stem.split("-")[2:] == ["13.0.48", "8.0", "9.0a+PTX"]
    for nvcc, release, is_same in [("/usr/bin/nvcc", "V13.0.48", True), ("nvcc", "V13.0.88", False)]:
        monkeypatch.setattr(cuda_loader, "find_toolkit", lambda: Toolkit(nvcc, release, None))  # noqa: B023
        assert (build("8.0 9.0a+PTX") == first) is is_same
    monkeypatch.setattr(cuda_loader, "CUDA_FLAGS", ("-O1",))
    assert build("8.0 9.0a+PTX").stem.split("-")[1] != first.stem.split("-")[1]


def test_all_are_counted_and_removed_when_their_time_comes(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = [build("8.0"), build("9.0+PTX")]
    assert set(builds.cached_builds()) == set(old)
    for path in old:
        os.utime(path, (1, 1))
    (old[1].parent / f"{old[1].stem}.0123456789abcdef.trial").touch()
    new = build("9.0")
    assert set(builds.cached_builds()) == {new}
    assert not list(old[1].parent.glob("*.trial"))


def test_the_command_line_shows_it(
    build: Build, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = build("8.0 9.0")
    monkeypatch.setattr("kvcache_plugins.kernels.cuda_trial.passed", lambda library, device: False)
    move(monkeypatch, (9, 0))
    assert main(["kernels", "status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"CUDA kernels:    cached", f"CUDA library:    {path}", "CUDA compiler:   none found"} <= set(
        lines
    )
