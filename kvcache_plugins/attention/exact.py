"""When a native kernel reads exact tokens faster than torch's own attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..kernels import loader
from ..models.decoder import decoder_config
from ..models.layer_plan import caches_latents
from .limits import MOST_QUERIES

__all__ = ["reads_exact_tokens_faster", "reads_prompts_faster"]

_SHOWING = ("sdpa", "kvcache_plugins")
"""Attention functions that are looked up by these names, and hand over all that changes a logit."""


def reads_exact_tokens_faster(states: Tensor, kernel: str) -> bool:
    """Whether tokens of which nothing is packed are better read by a native kernel.

    Of 32 heads, over 4096 exact tokens of 8 kv heads of 128 channels (one thread of a Zen 5 core), in
    milliseconds: bf16, one new token 1 to 2, torch 28; 16 of them 8.5 and 19, 64 of them 30 and 61, 1024 of
    them 423 and 813. With AVX2 64 take as long as with torch. One of fp32 over 2048 tokens, 2.3 and 1.6. So
    half precision is, of many queries bf16 with AVX-512 (not with AMX, which torch uses); single precision is
    not.

    Args:
        states (`torch.Tensor` of shape `(B, H, q, D)`): Queries or keys of the new tokens.
        kernel (`str`): The option of that name.
    """
    return (
        states.is_cpu
        and kernel != "torch"
        and states.dtype in (torch.bfloat16, torch.float16)
        and loader.try_load()
        and (states.shape[2] <= MOST_QUERIES or _multiplies_pairs(states.dtype))
    )


def _multiplies_pairs(dtype: torch.dtype) -> bool:
    """Whether many queries are multiplied faster than by torch."""
    if dtype != torch.bfloat16 or torch.cpu._is_amx_tile_supported():
        return False
    return loader.instruction_set() == "avx512"


def reads_prompts_faster(model: nn.Module, kernel: str) -> bool:
    """Whether a prompt, too, of which all tokens are exact, is better read by a native kernel.

    A prompt of 4000 tokens of 32 heads (8 kv heads of 128 channels, bf16, one thread of a Zen 5 core) took
    1.3 seconds a layer so, and 2.0 with torch's attention.

    Args:
        model (`PreTrainedModel`): Whose attention must be a function that takes handles, of keys and values
            and not of latents.
        kernel (`str`): The option of that name.
    """
    config = decoder_config(model.config)
    if getattr(config, "_attn_implementation", None) not in _SHOWING or caches_latents(config):
        return False
    parameter = next(model.parameters(), None)
    if parameter is None or not parameter.is_cpu or getattr(model, "dtype", None) != torch.bfloat16:
        return False  # and kernels for CPUs are not built where they are not needed
    states = torch.empty(1, 1, MOST_QUERIES + 1, 1, dtype=torch.bfloat16, device="cpu")
    return reads_exact_tokens_faster(states, kernel)
