"""The examples do what they say."""

from __future__ import annotations

import doctest
import html
import importlib.util
import json
import re
import runpy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache_plugins import KernelUnavailableError, RetainingHeads, list_backends, registry
from kvcache_plugins.cli.backend_table import SECTIONS, backend_rows
from kvcache_plugins.runs.hidden_codes import hide_codes
from kvcache_plugins.testing import BackendConformance, models
from tests.launching import run_script

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def registered() -> Iterator[None]:
    spec = importlib.util.spec_from_file_location("add_a_backend", EXAMPLES / "add_a_backend.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert "mulaw" in list_backends()
    yield
    del registry._registered["mulaw"]  # the registry is for the whole process; other tests go over all of it


@pytest.mark.usefixtures("registered")
def test_the_docstring_that_is_copied_has_every_section() -> None:
    row = next(row for row in backend_rows() if row.name == "mulaw")
    assert row.summary.endswith(".") and set(row.sections) == set(SECTIONS) and all(row.sections.values())


@pytest.mark.usefixtures("registered")
class TestAddABackend(BackendConformance):
    """The example's backend passes the suite every backend passes."""

    @pytest.fixture
    def cache_config(self) -> dict[str, Any]:
        return {"backend": "mulaw", "residual_length": 16}


def test_add_a_backend_runs_as_a_script() -> None:
    done = run_script(str(EXAMPLES / "add_a_backend.py"))
    assert done.returncode == 0, done.stderr
    assert "backend               mulaw" in done.stdout
    assert "bits per value" in done.stdout


def test_a_document_that_cannot_be_asked_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = runpy.run_path(str(EXAMPLES / "ask_a_document.py"))

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["ask_a_document.py", *words, "--folder", str(tmp_path)])
        return example["main"](), capsys.readouterr().err

    assert run("ask") == (2, f"error: {tmp_path} holds no document: `read` one into it first.\n")
    status, error = run("read", "--document", str(tmp_path / "none.txt"))
    assert status == 2 and "none.txt" in error and error.count("\n") == 1
    for content, said in ((b"", "is empty"), (b"caf\xe9", "must be UTF-8 text")):
        (tmp_path / "document.txt").write_bytes(content)
        status, error = run("read", "--document", str(tmp_path / "document.txt"))
        assert status == 2 and "document.txt" in error and said in error and error.count("\n") == 1

    status, error = run("read", "--cache_config", '{"backend": "HQQ", "nbits": 4}')
    assert status == 2 and "transformers' own caches cannot be saved" in error and error.count("\n") == 1

    for given in ("5", "[]", "{", '{"nbits": 4}'):
        status, error = run("read", "--cache_config", given)
        assert status == 2 and error.startswith("error: --cache_config must be a JSON object")
    status, error = run("read", "--cache_config", '{"backend": "dense"}')
    assert status == 2 and "must name a backend of `kvcache-plugins list`" in error

    def no_kernel(model: str) -> None:
        raise KernelUnavailableError("kernel='native' cannot be had here")

    monkeypatch.setitem(example["main"].__globals__, "load", no_kernel)
    assert run("read") == (2, "error: kernel='native' cannot be had here\n")
    (tmp_path / "document.json").write_text("{}")
    assert run("ask", "\udcff")[1].startswith("error: A question must be text, got '\\udcff' after 0")

    def interrupt(model: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(example["main"].__globals__, "load", interrupt)
    assert run("read") == (130, "\ninterrupted: nothing is kept of what was not finished.\n")


def test_a_document_that_cannot_be_saved_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example, text = runpy.run_path(str(EXAMPLES / "ask_a_document.py")), tmp_path / "document.txt"

    def run(content: str) -> int:
        text.write_text(content)
        words = ["read", "--document", str(text), "--cache_config", '{"backend": "int8"}']
        monkeypatch.setattr("sys.argv", ["ask_a_document.py", *words, "--folder", str(tmp_path / "cache")])
        status: int = example["main"]()
        return status

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    assert run("It was a bright cold day.") == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()}
    assert sorted(before) == ["cache.json", "cache.safetensors", "document.json"]
    with monkeypatch.context() as disk:
        disk.setattr("kvcache_plugins.persistence.write_json", full)
        assert run("The clocks were striking thirteen.") == 2
    assert "No space left" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()} == before


def test_a_document_of_which_reading_was_cut_short_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed between the cache and the token ids, a process leaves those of another document."""
    example, text = runpy.run_path(str(EXAMPLES / "ask_a_document.py")), tmp_path / "document.txt"

    def run(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["ask_a_document.py", *words, "--folder", str(tmp_path / "cache")])
        status: int = example["main"]()
        return status

    reading = ("read", "--document", str(text), "--cache_config", '{"backend": "int8"}')
    text.write_text("It was a bright cold day.")
    assert run(*reading) == 0
    text.write_text("The clocks were striking thirteen.")
    replace, unlink = Path.replace, Path.unlink

    def cut_short(path: Path, target: Path) -> Path:
        if path.name == "document.json.unfinished":
            raise KeyboardInterrupt
        return replace(path, target)

    def stays(path: Path, missing_ok: bool = False) -> None:
        if path.name != "document.json.unfinished":
            unlink(path, missing_ok)

    with monkeypatch.context() as killed:
        killed.setattr(Path, "replace", cut_short)
        killed.setattr(Path, "unlink", stays)  # as a process that is killed cleans nothing up
        assert run(*reading) == 130
    assert run("ask", "Then") == 2
    assert "did not come to its end: `read` the document again" in capsys.readouterr().err
    assert run(*reading) == 0 and run("ask", "Then") == 0


def test_a_model_is_found_again_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example, text = runpy.run_path(str(EXAMPLES / "ask_a_document.py")), tmp_path / "document.txt"
    text.write_text("It was a bright cold day.")
    monkeypatch.chdir(EXAMPLES / "models")
    words = ["read", "--model", "tiny-llama-books", "--document", str(text), "--folder", str(tmp_path / "c")]
    monkeypatch.setattr("sys.argv", ["ask_a_document.py", *words, "--cache_config", '{"backend": "int8"}'])
    assert example["main"]() == 0
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["ask_a_document.py", "ask", "Then", "--folder", "c"])
    assert example["main"]() == 0


def test_a_document_is_read_once_and_asked_in_another_process(tmp_path: Path) -> None:
    script, folder = EXAMPLES / "ask_a_document.py", ["--folder", str(tmp_path / "cache")]
    document = tmp_path / "document.txt"
    document.write_text(hide_codes((EXAMPLES.parent / "LICENSE").read_text()))
    done = run_script(str(script), "read", "--document", str(document), *folder)
    assert done.returncode == 0, done.stderr
    assert re.search(r"tokens seen / held +\d{4} / 384\n", done.stdout)
    done = run_script(str(script), "ask", *folder)
    assert done.returncode == 0, done.stderr
    for name, code in (("Alice", "48213"), ("Oliver", "90574"), ("Kate", "17362")):
        assert f"The code of {name} is {code}" in done.stdout


def test_what_is_kept_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every token the share of heads that hold it, where it stands in the text."""
    example = runpy.run_path(str(EXAMPLES / "what_is_kept.py"))
    text = "".join(f"{number} caf\u00e9s <b>&amp; bars</b>\n" for number in range(60))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")

    def run(cache_config: dict[str, Any], *words: str) -> tuple[int, str]:
        words = ("--output", str(tmp_path / "out"), "--cache_config", json.dumps(cache_config), *words)
        monkeypatch.setattr("sys.argv", ["what_is_kept.py", "--text", str(tmp_path / "text.txt"), *words])
        return example["main"](), capsys.readouterr().err

    recent = {"backend": "streaming_llm", "budget": 100}
    assert run(recent, "--tokens", "400")[0] == 0
    page = (tmp_path / "out" / "what_is_kept.html").read_text(encoding="utf-8")
    spans = re.findall(r'<span style="--share: ([\d.]+)" title="token (\d+): [^"]*">([^<]*)</span>', page)
    assert [int(place) for _, place, _ in spans] == list(range(400))
    assert [float(share) for share, _, _ in spans] == [1.0] * 4 + [0.0] * 300 + [1.0] * 96
    shown = html.unescape("".join(word for _, _, word in spans))
    assert text.startswith(shown) and len(shown) > 500
    assert (tmp_path / "out" / "what_is_kept.png").stat().st_size > 5000

    def generate(*_: Any, **__: Any) -> None:
        pytest.fail("the text was read")

    monkeypatch.setattr("transformers.LlamaForCausalLM.generate", generate)
    for refused in ({"backend": "int8"}, {**recent, "skip_layers": [*range(6)]}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no layer is packed
            status, error = run(refused)
        assert status == 2 and "must name a backend that evicts" in error
    for other in ("5", '{"backend": "dense"}', '{"backend": "quanto"}'):
        status, error = run(recent, "--cache_config", other)
        assert status == 2 and error.startswith("error: --cache_config must ")

    def no_kernel(*_: Any) -> None:
        raise KernelUnavailableError("kernel='native' cannot be had here")

    monkeypatch.setitem(example["main"].__globals__, "read", no_kernel)
    status, error = run(recent)
    assert status == 2 and error.endswith("error: kernel='native' cannot be had here\n")
    assert run(recent, "--tokens", "0")[1] == "error: --tokens must be at least 1, got 0.\n"


@pytest.mark.parametrize("docstring", [RetainingHeads.__doc__, models.__doc__], ids=["heads", "models"])
def test_examples_in_docstrings(docstring: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    text = re.sub(r"(?m)^ *```.*$", "", docstring)
    names = {"torch": torch, "RetainingHeads": RetainingHeads}
    example = doctest.DocTestParser().get_doctest(text, names, "docstring", None, 0)
    assert example.examples and doctest.DocTestRunner(verbose=False).run(example).failed == 0
