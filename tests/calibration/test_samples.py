"""Samples of text: where they begin, what they begin with, and texts that do not do."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache_plugins.calibration.options import CalibrationOptions
from kvcache_plugins.calibration.samples import read_samples
from kvcache_plugins.runs.language_reference import read_language_reference
from kvcache_plugins.runs.loading import Subject
from kvcache_plugins.runs.sharding import Shard


class Characters:
    """A tokenizer of one token a character, and those that it puts in front of every text."""

    def __init__(self, *first: int) -> None:
        self.first = first

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, Any]:
        ids = [ord(character) for character in text]
        return {"input_ids": [*self.first, *ids] if add_special_tokens else ids}


def subject(*first: int) -> Subject:
    return Subject(None, Characters(*first), Shard())


def options(**given: Any) -> CalibrationOptions:
    return CalibrationOptions(**({"model": "m", "sequence_length": 10, "num_samples": 4} | given))


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """Hundred different characters."""
    path = tmp_path / "book.txt"
    path.write_text("".join(chr(200 + i) for i in range(100)), encoding="utf-8")
    return path


def test_samples_do_not_overlap(book: Path) -> None:
    samples = read_samples(subject(), options(text_files=[str(book)]))
    assert samples.token_ids.shape == (4, 10) and samples.token_ids.dtype == torch.int64
    assert len(samples.token_ids.unique()) == 40
    assert (samples.token_ids.diff(dim=1) == 1).all(), "each is a stretch of the text"
    assert samples.source == "book.txt", "no trace of where the file lies"


def test_the_seed_decides_where(book: Path) -> None:
    found = [read_samples(subject(), options(text_files=[str(book)], seed=seed)) for seed in (0, 0, 1)]
    assert torch.equal(found[0].token_ids, found[1].token_ids) and found[0].digest == found[1].digest
    assert not torch.equal(found[0].token_ids, found[2].token_ids) and found[0].digest != found[2].digest


def test_samples_may_lie_anywhere(book: Path) -> None:
    found = [
        read_samples(subject(), options(text_files=[str(book)], seed=seed, num_samples=2)).token_ids
        for seed in range(100)
    ]
    starts = torch.stack(found)[:, :, 0] - 200
    assert starts.min() == 0 and starts.max() == 90 and len(starts.unique()) > 60


def test_a_short_text_is_used_evenly(book: Path) -> None:
    samples = read_samples(subject(), options(text_files=[str(book)], sequence_length=40))
    assert samples.token_ids[:, 0].tolist() == [200, 220, 240, 260]


def test_a_text_of_one_sample(book: Path) -> None:
    samples = read_samples(subject(), options(text_files=[str(book)], sequence_length=100, num_samples=1))
    assert samples.token_ids[0].tolist() == list(range(200, 300))


def test_files_are_joined(book: Path) -> None:
    both = read_samples(
        subject(), options(text_files=[str(book), str(book)], sequence_length=202, num_samples=1)
    )
    assert both.token_ids[0].tolist() == [*range(200, 300), 10, 10, *range(200, 300)]


def test_samples_begin_as_texts_do(book: Path) -> None:
    for first in ((1,), (1, 2)):
        samples = read_samples(subject(*first), options(text_files=[str(book)]))
        assert samples.token_ids.shape == (4, 10)
        assert samples.token_ids[:, : len(first)].tolist() == [list(first)] * 4
        assert samples.token_ids[:, len(first) :].min() >= 200


def test_too_short(book: Path) -> None:
    with pytest.raises(ValueError, match=r"book\.txt\) has 100 tokens, a sample .* needs 101"):
        read_samples(subject(), options(text_files=[str(book)], sequence_length=101))


def test_the_language_reference() -> None:
    samples = read_samples(subject(), options(dataset="pydoc", num_samples=1, sequence_length=30))
    assert samples.source == "pydoc_data.topics"
    assert "".join(map(chr, samples.token_ids[0].tolist())) in read_language_reference()


def test_not_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--text_files must be a file, '.*' cannot be read: Is a directory"):
        read_samples(subject(), options(text_files=[str(tmp_path)]))
    (tmp_path / "x.bin").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match=r"must be UTF-8 text, '.*x\.bin' is not"):
        read_samples(subject(), options(text_files=[str(tmp_path / "x.bin")]))


class TestDataset:
    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """A stand-in for the package datasets, whose data set never ends."""
        calls: list[Any] = []

        def load_dataset(*args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            column = "text" if args[0] != "org/other" else "content"
            index = 0
            while True:
                assert index < 1000, "more was read than is needed"
                yield {column: "row"}
                index += 1

        module: Any = types.ModuleType("datasets")
        module.load_dataset = lambda *args, **kwargs: calls.append((args, kwargs)) or load_dataset(*args)
        monkeypatch.setitem(sys.modules, "datasets", module)
        return calls

    def test_rows_are_read_as_needed(self, calls: list[Any]) -> None:
        samples = read_samples(subject(), options(dataset="org/name:config"))
        assert calls[0] == (("org/name", "config"), {"split": "train", "streaming": True})
        assert samples.source == "org/name:config"
        assert "".join(map(chr, samples.token_ids[0].tolist())) in "row\n\n" * 4

    def test_the_seed_decides_where(self, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        rows = [{"text": chr(200 + index)} for index in range(200)]
        monkeypatch.setattr(sys.modules["datasets"], "load_dataset", lambda *args, **kwargs: iter(rows))
        found = [read_samples(subject(), options(dataset="org/name", seed=seed)) for seed in (0, 1)]
        assert found[0].digest != found[1].digest
        assert max(int(samples.token_ids.max()) for samples in found) > 230, "of more than is needed"

    def test_the_papers_text_by_default(self, calls: list[Any]) -> None:
        read_samples(subject(), options())
        assert calls[0][0] == ("Salesforce/wikitext", "wikitext-2-raw-v1")

    def test_no_column_text(self, calls: list[Any]) -> None:
        with pytest.raises(ValueError, match=r"must have a column 'text', found are \['content'\]"):
            read_samples(subject(), options(dataset="org/other"))

    def test_no_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(ValueError, match=r"package datasets.*pip install.*--text_files"):
            read_samples(subject(), options())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nbits": ({"nbits": [5]}, r"one or more different numbers of 2, 3, 4, got \[5\]"),
    "nbits-twice": ({"nbits": [3, 3]}, "different"),
    "nbits-none": ({"nbits": []}, "one or more"),
    "nbits-number": ({"nbits": 3}, "one or more"),
    "fraction-half": ({"outlier_fraction": 0.5}, r"\[0, 0.1\], got 0.5"),
    "fraction-negative": ({"outlier_fraction": -0.1}, r"\[0, 0.1\], got -0.1"),
    "fraction-nan": ({"outlier_fraction": float("nan")}, r"\[0, 0.1\], got nan"),
    "fraction-bool": ({"outlier_fraction": False}, r"\[0, 0.1\], got False"),
    "fraction-text": ({"outlier_fraction": "1%"}, r"got '1%'"),
    "weight": ({"weight": "fischer"}, "Did you mean 'fisher'"),
    "samples": ({"num_samples": 0}, "--num_samples must be an integer >= 1"),
    "many samples": ({"num_samples": 10**9}, "--num_samples must be at most [0-9,]+ with --sequence_length"),
    "sink": ({"sink_length": 9}, "--sink_length must leave at least 2 of the 10 tokens"),
    "files": ({"text_files": "book.txt"}, "one or more files"),
    "tp_plan": ({"tp_plan": "auto"}, "--device_map"),
    "backend": ({"backend": "int8"}, r"\['kivi', 'kvquant'\]"),
    "target-low": ({"target_bits": 1.5}, r"within \[2, 4\].*got 1.5"),
    "target-high": ({"target_bits": 4.5}, r"within \[2, 4\].*got 4.5"),
    "target-nan": ({"target_bits": float("nan")}, r"got nan"),
    "target-beyond-nbits": ({"target_bits": 3.0, "nbits": [2]}, r"within \[2, 2\]"),
    "cache-without-target": ({"cache_config": [{"backend": "kivi"}]}, "--target_bits"),
    "two-caches": (
        {"cache_config": [{"backend": "kvquant"}, {"backend": "kvquant"}], "target_bits": 3},
        "the one cache",
    ),
    "other-cache": (
        {"cache_config": [{"backend": "kivi"}], "target_bits": 3},
        "must be for --backend 'kvquant', got 'kivi'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_are_refused(name: str) -> None:
    given, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        options(**given)


def test_which_bits_are_fitted() -> None:
    assert options().fitted_bits == (3,)
    assert options(nbits=[4, 2]).fitted_bits == (2, 4)
    assert options(target_bits=3.0).fitted_bits == options(target_bits=3.0).candidate_bits == (2, 3, 4)
    kivi = options(target_bits=6.0, backend="kivi")
    assert kivi.candidate_bits == (2, 3, 4, 8) and not kivi.needs_codebooks
