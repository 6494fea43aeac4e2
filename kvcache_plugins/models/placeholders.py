"""What of a prompt is no text: images, videos and sounds, and the tokens that stand for them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from torch import Tensor

__all__ = ["find_features", "find_placeholder"]

_NAMES = tuple(
    f"{modality}_token_{word}" for modality in ("image", "video", "audio") for word in ("id", "index")
)
"""Names that configurations have for such tokens."""
_FEATURES = (
    "audio_input_ids",
    "encoder_inputs_embeds",
    "flattened_patches",
    "image_embeds",
    "image_encoder_embeddings",
    "image_patches",
    "input_features",
    "input_values",
    "mm_encoder_outputs",
    "perceiver_embeddings",
    "pixel_values",
)
"""Names, or parts of them, of the arguments by which models are shown such things."""


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


def find_features(arguments: Mapping[str, Any]) -> str | None:
    """Say which arguments of a model's call are images or sounds, whatever its tokens; `None` if none is.

    Args:
        arguments (`dict`): The call's arguments, by name.
    """
    shown = (name for name, value in arguments.items() if _is_shown(value))
    names = sorted(name for name in shown if any(part in name for part in _FEATURES))
    return ", ".join(names) or None


def _is_shown(value: Any) -> bool:
    if isinstance(value, Mapping):  # of kinds of features, not all of which a prompt has
        return any(_is_shown(each) for each in value.values())
    return isinstance(value, (Tensor, list, tuple))
