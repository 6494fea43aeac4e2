"""Who reads a prompt: the model's own attention, or ours where it is faster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .view import StreamView

if TYPE_CHECKING:
    from .base import PackedLayer

__all__ = ["shows_prompt"]


def shows_prompt(layer: PackedLayer, key_states: Tensor, keys: StreamView, values: StreamView) -> bool:
    """Whether attention is given handles of the first tokens, all exact, in place of the tensors.

    Args:
        layer (`PackedLayer`): Whose `prompt_dtype` says of what this pays for the model it was bound to.
        key_states (`torch.Tensor` of shape `(B, H, n, D)`): Keys of the first tokens.
        keys (`StreamView`): What attention reads of them.
        values (`StreamView`): What it reads of their values.
    """
    return (
        key_states.dtype == layer.prompt_dtype
        and key_states.is_cpu
        and not torch.is_grad_enabled()  # a prompt has gradients, unless they are read from a cache
        and keys.packed_length == values.packed_length == 0
        and keys.length == values.length == key_states.shape[2]
    )
