"""The metrics of LongBench, each a function of one answer and one reference, equal to the benchmark's own.

What looks odd here (a prediction of many numbers, the way classes are struck out, the rounding of the code
similarity) is what the published scores were computed with.

Source: `metrics.py` of https://github.com/THUDM/LongBench; section 4 of the paper (arXiv 2308.14508).
"""

from __future__ import annotations

import difflib
import importlib
import logging
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from .rouge_l import MOST_STEPS, rouge_l

__all__ = [
    "METRICS",
    "check_metric",
    "check_reference",
    "classification",
    "code_similarity",
    "count",
    "qa_f1",
    "qa_f1_zh",
    "retrieval",
    "retrieval_zh",
    "rouge",
    "rouge_zh",
]

_Classes = Sequence[str] | None
_PARAGRAPHS = {"retrieval": "Paragraph ", "retrieval_zh": "段落"}
"""How the references of a metric name a paragraph, before its number."""

# Code points that count as punctuation in a Chinese text, beside the ASCII ones. The gaps are deliberate:
# U+300A is one of them, though its partner U+300B is punctuation.
_CHINESE_PUNCTUATION = (
    (0x2013, 0x2014), (0x2018, 0x2019), (0x201B, 0x201F), (0x2026, 0x2027), (0x3001, 0x3003),
    (0x300B, 0x3011), (0x3014, 0x301F), (0x3030, 0x3030), (0x303E, 0x303F), (0xFE4F, 0xFE4F),
    (0xFF01, 0xFF0D), (0xFF0F, 0xFF0F), (0xFF1A, 0xFF20), (0xFF3B, 0xFF40), (0xFF5B, 0xFF64),
)  # fmt: skip
_NO_ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NO_PUNCTUATION = _NO_ASCII_PUNCTUATION | {
    code: None for first, last in _CHINESE_PUNCTUATION for code in range(first, last + 1)
}


def qa_f1(prediction: str, reference: str, all_classes: _Classes = None) -> float:
    """Return the F1 of the bags of words, in lower case, without punctuation and articles."""
    return _f1(_english_words(prediction), _english_words(reference))


def qa_f1_zh(prediction: str, reference: str, all_classes: _Classes = None) -> float:
    """Return the F1 of the bags of words as `jieba` cuts them, in lower case, without punctuation."""
    return _f1(_chinese_words(prediction), _chinese_words(reference))


def rouge(prediction: str, reference: str, all_classes: _Classes = None) -> float:
    """Return ROUGE-L, 0 for an empty text and for one too long for the original (see `rouge_l`)."""
    return rouge_l(prediction, reference)


def rouge_zh(prediction: str, reference: str, all_classes: _Classes = None) -> float:
    """Return ROUGE-L over the words `jieba` finds."""
    # one call deeper in the original, which leaves one step less
    return rouge_l(" ".join(_cut(prediction)), " ".join(_cut(reference)), MOST_STEPS - 1)


def classification(prediction: str, reference: str, all_classes: _Classes = None) -> float:
    """Return one over the number of classes named in the answer, if the right one is among them.

    A class that is part of the right one's name does not count, except that the original, striking them out
    of the list it walks along, passes over the one after each that it strikes.

    Args:
        prediction (`str`): The answer.
        reference (`str`): The name of the right class.
        all_classes (`Sequence[str]`): The names of all classes.

    Raises:
        ValueError: If there are no classes.
    """
    if all_classes is None:
        raise ValueError("The metric 'classification' needs all_classes, a list of names, got None.")
    named = [name for name in all_classes if name in prediction]
    position = 0
    while position < len(named):
        name = named[position]
        if name in reference and name != reference:
            named.remove(name)
        position += 1
    return 1.0 / len(named) if reference in named else 0.0


def retrieval(prediction: str, reference: str, all_classes: _Classes = None) -> float:
    """Return the share of the numbers in the answer that are the paragraph's, as in `Paragraph 7`.

    Raises:
        ValueError: If the reference names no paragraph.
    """
    return count(prediction, _number_after(_PARAGRAPHS["retrieval"], reference))


def retrieval_zh(prediction: str, reference: str, all_classes: _Classes = None) -> float:
    """Return the share of the numbers in the answer that are the paragraph's, as in `段落7`.

    Raises:
        ValueError: If the reference names no paragraph.
    """
    return count(prediction, _number_after(_PARAGRAPHS["retrieval_zh"], reference))


def count(prediction: str, reference: str, all_classes: _Classes = None) -> float:
    """Return the share of the numbers in the answer that are the right one, 0 if there is none."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(str(reference)) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, reference: str, all_classes: _Classes = None) -> float:
    """Return how similar the first line of code in the answer is to the reference, in whole hundredths.

    The measure is `fuzz.ratio` of `fuzzywuzzy` without its optional speed-up, that is `difflib`'s matching
    of blocks. (`rapidfuzz` and `thefuzz` compute something else under the same name.) A line with a
    backtick, a hash sign or two slashes is taken for a comment.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((text for text in lines if not any(mark in text for mark in ("`", "#", "//"))), "")
    if line == reference:
        return 1.0
    if not line or not reference:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


METRICS: dict[str, Callable[[str, str, _Classes], float]] = {
    "qa_f1": qa_f1,
    "qa_f1_zh": qa_f1_zh,
    "rouge": rouge,
    "rouge_zh": rouge_zh,
    "classification": classification,
    "retrieval": retrieval,
    "retrieval_zh": retrieval_zh,
    "count": count,
    "code_similarity": code_similarity,
}
"""All metrics by name: functions of the answer, one reference and the classes, with values in [0, 1]."""


def check_metric(name: str) -> None:
    """Make sure that a metric can be computed here.

    Raises:
        ValueError: If a package it needs is not installed; the message names the extra.
    """
    if name in ("qa_f1_zh", "rouge_zh"):
        _jieba()


def check_reference(name: str, reference: str) -> None:
    """Make sure that answers can be scored by a metric with a reference, whatever they are.

    Raises:
        ValueError: If the reference lacks what the metric reads in it.
    """
    if name in _PARAGRAPHS:
        _number_after(_PARAGRAPHS[name], reference)


def _f1(predicted: list[str], expected: list[str]) -> float:
    shared = (Counter(predicted) & Counter(expected)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(expected)
    return 2 * precision * recall / (precision + recall)


def _english_words(text: str) -> list[str]:
    """Punctuation goes before the articles: "a.n" becomes an article, and goes too."""
    bare = text.lower().translate(_NO_ASCII_PUNCTUATION)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def _chinese_words(text: str) -> list[str]:
    """Words are found first, with the punctuation in place; white space inside a word goes."""
    bare = ("".join(word.lower().translate(_NO_PUNCTUATION).split()) for word in _cut(text))
    return [word for word in bare if word]


def _number_after(word: str, reference: str) -> str:
    found = re.search(word + r"(\d+)", reference)
    if found is None:
        raise ValueError(f"The reference must name a paragraph, as in '{word}7', got {reference!r}.")
    return found[1]


def _cut(text: str) -> list[str]:
    words: list[str] = _jieba().lcut(text, cut_all=False)
    return words


def _jieba() -> Any:
    try:
        jieba: Any = importlib.import_module("jieba")
    except ImportError as error:
        raise ValueError(
            "Chinese answers are cut into words by jieba, which is not installed: "
            "pip install 'kvcache-plugins[eval]', or leave out the Chinese tasks with --tasks."
        ) from error
    jieba.setLogLevel(logging.WARNING)  # it announces the loading of its dictionary
    return jieba
