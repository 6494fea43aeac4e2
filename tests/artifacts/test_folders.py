"""Artifacts arrive whole or not at all, and go to the hub as they are."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcache_plugins.artifacts.files import write_tensors
from kvcache_plugins.artifacts.folders import check_card, check_push, locate, push, replacing
from kvcache_plugins.cli import main
from kvcache_plugins.errors import ArtifactError

ROOT = Path(__file__).resolve().parents[2]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_directory_appears_at_once(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "artifact"
    with replacing(target) as folder:
        (folder / "a.json").write_text("1")
        (folder / "a.json").chmod(0o600)
        assert not target.exists() and folder.parent == target.parent
    assert names(target) == ["a.json"] and names(target.parent) == ["artifact"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(target.stat().st_mode) == 0o777 & ~mask
    assert stat.S_IMODE((target / "a.json").stat().st_mode) == 0o666 & ~mask


def test_files_are_replaced_and_others_stay(tmp_path: Path) -> None:
    for name in ("a.json", "mine.txt"):
        (tmp_path / "artifact").mkdir(exist_ok=True)
        (tmp_path / "artifact" / name).write_text("old")
    with replacing(tmp_path / "artifact") as folder:
        (folder / "a.json").write_text("new")
        (folder / "b.bin").write_text("new")
    contents = {path.name: path.read_text() for path in (tmp_path / "artifact").iterdir()}
    assert contents == {"a.json": "new", "b.bin": "new", "mine.txt": "old"}
    assert names(tmp_path) == ["artifact"]


def test_a_directory_may_be_another_file_system(tmp_path: Path) -> None:
    """From where it stands, files cannot be moved there."""
    (tmp_path / "mounted").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "artifact").symlink_to(tmp_path / "mounted", target_is_directory=True)
    with replacing(tmp_path / "here" / "artifact") as folder:
        (folder / "a.json").write_text("new")
        assert folder.resolve().parent == tmp_path / "mounted"
    assert names(tmp_path / "mounted") == ["a.json"] and names(tmp_path / "here") == ["artifact"]


@pytest.mark.parametrize("exists", [False, True])
def test_a_failure_changes_nothing(tmp_path: Path, exists: bool) -> None:
    target = tmp_path / "artifact"
    if exists:
        target.mkdir()
        (target / "a.json").write_text("old")

    def write_half() -> None:
        with replacing(target) as folder:
            (folder / "a.json").write_text("new")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_half()
    assert names(tmp_path) == (["artifact"] if exists else [])
    assert not exists or (target / "a.json").read_text() == "old"


def test_facts_arrive_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "artifact").mkdir()
    moved: list[str] = []
    replace = Path.replace

    def noted(self: Path, target: Path) -> Path:
        moved.append(self.name)
        return replace(self, target)

    with replacing(tmp_path / "artifact") as folder:
        for name in ("facts.json", "README.md", "tensors.safetensors"):
            (folder / name).write_text("")
        monkeypatch.setattr(Path, "replace", noted)
    assert moved == ["README.md", "tensors.safetensors", "facts.json"]


def test_push_uploads_the_named_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    class Hub:
        def __init__(self, **options: Any) -> None:
            calls.append(("token", options))

        def create_repo(self, repo_id: str, **options: Any) -> Any:
            calls.append((repo_id, options))
            return SimpleNamespace(repo_id=f"me/{repo_id}")

        def create_branch(self, repo_id: str, **options: Any) -> None:
            calls.append((repo_id, options))

        def upload_folder(self, **options: Any) -> str:
            calls.append(("upload", options))
            return "https://hub/commit"

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    options: dict[str, Any] = {"private": True, "token": "secret", "revision": "v1"}
    assert push(tmp_path, ("a.json", "b"), "artifact", **options) == "https://hub/commit"
    assert calls[:2] == [("token", {"token": "secret"}), ("artifact", {"private": True, "exist_ok": True})]
    assert calls[2] == ("me/artifact", {"branch": "v1", "exist_ok": True})
    assert calls[3][1]["folder_path"] == str(tmp_path)
    assert calls[3][1]["repo_id"] == "me/artifact", "an upload needs the owner"
    assert calls[3][1]["allow_patterns"] == ["a.json", "b"] and calls[3][1]["revision"] == "v1"
    push(tmp_path, ("a.json", "b"), "artifact")
    assert calls[5] == ("artifact", {"private": None, "exist_ok": True}), "as the owner has it"
    assert calls[6][0] == "upload" and calls[6][1]["revision"] is None


def test_whatever_the_hub_raises_is_told_as_an_os_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ConnectError(Exception):
        """As of httpx, which the hub client hands on where there is no network."""

    def fail(*args: Any, **options: Any) -> None:
        raise ConnectError("name not known")

    monkeypatch.setattr("huggingface_hub.HfApi.whoami", fail)
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", fail)
    for call in (lambda: check_push("artifact", "push_to_hub"), lambda: push(tmp_path, (), "artifact")):
        with pytest.raises(OSError, match="Nothing can be uploaded to the hub: name not known"):
            call()


@pytest.mark.parametrize("name", ["", "a/b/c", "my artifact"])
def test_what_no_repository_is_called_is_told_before_there_is_anything_to_upload(name: str) -> None:
    with pytest.raises(ValueError, match=rf"--hub_model_id must name a repository .*, got '{name}' \("):
        check_push(name, "hub_model_id")


@pytest.mark.parametrize(
    ("name", "given", "revision"),
    [
        ("org/first", None, None),
        ("org/second@v1.0", None, "v1.0"),
        ("org/third", "main", "main"),
        ("org/fourth@pr/1", "main", "pr/1"),
    ],
)
def test_a_repository_is_downloaded_once_in_the_revision_that_is_named(
    name: str, given: str | None, revision: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def download(repo_id: str, **options: Any) -> str:
        calls.append((repo_id, options))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    for _ in range(2):
        assert locate(name, ("a.json", "b"), revision=given) == tmp_path
    expected = {"revision": revision, "allow_patterns": ["a.json", "b"]}
    assert calls == [(name.partition("@")[0], expected)]


def test_a_directory_may_be_named_like_a_revision(tmp_path: Path) -> None:
    (tmp_path / "artifact@v1").mkdir()
    assert locate(str(tmp_path / "artifact@v1"), ()) == tmp_path / "artifact@v1"


def test_a_failed_download_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def fail(repo_id: str, **options: Any) -> str:
        calls.append(repo_id)
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    for _ in range(2):
        with pytest.raises(ArtifactError, match=r"heads='org/none@v1' is neither .*: no network"):
            locate("org/none@v1", (), option="heads")
    assert calls == ["org/none", "org/none"]


def test_a_readme_of_something_else_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_card(tmp_path / "missing")
    check_card(ROOT / "examples" / "models" / "tiny-llama-books-locret")
    check_card(ROOT / "examples" / "models" / "tiny-llama-books-kvquant3")
    (tmp_path / "README.md").write_text("A project of kvcache-plugins")
    for command in ("calibrate --dataset pydoc", "train-locret --use_cpu true"):
        model = ROOT / "examples" / "models" / "tiny-llama-books"
        assert main([*command.split(), "--model", str(model), "--output", str(tmp_path)]) == 2
        assert "README.md' is no card of an artifact" in capsys.readouterr().err
    assert names(tmp_path) == ["README.md"]


def test_tensors_that_cannot_be_written_are_an_error_of_the_system(tmp_path: Path) -> None:
    """Which commands tell in a line; what safetensors raises is a bug to them."""
    with pytest.raises(OSError, match="No such file or directory"):
        write_tensors(tmp_path / "missing" / "a.safetensors", {"a": torch.zeros(1)})


def test_a_directory_that_is_no_artifact(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ArtifactError, match=r"none of the files \['a.json', 'b.safetensors'\]. It is .* model"
    ):
        locate(str(tmp_path), ("a.json", "b.safetensors"))
    (tmp_path / "a.json").write_text("{}")
    assert locate(str(tmp_path), ("a.json", "b.safetensors")) == tmp_path
    with pytest.raises(ArtifactError, match="calibration='/nowhere' is neither a directory nor a hub repo"):
        locate("/nowhere", ("a.json",))
