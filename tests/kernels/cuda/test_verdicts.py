"""Where the verdict of a trial is kept: beside the build, or where only this user may write."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import tempfile
import time
from pathlib import Path

import pytest

from kvcache_plugins.kernels import verdicts
from kvcache_plugins.kernels.verdicts import Verdict, VerdictFile

PASSED = Verdict("H200", None, True)
FAILED = Verdict("H200", "2 bit: attention deviates by 0.3", True)
BUSY = Verdict("H200", "out of memory", False)
NAME = "cuda-0.1a.trial"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VerdictFile:
    """The verdict on a build in a cache directory; the user has a home and there are temporary files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for name in ("builds", "home", "tmp"):
        (tmp_path / name).mkdir()
    return VerdictFile(tmp_path / "builds" / "cuda-0.so", "1a")


@pytest.fixture
def own(file: VerdictFile, tmp_path: Path) -> tuple[Path, Path]:
    """Directories of the user's own, the better one first; not made yet."""
    return (
        tmp_path / "home" / "kvcache_plugins" / "trials",
        tmp_path / "tmp" / f"kvcache_plugins-{os.geteuid()}",
    )


def close(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be written into a folder, whoever asks, root included."""
    write, make, lock = Path.write_text, Path.mkdir, verdicts.file_lock

    def check(path: Path) -> None:
        if folder in path.parents:
            raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "write_text", lambda self, *args, **kw: check(self) or write(self, *args, **kw))
    monkeypatch.setattr(Path, "mkdir", lambda self, *args, **kw: check(self) or make(self, *args, **kw))
    monkeypatch.setattr(verdicts, "file_lock", lambda path: check(path) or lock(path))


def test_beside_the_build(file: VerdictFile, own: tuple[Path, Path]) -> None:
    assert file.read(0.0) is None
    with file.locked():
        file.write(FAILED)
    assert file.read(time.time() + 1) == FAILED
    assert {path.name for path in file.library.parent.iterdir()} == {NAME, "cuda-0.trial.lock"}
    assert not any(directory.exists() for directory in own)


def test_what_is_not_final_counts_for_a_while(file: VerdictFile) -> None:
    started = time.time() - 1
    file.write(BUSY)
    assert file.read(started) == BUSY
    assert file.read(time.time() + 1) is None


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"fault": null}', '{"device": 1, "other": 2}'])
def test_a_damaged_file_is_none(content: str, file: VerdictFile) -> None:
    (file.library.parent / NAME).write_text(content)
    assert file.read(0.0) is None
    file.write(PASSED)
    assert file.read(0.0) == PASSED


@pytest.mark.parametrize("place", [0, 1], ids=["home", "temporary files"])
def test_where_the_cache_directory_is_read_only(
    place: int, file: VerdictFile, own: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close(file.library.parent, monkeypatch)
    if place == 1:
        close(tmp_path / "home", monkeypatch)
    assert file.read(0.0) is None
    assert not any(directory.exists() for directory in own), "reading makes nothing"
    with file.locked():
        file.write(PASSED)
    assert file.read(0.0) == VerdictFile(file.library, file.key).read(0.0) == PASSED
    assert {path.name for path in own[place].iterdir()} == {NAME, "cuda-0.trial.lock"}
    assert own[place].stat().st_mode & 0o777 == 0o700
    assert not own[1 - place].exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_is_read_only(file: VerdictFile, own: tuple[Path, Path]) -> None:
    file.library.parent.chmod(0o555)
    with file.locked():
        file.write(PASSED)
    assert (own[0] / NAME).exists() and file.read(0.0) == PASSED


def test_a_user_without_a_home(
    file: VerdictFile, own: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    close(file.library.parent, monkeypatch)
    monkeypatch.setattr(verdicts.builds, "user_directory", no_home)
    file.write(PASSED)
    assert file.read(0.0) == PASSED and (own[1] / NAME).exists()


def make_shared(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.mkdir(parents=True)
    directory.chmod(0o777)


def make_of_a_group(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.mkdir(parents=True)
    directory.chmod(0o770)


def make_link(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = directory.parents[1] / f"elsewhere-{directory.name}"
    elsewhere.mkdir()
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.symlink_to(elsewhere)


def make_file(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.touch()


def make_of_somebody_else(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it had been made by another user, for whom this one is another."""
    directory.mkdir(parents=True, mode=0o755)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    directory.rename(directory.with_name(directory.name.replace(f"-{me}", f"-{me + 1}")))


@pytest.mark.parametrize("make", [make_shared, make_of_a_group, make_link, make_file, make_of_somebody_else])
def test_what_others_may_write_to_is_left_alone(
    make: object, file: VerdictFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: tuple[Path, Path],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Neither a verdict found there nor a link planted there is followed."""
    close(file.library.parent, monkeypatch)
    close(tmp_path / "home", monkeypatch)
    make(own[1], monkeypatch)  # type: ignore[operator]
    (directory,) = (tmp_path / "tmp").iterdir()
    victim = tmp_path / "victim"
    victim.write_text(json.dumps({"device": "H200", "fault": None, "is_final": True}))
    if directory.is_dir():
        (directory / NAME).symlink_to(victim)
    assert file.read(0.0) is None
    before = victim.read_text()
    with caplog.at_level(logging.WARNING), file.locked():
        file.write(FAILED)
    assert victim.read_text() == before and file.read(0.0) is None
    (said,) = caplog.messages
    assert "every process tries them again" in said and "KVCACHE_KERNEL_CACHE" in said
    for place in (file.library.parent, *verdicts._of_the_user()):
        assert str(place) in said


def test_one_process_holds_a_trial(file: VerdictFile) -> None:
    with file.locked():
        lock = file.library.with_name("cuda-0.trial.lock")
        with lock.open("a") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_what_happens_under_a_lock_is_heard_of(file: VerdictFile) -> None:
    with pytest.raises(FileNotFoundError, match="gone"), file.locked():
        raise FileNotFoundError("gone")
