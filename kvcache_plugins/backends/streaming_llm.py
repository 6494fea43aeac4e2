"""Attention sinks and a window: the first tokens and the newest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..eviction.cache import EvictingCache
from ..eviction.layer import EvictingLayer
from ..eviction.options import EvictingConfig
from ..registry import register_backend

__all__ = ["StreamingLLMCache", "StreamingLLMConfig", "StreamingLLMLayer"]


@dataclass(frozen=True, kw_only=True)
class StreamingLLMConfig(EvictingConfig):
    """Options of [`StreamingLLMCache`]; see [`EvictingConfig`].

    Args:
        sink_length (`int`): First real tokens never evicted.
    """

    sink_length: int = 4


class StreamingLLMLayer(EvictingLayer):
    """Worth of a token: how new it is."""

    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        seen = self.cumulative_length
        ages = torch.arange(seen, seen + keys.shape[2], dtype=torch.float32, device=keys.device)
        return ages.expand(keys.shape[:3])


@register_backend("streaming_llm")
class StreamingLLMCache(EvictingCache):
    """Keeps the first `sink_length` tokens and the newest.

    Paper: Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453.
    Deviates: evicts after a chunk, not after a token, while a prompt is read; the paper numbers positions
        within the cache, which is `positions="compact"`.
    Cost: 8 bytes per token and head beside the storage.
    Limits: whatever left the window is forgotten.
    """

    config_class = StreamingLLMConfig
    layer_class = StreamingLLMLayer
