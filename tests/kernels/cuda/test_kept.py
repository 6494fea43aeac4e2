"""What tests compile stays while it is used, and goes when it is not."""

from __future__ import annotations

import os
import time
import types
from pathlib import Path

import pytest

from kvcache_plugins.kernels import compiler
from tests.kernels.cuda import emulation, kept


def aged(path: Path, days: float) -> Path:
    """Make a file, or let an existing one be, last used so long ago."""
    path.touch()
    then = time.time() - days * 86400
    os.utime(path, (then, then))
    return path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_is_not_used_is_removed(tmp_path: Path) -> None:
    for name in ("a.o", "a.so", "a.ptx", "a.txt", "a.o.new", "a.program", "lock", "device.lock"):
        aged(tmp_path / name, kept.DAYS + 1)
        aged(tmp_path / f"young-{name}", kept.DAYS - 1)
    (tmp_path / "tmp1").mkdir()
    (tmp_path / "tmp1" / "host.o").touch()
    aged(tmp_path / "tmp1", kept.DAYS + 1)
    young = {name for name in names(tmp_path) if name.startswith("young")}
    kept.remove_unused(tmp_path)
    assert names(tmp_path) == young | {"lock", "device.lock"}


def test_what_is_found_is_used(tmp_path: Path) -> None:
    used, _ = (aged(tmp_path / name, kept.DAYS + 1) for name in ("used.o", "unused.o"))
    assert kept.is_there(used) and not kept.is_there(tmp_path / "none.o")
    kept.remove_unused(tmp_path)
    assert names(tmp_path) == {"used.o"}


def test_what_is_somebody_elses_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    file = aged(tmp_path / "a.o", 1)
    monkeypatch.setattr(os, "utime", refuse)
    assert kept.is_there(file)
    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(kept, "DAYS", 0)
    kept.remove_unused(tmp_path)
    assert file.exists()


def test_a_folder_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where checkouts cannot share one."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(kept, "_SHARED", tmp_path / "file" / "tests")  # which is no directory

    def mkdir(name: str) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        return tmp_path / name

    config = types.SimpleNamespace(cache=types.SimpleNamespace(mkdir=mkdir))
    assert kept.folder(config, "builds") == tmp_path / "builds"  # type: ignore[arg-type]
    aged(tmp_path / "builds" / "a.o", kept.DAYS + 1)
    assert kept.folder(config, "builds") == tmp_path / "builds"  # type: ignore[arg-type]
    assert names(tmp_path / "builds") == set()
    assert kept.folder(types.SimpleNamespace(), "builds") is None  # type: ignore[arg-type]


def test_objects_and_libraries_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever would otherwise compile and link them."""
    runs: list[list[str]] = []

    def run(command: list[str]) -> None:
        runs.append(command)
        Path(command[command.index("-o") + 1]).touch()

    monkeypatch.setattr(emulation, "run", run)
    source = tmp_path / "sources" / "unit.cu"
    source.parent.mkdir()
    source.write_text("int x;\n")
    found, builds = compiler.Compiler("c++", "test 1.0"), tmp_path / "builds"
    builds.mkdir()
    for _ in range(2):
        made = emulation.compiled(found, source, builds)
        library = emulation.linked(found, [made], builds)
        assert len(runs) == 2
        for path in (made, library):
            assert time.time() - path.stat().st_mtime < 3600
            aged(path, kept.DAYS + 1)
    kept.remove_unused(builds)
    emulation.compiled(found, source, builds)
    assert len(runs) == 3


def test_a_folder_of_all_checkouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_SHARED", tmp_path / "cache" / "tests")
    found = kept.shared_folder("nvcc")
    assert found == tmp_path / "cache" / "tests" / "nvcc" and found.is_dir()
    aged(found / "a.o", kept.DAYS + 1)
    assert kept.shared_folder("nvcc") == found and names(found) == set()
    assert kept.folder(types.SimpleNamespace(), "nvcc") == found  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    monkeypatch.setattr(kept, "_SHARED", tmp_path / "file" / "tests")  # which is no directory
    assert kept.shared_folder("nvcc") is None
