"""When exact tokens are attended to faster by what reads packed ones than by torch."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor, nn

from ..kernels import loader
from ..models.decoder import decoder_config
from ..models.facts import exchanges_attention
from ..models.layer_plan import caches_latents
from .limits import KERNEL_DTYPES, MOST_QUERIES
from .native import has_fast_passes

__all__ = ["TorchAttention", "prompt_dtype", "reads_exact_tokens_faster", "tensors_shown_from"]

_OURS = "kvcache_plugins"
_SHOWING = ("sdpa", "eager", _OURS)
"""Attention functions that are looked up by these names, and hand over all that changes a logit."""


class TorchAttention(Enum):
    """How a model attends on a CPU where it is given tensors."""

    FLASH = "tile by tile"
    SPARSE = "tile by tile, of what a mask shows"
    WHOLE = "all logits at once: torch's attention of keys and values of two sizes"
    EAGER = "all logits at once, written out by the model"


def reads_exact_tokens_faster(
    states: Tensor, kernel: str, instead_of: TorchAttention = TorchAttention.FLASH
) -> bool:
    """Whether tokens of which nothing is packed are better read by ours.

    *Flash.* Of 32 heads, over 4096 exact tokens of 8 kv heads of 128 channels (one thread of a Zen 5 core),
    in milliseconds: bf16, one new token 1 to 2, torch 28; 16 of them 8.5 and 19, 64 of them 30 and 61, 1024
    of them 423 and 813. With AVX2 64 take as long as with torch. In fp32 one over 2048 tokens 0.5 and 1.5
    (with AVX2 0.5 and 1.1), 8 of them 2.0 and 4.8 (3.4 and 4.7); of 32 kv heads 2.6 and 5.0 (2.8 and 4.4),
    6.0 and 7.5 (3.8 and 6.9); a prompt of 4096 473 and 826, with AVX2 782 and 819 (two threads). So a few
    queries are, and many in bf16 (not with AMX, which torch uses) and in fp32 with AVX-512.

    *Flash, with a mask.* Of that shape, prompts of 4096 tokens by the kernel, by blocks of queries and by
    torch: a window of 1024 in bf16 151, 450 and 1597, in fp32 231, 443 and 1456; two rows, one with 700 pads
    389, 862 and 3076, 574, 914 and 3015. With AVX2 355 and 431, 379 and 469; 784 and 913, 817 and 951: about
    what blocks take.

    *All logits at once.* Time and memory grow with the square of a prompt. One layer of 16 heads of 128
    channels that has a softcap took for 5000 tokens 6.8 s and 4.6 GB in bf16 and takes 1.5 s and 0.8 GB, in
    fp32 for 2048 tokens 1.7 s and 0.53 s; with AVX2 10.5 s and 1.1 s, 1.7 s and 0.56 s. In bf16 torch
    without a kernel is slower than the model (2.0 s and 1.2 s); in fp16, which torch hardly multiplies, it is
    four times as fast. Of keys of 192 and values of 128 channels (DeepSeek-V2-Lite) 6000 tokens took 9.2 s
    and 6.1 GB in bf16 and take 3.5 s and 0.7 GB, and about the same in fp32.

    Args:
        states (`torch.Tensor` of shape `(B, H, q, D)`): Queries or keys of the new tokens.
        kernel (`str`): The option of that name.
        instead_of (`TorchAttention`): What would attend.
    """
    dtype, many = states.dtype, states.shape[2] > MOST_QUERIES
    if not states.is_cpu or kernel == "torch":
        return False
    if many and instead_of is TorchAttention.WHOLE:
        return dtype in KERNEL_DTYPES
    if many and instead_of is TorchAttention.EAGER:
        if dtype == torch.bfloat16:
            return loader.try_load() and has_fast_passes(dtype)
        return dtype in KERNEL_DTYPES
    if many:
        return dtype in KERNEL_DTYPES and loader.try_load() and _multiplies_faster(dtype)
    if dtype == torch.float32:
        return loader.try_load() and loader.instruction_set() != "portable"
    return dtype in KERNEL_DTYPES and loader.try_load()


def _multiplies_faster(dtype: torch.dtype) -> bool:
    """Whether many queries are multiplied faster than by torch."""
    return has_fast_passes(dtype) and loader.instruction_set() == "avx512"


def prompt_dtype(model: nn.Module, kernel: str) -> torch.dtype | None:
    """Of what dtype a prompt, too, of which all tokens are exact, is better read by ours; `None` if of none.

    A prompt of 4000 tokens of 32 heads (8 kv heads of 128 channels, bf16, one thread of a Zen 5 core) took
    1.3 seconds a layer so, and 2.0 with torch's flash attention.

    Our own attention function is shown every prompt, and leaves to torch what has neither softcap nor sink
    logits and is read faster so. What has one took 2048 tokens of 16 heads in fp32 1.9 seconds a layer by the
    reference in torch and takes 0.8 (one thread of a Zen 3 core), in bf16 3.8 and 2.8.

    Args:
        model (`PreTrainedModel`): Whose attention must be a function that takes handles.
        kernel (`str`): The option of that name.
    """
    way, dtype = _torch_attention(model), getattr(model, "dtype", None)
    parameter = next(model.parameters(), None)
    if way is None or dtype not in KERNEL_DTYPES or parameter is None or not parameter.is_cpu:
        return None  # and kernels for CPUs are not built where they are not needed
    if way is TorchAttention.FLASH and _attention_name(model) == _OURS:
        return None if kernel == "torch" else dtype  # our own function decides: it is told of softcaps
    states = torch.empty(1, 1, MOST_QUERIES + 1, 1, dtype=dtype, device="cpu")
    return dtype if reads_exact_tokens_faster(states, kernel, way) else None


def tensors_shown_from(model: nn.Module, kernel: str) -> int | None:
    """New tokens of a call from which on tensors are given to attention as handles; `None` if it knows none.

    Of fewer, a mask hides little (`attention.unpacked`).

    Args:
        model (`PreTrainedModel`): Whose attention must be a function that takes handles.
        kernel (`str`): The option of that name.
    """
    parameter = next(model.parameters(), None)
    if parameter is None or not parameter.is_cpu or kernel == "torch":
        return None
    is_known = _torch_attention(model) in (TorchAttention.FLASH, TorchAttention.EAGER)
    return MOST_QUERIES + 1 if is_known else None


def _attention_name(model: nn.Module) -> str | None:
    return getattr(decoder_config(model.config), "_attn_implementation", None)


def _torch_attention(model: nn.Module) -> TorchAttention | None:
    """How a model attends to tensors; `None` where it knows no handles."""
    name = _attention_name(model)
    if name not in _SHOWING or not exchanges_attention(model):
        return None
    if caches_latents(decoder_config(model.config)):  # of which come keys of more channels than values have
        return TorchAttention.WHOLE
    return TorchAttention.EAGER if name == "eager" else TorchAttention.FLASH
