"""Who reads a prompt: the model's own attention, or a native kernel that does it faster."""

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
        layer (`PackedLayer`): Whose `reads_prompt` says that this pays for the model it was bound to.
        key_states (`torch.Tensor` of shape `(B, H, n, D)`): Keys of the first tokens.
        keys (`StreamView`): What attention reads of them.
        values (`StreamView`): What it reads of their values.
    """
    return (
        layer.reads_prompt
        and key_states.is_cpu
        and key_states.dtype == torch.bfloat16
        and not torch.is_grad_enabled()  # a prompt has gradients, unless they are read from a cache
        and keys.packed_length == values.packed_length == 0
        and keys.length == values.length == key_states.shape[2]
    )
