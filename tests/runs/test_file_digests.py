"""Files that have changed are told from those that have not, wherever they lie and however old they are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import LlamaConfig

from kvcache_plugins.runs import file_digests
from kvcache_plugins.runs.cache_names import CacheNames
from kvcache_plugins.runs.file_digests import digest_files, digest_folder, digest_words, model_settings


def write(folder: Path, weights: bytes = b"weights" * 3000) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_copy_is_the_same_and_a_change_is_not(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    digest = digest_folder(folder)
    assert digest is not None and len(digest) == 16
    (folder / "training.png").write_bytes(b"a picture")
    (folder / "results-passkey.json").write_text("{}")
    (folder / "checkpoint-2").mkdir()
    shutil.copytree(folder, tmp_path / "copy")
    assert digest_folder(tmp_path / "copy") == digest
    changed = [write(tmp_path / "other", b"weightS" * 3000), write(tmp_path / "longer", b"weights" * 3001)]
    (write(tmp_path / "described") / "config.json").write_text('{"a": 1}')
    (write(tmp_path / "renamed") / "config.json").rename(tmp_path / "renamed" / "kvquant.json")
    changed += [tmp_path / "described", tmp_path / "renamed"]
    assert len({digest, *map(digest_folder, changed)}) == 5


@pytest.mark.parametrize("place", [0, 4096, 8191, 12288, 20479])
def test_pieces_of_a_large_file_show_a_change_all_over_a_matrix(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_digests, "_WHOLE", 1000)
    monkeypatch.setattr(file_digests, "_STEP", 1024)
    monkeypatch.setattr(file_digests, "_PIECE", 64)
    data = bytearray(20480)
    digest = digest_folder(write(tmp_path / "large", bytes(data)))
    start = min(place, len(data) - 1024)
    data[start : start + 1024] = b"x" * 1024
    assert digest_folder(write(tmp_path / "large", bytes(data))) != digest


def test_length_and_end_of_a_large_file_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digests, "_WHOLE", 1000)
    monkeypatch.setattr(file_digests, "_STEP", 1024)
    monkeypatch.setattr(file_digests, "_PIECE", 64)
    contents = [bytes(20480), bytes(20470), bytes(20479) + b"x"]
    assert len({digest_folder(write(tmp_path / "large", data)) for data in contents}) == 3


def test_whatever_makes_a_model_counts(tmp_path: Path) -> None:
    names = ["pytorch_model.bin", "pool.pt", "heads.pth", "chat_template.jinja", "tokenizer.model"]
    names += ["modeling_own.py", "tokenizer.txt", "vocab.txt", "merges.txt", "generation_config.json"]
    found = {digest_folder(write(tmp_path))}
    for name in names:
        (tmp_path / name).write_text("more")
        found.add(digest_folder(tmp_path))
    assert len(found) == len(names) + 1


def test_words_are_told_from_their_parts() -> None:
    words = (["ab", "c"], ["a", "bc"], ["abc"], ["c", "ab"], ["ab", "c", ""])
    assert len({digest_words(some) for some in words}) == 5


def test_nothing_has_no_digest(tmp_path: Path) -> None:
    assert digest_folder(tmp_path) is None and digest_folder(tmp_path / "missing") is None
    assert digest_files([]) is None


def test_a_model_of_the_hub_is_known_by_its_commit(tmp_path: Path) -> None:
    config = LlamaConfig()
    assert model_settings("org/name", config) == {"model": "org/name", "model_digest": None}
    config._commit_hash = "abc"
    assert model_settings("org/name", config) == {"model": "org/name", "model_digest": "abc"}
    found = [model_settings(str(write(tmp_path / name)), config) for name in ("here", "there")]
    assert found == [{"model": "a directory", "model_digest": digest_folder(tmp_path / "here")}] * 2


def test_the_weights_of_a_pool_are_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pool = {"kind": "conv", "weights": "pool.safetensors", "fraction": 0.25}
    cache, plain = {"backend": "knorm", "budget": 64, "pool": pool}, {"backend": "int8"}
    found = set()
    for content in (b"old", b"new", b"old"):
        Path("pool.safetensors").write_bytes(content)
        write(Path("int8"), content)  # where LongBench puts its answers, say
        names = CacheNames([plain, cache])
        found.add(names[cache])
        assert names[plain] == '{"backend": "int8"}'
    assert len(found) == 2


def test_caches_are_named_by_what_their_artifacts_hold(tmp_path: Path) -> None:
    heads = str(write(tmp_path / "heads"))
    plain, storage = {"backend": "dense"}, {"backend": "kvquant", "calibration": heads}
    locret = {"backend": "locret", "heads": heads, "storage": {"backend": "int4"}}
    nested = {"backend": "locret", "heads": "org/name", "storage": storage}
    caches = [plain, locret, nested]
    names = CacheNames(caches)
    assert [cache for cache, _ in names] == caches and names[plain] == '{"backend": "dense"}'
    write(tmp_path / "heads", b"others")
    now = CacheNames(reversed(caches))
    assert now[plain] == names[plain] and now[locret] != names[locret] and now[nested] != names[nested]
    for name in (names[locret], names[nested]):
        assert now.is_outdated(f"{name}|window") and not names.is_outdated(f"{name}|window")
    assert not now.is_outdated(f"{names[plain]}|window") and not now.is_outdated('{"backend": "int8"} task 3')
    alone = {"backend": "locret", "heads": heads}
    assert not CacheNames([alone]).is_outdated(f"{names[locret]}|window"), "of another cache"
    write(tmp_path / "heads")
    assert {name: c for c, name in CacheNames(caches)} == {name: c for c, name in names}
