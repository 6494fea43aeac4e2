"""`kvcache-plugins report`: where the page goes, what is said, what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvcache_plugins.cli import main

RECORDED = Path(__file__).resolve().parents[2] / "examples" / "results"


def test_page_of_the_recorded_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "new" / "page.html"
    assert main(["report", str(RECORDED), "--output", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    for path in RECORDED.glob("*.json"):
        assert path.name in text
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]
    said = capsys.readouterr().out
    assert str(page) in said
    assert f"{len(list(RECORDED.glob('*.json')))} result files" in said


def test_page_goes_beside_the_results_and_names_what_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(RECORDED / "quickstart.json", tmp_path / "results.json")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "trainer_state.json").write_text('{"epoch": 1}')
    for _ in range(2):  # a page that is there already is replaced, and is no result file
        assert main(["report", str(tmp_path)]) == 0
        said = capsys.readouterr().out
        assert "left out broken.json: " in said
        assert "left out 2 json files that hold no results, such as config.json\n" in said
        assert "1 result file:" in said
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"results.json", "broken.json", "config.json", "trainer_state.json", "report.html"}


@pytest.mark.parametrize("output", [[], ["--output", "page.html"]])
def test_nothing_to_show_is_an_error_and_writes_nothing(
    output: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    empty = tmp_path / "empty"
    for directory in (empty, tmp_path):
        assert main(["report", str(directory), *output]) == 2
        assert str(directory) in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["results.json", "others.JSON", "new.json"])
def test_results_are_no_page(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "results.json", tmp_path / "others.JSON"):
        shutil.copy(RECORDED / "quickstart.json", path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(["report", str(tmp_path), "--output", str(tmp_path / name)]) == 2
    said = f"error: --output must be a page of HTML, not a file of json, got {str(tmp_path / name)!r}."
    assert said in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_directory_is_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(RECORDED), "--output", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "--output" in error
    assert str(tmp_path) in error
