"""What heads are trained on: prompts with their answers, as token ids, and batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Collator", "Example", "cut_middle"]


@dataclass(frozen=True)
class Example:
    """One text.

    Args:
        prompt_ids (`Sequence[int]`): What is read and labeled.
        answer_ids (`Sequence[int]`): What follows, whose queries say what of the prompt mattered: an answer,
            or a question the prompt does not know of and its answer.
    """

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]


def cut_middle(prompt_ids: Sequence[int], length: int) -> list[int]:
    """Return at most `length` tokens: the first half of them and the last, without the middle."""
    if len(prompt_ids) <= length:
        return list(prompt_ids)
    tail = length // 2
    return [*prompt_ids[: length - tail], *prompt_ids[len(prompt_ids) - tail :]]


@dataclass(frozen=True)
class Collator:
    """Puts examples into a batch, padded on the right.

    Args:
        pad_token_id (`int`): What fills the shorter rows.
    """

    pad_token_id: int = 0

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        """Return a batch.

        Returns:
            `dict`: `input_ids` and `attention_mask` `(B, T)`, int64: prompt, answer, padding; and
                `prompt_length` and `length` `(B,)`, int64: tokens of the prompt, and of both.
        """
        rows = [[*example.prompt_ids, *example.answer_ids] for example in examples]
        length = torch.tensor([len(row) for row in rows])
        input_ids = torch.full((len(rows), int(length.max())), self.pad_token_id)
        for index, row in enumerate(rows):
            input_ids[index, : len(row)] = torch.tensor(row)
        mask: Tensor = torch.arange(input_ids.shape[1]) < length[:, None]
        return {
            "input_ids": input_ids,
            "attention_mask": mask.long(),
            "prompt_length": torch.tensor([len(example.prompt_ids) for example in examples]),
            "length": length,
        }
