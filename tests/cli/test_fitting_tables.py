"""Tables on terminals of any width, and in files: names fold, and every number is there whole."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from kvcache_plugins.cli import display
from kvcache_plugins.cli.fitting import fitted, width_needed
from kvcache_plugins.cli.list import _table as list_table
from kvcache_plugins.evaluation.longbench import display as longbench_display
from kvcache_plugins.evaluation.passkey import display as passkey_display
from kvcache_plugins.evaluation.perplexity import tables as perplexity_tables
from kvcache_plugins.evaluation.speed import tables as speed_tables
from kvcache_plugins.runs.labels import cache_label
from kvcache_plugins.training.tables import recall_table

RESULTS = Path(__file__).resolve().parents[2] / "examples" / "results"
PACKED = {"backend": "int4", "key_bits": 8, "value_bits": 4}
README = {
    "backend": "locret",
    "heads": "examples/models/tiny-llama-books-locret",
    "budget": 128,
    "chunk_size": 64,
    "storage": PACKED,
}


def _recorded(name: str) -> dict[str, Any]:
    """Results of a run, with a cache whose name is long."""
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    last = document["results"][-1]
    document["results"].append(last | {"cache_config": README, "label": cache_label(README)})
    return document


def _context() -> dict[str, Any]:
    document = _recorded("bench_generate")
    numbers = {"tokens": 123_456_789, "kv_bytes": 2**41, "of_dense": 1.0, "batch_size": 1}
    document["largest_context"] = [
        row | numbers | {"note": "beyond the model's 131,072 positions; not verified: this machine is small"}
        for row in document["results"]
    ]
    document["settings"] |= {"memory_gb": 1.5, "model_bytes": 10**9}
    return document


def _longbench() -> dict[str, Any]:
    measured = {"kv_bytes": 12_582_912, "bits_per_value": 16.0, "memory_fraction": 1.0, "seconds": 123456.7}
    scores = {"multi_news": 12.34, "passage_retrieval_zh": 100.0}
    caches = [{"backend": "dense"}, README, {"backend": "kivi", "nbits": 2}] * 3
    results = [
        {
            "cache_config": cache_config,
            "label": cache_label(cache_config),
            "scores": scores,
            "rows": dict.fromkeys(scores, 200),
            "scores_by_length": {},
            "average": 56.17,
            **measured,
        }
        for cache_config in caches
    ]
    return {"results": results, "settings": {"longbench_e": False}}


def _recall() -> dict[str, Any]:
    row = {"recall": 0.125, "recall_by_layer": [0.25] * 32}
    return {"results": [row | {"label": label} for label in ("retaining heads", "knorm")]}


TABLES: dict[str, Callable[[], Table]] = {
    "perplexity": lambda: perplexity_tables.perplexity_table(_recorded("perplexity")),
    "generate": lambda: speed_tables.generation_table(_recorded("bench_generate")),
    "attention": lambda: speed_tables.attention_table(_recorded("bench_attention")),
    "context": lambda: speed_tables.context_table(_context()),
    "passkey": lambda: passkey_display.passkey_table(_recorded("passkey")),
    "longbench": lambda: longbench_display.longbench_table(_longbench()),
    "recall": lambda: recall_table(_recall()),
}


def _printed(renderables: list[Any], width: int) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None, highlight=False)
    for renderable in renderables:
        console.print(renderable)
    return re.sub("\\x1b\\[[0-9;]*m", "", file.getvalue())


def _numbers(table: Table) -> list[str]:
    columns = [column for column in table.columns if column.justify == "right"]
    return [str(cell) for column in columns for cell in column.cells if str(cell)]


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 120, 200])
@pytest.mark.parametrize("name", TABLES)
def test_numbers_are_never_cut(name: str, width: int) -> None:
    table = TABLES[name]()
    printed = _printed(fitted(table, width), width)
    assert max(map(len, printed.splitlines())) <= width
    assert "\u2026" not in printed
    for number in set(_numbers(table)):
        # as often as the table has it, and perhaps in its title, or once more as the name of a row
        whole = re.findall(rf"(?<![\d.,]){re.escape(number)}(?![\d,]|\.\d)", printed)
        assert len(whole) >= _numbers(table).count(number), number


@pytest.mark.parametrize("name", TABLES)
def test_numbers_are_never_cut_on_a_dumb_terminal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = TABLES[name]()
    expected = _printed(fitted(table, 80), 80)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as if this were a terminal
    for size in ("COLUMNS", "LINES"):  # which rich goes by first
        monkeypatch.delenv(size, raising=False)
    assert Console(width=1000).width == 80, "which rich makes of any width"
    parts = fitted(table, 80)
    monkeypatch.undo()
    assert _printed(parts, 80) == expected


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_fits_is_left_alone(name: str) -> None:
    table = TABLES[name]()
    assert fitted(table, 1000) == [table]


def test_every_part_begins_with_the_names_of_the_rows() -> None:
    table = speed_tables.generation_table(_recorded("bench_generate"))
    parts = fitted(table, 80)
    assert len(parts) > 1
    heads = [[str(column.header) for column in part.columns] for part in parts]
    assert all(head[:2] == ["tokens", "cache"] for head in heads)
    assert [name for head in heads for name in head[2:]] == [
        str(column.header) for column in table.columns[2:]
    ]
    assert not any(head[2].startswith("of") for head in heads), "apart from what it is a part of"
    assert [part.title for part in parts] == [table.title, *[None] * (len(parts) - 1)]


def test_names_fold_before_a_table_is_split() -> None:
    table = perplexity_tables.perplexity_table(_recorded("perplexity"))
    (part,) = fitted(table, width_needed(table) - 20)
    assert [column.header for column in part.columns] == [column.header for column in table.columns]


def test_sections_stay() -> None:
    table = speed_tables.attention_table(_recorded("bench_attention"))
    ends = [row.end_section for row in table.rows]
    assert any(ends)
    assert all([row.end_section for row in part.rows] == ends for part in fitted(table, 80))


@pytest.mark.parametrize("name", TABLES)
def test_a_file_is_as_wide_as_its_tables(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = TABLES[name]()
    display.show([table])
    printed = capsys.readouterr().out
    assert "\u2026" not in printed
    if name not in ("longbench", "recall"):
        assert f" {cache_label(README)} " in printed, "in one line"
    rules = [line for line in printed.splitlines() if set(line.strip()) == {"\u2500"}]
    assert len(rules) == 1, "one table"


def test_columns_of_text_fold_where_there_are_no_numbers() -> None:
    from kvcache_plugins.cli.backend_table import backend_rows

    table = list_table("all", backend_rows())
    (part,) = fitted(table, 80)
    assert len(part.columns) == len(table.columns)
