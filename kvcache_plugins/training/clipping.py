"""Clipping of gradients by value, which the Trainer itself does by norm only."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

__all__ = ["ClipValues"]


class ClipValues(TrainerCallback):
    """Clips every component of the gradient before a step of the optimizer, as the authors of Locret do.

    Args:
        limit (`float`): Largest magnitude of a component; 0.5 there.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clip; called when gradients are complete and averaged over processes."""
        torch.nn.utils.clip_grad_value_(kwargs["model"].parameters(), self.limit)
