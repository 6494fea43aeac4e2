"""Reconstruction: tokens that a model looks at to repeat a text are those it needs to answer about it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from ..attention.reference import AttentionOptions
from ..config import check_integer
from ..errors import UnsupportedOperationError
from ..eviction.headwise import HeadwiseConfig, HeadwiseLayer
from ..eviction.model_calls import TokenWatchingCache
from ..eviction.repetition import LEAD_LENGTH, Judgement, Passage, cut_passages
from ..eviction.sharing import HeadPart
from ..layers.handle import KVHandle
from ..layers.storing import storing
from ..layers.view import StreamView
from ..models.placeholders import find_placeholder
from ..models.rotary import frequencies_kept
from ..registry import register_backend

__all__ = ["KVzipCache", "KVzipConfig", "KVzipLayer"]

_LEAD, _NEW = "lead", "new"
_PHASES = (None, "decode", "chunk", "prompt")
"""Of two that wait, the later one is made up for: the end of a prompt, although an answer has begun."""


@dataclass(frozen=True, kw_only=True)
class KVzipConfig(HeadwiseConfig):
    """Options of [`KVzipCache`]; see [`HeadwiseConfig`].

    Args:
        sink_length (`int`): First real tokens never evicted.
        repeat_length (`int`): Tokens that are repeated at once.
        repeat_prompt (`list[int]`): Token ids that ask the model for a repetition, such as
            `tokenizer("Repeat the previous context exactly.", add_special_tokens=False).input_ids`.

    With the bundled model the mean KL divergence from the dense cache (nats per token, 384 tokens after 1536
    of three windows of each of three novels, read whole, budgets of 128, 256 and 512) was

        kvzip                 0.0188  0.0113  0.0052
        with head_floor=0.2   0.0181  0.0108  0.0050
        expected_attention    0.0214  0.0128  0.0059
        snapkv                0.0230  0.0148  0.0073

    Facts asked for later: see the README's table. Layers that shared a budget, as in the paper, remembered no
    more of them than layers that keep equally many tokens (0.55 beside 0.575, both with 0.2 as the least).
    """

    sink_length: int = 4
    repeat_length: int = 2048
    repeat_prompt: Sequence[int] = ()
    per_cache: ClassVar[frozenset[str]] = HeadwiseConfig.per_cache | {"repeat_length", "repeat_prompt"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self, "repeat_length", self.repeat_length, minimum=1)
        given: object = self.repeat_prompt
        is_list = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
        if not is_list or not all(type(token) is int and token >= 0 for token in self.repeat_prompt):
            raise ValueError(
                f"{type(self).__name__}.repeat_prompt must be a list of token ids, such as "
                f"tokenizer(TEXT, add_special_tokens=False).input_ids, got {given!r}."
            )
        object.__setattr__(self, "repeat_prompt", tuple(self.repeat_prompt))

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"repeat_prompt": list(self.repeat_prompt)}


class KVzipLayer(HeadwiseLayer):
    """Worth of a token: the most attention that any query pays it while its text is repeated.

    Attributes:
        remembers_text (`bool`): Whether it is the one that keeps the tokens that have not been judged yet.
        passage (`Passage`, *optional*): What is being repeated, in the copy of a layer that meets it.
    """

    scored_after = "forward"
    config: KVzipConfig
    remembers_text = False
    passage: Passage | None = None
    _waits: str | None = None
    _judgement: Judgement

    @property
    def must_choose(self) -> bool:
        """Whether something must go, or will when all of the prompt has been read.

        A prompt is judged call by call, so that a row does not depend on when others are full.
        """
        phase = self._waits or self._due
        if phase is None or phase == "decode":
            return phase is not None and self._exceeds(phase)
        assert self._budget is not None
        to_come = max(0, (self.prompt_length or 0) - self.cumulative_length)
        return self.mean_held + to_come > self._budget

    @property
    def _holders(self) -> tuple[KVzipLayer, ...]:
        """What this layer consists of; the first of them has what belongs to rows and not to heads."""
        return cast("tuple[KVzipLayer, ...]", self.uniform_layers)

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
        return holder.companions.get(_NEW, nothing), holder.companions.get(_LEAD, nothing)

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

    def settle(self) -> None:
        """Evict what is due; all tokens have been judged, or nothing is."""
        phase = self._waits or self._due
        for layer in (self, *self._holders):
            layer._waits = layer._due = None
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

    def end_judging(self) -> None:
        """Take over what was found."""
        for layer in self._holders:
            found = layer._judgement
            del layer._judgement
            layer._has_missed |= not found.is_shown
            layer.ledger.scores[:, :, -found.scores.shape[2] :].copy_(found.scores)

    def repeating(self, passage: Passage) -> KVzipLayer:
        """A copy of this layer that meets what repeats a passage, and stores nothing of it."""
        copied = copy.copy(self)
        copied.passage, copied._due, copied._waits = passage, None, None
        copied.parts = tuple(
            HeadPart(group, cast("KVzipLayer", part).repeating(passage)) for group, part in self.parts
        )
        if (branch := getattr(self, "branch", None)) is not None:
            vars(copied)["branch"] = copy.deepcopy(branch)
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
    def observes_queries(self) -> bool:
        return self.passage is not None and self.evicts

    def attended(self, query: Tensor, tokens: StreamView, options: AttentionOptions) -> None:
        if self.passage is None:
            super().attended(query, tokens, options)
        elif self.evicts and not self.parts:
            with storing():
                needed = self.passage.needed(query, tokens, options, self.config.sink_length)
                self._judgement.take(self.passage, needed)


@register_backend("kvzip")
class KVzipCache(TokenWatchingCache):
    """Keeps the tokens that the model needs to repeat what it has read, whatever will be asked.

    Paper: KVzip, arXiv 2505.23416.
    Deviates: a chunk of a prompt is repeated when it has been read, and before anything of it goes, which
        bounds memory; with `chunk_size=None` all of the prompt is, as in the paper. Layers keep equally many
        tokens, and heads do without `head_floor`. No words ask for the repetition unless `repeat_prompt`
        does.
    Cost: 8 bytes per token and head beside the storage, 4 per token that was not judged; what exceeds the
        budget is read twice, and so is every further chunk. All layers evict after the forward, so the peak
        is a budget and a chunk in every layer.
    Limits: needs `input_ids` of text, the queries (so a model that asks transformers for its attention
        function) and positions beyond the text for what repeats it.
    """

    config_class = KVzipConfig
    layer_class = KVzipLayer
    config: KVzipConfig
    purpose = "has the model repeat what it has read"
    is_repeating = False
    """Whether this is the copy of a cache that a repetition is read with."""
    _decoder: ReferenceType[Any] | None = None

    def __init__(self, model_or_config: Any, *, max_cache_length: int | None = None, **options: Any) -> None:
        super().__init__(model_or_config, max_cache_length=max_cache_length, **options)
        largest = max(self.config.repeat_prompt, default=0)
        if largest >= self.model_config.vocab_size:
            raise ValueError(
                f"{type(self.config).__name__}.repeat_prompt must be a list of token ids of the model, got "
                f"{largest} for a vocabulary of {self.model_config.vocab_size}."
            )
        for layer in self._zipped[:1]:
            layer.remembers_text = True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_decoder": None}  # no part of a pickle; the next call tells

    @property
    def _zipped(self) -> list[KVzipLayer]:
        return [layer for layer in self.layers if isinstance(layer, KVzipLayer)]

    @property
    def needs_queries(self) -> bool:
        return any(layer.evicts for layer in self.evicting_layers)

    def attach(self, model: nn.Module) -> None:
        processes = getattr(model, "tp_size", None) or 1
        if processes > 1 and any(layer.config.is_uneven for layer in self._zipped):
            # each would find by its own heads when to repeat, for which all are needed
            raise ValueError(
                f"{type(self.config).__name__}.head_floor is for heads of one process, "
                f"and {type(model).__name__} is spread over {processes} by tp_plan. Allowed here is None."
            )
        super().attach(model)

    def bind(
        self,
        model: nn.Module,
        attention_mask: Tensor | None = None,
        max_cache_length: int | None = None,
        *,
        prompt_length: int | None = None,
    ) -> KVzipCache:
        super().bind(model, attention_mask, max_cache_length, prompt_length=prompt_length)
        if prompt_length is not None:
            asked = len(self.config.repeat_prompt) + LEAD_LENGTH
            for seen, count in self._repetitions(prompt_length, max_cache_length or 0):
                self._check_room(seen + asked + min(count, self.config.repeat_length))
        return self

    def _repetitions(self, prompt_length: int, final_length: int) -> Iterator[tuple[int, int]]:
        """The longest to come, at most: tokens seen by then, and how many of them are judged."""
        seen, budget = self.get_seq_length(), self._smallest_budget(prompt_length)
        if prompt_length > budget:
            waiting = self._zipped[0].text()[0].shape[1] if seen else 0
            count = min(self.prefill_chunk_size or prompt_length, prompt_length - seen)
            yield seen + count, waiting + count
            yield prompt_length, count
        slack = self.config.decode_slack + 1
        first = max(prompt_length, budget) + slack
        if final_length >= first and any(one.evicts and one.config.evict_at_decode for one in self._zipped):
            yield first, slack if prompt_length > budget else first
            yield final_length, slack

    def _check_room(self, length: int) -> None:
        """Refuse a text that a model with a table of positions cannot repeat behind it."""
        limit = getattr(self.model_config, "max_position_embeddings", None)
        if limit is not None and length > limit and all(one.facts.rotary is None for one in self._zipped):
            raise ValueError(
                f"The backend 'kvzip' has the model repeat passages behind the text, which takes {length} "
                f"positions here, and models of type {self.model_config.model_type!r} have {limit}. Allowed "
                "are shorter texts, a smaller chunk_size or repeat_length, and backends that repeat nothing."
            )

    def check_tokens(self, model: Any, token_ids: Tensor) -> None:
        found = find_placeholder(model.config, token_ids)
        if found is not None:
            raise UnsupportedOperationError(
                "The backend 'kvzip' has the model repeat what it has read, and cannot have it repeat images "
                f"or sounds: this prompt has {found}. Allowed is text."
            )

    def take_tokens(self, decoder: Any, token_ids: Tensor, states: Tensor | None) -> None:
        if not self.is_repeating and self._zipped:
            self._decoder = ref(decoder)
            self._zipped[0].remember(token_ids)
            self._settle(decoder)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        super().crop(*args, **kwargs)
        decoder = None if self._decoder is None else self._decoder()
        if decoder is not None:  # drafts that stayed may be judged now
            with storing():
                self._settle(decoder)

    def _settle(self, decoder: Any) -> None:
        """Evict what is due, after the model has told what its tokens are worth."""
        layers = self._zipped
        for layer in layers:  # an interrupted repetition is made up for after the next call
            for holder in (layer, *layer._holders):
                holder.evict_due()
        if any(layer.must_choose for layer in layers):
            self._judge(decoder)
        for layer in layers:
            layer.settle()

    def _judge(self, decoder: Any) -> None:
        layers = [layer for layer in self._zipped if layer.evicts]
        memory = self._zipped[0]
        new, lead = memory.text()
        if not new.shape[1]:
            return
        seen, pads = memory.cumulative_length, memory.pads
        for layer in layers:
            layer.begin_judging(new.shape[1])
        before = None if pads is None else pads.to(new.device) - (seen - new.shape[1] - lead.shape[1])
        passages = cut_passages(lead, new, before, self.config.repeat_length, self.config.repeat_prompt)
        with frequencies_kept(decoder):
            for passage in passages:
                arguments = self._arguments(decoder, passage, seen, pads)
                decoder(**arguments, past_key_values=self._repeating(passage))
        for layer in layers:
            layer.end_judging()
        memory.forget_text()

    def _repeating(self, passage: Passage) -> KVzipCache:
        """A copy of this cache that takes a repetition and leaves this one as it is."""
        copied = copy.copy(self)
        copied.is_repeating = True
        copied.layers = [
            layer.repeating(passage) if isinstance(layer, KVzipLayer) else copy.deepcopy(layer)
            for layer in self.layers
        ]
        return copied

    def _arguments(self, decoder: Any, passage: Passage, seen: int, pads: Tensor | None) -> dict[str, Any]:
        """What a decoder is called with to read a passage again, as the continuation of all it has seen."""
        known = inspect.signature(decoder.forward).parameters
        token_ids = passage.token_ids.to(decoder.device)
        self._check_room(seen + token_ids.shape[1])
        call: dict[str, Any] = {"input_ids": token_ids, "use_cache": True}
        rows, count = token_ids.shape
        slots = torch.arange(seen + count, device=token_ids.device).expand(rows, -1)
        if pads is not None:
            pads = pads.to(token_ids.device)[:, None]
            call["attention_mask"] = (slots >= pads).long()
        if "position_ids" in known:  # not all models count from what the cache has seen (Bamba)
            call["position_ids"] = (slots[:, seen:] - (0 if pads is None else pads)).clamp_min(0)
        return call
