"""Which CUDA toolkit the kernels are built with. Needs neither one nor a GPU."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvcache_plugins.kernels import cuda_loader, cuda_packages, cuda_toolkit
from kvcache_plugins.kernels.cuda_toolkit import (
    Toolkit,
    find_ninja,
    find_toolkit,
    used_by_torch,
    why_unusable,
)


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    find_toolkit.cache_clear()
    yield
    find_toolkit.cache_clear()


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def toolkit(home: Path, release: str = "13.0") -> Path:
    """The nvcc of a toolkit, which says in a dry run where it is."""
    (home / "include").mkdir(parents=True)
    (home / "include" / "cuda_runtime_api.h").touch()
    body = (
        f'case "$1" in --version) echo "Cuda compilation tools, release {release}";; '
        f'--dryrun) echo "#\\$ _HERE_={home}/bin" >&2; echo "#\\$ TOP={home}/bin/.." >&2;; esac'
    )
    return script(home / "bin" / "nvcc", body)


def test_a_toolkit_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = toolkit(tmp_path / "cuda")
    monkeypatch.setenv("PATH", str(nvcc.parent), prepend=":")
    found = find_toolkit()
    assert found == Toolkit(str(nvcc), "Cuda compilation tools, release 13.0", tmp_path / "cuda")
    assert found.description == f"{nvcc} (Cuda compilation tools, release 13.0)"
    assert found.version == "13.0"
    full = "Cuda compilation tools, release 13.0, V13.0.48"
    assert Toolkit("nvcc", full, None).version == "13.0.48"


def test_the_toolkit_behind_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = toolkit(tmp_path / "cuda-13.0")
    wrapper = script(tmp_path / "local" / "bin" / "nvcc", f'exec {nvcc} "$@"')
    monkeypatch.setenv("PATH", str(wrapper.parent), prepend=":")
    found = find_toolkit()
    assert found is not None and found.nvcc == str(wrapper) and found.home == tmp_path / "cuda-13.0"


def test_the_toolkit_behind_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = toolkit(tmp_path / "cuda")
    silent = script(nvcc, 'if [ "$1" = --version ]; then echo "release 12.4"; else exit 1; fi')
    link = tmp_path / "local" / "bin" / "nvcc"
    link.parent.mkdir(parents=True)
    link.symlink_to(silent)
    monkeypatch.setenv("PATH", str(link.parent), prepend=":")
    found = find_toolkit()
    assert found is not None and found.nvcc == str(link) and found.home == tmp_path / "cuda"


def test_a_toolkit_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = toolkit(tmp_path / "other", "12.4")
    monkeypatch.setenv("PATH", str(other.parent), prepend=":")
    monkeypatch.setenv("CUDA_PATH", str(toolkit(tmp_path / "named").parents[1]))
    found = find_toolkit()
    assert found is not None and found.home == tmp_path / "named" and "13.0" in found.release
    find_toolkit.cache_clear()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nothing there"))  # then the one that can be found
    found = find_toolkit()
    assert found is not None and found.home == tmp_path / "other"


@pytest.mark.parametrize("body", ["exit 1", "echo nothing that is known", "echo release unknown"])
def test_an_nvcc_that_does_not_answer(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another takes its place, and none if there is none."""
    silent = script(tmp_path / "silent" / "nvcc", body)
    others = {"nvcc": str(silent), "/usr/local/cuda/bin/nvcc": str(toolkit(tmp_path / "cuda"))}
    monkeypatch.setattr(cuda_toolkit.shutil, "which", lambda name, path=None: others.get(name))
    found = find_toolkit()
    assert found is not None and found.home == tmp_path / "cuda"
    find_toolkit.cache_clear()
    others["/usr/local/cuda/bin/nvcc"] = str(silent)
    assert find_toolkit() is None


def test_no_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_toolkit.shutil, "which", lambda name, path=None: None)
    assert find_toolkit() is None


def test_torch_uses_it_for_a_while(tmp_path: Path) -> None:
    from torch.utils import cpp_extension

    before = cpp_extension.CUDA_HOME
    with used_by_torch(Toolkit("nvcc", "13.0", tmp_path)):
        assert cpp_extension.include_paths("cuda")[-1] == str(tmp_path / "include")
    assert before == cpp_extension.CUDA_HOME
    with pytest.raises(KeyError), used_by_torch(Toolkit("nvcc", "13.0", tmp_path)):
        raise KeyError
    assert before == cpp_extension.CUDA_HOME
    for unknown in (None, Toolkit("nvcc", "13.0", None)):
        with used_by_torch(unknown):
            assert before == cpp_extension.CUDA_HOME


# -- nvcc from pip

CUDA = "99.1"
"""Of the torch of these tests; no other toolkit of this machine fits it."""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tree of NVIDIA's packages, with two releases of CUDA, neither of which has a compiler."""
    monkeypatch.setattr(torch.version, "cuda", CUDA)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "installed")])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    importlib.invalidate_caches()
    for tree in ("cu98", "cu99", "cudnn"):
        (tmp_path / "installed" / "nvidia" / tree / "lib").mkdir(parents=True)
    return tmp_path / "installed" / "nvidia"


def test_the_nvcc_of_pip(packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = toolkit(tmp_path / "cuda", "13.0")
    monkeypatch.setenv("PATH", str(other.parent), prepend=":")
    found = find_toolkit()
    assert found is not None and found.home == tmp_path / "cuda"  # the first, if none fits
    reason = why_unusable(found)
    assert reason is not None and reason.startswith(f"{found.description} is not of the CUDA that torch was")
    assert '`pip install "cuda-toolkit[nvcc,nvvm,crt,cccl]==99.1.*" ninja` would install one.' in reason
    find_toolkit.cache_clear()
    for tree, release in {"cu98": "98.0", "cu99": "99.4"}.items():
        toolkit(packages / tree, release)
    found = find_toolkit()
    assert found is not None and found.home == packages / "cu99" and found.version == "99.4"
    assert why_unusable(found) is None
    find_toolkit.cache_clear()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))  # who names one gets that
    found = find_toolkit()
    assert found is not None and found.home == tmp_path / "cuda"


def test_a_toolkit_that_fits_torch_before_the_first(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nvcc that a distribution has put on the `PATH` is often older."""
    toolkit(packages / "cu99", "99.0")
    folders = [str(toolkit(tmp_path / "old", "11.5").parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(folders))
    found = find_toolkit()
    assert found is not None and found.home == packages / "cu99"
    monkeypatch.setattr(torch.version, "cuda", "11.8")
    find_toolkit.cache_clear()
    found = find_toolkit()
    assert found is not None and found.home == tmp_path / "old"
    monkeypatch.setattr(torch.version, "cuda", None)  # then nothing has to fit, as where nothing is built
    assert why_unusable(found) is None


def test_several_toolkits_side_by_side(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which one is called `cuda`."""
    monkeypatch.setattr(cuda_toolkit, "_INSTALLED", tmp_path / "local")
    for name, release in {"cuda-12.8": "12.8", "cuda-99.0": "99.0", "cuda-99.1": "99.1"}.items():
        toolkit(tmp_path / "local" / name, release)
    (tmp_path / "local" / "cuda").symlink_to("cuda-12.8")
    found = find_toolkit()
    assert found is not None and found.home == tmp_path / "local" / "cuda-99.1"
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setenv("PATH", str(tmp_path))
    find_toolkit.cache_clear()
    found = find_toolkit()
    assert found is not None and found.home == tmp_path / "local" / "cuda"


def test_what_is_said_where_there_is_none(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = why_unusable(None)
    assert reason is not None and reason.startswith(
        "no nvcc was found (CUDA_HOME, or nvcc on the PATH). `pip "
    )
    for cuda in ("12.8", None):  # of which pip has no nvcc
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert why_unusable(None) == "no nvcc was found (CUDA_HOME, or nvcc on the PATH)."


def test_packages_without_such_a_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    assert list(cuda_packages.nvccs()) == []
    monkeypatch.setitem(sys.modules, "nvidia", None)  # which no module is
    assert list(cuda_packages.nvccs()) == []


def test_a_library_with_its_versioned_name_alone_is_linked(packages: Path, tmp_path: Path) -> None:
    home = packages / "cu99"
    assert Toolkit("nvcc", "99.1", None).linker_options(tmp_path) == []
    found = Toolkit("nvcc", "99.1", home)
    assert found.linker_options(tmp_path) == []  # the linker says what it misses
    (home / "lib" / "libcudart.so.99").write_bytes(b"a library")
    assert found.linker_options(tmp_path) == [f"-L{tmp_path}"]
    assert (tmp_path / "libcudart.so").read_bytes() == b"a library"
    (home / "lib" / "libcudart.so").symlink_to("libcudart.so.99")
    assert found.linker_options(tmp_path / "elsewhere") == []


@pytest.mark.parametrize(("machine", "name"), [("x86_64", "x86_64-linux"), ("aarch64", "sbsa-linux")])
def test_what_conda_keeps_by_platform(
    machine: str, name: str, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    nvcc = toolkit(tmp_path / "conda", CUDA)
    monkeypatch.setenv("PATH", str(nvcc.parent), prepend=":")
    found = find_toolkit()
    assert found is not None and found.home == tmp_path / "conda" and found.include_paths() == []
    kept = tmp_path / "conda" / "targets" / name
    kept.mkdir(parents=True)
    (tmp_path / "conda" / "include").rename(kept / "include")
    (kept / "lib").mkdir()
    (kept / "lib" / "libcudart.so").touch()
    find_toolkit.cache_clear()
    found = find_toolkit()
    assert found is not None and found.home == tmp_path / "conda"
    assert found.include_paths() == [str(kept / "include")]
    assert found.linker_options(tmp_path) == [f"-L{kept / 'lib'}"]
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    find_toolkit.cache_clear()
    found = find_toolkit()
    assert found is not None and found.home is None and found.include_paths() == []


def test_what_may_be_wrong_with_the_packages(packages: Path, tmp_path: Path) -> None:
    (line,) = cuda_packages.advice(packages / "cu99", CUDA)
    assert "of different releases" in line and "==99.1.*" in line
    assert cuda_packages.advice(packages / "cu99", "12.8") == []
    assert cuda_packages.advice(tmp_path / "cuda", CUDA) == cuda_packages.advice(None, CUDA) == []


# -- ninja, and the compiler of the host


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A virtual environment that is not activated: its Python runs, its directory is not on the `PATH`."""
    toolkit(tmp_path / "cuda")
    script(tmp_path / "bin" / "sh", "exit 0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("KVCACHE_NO_BUILD", raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    return tmp_path / "venv"


def test_ninja_beside_python(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import cpp_extension

    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    monkeypatch.delenv("CXX", raising=False)
    reason = cuda_loader._why_not_buildable()
    assert reason == "no C++ compiler was found (CXX, or g++ or c++ on the PATH)."
    script(environment.parent / "bin" / "g++", "echo 'g++ 12'")
    assert find_ninja() is None
    reason = cuda_loader._why_not_buildable()
    assert reason is not None and "ninja" in reason and "beside Python" in reason
    ninja = script(environment / "bin" / "ninja", "echo 1.13")
    script(environment / "bin" / "sh", "exit 1")
    assert find_ninja() == str(ninja)
    assert cuda_loader._why_not_buildable() is None
    before = os.environ["PATH"]
    assert not cpp_extension.is_ninja_available()
    with used_by_torch(None):
        assert cpp_extension.is_ninja_available()
        assert os.environ["PATH"].split(os.pathsep) == [before, str(ninja.parent)]
    assert os.environ["PATH"] == before
    with pytest.raises(KeyError), used_by_torch(None):
        raise KeyError
    assert os.environ["PATH"] == before


def test_ninja_on_the_path_comes_first(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(environment / "bin" / "ninja", "echo 1.13")
    other = script(environment.parent / "bin" / "ninja", "echo 1.12")
    assert find_ninja() == str(other)
    before = os.environ["PATH"]
    with used_by_torch(None):
        assert os.environ["PATH"] == before


@pytest.mark.parametrize("executable", ["", None])
def test_no_python_to_look_beside(
    executable: str | None, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where Python is embedded; the current directory is not looked at."""
    monkeypatch.chdir(script(environment / "bin" / "ninja", "echo 1.13").parent)
    monkeypatch.setattr(sys, "executable", executable)
    assert find_ninja() is None
    monkeypatch.delenv("PATH")
    with used_by_torch(None):
        assert "PATH" not in os.environ
    assert "PATH" not in os.environ
