"""Retrieval tasks made from any text: what later text needs of an earlier one, made plain.

| task | in the prompt | in the answer |
|---|---|---|
| `passkey` | one fact in prose, of one of many forms | the question for it, and the answer |
| `facts` | several facts in prose, apart or together | questions for all, in another order, with answers |
| `records` | a list of keys and values within prose | some of the keys, and their values |
| `repetition` | prose | a piece of it again |
| `continuation` | prose | how it goes on |

Questions belong to the answer: heads see a prompt that does not know what it will be asked. Every example is
drawn from a seed and its index alone, so an interrupted training sees the same ones again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch.utils.data import Dataset

from ..evaluation.passkey.filler import Filler
from ..runs.loading import prefix_ids
from .examples import Example, cut_middle
from .wording import FACTS, NAMES, PASSKEYS, THINGS

__all__ = ["TASKS", "SyntheticTasks", "longest_example"]

_Draw = random.Random

_SHORTEST = 0.25
"""Shortest prompt, as a part of the longest."""


@dataclass(frozen=True)
class _Fact:
    """A statement, the question for it, and what answers it."""

    statement: str
    question: str
    answer: str


class SyntheticTasks(Dataset[Example]):
    """Examples of retrieval tasks.

    Args:
        text (`str`): Prose to hide things in.
        tokenizer (`PreTrainedTokenizerBase`): The model's.
        sequence_length (`int`): Tokens of the longest prompt; the shortest has a quarter of them. With its
            answer it has a quarter more, at most.
        size (`int`): How many examples there are.
        seed (`int`): Of all of them.

    Raises:
        ValueError: If the text is too short for a prompt.
    """

    def __init__(self, text: str, tokenizer: Any, *, sequence_length: int, size: int, seed: int = 0) -> None:
        self._filler = Filler.of_text(text, tokenizer)
        needed = sequence_length + sequence_length // 8
        if len(self._filler.ids) <= needed:
            raise ValueError(
                f"The text has {len(self._filler.ids)} tokens; prompts of --sequence_length "
                f"{sequence_length} need more than {needed}: give longer --text_files, or shorter prompts."
            )
        self._tokenizer = tokenizer
        self._start = prefix_ids(tokenizer)
        self._longest, self._size, self._seed = sequence_length, size, seed

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self._size:
            raise IndexError(f"Example {index} of {self._size}.")
        draw = _Draw(f"{self._seed} {index}")
        length = draw.randint(max(8, int(_SHORTEST * self._longest)), self._longest)
        task = draw.choices(list(TASKS), [weight for _, weight in TASKS.values()])[0]
        example: Example = TASKS[task][0](self, draw, length)
        prompt = cut_middle(example.prompt_ids, self._longest)  # one statement alone may be longer
        return Example(prompt, example.answer_ids[: longest_example(self._longest) - len(prompt)])

    def passkey(self, draw: _Draw, length: int) -> Example:
        """One fact, and the question for it."""
        fact = _passkey(draw)
        prompt = self._hide([fact.statement], draw, length)
        return Example(prompt, self._encode(fact.question + fact.answer))

    def facts(self, draw: _Draw, length: int) -> Example:
        """Several facts, and the questions for all of them."""
        facts = _several(draw, draw.randint(2, 10))
        if draw.random() < 0.3:
            facts.append(_passkey(draw))
        draw.shuffle(facts)
        facts = facts[: self._fitting([fact.statement for fact in facts])]
        prompt = self._hide([fact.statement for fact in facts], draw, length)
        draw.shuffle(facts)
        return Example(prompt, [x for fact in facts for x in self._encode(fact.question + fact.answer)])

    def records(self, draw: _Draw, length: int) -> Example:
        """A list of keys and values, and some of its lines again."""
        separator = draw.choice((": ", " = ", " - ", "\t"))
        keys = draw.sample(draw.choice((NAMES, THINGS)), draw.randint(2, 12))
        lines = [f"{key}{separator}{_value(draw)}\n" for key in keys]
        lines = lines[: self._fitting(lines)]
        prompt = self._hide(["\n" + "".join(lines)], draw, length)
        asked = draw.sample(lines, min(len(lines), 6))
        return Example(prompt, self._encode("\n" + "".join(asked)))

    def repetition(self, draw: _Draw, length: int) -> Example:
        """Prose, and a piece of it again."""
        prompt = self._prose(draw, length)
        size = min(draw.randint(16, 64), len(prompt) // 2)
        begin = draw.randint(0, len(prompt) - size)
        return Example(prompt, prompt[begin : begin + size])

    def continuation(self, draw: _Draw, length: int) -> Example:
        """Prose, and how it goes on."""
        extra = max(8, self._longest // 16)
        ids = self._prose(draw, length + extra)
        return Example(ids[:-extra], ids[-extra:])

    def _prose(self, draw: _Draw, length: int) -> list[int]:
        length -= len(self._start)
        begin = draw.randint(0, len(self._filler.ids) - length)
        return [*self._start, *self._filler.ids[begin : begin + length]]

    def _hide(self, statements: Sequence[str], draw: _Draw, length: int) -> list[int]:
        """Put statements into prose at ends of sentences, in order; together `length` tokens, if they fit."""
        hidden = [self._encode(statement) for statement in statements]
        room = max(length - len(self._start) - sum(map(len, hidden)), len(hidden))
        begin = draw.randint(0, len(self._filler.ids) - room)
        # sometimes all within a short stretch: what is crowded must be kept as well
        low, high = sorted((draw.random(), draw.random())) if draw.random() < 0.25 else (0.0, 1.0)
        wanted = sorted(begin + round(room * draw.uniform(low, high)) for _ in hidden)
        ids, last = list(self._start), begin
        for place, statement in zip(wanted, hidden, strict=True):
            end = min(max(self._filler.end_near(place, 32), last), begin + room)
            ids += self._filler.ids[last:end] + statement
            last = end
        return ids + self._filler.ids[last : begin + room]

    def _fitting(self, statements: Sequence[str]) -> int:
        """How many of the first statements fit into the longest prompt with prose around; at least one."""
        ends = accumulate(len(self._encode(statement)) + 1 for statement in statements)
        return max(1, sum(end < self._longest - len(self._start) for end in ends))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return list(ids)


def longest_example(sequence_length: int) -> int:
    """Return how many tokens a prompt of at most `sequence_length` and its answer have together, at most."""
    return sequence_length + sequence_length // 4


def _value(draw: _Draw) -> str:
    """What is worth remembering: mostly a number, sometimes words."""
    if draw.random() < 0.8:
        return "".join(draw.choice("0123456789") for _ in range(draw.choice((3, 4, 5, 5, 5, 6, 7))))
    return " ".join(draw.sample(THINGS, draw.randint(1, 2)))


def _passkey(draw: _Draw) -> _Fact:
    statement, question = draw.choice(PASSKEYS)
    value = _value(draw)
    return _Fact(statement.format(value=value), question, f" {value}.")


def _several(draw: _Draw, count: int) -> list[_Fact]:
    """Facts of one form or of several, about different names."""
    names = draw.sample(draw.choice((NAMES, NAMES, THINGS)), count)
    forms = [draw.choice(FACTS)] * count if draw.random() < 0.7 else draw.choices(FACTS, k=count)
    facts = []
    for name, (statement, question) in zip(names, forms, strict=True):
        value = _value(draw)
        facts.append(
            _Fact(statement.format(name=name, value=value), question.format(name=name), f" {value}.")
        )
    return facts


TASKS: dict[str, tuple[Callable[..., Example], float]] = {
    "passkey": (SyntheticTasks.passkey, 0.25),
    "facts": (SyntheticTasks.facts, 0.5),
    "records": (SyntheticTasks.records, 0.1),
    "repetition": (SyntheticTasks.repetition, 0.1),
    "continuation": (SyntheticTasks.continuation, 0.05),
}
"""Tasks by name, each with its share of the examples."""
