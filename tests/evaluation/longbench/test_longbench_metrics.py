"""The metrics of LongBench, on cases computed by hand and against the packages the benchmark calls."""

from __future__ import annotations

import difflib
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kvcache_plugins.evaluation.longbench.metrics import METRICS, check_metric
from kvcache_plugins.evaluation.longbench.rouge_l import MOST_STEPS, rouge_l
from kvcache_plugins.evaluation.longbench.scoring import average, row_score, score, score_by_length
from kvcache_plugins.evaluation.longbench.tasks import TASKS, find_tasks

CLASSES = ["Number", "Other number", "Other", "City", "Other location", "location"]


def _words(generator: random.Random, count: int) -> str:
    return "".join(
        generator.choice("abcdefghijk") + generator.choice([" ", " ", " ", ". ", "."]) for _ in range(count)
    )


# ---- tasks ----


def test_the_table_of_tasks() -> None:
    assert len(TASKS) == 21
    assert {task.metric for task in TASKS.values()} == set(METRICS)
    assert len(find_tasks(None, longbench_e=True)) == 13
    without_template = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    assert {name for name, task in TASKS.items() if not task.has_chat_template} == without_template
    assert {name for name, task in TASKS.items() if task.first_line_only} == without_template - {
        "lcc",
        "repobench-p",
    }
    by_length = {32: 7, 64: 6, 128: 4, 512: 4}
    assert Counter(task.max_new_tokens for task in TASKS.values()) == by_length


def test_unknown_tasks_are_refused_with_the_closest_name() -> None:
    with pytest.raises(ValueError, match="Did you mean 'hotpotqa'"):
        find_tasks(["hotpot_qa"])
    with pytest.raises(ValueError, match="LongBench-E has no task 'musique'"):
        find_tasks(["musique"], longbench_e=True)
    assert [task.name for task in find_tasks(["lcc", "qasper", "lcc"])] == ["qasper", "lcc"]


# ---- questions and answers ----


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("The Cat, sat!", "a cat sat", 1.0),
        ("cat cat dog", "cat bird", 2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2)),
        ("", "cat", 0.0),
        ("the", "a", 0.0),  # nothing is left of either
        ("a.n apple", "apple", 1.0),  # punctuation goes first, and leaves an article
        ("well-known", "well known", 0.0),  # punctuation leaves no gap
    ],
)
def test_qa_f1(prediction: str, reference: str, expected: float) -> None:
    assert METRICS["qa_f1"](prediction, reference, None) == pytest.approx(expected, abs=1e-12)


def test_chinese_answers() -> None:
    pytest.importorskip("jieba", reason="part of the extra 'eval'")
    f1, rouge = METRICS["qa_f1_zh"], METRICS["rouge_zh"]
    assert f1("厦门大学。", "厦门大学", None) == 1.0
    assert f1("北京、大学", "北京", None) == pytest.approx(2 / 3)
    assert f1("。》", "北京", None) == 0.0
    assert f1("《", "《", None) == 1.0  # U+300A does not count as punctuation
    assert f1("》", "》", None) == 0.0
    assert rouge("北京 大学", "大学", None) == pytest.approx(2 / 3, abs=1e-6)
    assert rouge("", "大学", None) == 0.0


def test_chinese_needs_jieba_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(ValueError, match=r"kvcache-plugins\[eval\]"):
        check_metric("rouge_zh")
    check_metric("rouge")


# ---- rouge ----


def test_rouge_by_hand() -> None:
    # sentences "a b c" and "x b"; of the reference "a c" and "b y"
    # common words: {a, c} and {b}; 3 of 4 distinct predicted words, 3 of 4 distinct reference words
    assert rouge_l("a b c. x b.", "a c. b y") == pytest.approx(0.75, abs=1e-7)
    # a word counts once, however often it is there
    assert rouge_l("a a a a", "a") == pytest.approx(1.0, abs=1e-7)
    # order matters: of "b a" and "a b" one word is common
    assert rouge_l("b a", "a b") == pytest.approx(0.5, abs=1e-7)


@pytest.mark.parametrize("empty", ["", ".", "...."])
def test_rouge_of_nothing_is_zero(empty: str) -> None:
    assert rouge_l(empty, "a") == rouge_l("a", empty) == rouge_l(empty, empty) == 0.0


def test_rouge_equals_the_package() -> None:
    package = pytest.importorskip("rouge", reason="part of the extra 'dev'")
    generator, seen = random.Random(0), set()
    for _ in range(150):
        prediction, reference = (_words(generator, generator.randrange(1, 40)) for _ in range(2))
        expected = package.Rouge().get_scores([prediction], [reference], avg=True)["rouge-l"]["f"]
        assert rouge_l(prediction, reference) == expected
        seen.add(expected)
    assert len(seen) > 20  # not all alike
    for blank in (" ", "\n", " . ", "\t.a"):
        expected = package.Rouge().get_scores([blank], ["a . b"], avg=True)["rouge-l"]["f"]
        assert rouge_l(blank, "a . b") == expected


_SCORER = """
from rouge import Rouge

def rouge_score(prediction, reference):
    try:
        return Rouge().get_scores([prediction], [reference], avg=True)["rouge-l"]["f"]
    except RecursionError:
        return 0.0

def rouge_zh_score(prediction, reference):
    return rouge_score(prediction, reference)

def scorer(metric, count):
    text = " ".join(map(str, range(count)))
    print(metric(text, text) > 0)

for metric, longest in ((rouge_score, MOST), (rouge_zh_score, MOST - 1)):
    for count in (longest, longest + 1):
        scorer(metric, count)
"""


def test_rouge_of_long_sentences_is_zero_where_the_package_gives_up(tmp_path: Path) -> None:
    # called as the benchmark's scorer does: from a function of the main module, which calls a metric
    pytest.importorskip("rouge", reason="part of the extra 'dev'")
    script = tmp_path / "scorer.py"
    script.write_text(_SCORER.replace("MOST", str(MOST_STEPS)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["True", "False"] * 2, done.stderr
    for count, expected in ((MOST_STEPS, 1.0), (MOST_STEPS + 1, 0.0)):
        text = " ".join(map(str, range(count)))
        assert rouge_l(text, text) == pytest.approx(expected, abs=1e-7)


# ---- classes, numbers, code ----


def _classification(prediction: str, reference: str, classes: list[str]) -> float:
    """Straightforward: a list that shrinks while it is walked along."""
    matches = [name for name in classes if name in prediction]
    for name in matches:
        if name in reference and name != reference:
            matches.remove(name)  # the point of this test
    return 1 / len(matches) if reference in matches else 0.0


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("City", "City", 1.0),
        ("City or Number", "City", 0.5),
        ("Other number", "Other number", 1.0),  # "Other" is struck out
        # "Other" is struck out, and "Other location", which follows, is passed over; then so is "location"
        ("Other location", "Other location", 1.0),
        ("none", "City", 0.0),
        ("", "City", 0.0),
    ],
)
def test_classification(prediction: str, reference: str, expected: float) -> None:
    assert METRICS["classification"](prediction, reference, CLASSES) == expected
    assert _classification(prediction, reference, CLASSES) == expected


def test_classification_passes_over_a_class_as_the_original_does() -> None:
    classes = ["a", "b", "a b"]  # "a" goes, "b" moves into its place and stays
    assert METRICS["classification"]("a b", "a b", classes) == 0.5
    generator, seen = random.Random(1), set()
    names = ["".join(generator.choice("ab") for _ in range(generator.randrange(1, 4))) for _ in range(9)]
    for _ in range(300):
        prediction = "".join(generator.choice("ab ") for _ in range(8))
        reference = generator.choice(names)
        expected = _classification(prediction, reference, names)
        assert METRICS["classification"](prediction, reference, names) == expected
        seen.add(expected)
    assert len(seen) > 3
    with pytest.raises(ValueError, match="all_classes"):
        METRICS["classification"]("a", "a", None)


@pytest.mark.parametrize(
    ("metric", "prediction", "reference", "expected"),
    [
        ("count", "There are 7 of 12, so 7", "7", 2 / 3),
        ("count", "seven", "7", 0.0),
        ("count", "07", "7", 0.0),
        ("count", "", "7", 0.0),
        ("retrieval", "Paragraph 3", "Paragraph 3", 1.0),
        ("retrieval", "3, 4 or 33", "Paragraph 3", 1 / 3),
        ("retrieval_zh", "段落5和6", "段落5", 0.5),
        ("code_similarity", "x = 1", "x = 1", 1.0),
        ("code_similarity", "", "", 1.0),
        ("code_similarity", "", "x", 0.0),
        ("code_similarity", "\n# comment\n// too\n`x`\nx = 1\ny", "x = 1", 1.0),
        ("code_similarity", "# only a comment", "x", 0.0),
    ],
)
def test_numbers_and_code(metric: str, prediction: str, reference: str, expected: float) -> None:
    assert METRICS[metric](prediction, reference, None) == pytest.approx(expected, abs=1e-12)


def test_a_reference_without_a_paragraph_is_an_error() -> None:
    with pytest.raises(ValueError, match="must name a paragraph"):
        METRICS["retrieval"]("3", "3", None)


def test_code_similarity_is_that_of_difflib_in_whole_percents() -> None:
    generator, seen = random.Random(2), set()
    for longest in (30, 300):  # from 200 letters on, difflib leaves out the frequent ones
        for _ in range(30):
            left, right = (
                "".join(generator.choice("abcde( ") for _ in range(generator.randrange(1, longest)))
                for _ in range(2)
            )
            expected = round(100 * difflib.SequenceMatcher(None, left, right).ratio()) / 100
            assert METRICS["code_similarity"](left, right, None) == expected
            seen.add(expected)
    assert len(seen) > 20


def test_code_similarity_is_not_the_share_of_common_letters() -> None:
    # "xyz" is a common subsequence, 3 letters of each; but "ab" is the longest block, and nothing matches
    # before or after it
    assert METRICS["code_similarity"]("xyzab", "abxqyqz", None) == round(100 * 2 * 2 / 12) / 100


# ---- from answers to scores ----


def test_only_the_first_line_counts_where_the_benchmark_says_so() -> None:
    assert row_score(TASKS["triviaqa"], "\n\ncat\ndog", ["cat"], None) == 1.0
    assert row_score(TASKS["qasper"], "\n\ncat\ndog", ["cat"], None) == pytest.approx(2 / 3)
    assert row_score(TASKS["qasper"], "cat", ["dog", "cat", "bird"], None) == 1.0
    assert row_score(TASKS["qasper"], "cat", [], None) == 0.0


def test_scores_are_rounded_means() -> None:
    rows = [{"pred": text, "answers": ["cat"], "all_classes": None} for text in ("cat", "dog", "cat dog")]
    assert score(TASKS["qasper"], rows) == 55.56  # (1 + 0 + 2/3) / 3
    assert average({"qasper": 55.56, "lcc": 10.0, "trec": 0.0}) == 21.85


def test_the_classes_of_the_last_row_hold_for_all() -> None:
    rows = [
        {"pred": "City Food", "answers": ["City"], "all_classes": ["City"]},
        {"pred": "Food", "answers": ["Food"], "all_classes": ["City", "Food"]},
    ]
    assert score(TASKS["trec"], rows) == 75.0


def test_groups_of_lengths() -> None:
    lengths, texts = (0, 3999, 4000, 7999), ("cat", "dog", "cat", "cat dog")
    rows = [
        {"pred": text, "answers": ["cat"], "all_classes": None, "length": length}
        for text, length in zip(texts, lengths, strict=True)
    ]
    assert score_by_length(TASKS["qasper"], rows) == {"0-4k": 50.0, "4-8k": 83.33, "8k+": None}
    rows[0]["length"] = 8000
    assert score_by_length(TASKS["qasper"], rows)["8k+"] == 100.0
