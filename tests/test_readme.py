"""The README says what the code does: its examples run, its tables are rendered, its links lead somewhere."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvcache_plugins import cli
from kvcache_plugins.registry import get_backend, list_backends
from kvcache_plugins.training.parsing import parse_arguments

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    status = _load_script("render_readme").main(["--check"])
    assert status == 0, f"run `python scripts/render_readme.py`:\n{capsys.readouterr().out}"


@pytest.mark.allow_deprecation(r".past_key_values", reason="the name that all supported releases know")
def test_python_examples_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All blocks in order and in one namespace, as a reader would paste them, from the root of the
    checkout."""
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    namespace: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"README.md, example {number + 1}", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "kivi" in printed
    assert "bits per value" in printed


def test_the_first_example_is_short() -> None:
    first = re.search(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    assert first is not None
    assert len(first[1].splitlines()) <= 10


def test_commands_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to the options of every line that a shell would run; what they do is tested elsewhere."""
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("any long text")
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    for name in cli._COMMANDS:
        importlib.import_module(f"kvcache_plugins.cli.{name}").add_parser(subparsers)
    blocks = re.findall(r"^```bash\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    commands = [shlex.split(line) for line in lines if not re.match(r"\w+=", line)]
    assert len(commands) >= 5
    for command in commands:
        program, *arguments = command
        if program == "python":
            script = (ROOT / arguments.pop(0)).read_text(encoding="utf-8")
            called = re.search(r"main\(\[(.*), \*sys", script)
            assert called is not None
            arguments = [*json.loads(f"[{called[1]}]"), *arguments]
        assert program in ("python", "kvcache-plugins")
        parsed = parser.parse_args(arguments)
        if arguments[0] == "train-locret":  # whose options are read when it runs
            parse_arguments(parsed.arguments)


def test_configurations_are_valid() -> None:
    given = [json.loads(text) for text in re.findall(r'`(\{"backend": "\w+".*?\})`', README)]
    assert len(given) >= 5
    for options in given:
        get_backend(options.pop("backend")).config_class.from_dict(options)


def _options_table() -> dict[str, str]:
    """Return key -> backends, of every key in the table of options."""
    table = README.partition("<!-- options:begin -->")[2].partition("<!-- options:end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    return {key: row[1] for row in rows for key in re.findall(r"`(\w+)`", row[0])}


# Backends registered by other tests, or by packages of the environment, are not the README's business.
BUILTIN = sorted(
    path.stem
    for path in (ROOT / "kvcache_plugins" / "backends").glob("[a-z]*.py")
    if path.stem in list_backends()
)


@pytest.mark.parametrize("backend", BUILTIN)
def test_options_table_names_every_option(backend: str) -> None:
    table = _options_table()
    for option in dataclasses.fields(get_backend(backend).config_class):
        assert option.name in table
        assert table[option.name].startswith("all") or backend in table[option.name]


def test_options_table_names_nothing_else() -> None:
    known = {"backend"}
    for backend in BUILTIN:
        known |= {option.name for option in dataclasses.fields(get_backend(backend).config_class)}
    assert set(_options_table()) == known


def test_backend_table_has_one_row_per_backend() -> None:
    packing, evicting = (_backends_in(part) for part in ("packing", "evicting"))
    assert sorted(packing + evicting) == BUILTIN
    assert [name for name in BUILTIN if get_backend(name).evicts] == evicting


def _backends_in(part: str) -> list[str]:
    table = README.partition(f"<!-- {part}:begin -->")[2].partition(f"<!-- {part}:end -->")[0]
    return re.findall(r"^\| `(\w+)`", table, flags=re.MULTILINE)


@pytest.mark.parametrize("document", ["README.md", ".github/CONTRIBUTING.md"])
def test_links_and_named_files_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    for target in targets:
        assert ((ROOT / document).parent / target).exists(), target
    for path in re.findall(r"(?<![\w./-])(?:examples|scripts|tests|kvcache_plugins|configs)/[\w./-]+", text):
        assert (ROOT / path.rstrip(".")).exists(), path


def test_replacing_a_part_needs_its_markers() -> None:
    render = _load_script("render_readme")
    text = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb\n"
    assert render.replace_part(text, "x", "new") == "a\n<!-- x:begin -->\nnew\n<!-- x:end -->\nb\n"
    with pytest.raises(ValueError, match="y:begin"):
        render.replace_part(text, "y", "new")


def test_only_committed_code_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    render = _load_script("render_readme")
    monkeypatch.setattr(render, "RECORDED", tmp_path / "kept" / "quickstart.json")
    results = tmp_path / "results.json"
    results.write_text(
        '{"schema_version": 1, "task": "quickstart", "results": [], "environment": {"dirty": true}}'
    )
    with pytest.raises(ValueError, match="not committed"):
        render.record(results, allow_dirty=False)
    render.record(results, allow_dirty=True)
    assert render.RECORDED.exists()
    results.write_text('{"schema_version": 1, "task": "other", "environment": {"dirty": false}}')
    with pytest.raises(ValueError, match="not a results"):
        render.record(results, allow_dirty=False)


def test_recorded_evaluations_become_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    render = _load_script("render_readme")
    monkeypatch.setattr(render, "RECORDED", tmp_path / "kept" / "quickstart.json")
    assert render.evaluations_part("perplexity", "passkey") == ""
    environment = {
        "command": "python scripts/x.py", "commit": "0123456789abc", "dirty": False, "device": "a processor",
        "threads": 2, "versions": {"torch": "1", "transformers": "2"},
    }  # fmt: skip
    rows = {
        "perplexity": [
            {"cache_config": {"backend": "dense"}, "perplexity": 3.14159, "kv_bytes": 1234567},
            {"cache_config": {"backend": "quanto", "nbits": 4}, "perplexity": 4.5, "kl_to_dense": 0.25},
        ],
        "passkey": [
            {"cache_config": {"backend": "dense"}, "accuracy": 0.5, "by_length": {"512": 0.75, "1024": 0.25}}
        ],
    }
    facts = [{"cache_config": {"backend": "dense"}, "accuracy": 0.25, "facts": 8}]
    for task, results in (*rows.items(), ("passkey", facts)):
        path = tmp_path / "results.json"
        document = {"schema_version": 1, "task": task, "results": results, "environment": environment}
        path.write_text(json.dumps(document))
        render.record(path, allow_dirty=False)
    assert "| dense | 0.250 |" in render.evaluations_part("facts")
    text = render.evaluations_part("perplexity", "passkey")
    assert "| dense | 3.142 | - | 1,234,567 |" in text
    assert "| quanto 4-bit (transformers) | 4.500 | 0.25000 | - |" in text
    assert "| cache | accuracy | 512 tokens | 1024 tokens |" in text
    assert "| dense | 0.500 | 0.75 | 0.25 |" in text
    assert text.count("`python scripts/x.py`; a processor with 2 threads") == 2
    assert "read packed" not in text  # no result has it
