"""Records survive an interruption, and only those of the same run are continued."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvcache_plugins.errors import ArtifactError
from kvcache_plugins.runs.journal import Journal

SETTINGS = {"length": 1024, "model": "m"}


def test_a_later_run_finds_the_records(tmp_path: Path) -> None:
    journal = Journal(tmp_path, SETTINGS)
    journal.add("a", {"score": 0.1, "text": "two\nlines é"})
    again = Journal(tmp_path, SETTINGS)
    assert "a" in again and "b" not in again and len(again) == 1
    assert again["a"] == {"score": 0.1, "text": "two\nlines é"}


def test_processes_write_apart_and_read_together(tmp_path: Path) -> None:
    first, second = Journal(tmp_path, SETTINGS, 0), Journal(tmp_path, SETTINGS, 1)
    first.add("a", {"x": 1})
    second.add("b", {"x": 2})
    assert "b" not in first
    first.reload()
    assert [first[key]["x"] for key in ("a", "b")] == [1, 2]
    assert len(Journal(tmp_path, SETTINGS, 5)) == 2, "another number of processes reads them all"


def test_numbers_that_json_cannot_hold_are_null(tmp_path: Path) -> None:
    settings = {"limit": float("inf")}
    assert Journal(tmp_path, settings).add("a", {"x": float("nan"), "y": [2.5]}) == {"x": None, "y": [2.5]}
    assert Journal(tmp_path, settings)["a"] == {"x": None, "y": [2.5]}
    for line in (tmp_path / "progress" / "records-0.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_a_record_is_what_a_later_run_would_read(tmp_path: Path) -> None:
    record = Journal(tmp_path, SETTINGS).add("a", {"pair": (1, 2), "value": 1 / 3})
    assert record == Journal(tmp_path, SETTINGS)["a"] == {"pair": [1, 2], "value": 1 / 3}


@pytest.mark.parametrize("process", [0, 1])
def test_a_failure_gives_way_to_what_another_try_has_found(process: int, tmp_path: Path) -> None:
    Journal(tmp_path, SETTINGS, 1).add("a", {"failed": "no memory"})
    later = Journal(tmp_path, SETTINGS, process)
    assert "a" in later and not later.is_done("a") and not later.is_done("b")
    later.add("a", {"x": 1})
    assert later.is_done("a") and Journal(tmp_path, SETTINGS)["a"] == {"x": 1}
    Journal(tmp_path, SETTINGS, 2).add("a", {"failed": "no memory"})
    assert Journal(tmp_path, SETTINGS)["a"] == {"x": 1}


@pytest.mark.parametrize("process", [0, 1])
def test_a_line_cut_short_is_dropped(tmp_path: Path, process: int) -> None:
    Journal(tmp_path, SETTINGS).add("a", {"x": 1})
    path = tmp_path / "progress" / "records-0.jsonl"
    path.write_text(path.read_text() + '{"key": "b", "rec')
    journal = Journal(tmp_path, SETTINGS, process)
    assert "a" in journal and "b" not in journal
    journal.add("c", {"x": 3})
    assert len(Journal(tmp_path, SETTINGS)) == 2


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    Journal(tmp_path, SETTINGS).add("a", {"x": 1})
    with pytest.raises(ValueError, match=r"length was 1024, is 2048.*--output"):
        Journal(tmp_path, SETTINGS | {"length": 2048})
    assert "a" in Journal(tmp_path, SETTINGS)


@pytest.mark.parametrize(("before", "now"), [({}, {"seed": 1}), ({"seed": 1}, {})])
def test_a_setting_that_has_come_or_gone_is_another(
    before: dict[str, int], now: dict[str, int], tmp_path: Path
) -> None:
    Journal(tmp_path, SETTINGS | before).add("a", {"x": 1})
    with pytest.raises(ValueError, match=f"seed was {before.get('seed')}, is {now.get('seed')}"):
        Journal(tmp_path, SETTINGS | now)


@pytest.mark.parametrize("process", [0, 1])
def test_settings_without_records_are_forgotten(tmp_path: Path, process: int) -> None:
    """A run that was stopped before its first record has nothing that could be mixed with others."""
    Journal(tmp_path, {"seed": 0}, process)
    journal = Journal(tmp_path, {"seed": 1})
    journal.add("a", {"loss": 1.0})
    assert list(Journal(tmp_path, {"seed": 1})) == ["a"]
    with pytest.raises(ValueError, match="seed was 1, is 0"):
        Journal(tmp_path, {"seed": 0})


@pytest.mark.parametrize(
    "damage", [b'{"key": "a"}\n', b"[]\n", b"\xff\n", b'{"settings": {}}\n{"ke\n', b'{"settings": {}}\n{}\n']
)
def test_a_strange_file_is_refused(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "progress" / "records-0.jsonl"
    path.parent.mkdir()
    path.write_bytes(damage)
    with pytest.raises(ArtifactError, match=r"records-0.*is not a record of an unfinished run"):
        Journal(tmp_path, SETTINGS)
    assert path.read_bytes() == damage


def test_a_full_disk_keeps_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path, SETTINGS)
    journal.add("a", {"x": 1})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        journal.add("b", {"x": 2})
    monkeypatch.undo()
    assert "b" not in journal
    journal.add("c", {"x": 3})
    again = Journal(tmp_path, SETTINGS)
    assert "a" in again and "c" in again and len(again) == 2


def test_records_of_a_run_of_more_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = Journal(tmp_path, SETTINGS, 1)
    for key in "abc":
        more.add(key, {"x": key})
    less = Journal(tmp_path, SETTINGS)
    less.add("d", {"x": "d"})
    assert less["a"] == {"x": "a"}
    less.remove()
    assert (
        capsys.readouterr().out
        == f"kept: {tmp_path / 'progress'}, for 2 records of a run of more than this one\n"
    )
    again = Journal(tmp_path, SETTINGS)
    assert all(again.is_done(key) and again[key] == {"x": key} for key in "abcd")
    again.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_leaves_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path, SETTINGS)
    journal.add("a", {"x": 1})
    journal.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_file_another_process_is_about_to_write_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "progress" / "records-1.jsonl"
    path.parent.mkdir()
    path.touch()
    Journal(tmp_path, SETTINGS, 0).add("a", {"x": 1})
    assert path.exists()
    assert "a" in Journal(tmp_path, SETTINGS, 1)
    assert json.loads(path.read_text().splitlines()[0]) == {"settings": SETTINGS}


def test_what_others_keep_in_the_folder_stays(tmp_path: Path) -> None:
    journal = Journal(tmp_path, SETTINGS)
    journal.add("a", {"x": 1})
    (tmp_path / "progress" / "notes.md").write_text("mine", encoding="utf-8")
    journal.remove()
    assert [path.name for path in (tmp_path / "progress").iterdir()] == ["notes.md"]
    (tmp_path / "progress" / "notes.md").unlink()
    Journal(tmp_path, SETTINGS).remove()
    assert list(tmp_path.iterdir()) == []
