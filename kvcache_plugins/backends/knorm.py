"""Small keys first: tokens whose keys are short receive much attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..eviction.cache import EvictingCache
from ..eviction.layer import EvictingLayer
from ..eviction.options import EvictingConfig
from ..registry import register_backend

__all__ = ["KnormCache", "KnormConfig", "KnormLayer"]


@dataclass(frozen=True, kw_only=True)
class KnormConfig(EvictingConfig):
    """Options of [`KnormCache`]; see [`EvictingConfig`].

    Args:
        sink_length (`int`): First real tokens never evicted.
    """

    sink_length: int = 4


class KnormLayer(EvictingLayer):
    """Worth of a token: `-|k|`."""

    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(keys.float(), dim=-1)
        return -norms


@register_backend("knorm")
class KnormCache(EvictingCache):
    """Keeps the tokens with the smallest key norms.

    Paper: A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv 2406.11430.
    Deviates: evicts in every layer; sinks and the newest tokens are protected.
    Cost: 8 bytes per token and head beside the storage.
    Limits: no regard for what is asked; a norm says little in models that normalize their keys (Qwen 3) or
        cache normalized latents (DeepSeek-V3). The rotary embedding keeps norms, so equal tokens have equal
        keys' norms in the first layer, and which of them stay is decided by rounding: it may differ with the
        length of a call and the size of a batch.
    """

    config_class = KnormConfig
    layer_class = KnormLayer
