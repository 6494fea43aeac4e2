"""The evicting cache layer: scores what it is given, and keeps the best of it, packed or not.

After a chunk has been attended to, the layer chooses `budget` slots per row and head and moves them together,
packed tokens as codes. Views that attention still reads keep the streams they were made of, so a layer's peak
is what it held plus one chunk plus what it keeps.

A backend derives from [`EvictingLayer`] and says what a token is worth: `score` when it arrives, `observe`
when it is attended to, or `ranks` when some must go.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..attention.exact import reads_exact_tokens_faster
from ..attention.reference import AttentionOptions
from ..config import BackendConfig
from ..errors import UnsupportedOperationError
from ..layers.base import PackedLayer
from ..layers.checking import changing, check_states
from ..layers.handle import KVHandle
from ..layers.prompts import shows_prompt
from ..layers.storing import storing
from ..layers.stream import StreamSpec
from ..layers.view import StreamView, joined
from ..models.facts import LayerFacts
from ..models.frequencies import Change
from .keeping import keep_slots
from .ledger import Ledger
from .options import EvictingConfig
from .pooling.stage import keep_and_pool
from .refusals import check_frequencies, check_shown, check_text
from .selection import choose_slots
from .storage import stored_stream

__all__ = ["COMPANION", "EvictingLayer"]

COMPANION = "companion_"  # what their names begin with among those of all tensors


class EvictingLayer(PackedLayer):
    """One attention layer's most important keys and values.

    Attributes:
        scored_after (`str`): `"update"` if a token can be judged by itself when it arrives, `"attention"` if
            queries must have been seen, `"forward"` if the model must have finished.
        reads_model (`bool`): Whether a token is judged by more than its key and value when it arrives.
        accumulates (`bool`): Whether every query counts, not just those after which something is evicted.
        counts_all_queries (`bool`): Whether what is kept does not depend on how many tokens came in the last
            call.
        evicts (`bool`): False for layers the user left out (`skip_layers`), which keep every token.
        prompt_length (`int`, *optional*): Tokens after which the prompt has been read, where it is known.
        companions (`dict[str, torch.Tensor]`): What a backend remembers besides, batch first.
        is_ragged (`bool`): Whether other layers hold another number of tokens, so that the model's mask fits
            only some of them.
    """

    scored_after: ClassVar[str] = "update"
    reads_model: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False
    counts_all_queries: ClassVar[bool] = True
    config: EvictingConfig

    def __init__(self, config: BackendConfig, layer_idx: int, facts: LayerFacts) -> None:
        self.evicts, self.is_ragged = True, False
        self.prompt_length: int | None = None
        self._full_length: int | None = None
        self._turn_length = 0
        self.pads: Tensor | None = None
        self.companions: dict[str, Tensor] = {}
        self._budget: int | None = None
        self._due: str | None = None
        self._postponed: str | None = None
        self._has_missed = self._awaits_queries = False
        super().__init__(config, layer_idx, facts)

    @property
    def change(self) -> Change | None:
        """When the model begins to rotate by frequencies that what is kept would be turned wrongly with."""
        return self.facts.change if self.config.positions == "compact" else None

    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        """Worth of new tokens, fp32 `(B, H, n)`; higher is kept. Keys and values are `(B, H, n, D)`."""
        return keys.new_zeros(keys.shape[:3], dtype=torch.float32)

    def observe(self, query: Tensor, tokens: StreamView, options: AttentionOptions) -> None:
        """Look at what was attended to; only called if `scored_after` is `"attention"`.

        Args:
            query (`torch.Tensor` of shape `(B, Hq, q, D)`): Queries of the newest tokens.
            tokens (`StreamView`): The keys they read: all that is held, the newest included.
            options (`AttentionOptions`): Scaling and mask.
        """

    def ranks(self) -> Tensor:
        """Worth of every token held, fp32 `(B, H, m)`, when some must go."""
        return self.ledger.scores

    def withdraw(self, count: int) -> None:
        """Take the `count` newest tokens, which `crop` has removed, out of `companions`; all goes, if any."""
        self.companions = {} if count else self.companions

    def key_stream(self, head_dim: int) -> StreamSpec:
        return stored_stream(self, "key", head_dim)

    def value_stream(self, head_dim: int) -> StreamSpec:
        return stored_stream(self, "value", head_dim)

    def _allocate(self, key_states: Tensor, value_states: Tensor) -> None:
        super()._allocate(key_states, value_states)
        batch_size, num_heads = key_states.shape[:2]
        self.ledger = Ledger(batch_size, num_heads, self.device)
        self._set_final_length()

    def bind(
        self, facts: LayerFacts, pads: Tensor | None, final_length: int | None, columns: int | None = None
    ) -> None:
        super().bind(facts, pads, final_length, columns)
        self._due = self._due if self.awaits_scores else None  # nothing had to go, so nothing was missed
        if self.cumulative_length == 0:
            self.pads = self.padding.lengths
        self._full_length = final_length
        self._set_final_length()

    def _lose_padding(self, count: int) -> None:
        if not self.evicts:
            return super()._lose_padding(count)
        raise UnsupportedOperationError(
            f"Layer {self.layer_idx} was given {count} tokens at first, and the attention mask has "
            f"{self.padding.columns} columns, zeros among them. The model puts tokens of its own before them "
            "(a soft prompt), so which ones are pads is not known, and a cache that evicts would keep pads "
            "for tokens. Allowed are prompts without padding."
        )

    def set_prompt_length(self, length: int | None) -> None:
        """Say after how many tokens the prompt, or the next turn of it, has been read.

        Args:
            length (`int`, *optional*): Tokens, those of earlier turns included; `None` if unknown.
        """
        seen = self.cumulative_length
        if length is not None and length > seen and length != self.prompt_length:  # else what is read goes on
            self._turn_length = length - seen if seen else 0
        self.prompt_length = length
        if length is not None and self.evicts:
            self._budget = self.config.budget_of(length)
            check_text(self, length, self._full_length)
        self._set_final_length()

    def budget_for(self, count: int) -> int:
        """Tokens to keep; a fraction of an unknown prompt is taken of the first `count` tokens given."""
        if self._budget is None:
            self._budget = self.config.budget_of(self.prompt_length or count)
        return self._budget

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take new keys and values, each `(B, H, q, D)`, return what attention reads, and evict.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Keys and values of shape `(B, H, m + q, D)`, for the `m`
            tokens held before: plain tensors where nothing is packed, nobody needs to see the queries and
            no kernel reads exact tokens faster, else two [`KVHandle`]s.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        check_states(self, key_states, value_states)
        self.prefetch()
        if self._due is not None:  # nobody has shown the layer what its last tokens were asked for
            self._has_missed = True
            self.evict_due()
        count, seen = key_states.shape[2], self.cumulative_length
        phase, has_drafts = self._phase(seen, count), self._has_drafts(seen + count)
        check_frequencies(self, phase, count)
        read = self._take(key_states, value_states, has_drafts)
        self.cumulative_length += count
        self._awaits_queries = True
        if self.evicts:
            self.budget_for(count)
            self._postpone(phase, has_drafts)
            if self.scored_after == "update" or key_states.is_meta:
                self.evict_due()
        self.is_torn = False
        return read

    def _take(self, key_states: Tensor, value_states: Tensor, has_drafts: bool) -> tuple[Tensor, Tensor]:
        """Hold new tokens, and return what attention reads."""
        with storing():
            scores = self.score(key_states, value_states)
            self.is_torn = True  # only now: a score may refuse, of which nothing is left
            keys, values = self._append(key_states, value_states, defer=has_drafts)
            self.ledger.append(scores, self.cumulative_length)
        is_exact = keys.packed_length == values.packed_length == 0
        if is_exact and self.scored_after != "attention" and not self.is_ragged:
            if keys.length == key_states.shape[2]:
                if not shows_prompt(self, key_states, keys, values):
                    return key_states, value_states
            elif self.is_read_as_tensors or not reads_exact_tokens_faster(key_states, self.config.kernel):
                return joined(keys, key_states), joined(values, value_states)  # knows no handles, or wins
        return KVHandle(self, keys, key_states), KVHandle(self, values, value_states)

    @property
    def observes_queries(self) -> bool:
        return self.scored_after == "attention" and self.evicts

    def attended(self, query: Tensor, tokens: StreamView, options: AttentionOptions) -> None:
        """Take notice that `query` was answered from `tokens`; evicts if that is what was waited for."""
        if not (self.observes_queries and self._awaits_queries):
            return  # later ones are those of layers that read the keys of this one (Gemma 3n)
        self._awaits_queries = False
        due = self._due or self._postponed  # with drafts, what will be evicted once they have been judged
        if self.accumulates or (due is not None and self._exceeds(due)):
            with storing():
                self.observe(query, tokens, options)
        self.evict_due()

    @property
    def held_length(self) -> int:
        return self.stored_length

    @property
    def mean_held(self) -> int:
        """Tokens held per row and head, which must not exceed the budget."""
        return self.held_length

    @property
    def exact_tail(self) -> int:
        """Newest tokens that are not packed where others are, so that no head can be without them."""
        return self.stored_keys.tail.length if self.stored_keys.packed_length else 0

    def evict_due(self) -> None:
        """Evict what `update` left until the scores are known."""
        if self._due is not None:
            self._evict(self._due)
            self._due = None

    @property
    def awaits_scores(self) -> bool:  # type: ignore[override]
        must_see = self.scored_after == "forward" or self.accumulates
        return self._due is not None and (must_see or self._exceeds(self._due))

    def room(self, limit: int) -> int:
        room = super().room(limit)
        if not (self.evicts and self.config.evict_at_decode) or self._budget is None:
            return room
        if not self.counts_all_queries:
            return 1
        return max(1, min(room, self._budget + self.config.decode_slack + 1 - self.mean_held))

    def check_crop(self, tokens_to_remove: int) -> None:
        """Refuse to `crop` tokens of which some are gone."""
        super().check_crop(tokens_to_remove)
        removed, seen = -int(tokens_to_remove), self.cumulative_length
        if self.is_initialized and 0 < removed < seen:
            newest = self.ledger.positions[:, :, -removed:]
            expected = torch.arange(seen - removed, seen - removed + newest.shape[2], device=newest.device)
            if removed > self.held_length or bool((newest != expected).any()):
                raise UnsupportedOperationError(
                    f"crop({tokens_to_remove}): layer {self.layer_idx} has evicted some of the newest "
                    f"{removed} tokens; only tokens that all heads still hold can be removed."
                )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` tokens, all of which must still be held (`check_crop`)."""
        self.check_crop(tokens_to_remove)
        removed = -int(tokens_to_remove)
        with storing(), changing(self):
            super().crop(tokens_to_remove)
            if self.is_initialized:
                self.ledger.truncate(min(removed, self.ledger.scores.shape[2]))
                self.withdraw(removed)
                self._due, self._postponed = self._postponed, None
                self.evict_due()
            elif self.evicts:  # it had come down to the pads among what was kept
                self.padding.set(self.pads, self.padding.columns)

    def batch_select_indices(self, indices: Tensor) -> None:
        with storing(), changing(self):
            super().batch_select_indices(indices)
            indices = indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices
            if self.pads is not None:
                self.pads = self.pads[indices.to(self.pads.device)]
            if self.is_initialized:
                self.ledger.index_batch(indices)
                held = self.companions.items()  # as the model gave them, wherever it made them
                self.companions = {name: t.index_select(0, indices.to(t.device)) for name, t in held}

    def reset(self) -> None:
        super().reset()
        self.pads, self.prompt_length, self._turn_length = None, None, 0

    def _forget(self) -> None:
        super()._forget()
        self._due = self._postponed = self._budget = None
        self._has_missed, self.companions = False, {}
        self.__dict__.pop("ledger", None)

    def _move(self, device: torch.device) -> None:
        super()._move(device)
        if self.is_initialized:
            with storing():
                self.ledger.to(device)
                self.companions = {name: t.to(device) for name, t in self.companions.items()}

    def tensors(self) -> dict[str, Tensor]:
        owned = super().tensors()
        if self.is_initialized:
            owned |= self.ledger.tensors() | self._named_companions()
        return owned if self.pads is None else owned | {"pads": self.pads}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = super().state()
        if not tensors:
            return tensors, facts
        tensors |= self.ledger.saved_tensors() | self._named_companions()
        if self.pads is not None:
            tensors["pads"] = self.pads
        own = {"prompt_length": self.prompt_length, "turn_length": self._turn_length, "kept": self._budget}
        return tensors, facts | own

    def load_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        super().load_state(tensors, facts)
        if tensors:
            self.ledger.load(tensors)
            self.pads = tensors.get("pads")
            self.companions = {
                name.removeprefix(COMPANION): t for name, t in tensors.items() if name.startswith(COMPANION)
            }
            self.prompt_length, self._turn_length = facts["prompt_length"], facts["turn_length"]
            self._budget = facts["kept"]

    def _named_companions(self) -> dict[str, Tensor]:
        return {f"{COMPANION}{name}": tensor for name, tensor in self.companions.items()}

    def _phase(self, seen: int, count: int) -> str:
        """Whether `count` tokens after `seen` are a chunk of a prompt, its end, or generated ones."""
        if self.prompt_length is None:
            return "prompt" if count > 1 or seen == 0 else "decode"
        if seen >= self.prompt_length:
            is_longer = count > self.config.decode_slack and seen + count > (self._full_length or 0)
            # than what was to come, and no drafts: a text, in a loop of one's own
            return "prompt" if is_longer and not self.record_past else "decode"
        return "chunk" if seen + count < self.prompt_length else "prompt"

    def _has_drafts(self, seen: int) -> bool:
        """Whether a `crop` will follow, before which nothing may be packed or evicted (drafted tokens)."""
        return self.record_past and (self.prompt_length is None or seen > self.prompt_length)

    def _postpone(self, phase: str, has_drafts: bool) -> None:
        """Evict later: once the queries have been seen, and drafts judged."""
        self._postponed = phase if has_drafts and self._postponed is None else self._postponed
        self._due = None if has_drafts else phase

    def _exceeds(self, phase: str, coming: int = 0) -> bool:
        """Whether something must go now, or when `coming` tokens have come."""
        assert self._budget is not None
        if phase == "decode" and not self.config.evict_at_decode:
            return False
        slack = self.config.decode_slack if phase == "decode" else 0
        return self.mean_held + coming > self._budget + slack

    def _evict(self, phase: str) -> None:
        if not self._exceeds(phase):
            return
        check_shown(self)
        budget = self.budget_for(0)  # which is known
        recent = self.config.protected_at(phase, budget, self._turn_length)
        pooling = self.config.pooling()
        with storing(), changing(self):
            if pooling is not None:
                keep_and_pool(self, pooling, budget, recent)
                return
            pads, sinks, kept = self.padding.lengths, self.config.sink_length, self._kept_length(budget)
            index = choose_slots(
                self.ranks(), kept, pads=pads, sink_length=sinks, recent=recent, exact=self.exact_tail
            )
            keep_slots(self, index)

    def _kept_length(self, budget: int) -> int:
        """Tokens kept of `budget`: where whole blocks are packed, those and what is exact."""
        keys = self.stored_keys
        if not keys.packed_length:
            return budget
        return budget - (budget - keys.tail.length) % keys.codec.unit_tokens

    def _set_final_length(self) -> None:
        """Tell the streams how much they will hold in the end, where that is known."""
        final, prompt = self._full_length, self.prompt_length
        if final is not None and self.evicts and prompt is not None and self._budget is not None:
            slack = self.config.decode_slack + 1 if self.config.evict_at_decode else final
            final = min(final, self._budget + min(slack, max(0, final - prompt)))
        self.final_length = final
        for stream in self.streams if self.is_initialized else ():
            stream.final_length = final
