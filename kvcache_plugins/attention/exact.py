"""When a native kernel reads exact tokens faster than torch's own attention."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import loader
from .limits import MOST_QUERIES

__all__ = ["reads_exact_tokens_faster"]


def reads_exact_tokens_faster(states: Tensor, kernel: str) -> bool:
    """Whether tokens of which nothing is packed are better read by a native kernel.

    From one new token of 32 heads over 512 and 2048 exact tokens of 8 kv heads of 128 channels (one thread of
    a Zen 5 core), in microseconds: bf16 259 and 1009, torch 2783 and 22464; fp32 266 and 2349, torch 232 and
    1575. So half precision is, and single precision is not.

    Args:
        states (`torch.Tensor` of shape `(B, H, q, D)`): Queries or keys of the new tokens.
        kernel (`str`): The option of that name.
    """
    return (
        states.is_cpu
        and kernel != "torch"
        and states.dtype in (torch.bfloat16, torch.float16)
        and states.shape[2] <= MOST_QUERIES
        and loader.try_load()
    )
