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
        window_length (`int`): Newest queries whose attention counts, and whose tokens stay, at most half of
            the budget; whatever `stabilizer_length` and `local_length` say, which may protect more.
        kernel_size (`int`): Neighbouring tokens over which it is averaged; odd.
    """

    window_length: int = 64
    kernel_size: int = 5

    def __post_init__(self) -> None:
        check_integer(self, "window_length", self.window_length, minimum=1)  # of what a budget has to hold
        super().__post_init__()
        check_integer(self, "kernel_size", self.kernel_size, minimum=1)
        if self.kernel_size % 2 == 0:
            raise ValueError(f"SnapKVConfig.kernel_size must be odd, got {self.kernel_size!r}.")

    def window_of(self, budget: int) -> int:
        """Tokens of the window where `budget` tokens are kept."""
        return min(self.window_length, budget // 2)

    def protected_at(self, phase: str, budget: int, turn_length: int = 0) -> int:
        newest = super().protected_at(phase, budget, turn_length)
        return newest if phase == "decode" else max(newest, self.window_of(budget))

    def _protected_in(self, budget: int) -> tuple[int, int, str]:
        protected, newest, name = super()._protected_in(budget)
        given = self.stabilizer_length or 0
        is_window = name == "stabilizer_length" and given < newest == self.window_of(budget)
        return protected, newest, "window_length" if is_window else name


class SnapKVLayer(HeadwiseLayer):
    """Worth of a token before the window: the attention it and its neighbours receive from the window."""

    scored_after = "attention"
    counts_all_queries = False  # but those of the last call
    config: SnapKVConfig

    def observe(self, query: Tensor, tokens: StreamView, options: AttentionOptions) -> None:
        window = min(max(1, self.config.window_of(self.mean_budget)), query.shape[2])
        query, options = newest_queries(query, options, window)
        counted = counted_queries(query, tokens)
        received = received_attention(query, tokens, options, counted, kernel=self.config.kernel)
        before = tokens.length - window
        is_pad = torch.arange(before, device=received.device) < tokens.stream.padding.starts(query)[:, None]
        votes = received[:, :, :before].masked_fill(is_pad[:, None], 0.0)
        self.ledger.scores[:, :, before:] = torch.finfo(torch.float32).max
        if before:  # where a neighbour is missing, a zero takes its place, as in the published code
            size = self.config.kernel_size
            pooled = F.avg_pool1d(votes, size, stride=1, padding=size // 2)
            self.ledger.scores[:, :, :before] = pooled


@register_backend("snapkv")
class SnapKVCache(EvictingCache):
    """Keeps the tokens that the newest queries attend to.

    Paper: SnapKV, arXiv 2404.14469.
    Deviates: between two chunks of a prompt the window is the end of the chunk, which has not seen the
        question yet; with `chunk_size=None` it is the end of the prompt, as in the paper. It is half of the
        budget at budgets below twice `window_length`, no longer than what came in the last call, and not all
        that is protected: the stabilizers and the local tokens may be more. Scores are summed over the query
        heads of a group. Tokens drafted with the end of the prompt belong to its window. Generated tokens are
        evicted with `evict_at_decode`, which the paper does not do.
    Cost: 8 bytes per token and head beside the storage; logits of the window, once per chunk, on CPUs by
        a kernel, else by torch, and then twice where those of 16 queries, or the numbers of all keys, are
        more than 4 million (64 million on a GPU).
    Limits: needs the queries, so a model that asks transformers for its attention function; weak where the
        question is not at the end of what has been read. While tokens are generated one at a time, the window
        is the newest of them alone, whatever `window_length` is.
    """

    config_class = SnapKVConfig
    layer_class = SnapKVLayer
