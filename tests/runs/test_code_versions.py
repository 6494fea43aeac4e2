"""A run is continued with the code it was begun with: ours, or that of a third party's package."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PathDistribution
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from kvcache_plugins import registry
from kvcache_plugins.cli import main
from kvcache_plugins.runs import code_versions, journal
from kvcache_plugins.runs.cache_names import CacheNames
from kvcache_plugins.runs.code_versions import code_digests, code_settings, foreign_versions, is_foreign

MODEL = str(Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama-books")
THEIRS = {"backend": "theirs", "budget": 48, "chunk_size": 16, "stabilizer_length": 4, "local_length": 8}
LABEL = "theirs budget=48 chunk_size=16 stabilizer_length=4 local_length=8"
INT8 = {"backend": "int8", "kernel": "torch"}
POLICY = '''
import kvcache_plugins as kvp
from kvcache_plugins.eviction.cache import EvictingCache
from kvcache_plugins.eviction.layer import EvictingLayer
from kvcache_plugins.eviction.options import EvictingConfig
from .norms import important


class TheirLayer(EvictingLayer):
    def score(self, keys, values):
        return important(keys)


@kvp.register_backend("theirs")
class TheirCache(EvictingCache):
    """Of a third party."""

    config_class, layer_class = EvictingConfig, TheirLayer
'''
NORMS = "def important(keys):\n    return {sign}keys.float().norm(dim=-1)\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of a third party, which announces its backend."""
    site = tmp_path / "site"
    folder = site / "theirs_package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "policy.py").write_text(POLICY)
    (folder / "norms.py").write_text(NORMS.format(sign=""))
    described = site / "theirs-1.5.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.5\n")
    (described / "entry_points.txt").write_text(
        f"[{registry.ENTRY_POINT_GROUP}]\ntheirs = theirs_package.policy\n"
    )
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two versions may be of one second
    points = PathDistribution(described).entry_points
    monkeypatch.setattr("importlib.metadata.entry_points", lambda *, group: points.select(group=group))
    registry._entry_points.cache_clear()
    yield folder
    registry._entry_points.cache_clear()
    forget()


def forget() -> None:
    """As a new process would, know nothing of the package."""
    registry._registered.pop("theirs", None)
    for name in [name for name in sys.modules if name.startswith("theirs_package")]:
        del sys.modules[name]
    importlib.invalidate_caches()


def change(package: Path, content: str) -> None:
    (package / "norms.py").write_text(content)
    forget()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "book.txt").write_text(topics["specialnames"][:4000], encoding="utf-8")
    row = {"context": topics["assignment"][:600], "input": "What?", "answers": ["a"], "all_classes": None}
    rows = [json.dumps(row | {"length": index, "input": f"What {index}?"}) for index in range(3)]
    (folder / "hotpotqa.jsonl").write_text("\n".join(rows))
    (folder / "prompts.json").write_text('{"hotpotqa": "{context} {input}"}')
    return folder


COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "perplexity": lambda data: [
        "--dataset", "text", "--text_files", str(data / "book.txt"), "--context_length", "96",
        "--prefill_length", "80", "--max_windows", "3",
    ],
    "passkey": lambda data: [
        "--filler_files", str(data / "book.txt"), "--lengths", "128", "--depths", "3", "--trials", "1",
        "--max_new_tokens", "2",
    ],
    "longbench": lambda data: [
        "--data_dir", str(data), "--prompts", str(data / "prompts.json"), "--max_length", "128",
    ],
}  # fmt: skip


def command(kind: str, data: Path, output: Path) -> list[str]:
    caches = ["--cache_config", json.dumps(THEIRS), json.dumps(INT8)]
    return [
        "eval", kind, "--model", MODEL, "--output", str(output), "--dtype", "fp32", "--no_plots",
        *COMMANDS[kind](data), *caches,
    ]  # fmt: skip


def interrupted(arguments: list[str], records: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command until so many records are kept."""
    add = journal.Journal.add

    def stopping(self: journal.Journal, key: str, record: Any) -> Any:
        add(self, key, record)
        if len(self) == records:
            raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr(journal.Journal, "add", stopping)
        assert main(arguments) == 130


KINDS = [
    "perplexity",
    *(pytest.param(kind, marks=pytest.mark.in_depth) for kind in COMMANDS if kind != "perplexity"),
]


def measured(output: Path) -> list[dict[str, Any]]:
    document = json.loads((output / "results.json").read_text())
    assert document["skipped"] == []
    return [{n: v for n, v in row.items() if "seconds" not in n} for row in document["results"]]


@pytest.mark.parametrize("kind", KINDS)
def test_records_of_changed_code_are_made_anew(
    kind: str,
    package: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The change is not even in the module of the class."""
    output, again = tmp_path / "out", command(kind, data, tmp_path / "out")
    interrupted(again, 8, monkeypatch)
    kept = shutil.copytree(output, tmp_path / "unchanged")
    made: list[str] = []
    add = journal.Journal.add
    monkeypatch.setattr(
        journal.Journal, "add", lambda self, key, record: made.append(key) or add(self, key, record)
    )
    change(package, NORMS.format(sign="-"))
    capsys.readouterr()
    assert main(again) == 0
    said = f"made anew: 3 records of {LABEL}, which an unfinished run has left, because of a change of"
    assert f"{said} the code of theirs 1.5\n" in capsys.readouterr().out
    backends = [json.loads(key[: key.index("}") + 1])["backend"] for key in made]
    assert backends == ["theirs", "theirs", "theirs", "int8"]
    assert not (output / "progress").exists()
    assert main(command(kind, data, tmp_path / "new")) == 0
    assert measured(output) == measured(tmp_path / "new")
    versions = json.loads((output / "results.json").read_text())["environment"]["versions"]
    assert versions["theirs"] == "1.5"

    change(package, NORMS.format(sign=""))  # as it was
    made.clear()
    assert main(command(kind, data, kept)) == 0
    assert len(made) == 1, "the one that the interruption left"
    assert "made anew" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_other_code_of_ours_is_refused(
    kind: str,
    data: Path,
    package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = command(kind, data, tmp_path / "out")
    interrupted(arguments, 2, monkeypatch)
    before = code_settings()
    with monkeypatch.context() as changed:
        changed.setattr(code_versions, "_OURS", "theirs_package")
        assert code_settings()["torch"] == before["torch"]
        assert main(arguments) == 2
    ours = f"kvcache-plugins was {before['kvcache-plugins']!r}, is "
    assert f"holds an unfinished run with other settings ({ours}" in capsys.readouterr().err
    with monkeypatch.context() as changed:
        changed.setattr(code_versions, "version_of", lambda name: before.get(name, "") and "0")
        assert main(arguments) == 2
    said = capsys.readouterr().err
    assert f"torch was {before['torch']!r}, is '0'" in said
    assert f"transformers was {before['transformers']!r}, is '0'" in said
    assert main(arguments) == 0


def test_any_source_of_a_package_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "edited_package"
    (folder / "csrc").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(code_versions, "_OURS", "edited_package")
    found: set[str] = set()
    for name in ("__init__.py", "code.py", "csrc/kernel.cu", "tasks.yaml", "results.json", "code.pyc"):
        (folder / name).write_text("'a source'")
        importlib.import_module("edited_package")
        found.add(code_settings()["kvcache-plugins"])
    assert len(found) == 4, "results are no source, nor is what Python compiles"
    del sys.modules["edited_package"]


def test_caches_of_ours_are_known_by_their_options() -> None:
    for backend in ("dense", "int8", "fp8", "unheard_of"):
        assert not is_foreign({"backend": backend}) and code_digests({"backend": backend}) == {}
    assert foreign_versions([{"backend": "int8"}, {"backend": "?"}]) == {}
    quanto = {"backend": "quanto", "nbits": 4}
    assert list(code_digests(quanto)) == [f"optimum-quanto {code_versions.version_of('optimum-quanto')}"]
    assert code_digests({**quanto, "backend": "Quanto"}) == code_digests(quanto)
    assert not is_foreign(quanto) and foreign_versions([quanto]) == {}


def test_a_storage_is_code_of_a_cache(package: Path) -> None:
    stored = {"backend": "knorm", "budget": 64, "storage": {"backend": "THEIRS"}}
    assert not is_foreign(stored), "it has not been built, so it cannot have computed"
    registry.get_backend("theirs")
    assert is_foreign(stored) and foreign_versions([stored]) == {"theirs": "1.5"}
    name = CacheNames([stored])[stored]
    change(package, NORMS.format(sign="-"))
    registry.get_backend("theirs")
    assert CacheNames([stored])[stored] != name
    change(package, NORMS.format(sign=""))
    registry.get_backend("theirs")
    assert CacheNames([stored])[stored] == name


def test_a_script_is_in_no_distribution(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_script.py").write_text(POLICY.replace("from .norms", "from theirs_package.norms"))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("own_script")
    assert foreign_versions([THEIRS]) == {"own_script": "in no distribution"}
    [(name, digest)] = code_digests(THEIRS).items()
    assert name == "the code of own_script"
    (tmp_path / "own_script.py").write_text("# changed")
    assert code_digests(THEIRS) != {name: digest}
    (tmp_path / "own_script.py").unlink()
    del sys.modules["own_script"]  # as of what was typed, of which not even the text is known
    assert list(code_digests(THEIRS)) == [name]


@pytest.mark.parametrize("kind", KINDS)
def test_a_mistake_of_a_third_party_does_not_end_a_comparison(
    kind: str, package: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    change(package, "def important(keys):\n    return keys.no_such_method()\n")
    assert main(command(kind, data, output)) == 1
    document = json.loads((output / "results.json").read_text())
    assert [row["cache_config"]["backend"] for row in document["results"]] == ["dense", "int8"]
    [entry] = document["skipped"]
    assert entry["cache_config"] == THEIRS and entry["is_failure"] is True
    mistake = "AttributeError: 'Tensor' object has no attribute 'no_such_method'"
    assert entry["reason"].startswith("failed") and mistake in entry["reason"]
    shown = capsys.readouterr()
    assert shown.err.count("Traceback") == 1 and "norms.py" in shown.err, "once, not for every window"
    assert f"error: {LABEL} {entry['reason']}" in shown.err
    assert document["environment"]["versions"]["theirs"] == "1.5"
    change(package, NORMS.format(sign=""))
    assert main(command(kind, data, output)) == 0
    assert len(measured(output)) == 3
