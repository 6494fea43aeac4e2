"""Compared with what follows: tokens stand out whose channels lie unevenly in the range of the next ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import check_integer
from ..eviction.cache import EvictingCache
from ..eviction.layer import EvictingLayer
from ..eviction.options import EvictingConfig
from ..layers.view import StreamView
from ..registry import register_backend

__all__ = ["LagKVCache", "LagKVConfig", "LagKVLayer"]

_LAG_SIZE = 128
_UNJUDGED = 1.0
"""Score of a token that cannot be judged yet; that of a judged one is below."""


@dataclass(frozen=True, kw_only=True)
class LagKVConfig(EvictingConfig):
    """Options of [`LagKVCache`]; see [`EvictingConfig`].

    Args:
        sink_length (`int`): First real tokens never evicted; they belong to no partition.
        lag_size (`int`, *optional*): Tokens of a partition, at least 2; 128, at most an eighth of the budget,
            if not given. `budget` should exceed two partitions and the sinks: the newest tokens, up to two
            partitions, cannot be judged and are kept first.
    """

    sink_length: int = 4
    lag_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lag_size is not None:
            check_integer(self, "lag_size", self.lag_size, minimum=2)

    def lag_at(self, budget: int) -> int:
        """Tokens of a partition, where `budget` tokens are kept."""
        return max(2, min(_LAG_SIZE, budget // 8)) if self.lag_size is None else self.lag_size


class LagKVLayer(EvictingLayer):
    """Worth of a token: its rank in its partition, as a fraction of it.

    A token is judged once, when something must go and all of the next partition has come; until then it is
    worth more than any that is judged. All heads of a row have the same unjudged tokens, its newest.
    """

    config: LagKVConfig

    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        return super().score(keys, values) + _UNJUDGED

    def ranks(self) -> Tensor:
        scores = self.ledger.scores
        if not scores.is_meta:
            self._judge(scores)
        # Many scores are equal, one in every partition: of these the newer token is the better.
        order = scores.argsort(dim=2, stable=True)
        places = torch.arange(scores.shape[2], dtype=scores.dtype, device=scores.device)
        return torch.empty_like(scores).scatter_(2, order, places.expand_as(scores))

    def _judge(self, scores: Tensor) -> None:
        """Write the scores `(B, H, m)` of the partitions that a whole one has followed since the last time.

        A row's partitions begin at its slots `offsets + k * lag`, for all `k`: those of rows that are padded
        differently are shifted against each other by less than a partition.
        """
        held = scores.shape[2]
        lag = self.config.lag_at(self.budget_for(held))
        slots = torch.arange(held, device=scores.device)
        first = self.padding.starts(scores) + self.config.sink_length
        is_open = (scores[:, 0] == _UNJUDGED) & (slots >= first[:, None])
        oldest = held - int(is_open.sum(1).max())
        pads = first.new_zeros(()) if self.pads is None else self.pads.to(first.device)
        offsets = (pads + self.config.sink_length - (self.cumulative_length - held)) % lag
        step = max(1, min(stream.slab_tokens for stream in self.streams) // lag)
        last = held // lag - 1  # the partition from here on is followed by no whole one in any row
        for start in range((oldest - lag + 1) // lag, last, step):
            count = min(step, last - start)
            span = torch.arange(start * lag, (start + count + 1) * lag, device=scores.device)
            places = (offsets[..., None] + span).expand(len(scores), -1)
            is_held = (places >= 0) & (places < held)
            is_new = (is_open.gather(1, places.clamp(0, held - 1)) & is_held)[:, : count * lag]
            is_followed = places.unflatten(1, (count + 1, lag))[:, 1:, -1:] < held
            rows, columns = (
                (is_new.unflatten(1, (count, lag)) & is_followed).flatten(1).nonzero(as_tuple=True)
            )
            if not len(rows):
                continue
            found = self._ranks_within(places, is_new, lag)
            scores[rows, :, places[rows, columns]] = found[rows, :, columns]

    def _ranks_within(self, places: Tensor, is_new: Tensor, lag: int) -> Tensor:
        """Rank every token of `n` partitions within its own, by keys and values.

        Args:
            places (`torch.Tensor` of shape `(B, (n + 1) * lag)`): Slots of the partitions of every row and of
                the one after them; outside of what is held where a row has none.
            is_new (`torch.Tensor` of shape `(B, n * lag)`): Which of them are held and not judged.
            lag (`int`): Tokens of a partition.

        Returns:
            `torch.Tensor` of shape `(B, H, n * lag)`: fp32, in `[0, 1)`. What a partition has lost before it
            could be judged counts as the lowest.
        """
        count = is_new.shape[1] // lag
        low, high = max(0, int(places.min())), min(self.held_length, int(places.max()) + 1)
        index = (places.clamp(low, high - 1) - low)[:, None, :, None]
        is_missing = ~is_new.unflatten(1, (count, lag))[:, None]
        worth: Tensor | float = 0.0
        for stream in self.streams:
            states = StreamView.of(stream).read(low, high).float()
            states = states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3]))
            deviations = _deviations(states.unflatten(2, (count + 1, lag)))
            worth = worth + deviations.masked_fill(is_missing, -torch.inf).softmax(-1)
        assert isinstance(worth, Tensor)
        ranks = worth.masked_fill(is_missing, -torch.inf).argsort(dim=-1, stable=True).argsort(dim=-1)
        return ranks.flatten(2).float() / lag


def _deviations(partitions: Tensor) -> Tensor:
    """Return the standard deviation over the channels of every token, relative to the next partition.

    Args:
        partitions (`torch.Tensor` of shape `(B, H, n + 1, lag, D)`): States, fp32.

    Returns:
        `torch.Tensor` of shape `(B, H, n, lag)`: Of states of which 0 and 1 are the smallest and the
        largest value of their channel in the next partition; 0 where that is constant and tells nothing.
    """
    smallest, largest = partitions[:, :, 1:].aminmax(dim=3, keepdim=True)
    extent = largest - smallest
    extent = extent.masked_fill(extent == 0, torch.inf)
    return ((partitions[:, :, :-1] - smallest) / extent).std(-1)


@register_backend("lagkv")
class LagKVCache(EvictingCache):
    """Keeps the tokens of every partition that stand out most against the next partition.

    Paper: LagKV, arXiv 2504.04704.
    Deviates: a budget takes the place of a share: partitions go on losing tokens as the text grows, all the
        same share, by rank; of equal ranks the newer stay. As in the paper's recursive compression a token
        is judged once, by the original tokens after it, while they are all still held; survivors are not
        partitioned anew. The published code has 16 sinks and partitions of 1024 tokens unless told
        otherwise.
    Cost: 8 bytes per token and head beside the storage; reads every key and value once or twice in all, when
        it is judged and as a reference.
    Limits: the newest tokens, one to two partitions, cannot be judged and are kept first, the newest of
        them before all: of a shorter prompt, or with a budget of no more than two partitions, little else
        is kept. No regard for what is asked.
    """

    config_class = LagKVConfig
    layer_class = LagKVLayer
