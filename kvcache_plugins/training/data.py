"""The examples of a training, and others to measure the recall on."""

from __future__ import annotations

import random
from typing import Any

from torch.utils.data import Dataset

from ..runs.language_reference import read_language_reference
from ..runs.text_files import read_text_file
from .conversations import Conversations, read_rows
from .examples import Example
from .options import SYNTHETIC, LocretOptions
from .synthetic import SyntheticTasks, longest_example

__all__ = ["build_datasets"]

_HELD_OUT = 0.1
"""Part of a text, its end, that evaluation examples are made of; at least what one of them needs."""
_ENDLESS = 1 << 20
"""Synthetic examples there are: more than any training takes."""


def build_datasets(
    options: LocretOptions, tokenizer: Any, *, positions: int | None, seed: int
) -> tuple[Dataset[Example], Dataset[Example]]:
    """Return examples to train on and examples to evaluate on, which share no text.

    Args:
        options (`LocretOptions`): Which.
        tokenizer (`PreTrainedTokenizerBase`): The model's.
        positions (`int`, *optional*): Positions the model has.
        seed (`int`): Of the examples and their order.

    Raises:
        ValueError: If the data is too small or of no known form, or a prompt longer than the
            model's positions.
        OSError: If it cannot be read.
    """
    if options.dataset == SYNTHETIC:
        if positions is not None and longest_example(options.sequence_length) > positions:
            raise ValueError(
                f"--sequence_length must be at most {positions * 4 // 5}: the model has {positions} "
                f"positions, got {options.sequence_length}."
            )
        return _synthetic(options, tokenizer, seed)
    max_length = options.max_length or positions or 8192
    if positions is not None and max_length > positions:
        raise ValueError(f"--max_length must be at most the model's {positions} positions, got {max_length}.")
    rows = read_rows(options.dataset)
    if len(rows) <= options.eval_examples:
        raise ValueError(
            f"--dataset {options.dataset!r} has {len(rows)} rows, of which --eval_examples takes "
            f"{options.eval_examples}: none is left to train on."
        )
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    wanted = None if options.num_examples is None else options.num_examples + options.eval_examples
    order = order[:wanted]
    train, held_out = order[: -options.eval_examples], order[-options.eval_examples :]
    return (
        Conversations(rows, tokenizer, max_length=max_length, order=train),
        Conversations(rows, tokenizer, max_length=max_length, order=held_out),
    )


def _synthetic(
    options: LocretOptions, tokenizer: Any, seed: int
) -> tuple[Dataset[Example], Dataset[Example]]:
    texts = [read_text_file(name, "--text_files").strip() for name in options.text_files or ()]
    if not texts:
        texts = [read_language_reference()]
    train, held_out = [], []
    # a text of so many characters has enough tokens, whatever the language
    least = 8 * options.sequence_length
    for text in texts:
        cut = len(text) - max(int(_HELD_OUT * len(text)), min(least, len(text) // 2))
        train.append(text[:cut])
        held_out.append(text[cut:])
    length = options.sequence_length
    return (
        SyntheticTasks("\n\n".join(train), tokenizer, sequence_length=length, size=_ENDLESS, seed=seed),
        SyntheticTasks(
            "\n\n".join(held_out),
            tokenizer,
            sequence_length=length,
            size=options.eval_examples,
            seed=seed + 1,
        ),
    )
