"""Evicting layers for which every query counts; those of generated tokens wait, and are counted together.

To count a query, torch reads every key that is held. It does so once for eight of them instead of for
each, before anything that is held goes or moves: so what comes out is the same to fp32 rounding, but for
tokens that were packed meanwhile. Attention has read these exactly, and they count as they are packed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..attention.latent import LatentKeys
from ..attention.reference import AttentionOptions
from ..layers.checking import changing
from ..layers.storing import storing
from ..layers.view import StreamView
from ..models.layer_plan import caches_latents, query_heads
from .cache import EvictingCache
from .headwise import HeadwiseLayer
from .layer import COMPANION

__all__ = ["MOST_WAITING", "AccumulatingCache", "AccumulatingLayer"]

MOST_WAITING = 8
"""Queries that wait at most; a layer has room for so many from the first it is shown."""
_WAITING = "waiting"
_SAVED = f"{COMPANION}{_WAITING}"


class AccumulatingLayer(HeadwiseLayer):
    """An evicting layer that looks at every query, of generated tokens at several in one call of `observe`.

    They do not wait where the model gives a mask (rows whose pads are held; models that run `eager`), biases
    or sink logits of single queries, nor where tokens are drafted.

    Attributes:
        num_query_heads (`int`): Of the model, by its configuration.
        holds_latents (`bool`): Whether latents are stored as keys, and rotated keys as values.
    """

    scored_after = "attention"
    accumulates = True
    num_query_heads = 0
    holds_latents = False
    _num_waiting = 0
    _waiting_options = AttentionOptions()

    def _take(self, key_states: Tensor, value_states: Tensor, has_drafts: bool) -> tuple[Tensor, Tensor]:
        if key_states.shape[2] > 1 or has_drafts:
            self.count_waiting()
        return super()._take(key_states, value_states, has_drafts)

    def attended(self, query: Tensor, tokens: StreamView, options: AttentionOptions) -> None:
        if self.parts or not (self.observes_queries and self._awaits_queries):
            super().attended(query, tokens, options)
            return
        if _WAITING not in self.companions:
            with storing():
                self._make_room(query)
        if self._may_wait(query, options):
            with storing():
                self.companions[_WAITING][:, :, self._num_waiting] = query[:, :, 0]
            self._num_waiting += 1
            self._waiting_options, self._awaits_queries = options, False
            if self._num_waiting == MOST_WAITING:
                self.count_waiting(tokens)
            self.evict_due()
        else:
            if self._num_waiting:
                query, options = self._joined(query, tokens.length, options)
            super().attended(query, tokens, options)

    def count_waiting(self, tokens: StreamView | None = None) -> None:
        """Look at the queries that wait, of the newest tokens, together; `tokens` if not all that is held."""
        if not self._num_waiting:
            return
        with storing(), changing(self):
            query, self._num_waiting = self.companions[_WAITING][:, :, : self._num_waiting], 0
            options = replace(self._waiting_options, is_causal=query.shape[2] > 1)
            self.observe(query, tokens or self.keys_as_met(), options)

    @property
    def query_dim(self) -> int:
        """Channels of a query: of its keys, or of latents and of rotated keys."""
        return self.stored_keys.head_dim + (self.stored_values.head_dim if self.holds_latents else 0)

    def keys_as_met(self) -> StreamView:
        """All keys that are held, as queries meet them."""
        keys, values = map(StreamView.of, self.streams)
        if not self.holds_latents:
            return keys
        return LatentKeys(keys.stream, keys.packed_length, keys.segments, parts=(keys, values))

    def withdraw(self, count: int) -> None:
        if self.cumulative_length == 0:
            self.companions = {}

    def crop(self, tokens_to_remove: int) -> None:
        self._count_all()
        super().crop(tokens_to_remove)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        self._count_all()
        tensors, facts = super().state()
        if _SAVED in tensors:
            tensors[_SAVED] = tensors[_SAVED][:, :, :0]  # of the room only the shape
        return tensors, facts

    def load_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        super().load_state(tensors, facts)
        if _WAITING in self.companions:
            self._make_room(self.companions[_WAITING])

    def _may_wait(self, query: Tensor, options: AttentionOptions) -> bool:
        """Whether a query can be looked at later: of a generated token, masked by nothing but its place."""
        sinks = options.sink_logits
        return (
            self._due == "decode"
            and query.shape[2] == 1
            and query.dtype == self.companions[_WAITING].dtype
            and options.mask is options.position_bias is options.alibi_slopes is None
            and (sinks is None or sinks.dim() == 1)
        )

    def _make_room(self, query: Tensor) -> None:
        """Make room for queries such as `query` `(B, Hq, n, D)`."""
        batch_size, heads, _, head_dim = query.shape
        self.companions[_WAITING] = query.new_empty(batch_size, heads, MOST_WAITING, head_dim)

    def _joined(
        self, query: Tensor, length: int, options: AttentionOptions
    ) -> tuple[Tensor, AttentionOptions]:
        """Queries that wait and one behind them `(B, Hq, 1, D)` that may not, with what masks them all."""
        count, self._num_waiting = self._num_waiting, 0
        query = torch.cat([self.companions[_WAITING][:, :, :count].to(query.dtype), query], dim=2)
        changed: dict[str, Any] = {"is_causal": options.mask is None}
        sees = torch.ones(count, length, dtype=torch.bool, device=query.device).tril(length - count - 1)
        for name in ("mask", "position_bias"):
            given: Tensor | None = getattr(options, name)
            if given is None:
                continue
            if given.dtype == torch.bool:
                rows = sees
            else:
                rows = torch.zeros_like(sees, dtype=given.dtype).masked_fill_(~sees, -torch.inf)
            given = given.expand(*given.shape[:-2], 1, length)
            changed[name] = torch.cat([rows.expand(*given.shape[:-2], count, length), given], dim=-2)
        return query, replace(options, **changed)

    def _count_all(self) -> None:
        """Let nothing wait any more, in no part of this layer."""
        for layer in (self, *(layer for _, layer in self.parts)):
            assert isinstance(layer, AccumulatingLayer)
            layer.count_waiting()

    def _postpone(self, phase: str, has_drafts: bool) -> None:
        super()._postpone(phase, has_drafts)
        if not self.parts and self.records.data.is_meta:  # nobody shows queries where there are only shapes
            shape = (self.records.shape[0], self.num_query_heads, 0, self.query_dim)
            self._make_room(torch.empty(shape, dtype=self.dtype, device="meta"))

    def _evict(self, phase: str) -> None:
        if not self.is_part and self._exceeds(phase):
            self._count_all()
        super()._evict(phase)

    def _forget(self) -> None:
        super()._forget()
        self._num_waiting = 0


class AccumulatingCache(EvictingCache):
    """A cache of such layers."""

    def __init__(self, model_or_config: Any, *, max_cache_length: int | None = None, **options: Any) -> None:
        super().__init__(model_or_config, max_cache_length=max_cache_length, **options)
        for layer in self.evicting_layers:
            assert isinstance(layer, AccumulatingLayer)
            layer.num_query_heads = query_heads(self.model_config, layer.layer_idx)
            layer.holds_latents = caches_latents(self.model_config)
