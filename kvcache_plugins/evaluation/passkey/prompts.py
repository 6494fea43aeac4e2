"""Prompts of the passkey evaluation: keys hidden in a text of exactly so many tokens.

```
[special tokens] introduction | filler ... | needle | ... filler | question
                                           ^ depth, moved to the end of a sentence, or else a word, if near

[special tokens] introduction | needle | ... filler | needle | ... filler        with several facts
```

Key and piece of filler are drawn from a seed for each length, depth and trial: every cache and every process
gets the same prompts, and a trial does not depend on which others there are.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...runs.loading import encode, prefix_ids
from .filler import Filler
from .options import NAMES, PasskeyOptions

__all__ = ["Trial", "build_trials", "first_integer"]

_NEAR = 64  # tokens by which a needle may leave its depth, less in a short filler
_ANCHOR = "."  # what the needle and the question follow


@dataclass(frozen=True)
class Trial:
    """One key in one prompt.

    Args:
        length (`int`): Tokens of the prompt.
        depth (`float`): Where the needle was asked for, as a part of the filler.
        index (`int`): Of the trial among those of its length and depth.
        key (`str`): Five digits, the first not zero.
        ids (`tuple[int]`): Token ids, `length` of them. Trials of one length and index have the same ones if
            there are several facts.
        question (`tuple[int]`): What is asked after the prompt; empty if the prompt ends with it.
    """

    length: int
    depth: float
    index: int
    key: str
    ids: tuple[int, ...]
    question: tuple[int, ...] = ()


def build_trials(options: PasskeyOptions, text: str, tokenizer: Any) -> list[Trial]:
    """Build all prompts, by length, depth and trial; with several facts by length, trial and depth.

    Args:
        options (`PasskeyOptions`): What to build.
        text (`str`): The filler.
        tokenizer (`PreTrainedTokenizerBase`): The model's.

    Raises:
        ValueError: If a length cannot hold needles and question, or the filler is shorter than needed.
    """
    parts = _Parts(options, text, tokenizer)
    if options.facts > 1:
        return [
            trial
            for length in options.lengths
            for index in range(options.trials)
            for trial in parts.facts(length, index)
        ]
    return [
        parts.trial(length, depth, index)
        for length in options.lengths
        for depth in options.depth_fractions
        for index in range(options.trials)
    ]


def first_integer(answer: str) -> str | None:
    """Return the digits of the first integer in an answer."""
    found = re.search("[0-9]+", answer)
    return found.group() if found else None


class _Parts:
    """What prompts are put together from."""

    def __init__(self, options: PasskeyOptions, text: str, tokenizer: Any) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._start = [*prefix_ids(tokenizer), *encode(tokenizer, options.introduction)]
        self._filler = Filler.of_text(text, tokenizer)
        if options.filler_text is not None:
            copies = max(options.lengths) // len(self._filler.ids) + 2
            self._filler = Filler.of_text(" ".join([text] * copies), tokenizer)

    def trial(self, length: int, depth: float, index: int) -> Trial:
        """One key, and the question for it at the end of the prompt."""
        draw = random.Random(f"{self._options.seed} {length} {depth} {index}")
        key = str(draw.randrange(10_000, 100_000))
        needle = self._inside(self._options.needle.replace("{key}", key))
        question = self._inside(self._options.question)
        filler_length = self._filler_length(length, [needle], question)
        hidden = self._hide({depth: needle}, filler_length, draw)
        return Trial(length, depth, index, key, (*self._start, *hidden, *question))

    def facts(self, length: int, index: int) -> list[Trial]:
        """Several keys in one prompt, and a question for each."""
        count, depths = self._options.facts, self._options.depth_fractions
        draw = random.Random(f"{self._options.seed} {length} {index} of {count} facts")
        names = draw.sample(NAMES, count)
        keys = [str(key) for key in draw.sample(range(10_000, 100_000), count)]
        needle, question = self._options.needle, self._options.question
        needles = [
            self._inside(needle.replace("{key}", key).replace("{name}", name))
            for name, key in zip(names, keys, strict=True)
        ]
        filler_length = self._filler_length(length, needles, ())
        hidden = self._hide(dict(zip(depths, needles, strict=True)), filler_length, draw)
        ids = (*self._start, *hidden)
        return [
            Trial(length, depth, index, key, ids, tuple(self._inside(question.replace("{name}", name))))
            for depth, name, key in zip(depths, names, keys, strict=True)
        ]

    def _hide(
        self, needles: Mapping[float, Sequence[int]], filler_length: int, draw: random.Random
    ) -> list[int]:
        """Return a piece of filler with needles at their depths, ascending."""
        stop = self._stop(filler_length, draw)
        start = stop - filler_length
        hidden, done = [], start
        for depth, needle in needles.items():
            position = start
            if depth > 0:
                wanted = start + round(depth * filler_length)
                # at most half the way to the next depth, which also keeps the needle inside the filler
                near = min(_NEAR, filler_length // 16, filler_length // (2 * self._options.depths))
                position = self._filler.end_near(wanted, near)
            hidden += [*self._filler.ids[done:position], *needle]
            done = position
        return hidden + self._filler.ids[done:stop]

    def _filler_length(self, length: int, needles: Sequence[Sequence[int]], question: Sequence[int]) -> int:
        """Return the tokens left for filler."""
        others = len(self._start) + sum(map(len, needles)) + len(question)
        least = others + len(needles)  # something between two needles
        if length < least:
            parts = f"{len(needles)} needles" if not question else "needle and question"
            raise ValueError(
                f"--lengths must be above {least - 1}, the tokens of introduction, {parts} alone, "
                f"got {length}."
            )
        if len(self._filler.ids) < length - others:
            raise ValueError(
                f"The filler has {len(self._filler.ids)} tokens and a prompt of {length} needs "
                f"{length - others}: give longer --filler_files, or a --filler_text to be repeated."
            )
        return length - others

    def _stop(self, filler_length: int, draw: random.Random) -> int:
        """Choose where a piece of filler ends: with a sentence, so that the question follows one."""
        candidates = self._filler.sentences_from(filler_length)
        return draw.choice(candidates) if candidates else draw.randint(filler_length, len(self._filler.ids))

    def _inside(self, text: str) -> list[int]:
        """Return the ids of a text as it stands after another sentence.

        A tokenizer may put a blank of its own before the first word of what it is given.
        """
        anchor, both = encode(self._tokenizer, _ANCHOR), encode(self._tokenizer, _ANCHOR + text)
        return both[len(anchor) :] if both[: len(anchor)] == anchor else encode(self._tokenizer, text)
