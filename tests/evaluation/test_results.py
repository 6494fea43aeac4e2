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
from kvcache_plugins.evaluation import results
from kvcache_plugins.evaluation.labels import DENSE, dense_first

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


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_damaged_files_are_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"results\.json"):
        results.read_results(tmp_path)


def test_dense_comes_first_and_once() -> None:
    int8 = {"backend": "int8"}
    assert dense_first([int8, DENSE]) == [DENSE, int8]
    dense_first([])[0]["backend"] = "changed"
    assert dense_first([]) == [{"backend": "dense"}]
