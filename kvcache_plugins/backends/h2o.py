"""Heavy hitters: the tokens that have received most attention so far, and the newest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention.received import received_attention
from ..attention.reference import AttentionOptions
from ..config import check_flag
from ..eviction.accumulating import AccumulatingCache, AccumulatingLayer
from ..eviction.headwise import HeadwiseConfig
from ..eviction.queries import counted_queries
from ..layers.view import StreamView
from ..registry import register_backend

__all__ = ["H2OCache", "H2OConfig", "H2OLayer"]


@dataclass(frozen=True, kw_only=True)
class H2OConfig(HeadwiseConfig):
    """Options of [`H2OCache`]; see [`HeadwiseConfig`].

    Args:
        local_length (`int`, *optional*), stabilizer_length (`int`, *optional*): Newest tokens that are kept;
            half of the budget if not given, as in the paper.
        normalize (`bool`): Divide what a token received by the number of queries that saw it, as early
            tokens are seen by more.
    """

    normalize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag(self, "normalize", self.normalize)

    def protected_at(self, phase: str, budget: int, turn_length: int = 0) -> int:
        given = self.stabilizer_length if phase == "chunk" else self.local_length
        return max(budget // 2 if given is None else given, self.exact_length)


class H2OLayer(AccumulatingLayer):
    """Worth of a token: the attention it has received from every query since it came."""

    config: H2OConfig

    def observe(self, query: Tensor, tokens: StreamView, options: AttentionOptions) -> None:
        counted = counted_queries(query, tokens)
        received = received_attention(query, tokens, options, counted, kernel=self.config.kernel)
        self.ledger.scores.add_(received)

    def ranks(self) -> Tensor:
        if not self.config.normalize:
            return self.ledger.scores
        queries = self.cumulative_length - self.ledger.positions
        return self.ledger.scores / queries.to(torch.float32)


@register_backend("h2o")
class H2OCache(AccumulatingCache):
    """Keeps the tokens with the largest accumulated attention.

    Paper: H2O: Heavy-Hitter Oracle, arXiv 2306.14048.
    Deviates: evicts after a chunk, not after a token, while a prompt is read; scores are summed over the
        query heads of a group. Drafted tokens that are rejected have voted.
    Cost: 8 bytes per token and head beside the storage, and 8 queries, which wait while tokens are generated
        to be counted together: logits are computed once more, on CPUs by a kernel, else by torch, and then
        twice where those of 16 queries, or the numbers of all keys, are more than 4 million (64 million on a
        GPU). With a mask at every step (as long as pads are held; `eager`) none waits, and every step reads
        all keys again.
    Limits: needs the queries, so a model that asks transformers for its attention function.
    """

    config_class = H2OConfig
    layer_class = H2OLayer
