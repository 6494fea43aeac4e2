"""From what the head of a language model gives to its logits.

Families scale their logits, cap them, or leave out entries of a padded vocabulary, each in its own `forward`,
and one name in their configurations means a factor here and a divisor there. So what a model does is not read
from its configuration alone: of all that it may mean, the one is taken that gives the model's own logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .decoder import decoder_only_config

__all__ = ["LogitRule", "find_logit_rule", "outputs_of_head"]

_FACTORS = (
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier",
    "logits_mup_width_multiplier",
)
"""Names in configurations of what logits are multiplied with, or divided by."""
_CAPS = ("final_logit_softcapping", "logits_soft_cap")


@dataclass(frozen=True)
class LogitRule:
    """What a model does to the outputs of its head.

    Args:
        vocab_size (`int`): Leading entries that are logits.
        scale (`float`): Their factor.
        softcap (`float`, *optional*): Their bound, `c` in `c tanh(x / c)`.
    """

    vocab_size: int
    scale: float = 1.0
    softcap: float | None = None

    def apply(self, outputs: Tensor) -> Tensor:
        """Return the logits `(..., vocab_size)`, fp32, of outputs of the head `(..., V)`."""
        logits = outputs[..., : self.vocab_size].float() * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def outputs_of_head(model: Any, states: Tensor) -> Tensor:
    """Return what a model's head gives `(B, n, V)` of the states `(B, n, D)` of its decoder.

    Raises:
        ValueError: Naming the model, if its head takes something else than these states.
    """
    head = model.get_output_embeddings()
    width = getattr(head, "in_features", states.shape[-1])
    if width != states.shape[-1]:
        raise ValueError(
            f"The logits of {type(model).__name__} (model_type={model.config.model_type!r}) are not what its "
            f"head gives of its decoder's states, which have {states.shape[-1]} channels where it takes "
            f"{width}. Allowed are models whose logits are."
        )
    found: Tensor = head(states)
    return found


def find_logit_rule(model: Any, outputs: Tensor, logits: Tensor) -> LogitRule:
    """Find what a model does to the outputs of its head, by logits it has made.

    Args:
        model (`PreTrainedModel`): The model.
        outputs (`torch.Tensor` of shape `(B, V)`): What its head gives for some states.
        logits (`torch.Tensor` of shape `(B, vocab_size)`): What the model made of the same states.

    Raises:
        ValueError: Naming the model, if nothing its configuration may mean gives these logits.
    """
    config = decoder_only_config(model.config)
    rules = [
        LogitRule(logits.shape[-1], scale, softcap)
        for softcap, scale in product((*_numbers(config, _CAPS), None), _scales(config))
    ]
    # Rounded as both are, errors below half a unit in the last place say nothing: then the first is taken.
    unit = torch.finfo(outputs.dtype).eps
    errors = [max(error, unit / 2) for error in _errors(rules, outputs, logits.to(outputs.device))]
    smallest = min(errors, default=float("inf"))
    if not smallest <= max(2 * unit, 1e-3):  # matrix products of other shapes, or in TF32, differ as much
        raise ValueError(
            f"The logits of {type(model).__name__} (model_type={model.config.model_type!r}) are not what its "
            "head gives, scaled or capped by its configuration (known are "
            f"{', '.join(sorted((*_FACTORS, *_CAPS)))}): they differ by {smallest:.1%}. Allowed are models "
            "whose logits are."
        )
    return rules[errors.index(smallest)]


def _scales(config: Any) -> list[float]:
    numbers = list(_numbers(config, _FACTORS))
    return [*numbers, *(1.0 / number for number in numbers), 1.0]


def _numbers(config: Any, names: tuple[str, ...]) -> Iterator[float]:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (int, float)) and value > 0:  # MPT's may be a word
            yield float(value)


def _errors(rules: list[LogitRule], outputs: Tensor, logits: Tensor) -> list[float]:
    """Of every rule: its largest error in any row, relative to the row."""
    if logits.shape[-1] > outputs.shape[-1]:
        return []
    wanted = logits.float()
    norms = wanted.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    found = [((rule.apply(outputs) - wanted).norm(dim=-1) / norms).amax() for rule in rules]
    return torch.stack(found).tolist()  # one wait for the device
