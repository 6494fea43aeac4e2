"""`eval perplexity`: what it refuses, how it cuts texts, what it computes, and that it can be interrupted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import kvcache_plugins as kvp
from kvcache_plugins.cli import main
from kvcache_plugins.evaluation.perplexity import run as perplexity
from kvcache_plugins.evaluation.perplexity import scoring as perplexity_scoring
from kvcache_plugins.evaluation.perplexity import tables as perplexity_tables
from kvcache_plugins.evaluation.perplexity.options import PerplexityOptions
from kvcache_plugins.evaluation.perplexity.summary import mean_and_error, summarize
from kvcache_plugins.evaluation.perplexity.texts import Text, Window, cut_windows, read_texts
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.runs import text_files
from kvcache_plugins.runs.language_reference import read_language_reference
from kvcache_plugins.runs.loading import encode

MODEL = str(Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama-books")
LENGTH, PREFILL = 64, 40
INT8, KIVI = {"backend": "int8", "kernel": "torch"}, {"backend": "kivi", "nbits": 2, "residual_length": 32}


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "book.txt"
    path.write_text(topics["specialnames"][:4000], encoding="utf-8")
    return path


def command(output: Path, *arguments: str) -> list[str]:
    return ["eval", "perplexity", "--model", MODEL, "--output", str(output), *arguments]


def on(book: Path, output: Path, *arguments: str) -> list[str]:
    window = ("--context_length", str(LENGTH), "--prefill_length", str(PREFILL), "--max_windows", "2")
    caches = ("--cache_config", json.dumps(INT8), json.dumps(KIVI))
    text = ("--dataset", "text", "--text_files", str(book), "--dtype", "fp32")
    return command(output, *text, *window, *caches, *arguments)


def results(output: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((output / "results.json").read_text(encoding="utf-8"))
    return document


# ---- what is refused, before the model is loaded ----


def test_the_mark_that_editors_put_first_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "marked.txt"
    path.write_bytes(b"\xef\xbb\xbfA book.")
    assert text_files.read_text_file(path, "--text_files") == "A book."


def _refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    assert main(arguments) == 2
    return capsys.readouterr().err


@pytest.fixture
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "load_subject", lambda *_: pytest.fail("the model was loaded"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "pg-19"], "Did you mean 'pg19'?"),
        (["--dataset", "text"], "needs --text_files"),
        (["--dataset", "pydoc", "--text_files", "a.txt"], "goes with --dataset text"),
        (["--dataset", "pydoc", "--dataset_path", "a"], "goes with --dataset pg19"),
        (["--dataset", "text", "--text_files", "nowhere.txt"], "--text_files must be a file, 'nowhere.txt'"),
        (
            ["--dataset", "pydoc", "--model", "./nowhere"],
            "--model must be a directory or a hub id; there is no",
        ),
        (
            ["--dataset", "pydoc", "--context_length", "64", "--prefill_length", "64"],
            "below --context_length",
        ),
        (["--dataset", "pydoc", "--context_length", "64", "--stride", "31"], "at least the 32 predicted"),
        (["--dataset", "pydoc", "--block_length", "0"], "--block_length must be an integer >= 1"),
        (["--dataset", "pydoc", "--max_reference_gb", "0.001"], "--no_kl"),
        (["--dataset", "pydoc", "--dtype", "fp32", "--max_reference_gb", "0.016"], "take 0.0168 GB, more"),
        (
            ["--dataset", "pydoc", "--no_kl", "--max_reference_gb", "9"],
            "--max_reference_gb is for the comparison that --no_kl leaves out, got 9.0.",
        ),
        (
            ["--dataset", "pydoc", "--approximate_blocks"],
            "--approximate_blocks needs a --block_length above 1",
        ),
        (["--dataset", "pydoc", "--context_length", "100000000"], "needs 100000000 tokens of text"),
        (["--dataset", "pydoc", "--cache_config", '{"backend": "int8", "nbits": 3}'], "nbits"),
    ],
)
@pytest.mark.usefixtures("_no_model")
def test_wrong_options_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in _refused(capsys, command(tmp_path, *arguments))


@pytest.mark.usefixtures("_no_model")
def test_wrong_texts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "story.txt"
    text = ("--dataset", "text", "--text_files", str(path))
    assert "cannot be read: No such file" in _refused(capsys, command(tmp_path, *text))
    path.write_text("  \n")
    assert "is empty" in _refused(capsys, command(tmp_path, *text))
    path.write_bytes(b"\xff\xfe\x00")
    assert "must be UTF-8" in _refused(capsys, command(tmp_path, *text))
    path.write_text("Once upon a time")
    tokens = len(AutoTokenizer.from_pretrained(MODEL)("Once upon a time").input_ids)
    message = _refused(capsys, command(tmp_path, *text, "--context_length", "100"))
    assert f"needs 100 tokens of text, but 'story.txt' has {tokens}." in message


@pytest.mark.usefixtures("_no_model")
def test_an_output_that_cannot_be_written_is_refused(
    book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert "must be a directory" in _refused(capsys, on(book, tmp_path / "file"))
    assert "file" in _refused(capsys, on(book, tmp_path / "file" / "below"))


def test_windows_beyond_the_positions_of_the_model_are_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    for length, warned in ((4096, 0), (4097, 1)):
        perplexity._warn_of_length(_options(context_length=length), AutoConfig.from_pretrained(MODEL))
        assert len(recwarn) == warned
    assert "--context_length 4097 goes beyond the 4096 positions" in str(recwarn.pop().message)


def test_no_text_is_fetched_for_a_model_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perplexity, "read_texts", lambda *_: pytest.fail("the text was fetched"))
    (tmp_path / "empty").mkdir()
    arguments = ["eval", "perplexity", "--model", str(tmp_path / "empty"), "--output", str(tmp_path / "out")]
    assert "The configuration of --model" in _refused(capsys, arguments)


def test_a_model_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--model must name" in _refused(capsys, ["eval", "perplexity", "--dataset", "pydoc"])


# ---- texts and windows ----


def _options(**options: Any) -> PerplexityOptions:
    return PerplexityOptions.from_dict({"model": "m", "dataset": "pydoc", "context_length": 10} | options)


def test_windows_begin_as_texts_do(book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    plain = tokenizer("a").input_ids
    template = "<a> <b> $A <c>"
    given = [(name, 3 + index) for index, name in enumerate(("<a>", "<b>", "<c>"))]
    tokenizer._tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=given)
    assert tokenizer("a").input_ids == [3, 4, *plain, 5]
    windows: list[Window] = []
    monkeypatch.setattr(perplexity, "load_tokenizer", lambda options: tokenizer)
    monkeypatch.setattr(
        perplexity, "cut_windows", lambda *given: windows.extend(cut_windows(*given)) or windows
    )
    monkeypatch.setattr(perplexity, "load_subject", lambda *_: pytest.fail("far enough"))
    with pytest.raises(pytest.fail.Exception, match="far enough"):
        main(on(book, tmp_path))
    assert [window.token_ids[:2] for window in windows] == [(3, 4)] * 2
    ids = tokenizer(book.read_text(), add_special_tokens=False, verbose=False).input_ids
    assert windows[1].token_ids[2:] == tuple(ids[LENGTH - 2 : 2 * (LENGTH - 2)])


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def _texts(*lengths: int) -> list[Text]:
    return [
        Text(f"t{n}", " ".join(str(100 * n + i) for i in range(length))) for n, length in enumerate(lengths)
    ]


def test_windows_follow_each_other_within_a_text() -> None:
    windows = cut_windows(_texts(25, 9, 10), _numbers, _options())
    assert [(window.text, window.start) for window in windows] == [("t0", 0), ("t0", 10), ("t2", 0)]
    assert windows[1].token_ids == tuple(range(10, 20))
    assert len({window.digest for window in windows}) == 3


def test_no_token_is_predicted_twice_and_with_the_least_stride_none_is_left_out() -> None:
    options = _options(prefill_length=6, stride=4)
    windows = cut_windows(_texts(26), _numbers, options)
    predicted = [token for window in windows for token in window.token_ids[6:]]
    assert predicted == list(range(6, 26))


def test_what_a_tokenizer_puts_in_front_counts_towards_the_length() -> None:
    windows = cut_windows(_texts(20), _numbers, _options(), prefix=[7])
    assert [window.token_ids[:2] for window in windows] == [(7, 0), (7, 9)]
    assert {len(window.token_ids) for window in windows} == {10}


def test_number_of_windows() -> None:
    texts = _texts(50, 50)
    assert len(cut_windows(texts, _numbers, _options(max_windows=7))) == 7
    some = cut_windows(texts, _numbers, _options(max_windows_per_text=2))
    assert [window.text for window in some] == ["t0", "t0", "t1", "t1"]
    read: list[str] = []

    def encode(text: str) -> list[int]:
        read.append(text)
        return _numbers(text)

    assert len(cut_windows(texts, encode, _options(max_windows=5))) == 5
    assert len(read) == 1, "texts beyond the last window are not tokenized"


@pytest.mark.parametrize("limit", [{"max_windows": 3}, {"max_windows_per_text": 2}, {"max_windows": 99}])
def test_of_a_text_no_more_is_tokenized_than_is_read(limit: dict[str, int]) -> None:
    tokenizer, reference = AutoTokenizer.from_pretrained(MODEL), read_language_reference()
    read: list[str] = []

    def encode(text: str) -> list[int]:
        read.append(text)
        return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    for content in (reference, " " * 9000 + reference):  # of blanks a token has many
        found = cut_windows([Text("t", content)], encode, _options(context_length=50, **limit))
        some = next(iter(limit.values()))
        assert found == cut_windows([Text("t", content)], encode, _options(context_length=50))[:some]
        assert (len(read[0]) < len(content)) == (some < 99)
        read.clear()


def test_windows_that_overlap_need_as_much_as_the_last_of_them_reads() -> None:
    options = _options(context_length=1000, prefill_length=990, stride=10, max_windows=3)
    windows = cut_windows(_texts(3000), _numbers, options)
    assert [window.token_ids[-1] for window in windows] == [999, 1009, 1019]


def test_a_beginning_of_too_few_tokens_is_not_all_that_is_read() -> None:
    words = " ".join("x" * 60 for _ in range(300))
    windows = cut_windows(
        [Text("t", words)],
        lambda text: list(range(len(text.split()))),
        _options(context_length=100, max_windows=1),
    )
    assert [window.token_ids for window in windows] == [tuple(range(100))]


def test_of_several_files_none_may_be_too_short() -> None:
    options = _options(dataset="text", text_files=["t0", "t1"])
    with pytest.raises(ValueError, match=r"needs 10 tokens of text, but 't1' has 9\."):
        cut_windows(_texts(25, 9), _numbers, options)


def test_a_text_beyond_the_memory_is_told_before_it_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(text_files, "machine_memory", lambda: 10**6)
    path = tmp_path / "story.txt"
    path.write_text("Once upon a time. " * 1000)
    text = ["--dataset", "text", "--text_files", str(path)]
    said = "error: A text of 18,000 characters is too long: to tokenize it takes about 0.0 GB, and this"
    assert _refused(capsys, command(tmp_path, *text)).startswith(said)


def test_halves_of_characters_are_told_before_the_model_is_loaded() -> None:
    with pytest.raises(ValueError, match=r"must be text, got '.ud83d' after 2 characters, half of a"):
        encode(AutoTokenizer.from_pretrained(MODEL), "a \ud83d b")


def test_texts_that_are_all_short_are_refused() -> None:
    with pytest.raises(ValueError, match=r"needs 10 tokens of text, but the longest text, 't1', has 8"):
        cut_windows(_texts(3, 8), _numbers, _options())


def test_pg19_is_read_from_a_stand_in(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"short_book_title": "A", "text": "first"}, {"short_book_title": "B", "text": "second"}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "test.parquet")
    texts = read_texts(_options(dataset="pg19", dataset_path=str(tmp_path)))
    assert [text.content for text in texts] == ["first", "second"]
    assert [text.name for text in texts] == ["A (row 1)", "B (row 2)"]


def test_pg19_is_asked_for_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[str] = []

    def load_dataset(path: str) -> dict[str, Any]:
        asked.append(path)
        return {"test": datasets.Dataset.from_list([{"text": "a"}])}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [text.content for text in read_texts(_options(dataset="pg19"))] == ["a"]
    assert asked == ["emozilla/pg19-test"]


def test_of_several_splits_the_test_set_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    splits = {name: datasets.Dataset.from_list([{"text": name}]) for name in ("train", "test", "dev")}
    monkeypatch.setattr(datasets, "load_dataset", lambda path: splits)
    assert [text.content for text in read_texts(_options(dataset="pg19"))] == ["test"]
    del splits["test"]
    with pytest.raises(ValueError, match=r"must have a split 'test', found are \['dev', 'train'\]"):
        read_texts(_options(dataset="pg19"))
    del splits["train"]
    assert [text.content for text in read_texts(_options(dataset="pg19"))] == ["dev"]


def test_a_data_set_without_texts_is_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"content": "a", "title": "b"}]).to_parquet(tmp_path / "test.parquet")
    with pytest.raises(ValueError, match=r"must have a column 'text', found are \['content', 'title'\]"):
        read_texts(_options(dataset="pg19", dataset_path=str(tmp_path)))
    datasets.Dataset.from_list([{"text": "a"}, {"text": None}]).to_parquet(tmp_path / "test.parquet")
    with pytest.raises(ValueError, match="must hold text, row 2 holds None"):
        read_texts(_options(dataset="pg19", dataset_path=str(tmp_path)))


# ---- statistics ----


def test_standard_errors_over_windows_and_over_tokens() -> None:
    values = torch.randn(6, 5, dtype=torch.float64)
    records = [
        {"tokens": 5, "nll": float(row.sum()), "nll_squares": float((row * row).sum())} for row in values
    ]
    assert mean_and_error(records, "nll") == pytest.approx(
        (float(values.mean()), float(values.mean(1).std()) / math.sqrt(6))
    )
    assert mean_and_error(records[:1], "nll") == pytest.approx(
        (float(values[0].mean()), float(values[0].std()) / math.sqrt(5))
    )


def test_standard_errors_of_windows_of_different_lengths_and_of_one_token() -> None:
    records = [{"tokens": 2, "nll": 6.0}, {"tokens": 6, "nll": 10.0}, {"tokens": 2, "nll": 2.0}]
    # each window by its sum less what the mean of 1.8 would give: 2.4, -0.8 and -1.6
    error = math.sqrt(3 / 2 * (2.4**2 + 0.8**2 + 1.6**2)) / 10
    assert mean_and_error(records, "nll") == pytest.approx((1.8, error))
    assert mean_and_error([{"tokens": 1, "nll": 2.5, "nll_squares": 6.25}], "nll") == (2.5, 0.0)


def _record(kv_bytes: int, *, is_exact: bool, **sums: list[float]) -> dict[str, Any]:
    """Of a window of two predicted tokens."""
    record: dict[str, Any] = {"tokens": 2, "kv_bytes": kv_bytes, "is_exact": is_exact, "kernel": ["torch"]}
    for name, values in sums.items():
        record |= {name: sum(values), f"{name}_by_position": values}
    return record | {"packed_read": 0.5, "agreement": 1, "seconds": 3.0}


def test_windows_are_put_together() -> None:
    dense = [_record(1000, is_exact=True, nll=values) for values in ([1.0, 2.0], [3.0, 4.0], [5.0, 6.0])]
    records = [
        _record(300, is_exact=True, nll=[1.5, 2.0], increase=[0.5, 0.0], kl=[0.25, 0.0]),
        _record(500, is_exact=False, nll=[3.5, 4.0], increase=[0.5, 0.0], kl=[0.25, 0.5]),
        _record(400, is_exact=True, nll=[5.5, 7.5], increase=[0.5, 1.5], kl=[0.25, 1.0]),
    ]
    row = summarize(INT8, records, dense, prefill=10, dense_bits=16)
    assert (row["nll"], row["nll_increase"], row["kl_to_dense"]) == (4.0, 0.5, 0.375)
    assert row["perplexity"] == pytest.approx(math.exp(4.0))
    assert (row["kv_bytes"], row["memory_fraction"], row["bits_per_value"]) == (500, 0.5, 8.0)
    assert (row["tokens"], row["windows"], row["seconds"], row["blocks"]) == (6, 3, 9.0, "approximate")
    assert (row["packed_read_fraction"], row["top1_agreement"]) == (0.25, 0.5)
    assert row["nll_by_position"] == [
        {"start": 10, "stop": 11, "nll": 3.5, "increase": 0.5, "kl": 0.25},
        {"start": 11, "stop": 12, "nll": 4.5, "increase": 0.5, "kl": 0.5},
    ]
    negative = [_record(300, is_exact=True, nll=[1.0, 1.0], kl=[-1e-17, 0.0])] * 2
    assert summarize(INT8, negative, dense[:2], prefill=10, dense_bits=16)["kl_to_dense"] == 0.0


# ---- a run ----


@pytest.fixture(scope="module")
def finished(book: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("finished")
    assert main(on(book, output)) == 0
    return output


@torch.inference_mode()
def test_results_equal_plain_loops(finished: Path, book: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    ids = torch.tensor(AutoTokenizer.from_pretrained(MODEL)(book.read_text(), verbose=False)["input_ids"])
    document = results(finished)
    assert [row["cache_config"] for row in document["results"]] == [{"backend": "dense"}, INT8, KIVI]
    dense = [model(ids[None, s : s + LENGTH]).logits[0, PREFILL - 1 : -1] for s in (0, LENGTH)]
    for row in document["results"]:
        nll, divergence, agreement = [], [], []
        for window, reference in zip((0, LENGTH), dense, strict=True):
            tokens = ids[None, window : window + LENGTH]
            logits = reference
            if row["cache_config"]["backend"] != "dense":
                cache = kvp.build_cache(model, row["cache_config"]).bind(model)
                steps = [model(tokens[:, :PREFILL], **as_argument(cache)).logits[0, -1]]
                steps += [
                    model(tokens[:, position : position + 1], **as_argument(cache)).logits[0, -1]
                    for position in range(PREFILL, LENGTH - 1)
                ]
                logits = torch.stack(steps)
            nll.append(
                torch.nn.functional.cross_entropy(logits.double(), tokens[0, PREFILL:], reduction="none")
            )
            divergence.append(
                torch.distributions.kl_divergence(
                    torch.distributions.Categorical(logits=reference.double()),
                    torch.distributions.Categorical(logits=logits.double()),
                )
            )
            agreement.append((logits.argmax(-1) == reference.argmax(-1)).double())
        assert row["tokens"] == 2 * (LENGTH - PREFILL)
        assert row["nll"] == pytest.approx(float(torch.cat(nll).mean()), abs=1e-6)
        assert row["perplexity"] == pytest.approx(math.exp(float(torch.cat(nll).mean())), rel=1e-6)
        positions = torch.stack(nll).mean(0)
        for point in row["nll_by_position"]:
            part = positions[point["start"] - PREFILL : point["stop"] - PREFILL]
            assert point["nll"] == pytest.approx(float(part.mean()), abs=1e-5)
        assert row["nll_by_position"][0]["start"] == PREFILL and row["nll_by_position"][-1]["stop"] == LENGTH
        if row["cache_config"]["backend"] != "dense":
            assert row["kl_to_dense"] == pytest.approx(
                float(torch.cat(divergence).mean()), rel=1e-3, abs=1e-7
            )
            assert row["kl_to_dense"] > 1e-7, "the cache was not read"
            assert row["top1_agreement"] == pytest.approx(float(torch.cat(agreement).mean()))


def test_results_say_what_was_measured(finished: Path) -> None:
    document = results(finished)
    assert document["task"] == "perplexity"
    assert document["settings"]["windows"] == 2 and document["settings"]["text_files"] == ["book.txt"]
    dense, int8, kivi = document["results"]
    assert dense["kv_bytes"] == 6 * 2 * (2 * LENGTH * 64 * 4) and dense["bits_per_value"] == 32
    for row in (int8, kivi):
        assert row["blocks"] == "exact" and row["stderr_over"] == "windows"
        assert row["memory_fraction"] == row["kv_bytes"] / dense["kv_bytes"] < 1
        assert 0 < row["packed_read_fraction"] < 1 and row["seconds"] > 0
    assert (finished / "perplexity.png").read_bytes().startswith(b"\x89PNG")
    assert not (finished / "progress").exists()


def test_an_interrupted_run_goes_on(
    finished: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []

    def score_window(*arguments: Any, **options: Any) -> Any:
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(arguments[2]["backend"])
        return perplexity_scoring.score_window(*arguments, **options)

    monkeypatch.setattr(perplexity, "score_window", score_window)
    assert main(on(book, tmp_path, "--no_plots")) == 130
    assert done == ["dense", "int8", "kivi", "dense"]
    done[:] = ["x"] * 5
    assert main(on(book, tmp_path, "--no_plots")) == 0
    # Of the second window, the dense run is needed again to compare with.
    assert done[5:] == ["dense", "int8", "kivi"]
    again, whole = results(tmp_path)["results"], results(finished)["results"]
    assert [{**row, "seconds": 0} for row in again] == [{**row, "seconds": 0} for row in whole]


def test_a_run_goes_on_with_other_windows_but_not_with_other_settings(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[Any] = []

    def score_window(*arguments: Any, **options: Any) -> Any:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(arguments)
        return perplexity_scoring.score_window(*arguments, **options)

    monkeypatch.setattr(perplexity, "score_window", score_window)
    assert main(on(book, tmp_path, "--no_plots")) == 130
    for name, *value in (
        ("prefill_length", "39"), ("dtype", "bf16"), ("block_length", "8"), ("no_kl",),
    ):  # fmt: skip
        said = _refused(capsys, on(book, tmp_path, f"--{name}", *value))
        assert f"holds an unfinished run with other settings ({name} was " in said
    fewer = ("--max_windows", "1", "--stride", "70", "--max_windows_per_text", "1", "--no_plots")
    assert main(on(book, tmp_path, *fewer)) == 0
    assert len(done) == 3 and [row["windows"] for row in results(tmp_path)["results"]] == [1] * 3


def test_without_the_comparison(book: Path, tmp_path: Path) -> None:
    assert main(on(book, tmp_path, "--no_kl", "--approximate_blocks", "--block_length", "8")) == 0
    dense, int8, _ = results(tmp_path)["results"]
    assert dense["blocks"] == "exact" and int8["blocks"] == "approximate"
    assert "kl_to_dense" not in int8 and int8["nll_increase"] != 0
    assert (tmp_path / "perplexity.png").exists()


def _spoil(monkeypatch: pytest.MonkeyPatch, number: float, *backends: str) -> None:
    """Let the model predict no numbers with some caches."""
    read, made, is_spoilt = perplexity_scoring.predictions, perplexity_scoring.new_cache, [False]

    def new_cache(model: Any, cache_config: Any, **options: Any) -> Any:
        is_spoilt[0] = cache_config["backend"] in backends
        return made(model, cache_config, **options)

    def predictions(*arguments: Any) -> Any:
        for prediction in read(*arguments):
            logits = torch.full_like(prediction.logits, number)
            yield prediction._replace(logits=logits) if is_spoilt[0] else prediction

    monkeypatch.setattr(perplexity_scoring, "predictions", predictions)
    monkeypatch.setattr(perplexity_scoring, "new_cache", new_cache)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_cache_with_which_the_model_predicts_no_numbers(
    number: float,
    book: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The highest of several NaN would be where that of the dense run is, which would be agreement."""
    _spoil(monkeypatch, number, "int8")
    assert main(on(book, tmp_path, "--max_windows", "2")) == 1
    document = results(tmp_path)
    assert "int8" not in [row["cache_config"]["backend"] for row in document["results"]]
    (entry,) = document["skipped"]
    said = "24 of 24 predictions are not numbers (NaN or infinite logits)"
    assert entry["cache_config"] == INT8 and entry["is_failure"] and said in entry["reason"]
    captured = capsys.readouterr()
    assert said in captured.out and "error: int8" in captured.err and said in captured.err
    assert (tmp_path / "perplexity.png").exists()


def test_a_model_that_predicts_no_numbers_is_refused(
    book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _spoil(monkeypatch, math.nan, "dense", "int8")
    said = _refused(capsys, on(book, tmp_path))
    assert "The model itself, in float32 and with its ordinary cache, makes no sense of the text" in said
    assert not (tmp_path / "results.json").exists()


def test_a_perplexity_beyond_all_numbers(tmp_path: Path) -> None:
    dense = [_record(1000, is_exact=True, nll=[1000.0, 800.0])] * 2
    row = summarize({"backend": "dense"}, dense, dense, prefill=10, dense_bits=16)
    assert (row["perplexity"], row["nll"]) == (math.inf, 900.0)
    said = "no number is as high as the perplexity of dense (null in the results): see nll"
    environment = {"device": "cpu", "threads": 1, "versions": {"torch": "2"}}
    document = {"results": [row], "skipped": [], "environment": environment, "settings": {}}
    assert said in perplexity_tables.footnotes(document)


def test_a_cache_of_transformers_that_fails_is_shown(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score_window(*arguments: Any, **options: Any) -> Any:
        if arguments[2]["backend"] in ("quanto", "int8"):
            raise RuntimeError("no such group")
        return perplexity_scoring.score_window(*arguments, **options)

    monkeypatch.setattr(perplexity, "score_window", score_window)
    monkeypatch.setattr("kvcache_plugins.evaluation.caches.why_unavailable", lambda *_: None)
    text = ("--dataset", "text", "--text_files", str(book), "--context_length", "64", "--max_windows", "1")
    arguments = command(tmp_path, *text, "--no_plots", "--cache_config")
    assert main([*arguments, '{"backend": "quanto"}']) == 0
    [entry] = results(tmp_path)["skipped"]
    assert (entry["reason"], entry["is_failure"]) == ("failed: no such group", True)
    with pytest.raises(RuntimeError, match="no such group"):
        main([*arguments, '{"backend": "int8"}'])
