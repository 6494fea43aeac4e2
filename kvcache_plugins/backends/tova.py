"""What the newest token looks at, for all heads together."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..attention.received import received_attention
from ..attention.reference import AttentionOptions
from ..eviction.cache import EvictingCache
from ..eviction.layer import EvictingLayer
from ..eviction.options import EvictingConfig
from ..eviction.queries import newest_queries
from ..layers.view import StreamView
from ..models.facts import refuse_split_heads
from ..registry import register_backend

__all__ = ["TOVACache", "TOVAConfig", "TOVALayer"]


@dataclass(frozen=True, kw_only=True)
class TOVAConfig(EvictingConfig):
    """Options of [`TOVACache`]; see [`EvictingConfig`]."""


class TOVALayer(EvictingLayer):
    """Worth of a token: the attention of the newest query, averaged over all heads of the layer."""

    scored_after = "attention"

    def observe(self, query: Tensor, tokens: StreamView, options: AttentionOptions) -> None:
        heads = query.shape[1]
        query, options = newest_queries(query, options, 1)
        received = received_attention(query, tokens, options, kernel=self.config.kernel)
        self.ledger.scores.copy_(received.sum(1, keepdim=True).div_(heads).expand_as(received))


@register_backend("tova")
class TOVACache(EvictingCache):
    """Keeps the tokens that the newest one attends to, the same ones for every head of a layer.

    Paper: Transformers are Multi-State RNNs, arXiv 2401.06104.
    Deviates: evicts after a chunk, not after a token, while a prompt is read; of tokens drafted with its end,
        the last one decides, also if it is rejected. The newest tokens are protected between the chunks of a
        prompt (stabilizers) and from its end on (local), which the paper does not do.
    Cost: 8 bytes per token and head beside the storage; logits of one query, once per eviction, on CPUs
        by a kernel, else by torch, and then of more than 4 million (of 64 million on a GPU) twice.
    Limits: needs the queries, so a model that asks transformers for its attention function, and all heads of
        a layer in one process, so no tensor parallel model.
    """

    config_class = TOVAConfig
    layer_class = TOVALayer

    def attach(self, model: nn.Module) -> None:
        refuse_split_heads(model, self.backend)
