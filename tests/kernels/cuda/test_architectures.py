"""For which GPUs the CUDA kernels are built. Needs no GPU; torch reads the lists itself."""

from __future__ import annotations

import os

import pytest
import torch

from kvcache_plugins.errors import KernelUnavailableError
from kvcache_plugins.kernels import cuda_loader
from kvcache_plugins.kernels.cuda_architectures import VARIABLE, runs_on, to_build, told_to_torch


def present(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    """GPUs, and a torch built for all that there were until 12.0."""
    codes = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: codes)


@pytest.mark.parametrize(
    ("given", "built"),
    [
        ("9.0", ["9.0"]),
        ("7.5 8.0 8.6 9.0 10.0 12.0+PTX", ["8.0", "8.6", "9.0", "10.0", "12.0+PTX"]),
        ("5.2 6.0 6.1 7.0 7.2 7.5 8.0 8.6 8.7 9.0+PTX", ["8.0", "8.6", "8.7", "9.0+PTX"]),
        ("7.5;8.0;8.6+PTX", ["8.0", "8.6+PTX"]),
        ("7.5+PTX 8.0", ["8.0"]),
        ("9.0 8.0 9.0+PTX", ["8.0", "9.0+PTX"]),
        ("9.0;9.0a;10.0a+PTX", ["9.0", "9.0a", "10.0a+PTX"]),
        ("Ampere", ["8.0", "8.6+PTX"]),
        ("Volta;Turing Hopper", ["9.0+PTX"]),
    ],
)
def test_what_is_too_old_is_left_out(given: str, built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, given)
    assert list(to_build()) == built


@pytest.mark.parametrize("given", ["7.5", "6.1;7.0+PTX", "Turing"])
def test_a_list_of_which_nothing_is_left(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(KernelUnavailableError, match=r"capability 8\.0 and newer, of which") as failure:
        to_build()
    assert f"none in {VARIABLE}={given!r}" in str(failure.value)


def test_flags_that_are_not_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a later torch may have them: nothing is left out that nobody has looked at."""
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "_get_cuda_arch_flags", lambda: ["-arch=all-major"])
    with pytest.raises(KernelUnavailableError, match="'-arch=all-major' names no architecture"):
        to_build()


@pytest.mark.parametrize("given", ["9.x", "8.0; 9.0", "Ampère"])
def test_a_list_that_torch_does_not_know(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(KernelUnavailableError, match="Unknown CUDA arch") as failure:
        to_build()
    assert f"{VARIABLE}={given!r}" in str(failure.value)


@pytest.mark.parametrize(
    ("architectures", "machine_code", "ptx"),
    [
        (["8.0"], {"8.0", "8.6"}, set()),
        (["8.6", "9.0"], {"8.6", "9.0"}, set()),
        (["8.0+PTX"], {"8.0", "8.6"}, {"9.0", "10.0", "10.3", "12.0"}),
        (["8.6", "10.0+PTX"], {"8.6", "10.0", "10.3"}, {"12.0"}),
        (["9.0a+PTX", "10.0a"], {"9.0", "10.0"}, set()),
        (["ad965522575556a2"], set(), set()),
        ([], set(), set()),
    ],
)
def test_what_a_build_runs_on(architectures: list[str], machine_code: set[str], ptx: set[str]) -> None:
    for gpu in ("8.0", "8.6", "9.0", "10.0", "10.3", "12.0"):
        major, minor = map(int, gpu.split("."))
        assert runs_on(architectures, (major, minor), from_ptx=False) == (gpu in machine_code), gpu
        assert runs_on(architectures, (major, minor), from_ptx=True) == (gpu in machine_code | ptx), gpu


@pytest.mark.parametrize("given", [None, "", "native"])
def test_without_a_list_those_present_count(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if given is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, given)
    present(monkeypatch, (6, 1), (8, 9), (9, 0))
    assert to_build() == ("8.9", "9.0+PTX")
    present(monkeypatch, (12, 1))  # for which this torch has no code of its own
    assert to_build() == ("12.0+PTX",)
    present(monkeypatch, (7, 5))
    with pytest.raises(
        KernelUnavailableError, match=r"8\.0 and newer, of which there is none in the GPUs here"
    ):
        to_build()


def test_torch_is_told_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in ("7.5 8.0", None):
        if before is None:
            monkeypatch.delenv(VARIABLE)
        else:
            monkeypatch.setenv(VARIABLE, before)
        with told_to_torch(["8.0", "9.0+PTX"]):
            assert os.environ[VARIABLE] == "8.0;9.0+PTX"
        assert os.environ.get(VARIABLE) == before
        with pytest.raises(KeyError), told_to_torch(["8.0"]):
            raise KeyError
        assert os.environ.get(VARIABLE) == before


def test_a_build_is_told_and_named_after_what_is_left(
    builder: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "7.5 9.0+PTX 8.0")
    path = cuda_loader.build()
    assert builder == ["8.0;9.0+PTX"]
    monkeypatch.setattr(cuda_loader, "_path", None)
    monkeypatch.setenv(VARIABLE, "8.0;9.0+PTX")
    assert cuda_loader.status().state == "cached" and cuda_loader.status().path == path
    monkeypatch.setenv(VARIABLE, "8.0;9.0")
    assert cuda_loader.status().state == "missing" and cuda_loader.status().path != path


def test_nothing_is_built_for_what_is_too_old(builder: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "7.0 7.5")
    status = cuda_loader.status()
    assert status.state == "unavailable" and f"none in {VARIABLE}='7.0 7.5'" in (status.reason or "")
    with pytest.raises(KernelUnavailableError, match=rf"none in {VARIABLE}='7\.0 7\.5'"):
        cuda_loader.build()
    assert builder == []
