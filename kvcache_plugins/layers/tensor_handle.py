"""Handles of keys and values that lie in tensors: attention may read them by another way than torch's."""

from __future__ import annotations

import torch
from torch import Tensor

from .lazy import LazyTensor

__all__ = ["TensorHandle", "shown"]


class TensorHandle(LazyTensor):
    """Keys or values of one layer in one call, of shape `(B, H, T, D)`, which are there.

    It says whose they are: our attention takes them where it reads them faster. Any other operation is given
    the tensor.

    Attributes:
        states (`torch.Tensor` of shape `(B, H, T, D)`): The tensor.
    """

    states: Tensor

    @staticmethod
    def __new__(cls, states: Tensor) -> TensorHandle:
        handle: TensorHandle = Tensor._make_wrapper_subclass(
            cls, states.shape, dtype=states.dtype, device=states.device
        )
        handle.states = states
        return handle

    def dense(self) -> Tensor:
        """The tensor."""
        return self.states

    def __repr__(self) -> str:  # type: ignore[override]
        return f"TensorHandle(shape={tuple(self.shape)})"


def shown(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return handles of what an update has returned, if that is tensors on a CPU and no gradient is recorded.

    Args:
        keys (`torch.Tensor` of shape `(B, H, T, D)`): What attention reads.
        values (`torch.Tensor` of shape `(B, H, T, Dv)`): Their values.
    """
    if type(keys) is not Tensor or type(values) is not Tensor:
        return keys, values
    if not keys.is_cpu or torch.is_grad_enabled():
        return keys, values
    return TensorHandle(keys), TensorHandle(values)
