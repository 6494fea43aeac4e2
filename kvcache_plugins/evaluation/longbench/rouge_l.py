"""ROUGE-L as the package `rouge` 1.0.1 computes it, which is what LongBench's own scorer calls.

It is not the textbook's: a text is cut into sentences at full stops, words count once however often they
occur, and the common subsequences of all pairs of sentences are put together as one set of words. Other
packages (`rouge_score`, and with it `evaluate.load("rouge")`) give other numbers.

The package walks back through its table by recursion, one call a step. In the benchmark's scorer, under
Python's default limit of 1000 nested calls, a long enough sentence therefore raises, and an answer that
raises scores 0. It happens to Chinese summaries, which have no full stops of that kind. The package
would therefore score by how deep in a program it is called, which is why it is not called here. Written as a
loop, with the steps counted, the score is always what the benchmark's scorer gives.

Source: https://github.com/pltrdy/rouge; the tests compare with it.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["MOST_STEPS", "rouge_l"]

MOST_STEPS = 990
"""Steps that 1000 nested calls leave for one walk: measured with the package, called as the scorer does."""


def rouge_l(prediction: str, reference: str, most_steps: int = MOST_STEPS) -> float:
    """Return the F-measure of ROUGE-L, 0 where the package raises.

    Args:
        prediction (`str`): Words are parted by white space, sentences by full stops; without one the score
            is 0.
        reference (`str`): Likewise.
        most_steps (`int`): Longest walk through the table of two sentences; a longer one scores 0.

    Returns:
        `float`: In [0, 1].
    """
    predicted, expected = _sentences(prediction), _sentences(reference)
    if not predicted or not expected:
        return 0.0
    shared: set[str] = set()
    for sentence in expected:
        for other in predicted:
            words = _common_words(sentence, other, most_steps)
            if words is None:
                return 0.0
            shared |= words
    recall = len(shared) / len({word for sentence in expected for word in sentence})
    precision = len(shared) / len({word for sentence in predicted for word in sentence})
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def _sentences(text: str) -> list[list[str]]:
    """Cut a text into sentences of words. One of nothing but white space holds one empty word."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common_words(x: Sequence[str], y: Sequence[str], most_steps: int) -> set[str] | None:
    """Return the words of a longest common subsequence, None if finding them takes too many steps.

    Of several such sequences it is the one the package finds: at equal lengths it goes on in `x`.
    """
    table = [[0] * (len(y) + 1)]
    for word in x:
        above, row = table[-1], [0]
        for column, other in enumerate(y):
            row.append(above[column] + 1 if word == other else max(above[column + 1], row[column]))
        table.append(row)
    words = set()
    i, j, steps = len(x), len(y), 0
    while i and j:
        steps += 1
        if x[i - 1] == y[j - 1]:
            words.add(x[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words if steps <= most_steps else None
