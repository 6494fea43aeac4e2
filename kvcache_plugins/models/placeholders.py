"""Tokens that stand for what is no text: images, videos, sounds."""

from __future__ import annotations

from itertools import product
from typing import Any

from torch import Tensor

__all__ = ["find_placeholder"]

_NAMES = tuple(
    f"{modality}_token_{word}" for modality in ("image", "video", "audio") for word in ("id", "index")
)
"""Names that configurations have for them."""


def find_placeholder(config: Any, token_ids: Tensor) -> str | None:
    """Say which token of a model's that stands for an image or a sound is among others; `None` if none is.

    Args:
        config (`PreTrainedConfig`): Of the model.
        token_ids (`torch.Tensor` of shape `(B, n)`): Tokens; `(B, n, codes)` of sounds that are nothing else.
            A single one is not looked at: it was generated, and not worth waiting for a device at every step.
    """
    if token_ids.shape[1] == 1:
        return None
    if token_ids.ndim > 2:
        return f"tokens of {token_ids.shape[2]} codes"
    parts = (config, *(getattr(config, name, None) for name in ("vision_config", "audio_config")))
    for name, part in product(_NAMES, parts):
        placeholder = getattr(part, name, None)
        if isinstance(placeholder, int) and bool((token_ids == placeholder).any()):
            return f"tokens {placeholder} ({name})"
    return None
