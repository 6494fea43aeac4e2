"""What the end of the prompt looks at: attention received from a window of the newest queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention.received import received_attention
from ..attention.reference import AttentionOptions
from ..config import check_integer
from ..eviction.cache import EvictingCache
from ..eviction.headwise import HeadwiseConfig, HeadwiseLayer
from ..eviction.queries import counted_queries, newest_queries
from ..layers.view import StreamView
from ..registry import register_backend

__all__ = ["SnapKVCache", "SnapKVConfig", "SnapKVLayer"]


@dataclass(frozen=True, kw_only=True)
class SnapKVConfig(HeadwiseConfig):
    """Options of [`SnapKVCache`]; see [`HeadwiseConfig`].

    Args:
        window_length (`int`): Newest queries whose attention counts.
        kernel_size (`int`): Neighbouring tokens over which it is averaged; odd.
    """

    window_length: int = 64
    kernel_size: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self, "window_length", self.window_length, minimum=1)
        check_integer(self, "kernel_size", self.kernel_size, minimum=1)
        if self.kernel_size % 2 == 0:
            raise ValueError(f"SnapKVConfig.kernel_size must be odd, got {self.kernel_size!r}.")


class SnapKVLayer(HeadwiseLayer):
    """Worth of a token: the attention it and its neighbours receive from the newest queries."""

    scored_after = "attention"
    counts_all_queries = False  # but those of the last call
    config: SnapKVConfig

    def observe(self, query: Tensor, tokens: StreamView, options: AttentionOptions) -> None:
        query, options = newest_queries(query, options, self.config.window_length)
        received = received_attention(query, tokens, options, counted_queries(query, tokens))
        slots = torch.arange(tokens.length, device=received.device)
        is_real = (slots >= tokens.stream.padding.starts(query)[:, None])[:, None].to(received)
        # an average over the neighbours that exist: pads are not among them
        pooled = self._pooled(received * is_real) / self._pooled(is_real).clamp_min_(1.0)
        self.ledger.scores.copy_(pooled)

    def _pooled(self, numbers: Tensor) -> Tensor:
        """Sum over the neighbours of every token, `(B, H, m)`."""
        size = self.config.kernel_size
        return F.avg_pool1d(numbers, size, stride=1, padding=size // 2) * size


@register_backend("snapkv")
class SnapKVCache(EvictingCache):
    """Keeps the tokens that the newest queries attend to.

    Paper: SnapKV, arXiv 2404.14469.
    Deviates: between two chunks of a prompt the window is the end of the chunk, which has not seen the
        question yet; with `chunk_size=None` it is the end of the prompt, as in the paper. Scores are summed
        over the query heads of a group. Tokens drafted with the end of the prompt belong to its window.
    Cost: 8 bytes per token and head beside the storage; logits of the window, twice, once per chunk.
    Limits: needs the queries, so a model that asks transformers for its attention function; weak where the
        question is not at the end of what has been read.
    """

    config_class = SnapKVConfig
    layer_class = SnapKVLayer
