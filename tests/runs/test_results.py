"""The result file: its shape, that it appears whole or not at all, and where it says it comes from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcache_plugins.artifacts import files
from kvcache_plugins.errors import ArtifactError
from kvcache_plugins.runs import results
from kvcache_plugins.runs.labels import DENSE, cache_label, dense_first

ROOT = Path(__file__).resolve().parents[2]


def _document(**changes: Any) -> dict[str, Any]:
    rows = [{"cache_config": DENSE, "score": 1.0}, {"cache_config": {"backend": "int8"}, "score": 0.5}]
    return results.build_document("test", rows, settings={"length": 3}) | changes


def test_what_is_written_is_read(tmp_path: Path) -> None:
    document = _document()
    path = results.write_results(tmp_path / "new" / "folder", document)
    assert path == tmp_path / "new" / "folder" / "results.json"
    assert results.read_results(path) == results.read_results(path.parent) == document
    assert document["schema_version"] == 1
    assert document["task"] == "test"
    assert document["settings"] == {"length": 3}
    assert document["skipped"] == []


def test_numbers_that_json_cannot_hold_are_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = _document(settings={"limit": float("inf")}, more=[(float("nan"), 1.5)])
    text = results.write_results(tmp_path, document).read_text()
    assert json.loads(text, parse_constant=pytest.fail) == json.loads(text)
    read = results.read_results(tmp_path)
    assert (read["settings"], read["more"]) == ({"limit": None}, [[None, 1.5]])
    results.write_results(tmp_path, document)
    assert "replaced: " in capsys.readouterr().out, "of an earlier run with the same settings"


def test_environment_says_where_it_ran() -> None:
    place = results.environment()
    assert set(place) == {"versions", "device", "cpu", "threads", "commit", "dirty", "command"}
    assert {"python", "torch", "transformers", "kvcache-plugins"} <= set(place["versions"])
    assert place["device"] == place["cpu"]
    assert place["threads"] >= 1


def test_commit_of_another_repository_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    inside = tmp_path / "site-packages"
    inside.mkdir()
    monkeypatch.setattr(results, "_ROOT", inside)
    place = results.environment()
    assert (place["commit"], place["dirty"]) == (None, None)


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        ([str(ROOT / "scripts" / "benchmark.py"), "attention"], "python scripts/benchmark.py attention"),
        (
            [str(ROOT / "kvcache_plugins" / "__main__.py"), "eval", "passkey"],
            "python -m kvcache_plugins eval passkey",
        ),
        (["/usr/local/bin/kvcache-plugins", "bench", "a b"], "kvcache-plugins bench 'a b'"),
        (
            ["kvcache-plugins", "--hub_token", "hf_1", "--tokens", "4"],
            "kvcache-plugins --hub_token ... --tokens 4",
        ),
        (["kvcache-plugins", "--hub-token=hf_1"], "kvcache-plugins --hub-token=..."),
    ],
)
def test_command_names_no_place_of_the_machine_and_no_token(
    argv: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert results.environment()["command"] == command


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"task": ""}, "task"),
        ({"results": []}, "non-empty list"),
        ({"results": [{"score": 1}]}, r"results\[0\]"),
        ({"results": [{"cache_config": {"backend": "int8"}}]}, "first result must be the dense cache"),
        ({"results": [{"cache_config": DENSE}, {"cache_config": {"nbits": 4}}]}, r"results\[1\]"),
        ({"environment": {"device": "x"}}, "commit"),
        ({"environment": None}, "missing"),
    ],
)
def test_other_shapes_are_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    document = _document(**changes)
    with pytest.raises(ValueError, match=said):
        results.write_results(tmp_path / "out", document)
    assert not (tmp_path / "out").exists()
    (tmp_path / "results.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=said):
        results.read_results(tmp_path)


def test_a_file_that_cannot_be_finished_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = results.write_results(tmp_path, _document())
    before = path.read_text()
    with pytest.raises(TypeError):
        results.write_results(tmp_path, _document(settings={"device": object()}))
    assert path.read_text() == before

    def full(*args: object, **options: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(files.Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        results.write_results(tmp_path, _document(task="other"))
    assert path.read_text() == before


def _told(tmp_path: Path, capsys: pytest.CaptureFixture[str], document: dict[str, Any]) -> str:
    results.write_results(tmp_path, document)
    assert results.read_results(tmp_path) == document
    return capsys.readouterr().out


def test_results_of_another_run_are_kept_under_another_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, picture = tmp_path / "results.json", tmp_path / "attention.png"
    first, other = _document(task="bench attention"), _document(task="passkey")
    assert _told(tmp_path, capsys, first) == ""
    picture.write_text("first")
    again = first | {"results": [row | {"score": 0} for row in first["results"]]}
    assert _told(tmp_path, capsys, again) == f"replaced: {path}, of an earlier run with the same settings\n"
    kept = tmp_path / "results-bench-attention.json"
    assert _told(tmp_path, capsys, other) == f"kept: {kept}, the results of an earlier run\n"
    assert results.read_results(kept) == again and not picture.exists()
    assert kept.with_suffix(".png").read_text() == "first"
    changes: list[dict[str, Any]] = [{"settings": {"length": 4}}, {"results": [{"cache_config": DENSE}]}]
    for number, change in enumerate(changes, start=2):
        _told(tmp_path, capsys, first)
        assert f"results-bench-attention{f'-{number}'}.json" in _told(tmp_path, capsys, first | change)
        path.unlink()
    path.write_text("somebody else's")
    _told(tmp_path, capsys, first)
    assert (tmp_path / "results-unknown.json").read_text() == "somebody else's"


def test_a_cache_that_was_skipped_is_of_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = _document()
    dense, int8 = whole["results"]
    entry = {"cache_config": int8["cache_config"], "reason": "not installed"}
    _told(tmp_path, capsys, whole | {"results": [dense], "skipped": [entry]})
    assert _told(tmp_path, capsys, whole).startswith("replaced: ")


@pytest.mark.parametrize("suffix", [".json", ".png"])
def test_neither_numbers_nor_a_picture_kept_before_are_replaced(suffix: str, tmp_path: Path) -> None:
    results.write_results(tmp_path, _document(task="bench attention"))
    (tmp_path / "attention.png").write_text("of these")
    before = tmp_path / f"results-bench-attention{suffix}"
    before.write_text("before")
    results.write_results(tmp_path, _document(task="passkey"))
    assert before.read_text() == "before"
    assert (tmp_path / "results-bench-attention-2.png").read_text() == "of these"


@pytest.mark.parametrize("last", [0, 1, 2])
def test_an_interruption_loses_no_results(last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the three files, old picture, old numbers and new ones, is the first not to arrive."""
    old, new = _document(task="bench attention"), _document(task="passkey")
    results.write_results(tmp_path, old)
    (tmp_path / "attention.png").write_text("old")
    moved, replace = [], files.Path.replace

    def interrupted(self: Path, target: Path) -> None:
        if target.parent == tmp_path and ".unfinished" not in target.name:
            if len(moved) == last:
                raise KeyboardInterrupt
            moved.append(target.name)
        replace(self, target)

    monkeypatch.setattr(files.Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        results.write_results(tmp_path, new)
    monkeypatch.undo()
    results.write_results(tmp_path, new)
    assert results.read_results(tmp_path) == new
    assert results.read_results(tmp_path / "results-bench-attention.json") == old
    assert (tmp_path / "results-bench-attention.png").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_damaged_files_are_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"results\.json"):
        results.read_results(tmp_path)


def test_dense_comes_first_and_every_cache_once() -> None:
    int8 = {"backend": "int8"}
    assert dense_first([int8, DENSE, {"backend": "int4"}, dict(int8)]) == [DENSE, int8, {"backend": "int4"}]
    dense_first([])[0]["backend"] = "changed"
    assert dense_first([]) == [{"backend": "dense"}]


def test_caches_of_one_label_are_told_apart() -> None:
    caches = [DENSE, *({"backend": "locret", "heads": heads} for heads in ("a/run", "b/run/", "b/last"))]
    rows = [{"cache_config": c, "label": cache_label(c), "length": n} for n in (1, 2) for c in caches]
    document = results.build_document("bench generate", rows, settings={})
    labels = [row["label"] for row in document["results"]]
    assert labels == ["dense", "locret heads=a/run", "locret heads=b/run/", "locret heads=last"] * 2
    assert [row["label"] for row in rows[1:3]] == ["locret heads=run"] * 2
