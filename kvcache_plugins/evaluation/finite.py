"""Predictions that are no numbers, which pass for some: a NaN is the highest logit wherever there is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from ..errors import NotFiniteError
from ..runs.labels import DENSE

__all__ = ["FiniteLogits", "refuse_wrong"]


class FiniteLogits(LogitsProcessor):
    """Lets all logits of a `generate()` pass and looks for such as are no numbers.

    A logit of minus infinity is one, of a token that must not come; but not if none may.
    """

    def __init__(self) -> None:
        self._predictions = 0
        self._wrong: int | Tensor = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._predictions += len(scores)
        wrong = (scores.isnan() | scores.isposinf()).any(-1) | scores.isneginf().all(-1)
        self._wrong = self._wrong + wrong.sum()  # a tensor: no step waits for a GPU
        return scores

    def check(self, cache_config: Mapping[str, Any], model: PreTrainedModel) -> None:
        """Raise `NotFiniteError` if there were any; see [`refuse_wrong`]."""
        refuse_wrong(int(self._wrong), self._predictions, cache_config, model.dtype)


def refuse_wrong(wrong: int, predictions: int, cache_config: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Refuse predictions of which some are no numbers.

    Args:
        wrong (`int`): How many are not.
        predictions (`int`): How many there are.
        cache_config (`Mapping`): The cache they were made with.
        dtype (`torch.dtype`): Of the model.

    Raises:
        NotFiniteError: If any is wrong; of the dense cache it says that this is the model's doing.
    """
    if wrong == 0:
        return
    found = f"{wrong} of {predictions} predictions are not numbers (NaN or infinite logits)"
    if dict(cache_config) != DENSE:
        raise NotFiniteError(found)
    name = str(dtype).removeprefix("torch.")
    raise NotFiniteError(
        f"The model itself, in {name} and with its ordinary cache, makes no sense of the text: {found}. "
        "Its weights are damaged, or --dtype must be one of a wider range, such as fp32."
    )
