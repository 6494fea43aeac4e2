"""The page of results: well-formed, complete, escaped, nothing loaded from outside, shown by a browser.

The page is read back with `html.parser`, and drawn by Chromium where there is one.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvcache_plugins.evaluation.pages import charts, documents, scales, styles
from kvcache_plugins.evaluation.pages.documents import find_results
from kvcache_plugins.evaluation.pages.markup import Markup, element
from kvcache_plugins.evaluation.pages.page import render_page
from kvcache_plugins.evaluation.perplexity.summary import summarize

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "examples" / "results"
DENSE = {"backend": "dense"}
CACHES: list[dict[str, Any]] = [
    DENSE,
    {"backend": "int8"},
    {"backend": "kivi", "nbits": 2},
    {"backend": "quanto", "nbits": 4},
]
ATTACK = "<script>alert('x')</script>\"><img src=http://evil.example/x.png onerror=alert(1)>&amp;"


def _document(task: str, rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    environment = {
        "versions": {"torch": "9.8.7", "transformers": "5.4.3"},
        "device": "a processor",
        "cpu": "a processor",
        "threads": 3,
        "commit": "0123456789abcdef",
        "dirty": True,
        "command": "python scripts/some.py --flag",
    }
    document = {"schema_version": 1, "task": task, "results": rows, "environment": environment}
    return document | {"settings": {"model": "some/model"}, "skipped": []} | changes


def _rows(caches: list[dict[str, Any]] = CACHES, **metrics: Any) -> list[dict[str, Any]]:
    """Results whose every number is another one, so that each can be looked for."""
    return [
        {"cache_config": cache, "kv_bytes": 1000 + index, "bits_per_value": 16 / (1 + index)}
        | {"memory_fraction": 1 / (1 + index)}
        | {key: value(index) if callable(value) else value for key, value in metrics.items()}
        for index, cache in enumerate(caches)
    ]


def _write(directory: Path, name: str, content: Any) -> None:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def _page(directory: Path) -> str:
    files, refused = find_results(directory)
    return render_page(files, refused, directory.name)


class _Reader(HTMLParser):
    """Checks that elements nest, and keeps what a browser would show or load."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"{tag} repeats an attribute: {names}"
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)

    def count(self, name: str) -> int:
        return sum(tag == name for tag, _ in self.tags)

    @property
    def shown(self) -> str:
        return "\n".join(self.text)


def _check_self_contained(reader: _Reader, page: str) -> None:
    for tag, attributes in reader.tags:
        assert tag not in ("img", "link", "iframe", "object", "embed", "image", "use", "base", "form")
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        assert "src" not in attributes
        if "href" in attributes:
            assert str(attributes["href"]).startswith("#")
    assert reader.count("script") == 1
    style = re.search(r"<style>(.*?)</style>", page, flags=re.DOTALL)
    assert style is not None
    assert not re.search(r"url\(|@import|http", style[1])


def _check_links(reader: _Reader) -> None:
    anchors = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(anchors) == len(set(anchors))
    targets = {str(attributes["href"])[1:] for _, attributes in reader.tags if "href" in attributes}
    assert targets <= set(anchors)


# ---- whole pages ----


def test_recorded_results_are_shown_with_every_value(tmp_path: Path) -> None:
    page = _page(RECORDED)
    reader = _Reader(page)
    _check_self_contained(reader, page)
    _check_links(reader)
    assert page.startswith("<!DOCTYPE html>")
    documents_found = [json.loads(path.read_text()) for path in RECORDED.glob("*.json")]
    assert len(documents_found) >= 3
    for document in documents_found:
        for row in document["results"]:
            for value in row.values():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    assert json.dumps(value) in reader.shown
        place = document["environment"]
        for fact in (place["command"], place["commit"], place["device"], *place["versions"].values()):
            assert fact in reader.shown
    assert reader.count("figure") >= 6
    assert "KL to dense" in reader.shown
    assert "ms per token" in reader.shown


ALL_TASKS: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "perplexity": (
        _rows(
            perplexity=lambda i: 31.25 + i,
            nll=lambda i: 3.5 + i / 7,
            kl_to_dense=lambda i: i / 300,
            top1_agreement=lambda i: 1 - i / 9,
            tokens=4321,
            packed_read_fraction=0.875,
        ),
        ["31.250", "34.250", "0.00333", "0.01000", "4,321", "0.875", "3.643"],
    ),
    "passkey": (
        _rows(
            accuracy=lambda i: 0.9 - i / 8,
            by_length=lambda i: {"512": 1.0, "2048": 0.7 - i / 10},
            by_depth=lambda i: {"512": {"0": 0.5, "100": 0.25}},
        ),
        ["90.0 %", "77.5 %", "2048", "70.0 %", "40.0 %", "By depth", "25.0 %"],
    ),
    "longbench": (
        _rows(
            average=lambda i: 40.5 - i,
            scores=lambda i: {"qasper": 50.25 - i, "trec": 11.5},
            scores_by_length=lambda i: {
                "qasper": {"0-4k": 61.5 - i, "4-8k": 33.75, "8k+": None},
                "trec": {"0-4k": 12.25, "4-8k": None, "8k+": None},
            },
        ),
        [
            *("40.50", "37.50", "qasper", "50.25", "47.25", "11.50"),
            *("Scores of texts of 0-4k words", "61.50", "58.50", "12.25", "Scores of texts of 4-8k", "33.75"),
        ],
    ),
    "bench attention": (
        [
            row | {"length": length, "batch_size": 1}
            for length in (1024, 8192)
            for row in _rows(
                median_ms=lambda i, n=length: n / 100 + i,
                ratio_to_best_dense=lambda i: 1 + i / 4,
                baseline_ms=lambda i, n=length: {"matmul": n / 100, "sdpa_enable_gqa": n / 10},
                kernel=lambda i: "matmul" if i == 0 else "cpu",
            )
        ],
        ["10.240", "81.920", "dense sdpa_enable_gqa", "819.200", "1.75"],
    ),
    "bench generate": (
        [
            row | {"length": length, "batch_size": batch_size}
            for length in (1024, 8192)
            for batch_size in (1, 4)
            for row in _rows(
                ttft_ms=lambda i, n=length: n + i,
                prefill_ms=lambda i, n=length: n - 3 + i,
                ms_per_token=lambda i: 10.25 + i,
                estimated_kv_bytes=lambda i: 2048 * (i + 1),
                peak_memory_bytes=lambda i: 5 * 2**30 + i,
            )
        ],
        ["1,024.0", "1,021.0", "8,195.0", "13.25", "8.00 KiB", "5.00 GiB", "batch of 4"],
    ),
    "quickstart": (
        _rows(perplexity=lambda i: 20 + i, kl_to_dense=lambda i: i / 10, ms_per_token=lambda i: 3.5 + i),
        ["23.000", "0.30000", "6.5"],
    ),
    "something <else>": (
        _rows(metric=lambda i: 0.125 + i, words=["a", "b"], flag=True, nothing=None, by_kind={"x": 0.5}),
        ["3.125", "a, b", "yes", "something <else>", "By kind", "50.0 %"],
    ),
}


@pytest.mark.parametrize("task", ALL_TASKS)
def test_every_kind_of_evaluation(task: str, tmp_path: Path) -> None:
    rows, expected = ALL_TASKS[task]
    skipped = [{"cache_config": {"backend": "hqq", "nbits": 4}, "reason": "not installed here"}]
    _write(tmp_path, "results.json", _document(task, rows, skipped=skipped))
    page = _page(tmp_path)
    reader = _Reader(page)
    _check_self_contained(reader, page)
    for text in [
        *expected,
        "hqq 4-bit",
        "not installed here",
        "some/model",
        "9.8.7",
        "--flag",
        "uncommitted",
    ]:
        assert text in reader.shown, text
    assert reader.count("figure") >= (0 if task == "something <else>" else 1)
    assert "texts of 8k+" not in reader.shown, "of which there are none"
    assert reader.count("nav") == 0  # one file needs no contents
    # the dense cache is the first row of the first table, transformers' own caches are marked
    kinds = [attributes.get("class") for tag, attributes in reader.tags if tag == "tr"]
    assert kinds[1] == "dense"
    assert "foreign" in kinds
    assert "transformers" in reader.text


@pytest.mark.parametrize("task", ALL_TASKS)
def test_missing_and_senseless_values_do_not_stop_the_page(task: str, tmp_path: Path) -> None:
    bare = [{"cache_config": cache} for cache in CACHES]
    odd: list[dict[str, Any]] = [
        {
            "cache_config": cache,
            **{key: junk for row in ALL_TASKS[task][0] for key in row if key != "cache_config"},
            "nll_by_position": junk,
        }
        for cache, junk in zip(CACHES, ("text", [1, {"a": None}], math.nan, {"b": {"c": []}}), strict=True)
    ]
    _write(tmp_path, "bare.json", _document(task, bare))
    _write(tmp_path, "odd.json", _document(task, odd, settings=7, skipped="x", largest_context=[1, {}]))
    _write(tmp_path, "zero.json", _document(task, _rows(kl_to_dense=0, perplexity=math.inf, length=0)))
    one = _document(task, ALL_TASKS[task][0][:1])
    _write(tmp_path, "one.json", one)
    for name, values in (("huge", (1e308, 1e-308)), ("tiny", (5e-324, 10**400)), ("wide", (1e300, -1e300))):
        rows = [
            {key: value if key == "cache_config" else values[index % 2] for key, value in row.items()}
            for index, row in enumerate(ALL_TASKS[task][0])
        ]
        _write(tmp_path, f"{name}.json", _document(task, rows))
    page = _page(tmp_path)
    reader = _Reader(page)
    _check_self_contained(reader, page)
    assert [name for name in ("bare", "odd", "zero", "one") if f"{name}.json" not in reader.shown] == []
    assert not re.search(r'="-?(nan|inf)', page)


def test_curves_by_position_are_drawn_as_the_evaluation_writes_them(tmp_path: Path) -> None:
    sums = {"tokens": 64, "nll_squares": 0.0, "increase_squares": 0.0, "packed_read": 0.0, "is_exact": True}
    records = [
        sums
        | {"kv_bytes": 1, "kernel": None, "seconds": 1.0, "nll": 64.0, "increase": 8.0 * index}
        | {"nll_by_position": [10.0 + part + index for part in range(16)]}
        | {"increase_by_position": [float(index)] * 16}
        for index in range(len(CACHES))
    ]
    del records[0]["increase_by_position"], records[0]["increase"]
    rows = [
        summarize(cache, [record], records[:1], prefill=100, dense_bits=32)
        for cache, record in zip(CACHES, records, strict=True)
    ]
    _write(tmp_path, "results.json", _document("perplexity", rows))
    reader = _Reader(_page(tmp_path))
    for title in ("Negative log-likelihood, by position", "Difference to the dense cache, by position"):
        assert title in reader.text
    # 16 ranges of 4 positions, the sums of 4 tokens each
    for point in (
        "dense: 102, 2.5",
        "dense: 162, 6.25",
        "int8: 106, 3",
        "kivi 2-bit: 106, 0.5",
        "dense: 102, 0",
    ):
        assert point in reader.text
    one_cache = tmp_path / "one"
    _write(one_cache, "results.json", _document("perplexity", rows[:1]))
    assert "Difference to the dense cache, by position" not in _Reader(_page(one_cache)).text


def test_the_recorded_perplexity_has_its_curves(tmp_path: Path) -> None:
    shutil.copy(RECORDED / "perplexity.json", tmp_path)
    document = json.loads((RECORDED / "perplexity.json").read_text())
    reader = _Reader(_page(tmp_path))
    for row in document["results"]:
        first = row["nll_by_position"][0]
        middle = (first["start"] + first["stop"]) / 2
        assert f"{row['label']}: {middle:,.6g}, {first['nll']:.4g}" in reader.text
    assert sum("by position" in text for text in reader.text) >= 2


def test_what_did_not_fit_and_the_largest_context_are_shown(tmp_path: Path) -> None:
    rows = [row | {"length": 4096, "batch_size": 2} for row in _rows(ms_per_token=5.5)]
    lost = {"fits": False, "reason": "did not fit: killed", "kv_bytes": None, "ms_per_token": None}
    rows[0] |= lost
    contexts = [
        {"cache_config": cache, "batch_size": 2, "tokens": 12345 * (index + 1), "note": f"note {index}"}
        for index, cache in enumerate(CACHES)
    ]
    document = _document("bench generate", rows, largest_context=contexts, settings={"memory_gb": 24.0})
    _write(tmp_path, "results.json", document)
    shown = _Reader(_page(tmp_path)).shown
    assert "dense\n, 4,096 tokens, batch of 2: did not fit: killed" in shown
    assert "Largest context that fits 24 GB, batch of 2" in shown
    for text in ("12,345", "49,380", "note 3"):
        assert text in shown


def test_fifty_files_have_contents_and_styles_of_their_own(tmp_path: Path) -> None:
    caches = [DENSE, *({"backend": "kivi", "nbits": 2, "residual_length": 32 * n} for n in range(1, 41))]
    for index in range(50):
        rows = _rows(
            caches[: 3 + index % 39],
            perplexity=lambda i, n=index: 30 + n + i / 100,
            kl_to_dense=lambda i: i / 500,
        )
        _write(tmp_path, f"run{index:02d}/results.json", _document("perplexity", rows))
    page = _page(tmp_path)
    reader = _Reader(page)
    _check_self_contained(reader, page)
    _check_links(reader)
    links = [attributes for tag, attributes in reader.tags if tag == "a"]
    assert len(links) == reader.count("section") == 50
    assert reader.count("figure") == 100


def test_what_comes_from_a_file_is_escaped(tmp_path: Path) -> None:
    rows = _rows([DENSE, {"backend": "int8", ATTACK: ATTACK}], metric=ATTACK)
    rows[1]["label"] = ATTACK
    rows[0] |= {ATTACK: 1.0, "by_kind": {ATTACK: 0.5}, "scores": {ATTACK: 1.0}}
    for row in rows:
        row |= {"kl_to_dense": 0.5, "perplexity": 2.0, "ms_per_token": 1.0, "length": 3, "batch_size": 1}
    for index, task in enumerate((ATTACK, "perplexity", "bench generate", "longbench")):
        skipped = [{"cache_config": {"backend": ATTACK}, "reason": ATTACK}]
        document = _document(task, rows, skipped=skipped, settings={"model": ATTACK, ATTACK: ATTACK})
        document["environment"] |= {"command": ATTACK, "device": ATTACK, "commit": ATTACK}
        _write(tmp_path, f"{index}.json", document)
    _write(tmp_path, "<b>bold</b>.json", "{")
    page = _page(tmp_path)
    reader = _Reader(page)
    _check_self_contained(reader, page)
    assert ATTACK in reader.shown
    assert "<b>bold</b>.json" in reader.shown
    assert reader.count("script") == page.count("<script") == 1


# ---- which files ----


def test_damaged_and_foreign_files_are_listed_and_do_not_stop_the_page(tmp_path: Path) -> None:
    good = _document("perplexity", _rows(perplexity=5.5))
    _write(tmp_path, "deep/er/results.json", good)
    _write(tmp_path, "half.json", '{"schema_version": 1, "task"')
    _write(tmp_path, "config.json", {"model_type": "llama"})
    _write(tmp_path, "future.json", good | {"schema_version": 7})
    _write(tmp_path, "latin.json", "{}")
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xff"}')
    _write(tmp_path, "nested.json", "[" * 100_000)
    _write(tmp_path, ".hidden/results.json", good)
    _write(tmp_path, "notes.txt", "nothing")
    files, refused = find_results(tmp_path)
    assert [file.path.as_posix() for file in files] == ["deep/er/results.json"]
    names = ["config.json", "future.json", "half.json", "latin.json", "nested.json"]
    assert [entry.path.as_posix() for entry in refused] == names
    shown = _Reader(_page(tmp_path)).shown
    assert "deep/er/results.json" in shown
    for entry in refused:
        assert f"{entry.path}\n: {entry.reason}" in shown
        assert str(tmp_path) not in entry.reason
    assert "got 7" in refused[1].reason


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    _write(tmp_path, "results.json", _document("perplexity", _rows(perplexity=5.5)))
    os.mkfifo(tmp_path / "pipe.json")
    command = [sys.executable, "-m", "kvcache_plugins", "report", str(tmp_path)]
    subprocess.run([*command, "--output", str(tmp_path / "page.html")], check=True, timeout=120)


def test_no_result_at_all_is_an_error_that_names_the_directory(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match=re.escape(str(directory))):
            find_results(directory)
    _write(tmp_path, "config.json", {"a": 1})
    with pytest.raises(ValueError, match=r"1 other json file there.*config\.json"):
        find_results(tmp_path)


def test_dense_comes_first_at_every_length() -> None:
    rows = [
        {"cache_config": cache, "length": length} for length in (9, 3) for cache in ({"backend": "b"}, DENSE)
    ]
    file = documents.ResultFile(Path("x.json"), {"results": rows})
    assert [(row["length"], row["cache_config"]["backend"]) for row in file.rows] == [
        (9, "dense"), (9, "b"), (3, "dense"), (3, "b"),
    ]  # fmt: skip


# ---- the parts ----


def test_only_markup_is_not_escaped() -> None:
    assert element("p", "<b>", Markup("<i></i>"), None, 3) == "<p>&lt;b&gt;<i></i>3</p>"
    assert element("a", class_='x" y="', stroke_width=1 / 3, title=None) == (
        '<a class="x&quot; y=&quot;" stroke-width="0.33"></a>'
    )


@pytest.mark.parametrize(
    "values", [[0.0], [5.0, 5.0], [1e-7, 3e-7], [-2.0, 8.0], [1e12, 3e12], [0.999, 1.001]], ids=str
)
def test_linear_axes_hold_their_values_between_a_few_round_ticks(values: list[float]) -> None:
    axis = scales.linear(values)
    assert all(0 <= axis.place(value) <= 1 for value in [*values, *axis.ticks])
    assert 2 <= len(axis.ticks) <= 11
    assert len(set(axis.labels())) == len(axis.ticks)
    assert [float(label.replace(",", "")) for label in axis.labels()] == pytest.approx(axis.ticks)


@pytest.mark.parametrize(
    "values", [[3.0], [1e-9, 1e9], [1.01, 1.02], [4096, 131072], [0.02, 7.0], [1e-5, 2e-5]], ids=str
)
def test_logarithmic_axes_do_too(values: list[float]) -> None:
    axis = scales.logarithmic(values)
    assert all(-1e-9 <= axis.place(value) <= 1 + 1e-9 for value in [*values, *axis.ticks])
    assert 2 <= len(axis.ticks) <= 11
    assert len(set(axis.labels())) == len(axis.ticks)
    middle = math.sqrt(axis.low * axis.high)
    assert axis.place(middle) == pytest.approx(0.5)


def test_every_cache_has_a_look_of_its_own() -> None:
    book = styles.StyleBook()
    backends = ["dense", "int8", "int4", "kivi", "float8", "kvquant", "locret", "h2o", "quanto", "hqq"]
    given = {(b, str(n)): book.style(b, str(n)) for b in backends for n in range(1 if b == "dense" else 6)}
    assert len(set(given.values())) == len(given)
    assert all(book.style(*cache) == style for cache, style in given.items())
    assert given["dense", "0"].color == "ink"
    assert {backend for (backend, _), style in given.items() if style.is_foreign} == {"quanto", "hqq"}


def _boxes(picture: str) -> list[tuple[float, float, float, float]]:
    """Boxes of the names in a picture, as wide as their letters can be."""
    found = re.findall(r'<text class="name" x="([\d.-]+)" y="([\d.-]+)">([^<]*)</text>', picture)
    return [(float(x), float(y) - 9, float(x) + 5.5 * len(text), float(y) + 1) for x, y, text in found]


def test_names_in_a_picture_do_not_overlap() -> None:
    style = styles.Style("s0", "circle")
    points = [(2 + (7 * n) % 11 / 3, 1 + (5 * n) % 13 / 40) for n in range(40)]
    series = [charts.Series(f"cache number {n}", style, [point]) for n, point in enumerate(points)]
    boxes = _boxes(charts.scatter("t", "x", "y", series, "linear"))
    assert 8 <= len(boxes) < 40
    for index, (left, top, right, bottom) in enumerate(boxes):
        assert left >= 0
        assert right <= 540
        for other in boxes[:index]:
            assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top


def test_a_line_goes_through_its_values() -> None:
    style = styles.Style("s0", "circle")
    series = [charts.Series("a", style, [(1024, 1.0), (2048, 10.0), (4096, 100.0)])]
    picture = charts.lines("t", "x", "y", series, axis="log", spanned=([1024, 4096], [1.0, 100.0]))
    path = re.search(r'<polyline [^>]*points="([^"]*)"', picture)
    assert path is not None
    (x0, y0), (x1, y1), (x2, y2) = ([float(part) for part in pair.split(",")] for pair in path[1].split())
    assert x0 < x1 < x2
    assert y0 > y1 > y2
    assert (x1 - x0, y0 - y1) == pytest.approx((x2 - x1, y1 - y2), abs=0.02)


# ---- a real browser ----

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


def _browse(page: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    return subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}", *arguments, page.as_uri(),
        ],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def _tasks_below(directory: Path) -> None:
    contents: Mapping[str, Any] = ALL_TASKS
    for index, (task, (rows, _)) in enumerate(contents.items()):
        _write(directory, f"{index}/results.json", _document(task, rows))


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_browser_shows_the_page_without_a_complaint(tmp_path: Path) -> None:
    _tasks_below(tmp_path / "results")
    page = tmp_path / "report.html"
    page.write_text(_page(tmp_path / "results"), encoding="utf-8")
    dumped = _browse(page, tmp_path, "--dump-dom")
    assert dumped.returncode == 0, dumped.stderr
    assert "CONSOLE" not in dumped.stderr
    # the script ran: it marks the tables it can sort
    assert dumped.stdout.count('class="sortable live"') == _Reader(page.read_text()).count("table") - (
        dumped.stdout.count("<table><thead>")
    )
    picture = tmp_path / "page.png"
    drawn = _browse(page, tmp_path, f"--screenshot={picture}", "--window-size=1200,2000")
    assert "CONSOLE" not in drawn.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 50_000  # an empty page of that size has a tenth of it
