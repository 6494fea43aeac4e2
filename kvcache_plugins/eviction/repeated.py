"""The layer that KVzip repeats: it waits for its tokens to be judged, and meets what repeats them as a copy.

```
a call ends      its tokens are remembered, and nothing is evicted yet
a repetition     a copy that shares what is held reads a passage, and stores nothing: `repeating`
all is judged    the scores are taken over, and what is due is evicted: `end_judging`, `settle`
```
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from ..attention.reference import AttentionOptions
from ..layers.gradients import copies_to_take
from ..layers.handle import KVHandle
from ..layers.storing import storing
from ..layers.view import StreamView
from ..models.frequencies import Change
from .headwise import HeadwiseLayer
from .repetition import LEAD_LENGTH, Judgement, Passage
from .sharing import HeadPart

__all__ = ["RepeatedLayer"]

_LEAD, _NEW = "lead", "new"
_PHASES = (None, "decode", "chunk", "prompt")
"""Of two that wait, the later one is made up for: the end of a prompt, although an answer has begun."""


class RepeatedLayer(HeadwiseLayer):
    """A layer whose newest tokens are judged by what a repetition of them looks at.

    Attributes:
        remembers_text (`bool`): Whether it is the one that keeps the tokens that have not been judged yet.
        passage (`Passage`, *optional*): What is being repeated, in the copy of a layer that meets it.
    """

    scored_after = "forward"
    remembers_text = False
    passage: Passage | None = None
    _waits: str | None = None
    _judgement: Judgement

    @property
    def must_choose(self) -> bool:
        """Whether something must go, or will when all of the prompt has been read.

        A prompt is judged call by call, so that a row does not depend on when others are full.
        """
        phase = self._waits
        if phase is None or phase == "decode":
            return phase is not None and self._exceeds(phase)
        assert self._budget is not None
        to_come = max(0, (self.prompt_length or 0) - self.cumulative_length)
        return self.mean_held + to_come > self._budget

    @property
    def _holders(self) -> tuple[RepeatedLayer, ...]:
        """What this layer consists of; the first of them has what belongs to rows and not to heads."""
        return cast("tuple[RepeatedLayer, ...]", self.uniform_layers)

    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        if keys.is_meta and self.remembers_text:  # nobody shows tokens where there are only shapes
            self.remember(torch.empty(keys.shape[0], keys.shape[2], device="meta"))
        return super().score(keys, values)

    def remember(self, token_ids: Tensor) -> None:
        """Keep tokens `(B, n)` until they are judged."""
        companions, new = self._holders[0].companions, token_ids.to(torch.int32)
        companions[_NEW] = torch.cat([companions[_NEW].to(new.device), new], 1) if _NEW in companions else new

    def text(self) -> tuple[Tensor, Tensor]:
        """Return tokens that have not been judged, `(B, n)`, and the last ones that have, `(B, k)`."""
        holder = self._holders[0]
        nothing = holder.ledger.positions[:, 0, :0]
        new = holder.companions.get(_NEW, nothing)  # where the model was given them, and not the layer's
        return new, holder.companions.get(_LEAD, nothing).to(new.device)

    def forget_text(self) -> None:
        """Take note that all tokens have been judged."""
        new, lead = self.text()
        companions = self._holders[0].companions
        companions[_LEAD] = torch.cat([lead, new], dim=1)[:, -LEAD_LENGTH:].clone()
        companions.pop(_NEW, None)

    def withdraw(self, count: int) -> None:
        for name in (_NEW, _LEAD):
            tokens = self.companions.pop(name, None)
            if tokens is not None and tokens.shape[1] > count:
                self.companions[name] = tokens[:, : tokens.shape[1] - count].clone()
            count -= 0 if tokens is None else min(count, tokens.shape[1])

    def evict_due(self) -> None:
        """Wait until the model has been asked what its tokens are worth: `settle`."""
        if _PHASES.index(self._due) > _PHASES.index(self._waits):
            self._waits = self._due
        self._due = None
        if self.device.type == "meta" and self.remembers_text and self.must_choose:
            self.forget_text()
        if self.device.type == "meta" or self._has_missed:
            self.settle()

    def wait(self) -> None:
        """Take note of what is due, also of an interrupted call, until its tokens are judged."""
        for layer in (self, *self._holders):
            layer.evict_due()

    def settle(self) -> None:
        """Evict what is due; all tokens have been judged, or nothing is."""
        phase = self._waits
        for layer in (self, *self._holders):
            layer._waits = None
        if phase is not None:
            self._evict(phase)

    def _forget(self) -> None:
        super()._forget()
        self._waits = None

    def _evict(self, phase: str) -> None:
        # a group of heads has no part of a text: what is remembered goes to the first one made
        before = self._holders[0].companions
        text = {name: before.pop(name) for name in (_NEW, _LEAD) if name in before}
        super()._evict(phase)
        self._holders[0].companions |= text

    def begin_judging(self, count: int) -> None:
        """Make room for what will be found of the `count` newest tokens."""
        self.prefetch()
        for layer in self._holders:
            layer._judgement = Judgement(layer.ledger.scores[:, :, -count:])

    def end_judging(self, was_read: bool) -> None:
        """Take over what was found, if anything `was_read`."""
        for layer in self._holders:
            found = layer._judgement
            del layer._judgement
            layer._has_missed |= was_read and not found.is_shown
            layer.ledger.scores[:, :, -found.scores.shape[2] :].copy_(found.scores)

    def repeating(self, passage: Passage) -> RepeatedLayer:
        """A copy of this layer that meets what repeats a passage, and stores nothing of it."""
        copied = copy.copy(self)
        copied.passage, copied._due, copied._waits = passage, None, None
        copied.parts = tuple(
            HeadPart(group, cast("RepeatedLayer", part).repeating(passage)) for group, part in self.parts
        )
        if (branch := getattr(self, "branch", None)) is not None:
            vars(copied)["branch"] = copy.deepcopy(branch, copies_to_take(self.beside().values()))
        return copied

    def _take(self, key_states: Tensor, value_states: Tensor, has_drafts: bool) -> tuple[Tensor, Tensor]:
        if self.passage is None or self.parts:
            return super()._take(key_states, value_states, has_drafts)
        views = [StreamView.of(stream) for stream in self.streams]
        keys, values = (
            replace(view, segments=(*view.segments, states))
            for view, states in zip(views, (key_states, value_states), strict=True)
        )
        return KVHandle(self, keys, key_states), KVHandle(self, values, value_states)

    @property
    def change(self) -> Change | None:
        return super().change if self.passage is None else None  # what is repeated is read by the text's own

    @property
    def observes_queries(self) -> bool:
        return self.passage is not None and self.evicts

    def attended(self, query: Tensor, tokens: StreamView, options: AttentionOptions) -> None:
        if self.passage is None:
            super().attended(query, tokens, options)
        elif self.evicts and not self.parts:
            with storing():
                needed = self.passage.needed(
                    query, tokens, options, self.config.sink_length, self.config.kernel
                )
                self._judgement.take(self.passage, needed)
