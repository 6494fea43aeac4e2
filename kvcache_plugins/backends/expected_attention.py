"""What is yet to come will look at: attention that queries like those so far are expected to pay."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention.expected import expected_attention
from ..attention.query_moments import QueryMoments, average_rotation
from ..attention.reference import AttentionOptions
from ..config import check_flag, check_integer, check_number
from ..eviction.accumulating import AccumulatingCache, AccumulatingLayer
from ..eviction.headwise import HeadwiseConfig
from ..layers.view import StreamView
from ..models.frequencies import Change
from ..registry import register_backend

__all__ = ["ExpectedAttentionCache", "ExpectedAttentionConfig", "ExpectedAttentionLayer"]

_DRAFTED = "drafted"
_TILE_VALUES = 1 << 21
"""Numbers of queries that are un-rotated at once: 8 MB in fp32."""


@dataclass(frozen=True, kw_only=True)
class ExpectedAttentionConfig(HeadwiseConfig):
    """Options of [`ExpectedAttentionCache`]; see [`HeadwiseConfig`].

    Args:
        sink_length (`int`): First real tokens never evicted; they neither count as queries nor share the
            expected weights.
        future_length (`int`): Positions after the newest token for whose queries tokens are kept.
        use_covariance (`bool`): Whether queries vary around their mean; without, a query head remembers `D`
            numbers and not `D + D * D`.
        use_value_norm (`bool`): Whether weights are multiplied by the lengths of the values.
        epsilon (`float`): Added to the weights before that, so that long values count without attention; 0 to
            1, and 0 without `use_value_norm`, where it would change nothing.
    """

    sink_length: int = 4
    future_length: int = 512
    use_covariance: bool = True
    use_value_norm: bool = True
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self, "future_length", self.future_length, minimum=1)
        for name in ("use_covariance", "use_value_norm"):
            check_flag(self, name, getattr(self, name))
        check_number(self, "epsilon", self.epsilon, minimum=0.0, maximum=1.0)
        if self.epsilon and not self.use_value_norm:
            raise ValueError(
                "ExpectedAttentionConfig.epsilon changes nothing without use_value_norm; allowed is 0, got "
                f"{self.epsilon!r}."
            )


class ExpectedAttentionLayer(AccumulatingLayer):
    """Worth of a token: the attention expected of the next queries, times the length of its value."""

    config: ExpectedAttentionConfig
    _scaling = 1.0

    @property
    def change(self) -> Change | None:
        return None if self.is_part else self.facts.change  # a part takes what its layer has not refused

    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        if keys.is_meta and self.evicts:
            self._count_from(keys.new_empty((keys.shape[0], self.num_query_heads, 0, self.query_dim)))
        return super().score(keys, values)

    def observe(self, query: Tensor, tokens: StreamView, options: AttentionOptions) -> None:
        self._scaling = options.scale_for(query.shape[3])
        drafted = self.companions.pop(_DRAFTED, None)
        if self._has_drafts(self.cumulative_length):  # not counted before it is known which ones stay
            parts = [query] if drafted is None else [drafted, query]
            self.companions[_DRAFTED] = torch.cat(parts, dim=2)
            return
        if drafted is not None:
            self._count(drafted, newer=query.shape[2])
        self._count(query)

    def withdraw(self, count: int) -> None:
        drafted = self.companions.pop(_DRAFTED, None)
        if self.cumulative_length == 0:
            self.companions = {}
        elif drafted is not None and count < drafted.shape[2]:
            self._count(drafted[:, :, : drafted.shape[2] - count])

    def ranks(self) -> Tensor:
        if self.ledger.scores.is_meta:
            return self.ledger.scores
        mean, covariance = self._future_queries()
        keys, values = self.keys_as_met(), self._summed_up()
        slots = torch.arange(keys.length, device=self.device)
        first = self.padding.starts(self.ledger.scores)[:, None] + self.config.sink_length
        worth = expected_attention(mean, covariance, keys, self._scaling, slots >= first)
        if not self.config.use_value_norm:
            return worth
        step = values.stream.slab_tokens
        norms = [
            torch.linalg.vector_norm(values.read(start, min(start + step, values.length)).float(), dim=-1)
            for start in range(0, values.length, step)
        ]
        return (worth + self.config.epsilon) * torch.cat(norms, dim=2)

    def moments(self) -> QueryMoments:
        """Of the queries that have been counted, before the rotary embedding."""
        found = self.companions
        return QueryMoments(found["count"], found["mean"], found.get("scatter"))

    def _future_queries(self) -> tuple[Tensor, Tensor | None]:
        """Mean and covariance of the queries of the next `future_length` positions, as they meet the keys."""
        moments = self.moments()
        if self.facts.rotary is None:
            return moments.mean, moments.covariance()
        next_slot = torch.full((1,), self.held_length, device=self.device)
        first = self._positions(next_slot).expand(len(moments.mean), 1)[:, 0]
        rotation = average_rotation(self.facts.rotary, first, self.config.future_length)
        return moments.turned(self.facts.rotary, *rotation)

    def _summed_up(self) -> StreamView:
        """What is summed up by weights."""
        return StreamView.of(self.stored_keys if self.holds_latents else self.stored_values)

    def _count(self, query: Tensor, newer: int = 0) -> None:
        """Add queries `(B, Hq, n, D)`, as the model rotated them, of the newest tokens but `newer`."""
        self._count_from(query)
        moments = self.moments()
        stop = self.held_length - newer
        slots = torch.arange(stop - query.shape[2], stop, device=query.device)
        positions = self._positions(slots)
        # sinks are never evicted, so that these are the slots after the pads whatever is held
        is_counted = slots >= self.padding.starts(query)[:, None] + self.config.sink_length
        step = max(1, _TILE_VALUES // query[:, :, :1].numel())
        with torch.autocast(query.device.type, enabled=False):
            for start in range(0, query.shape[2], step):
                run = slice(start, start + step)
                moments.add(self._unrotated(query[:, :, run].float(), positions[:, run]), is_counted[:, run])

    def _count_from(self, query: Tensor) -> None:
        """Begin with the moments of no query, for heads such as those of `query` `(B, Hq, n, D)`; once."""
        if "mean" not in self.companions:
            shape = (query.shape[0], query.shape[1], query.shape[3])
            made = QueryMoments.of_nothing(shape, query.device, has_scatter=self.config.use_covariance)
            self.companions |= made.tensors()

    def _unrotated(self, states: Tensor, positions: Tensor) -> Tensor:
        """Queries `(B, Hq, n, D)` of positions `(B or 1, n)` before the rotary embedding."""
        rotary = self.facts.rotary
        if rotary is None:
            return states
        cos, sin = (table.view(*positions.shape, -1)[:, None] for table in rotary.tables(positions.flatten()))
        return rotary.turn(states, cos, -sin)

    def _positions(self, slots: Tensor) -> Tensor:
        """By which positions `(B or 1, n)` the model rotates the tokens of the newest or the next slots."""
        if self.config.positions == "compact":
            first = self.padding.lengths
        else:  # in the text, from which some tokens are gone
            first = self.pads
            slots = slots + self.cumulative_length - self.held_length
        return slots[None] if first is None else slots - first.to(slots.device)[:, None]


@register_backend("expected_attention")
class ExpectedAttentionCache(AccumulatingCache):
    """Keeps the tokens that queries like those so far are expected to attend to.

    Paper: Expected Attention, arXiv 2510.00636.
    Deviates: every query so far counts, those of generated tokens too; of drafted tokens, those of the
        accepted ones; others that `crop` removes have counted. A value counts by its own length, as in
        NVIDIA's kvpress, not by that of what the output projection makes of it. All heads keep the newest
        tokens, and without `head_floor` equally many. Positions to come begin where the text ends when
        something is evicted, so between two chunks of a prompt in its middle; with `positions="compact"`,
        after what is held before the eviction. Soft caps and sink logits are left out.
    Cost: `Hq * (D + D * D)` fp32 numbers per row and layer, for `Hq` query heads of `D` channels: as much as
        516 tokens of Llama 3 8B in bf16; without covariance `Hq * D`. 8 queries, which wait while tokens are
        generated to be counted together, and 8 bytes per token and head beside the storage. `Hq * D * D`
        products per token that comes, and per token held at an eviction.
    Limits: needs the queries, so a model that asks transformers for its attention function. Models with
        latents (DeepSeek) have queries of 576 channels, whose covariance takes as much as 18 thousand latents
        of V2-Lite and 148 thousand of V3; their rotated channels are taken as they are, and a value's length
        is its latent's. Where the layout of a rotation is not known (NanoChat), queries are taken as they
        are, too. Queries from before an image that a model numbers by row and column (Qwen2-VL) are turned
        too far. Nothing is evicted of texts beyond the length at which a model's frequencies begin to follow
        it (`rope_type="dynamic"`; `"longrope"` but for Phi-3): they are refused.
    """

    config_class = ExpectedAttentionConfig
    undoes_rotation = True
    layer_class = ExpectedAttentionLayer
