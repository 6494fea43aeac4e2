"""Reconstruction: tokens that a model looks at to repeat a text are those it needs to answer about it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from ..config import check_integer
from ..eviction.headwise import HeadwiseConfig
from ..eviction.model_calls import TokenWatchingCache
from ..eviction.repeated import RepeatedLayer
from ..eviction.repetition import LEAD_LENGTH, Passage, cut_passages
from ..layers.counting import tensors_beside
from ..layers.gradients import copies_to_take
from ..layers.storing import storing
from ..models.cache_argument import as_argument
from ..models.frequencies import frequencies_kept, remember_frequencies
from ..models.placement import num_processes
from ..registry import register_backend

__all__ = ["KVzipCache", "KVzipConfig", "KVzipLayer"]


@dataclass(frozen=True, kw_only=True)
class KVzipConfig(HeadwiseConfig):
    """Options of [`KVzipCache`]; see [`HeadwiseConfig`].

    Args:
        sink_length (`int`): First real tokens never evicted.
        repeat_length (`int`): Tokens that are repeated at once.
        repeat_prompt (`list[int]`): Token ids that ask the model for a repetition, such as
            `tokenizer("Repeat the previous context exactly.", add_special_tokens=False).input_ids`.

    [`HeadwiseConfig`] says how far the model is from the dense cache's answers with it and with others.

    Of the facts of the README's table it remembers 0.512, and 0.575 with `head_floor=0.2`; one fact is 0.0125
    of them, and where bf16 is rounded decides on it. Layers that shared a budget, as in the paper, remembered
    0.525 to 0.55 when those were 0.525 and 0.575.
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


class KVzipLayer(RepeatedLayer):
    """Worth of a token: the most attention that any query pays it while its text is repeated."""

    config: KVzipConfig


@register_backend("kvzip")
class KVzipCache(TokenWatchingCache):
    """Keeps the tokens that the model needs to repeat what it has read, whatever will be asked.

    Paper: KVzip, arXiv 2505.23416.
    Deviates: a chunk of a prompt is repeated when it has been read, and before anything of it goes, which
        bounds memory; with `chunk_size=None` all of the prompt is, as in the paper. Layers keep equally many
        tokens, and heads do without `head_floor`. The newest tokens are protected (stabilizers and local),
        which the paper does not do. No words ask for the repetition unless `repeat_prompt` does.
    Cost: 8 bytes per token and head beside the storage, 4 per token that was not judged; what exceeds the
        budget is read twice, and so is every further chunk: 4096 tokens took 2.1 times as long as with
        `snapkv`, 1.6 times as with the dense cache (two layers of Llama 3 8B's shape, two CPU cores). All
        layers evict after the forward, so the peak is a budget and a chunk in every layer.
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
        for layer in self._zipped:
            layer.remembers_text = layer is self._memory

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_decoder": None}  # no part of a pickle; the next call tells

    @property
    def _zipped(self) -> list[KVzipLayer]:
        return [layer for layer in self.layers if isinstance(layer, KVzipLayer)]

    @property
    def _memory(self) -> KVzipLayer:
        """The layer that keeps the text which has not been judged: the first one that evicts, if any does."""
        return next((layer for layer in self._zipped if layer.evicts), self._zipped[0])

    @property
    def needs_queries(self) -> bool:
        return any(layer.evicts for layer in self.evicting_layers)

    def attach(self, model: nn.Module) -> None:
        processes = num_processes(model)
        if processes > 1 and any(layer.config.is_uneven for layer in self._zipped):
            # each would find by its own heads when to repeat, for which all are needed
            raise ValueError(
                f"{type(self.config).__name__}.head_floor is for heads of one process, "
                f"and {type(model).__name__} is spread over {processes} by tp_plan. Allowed here is None."
            )
        remember_frequencies(model)
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
            waiting = self._memory.text()[0].shape[1] if seen else 0
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

    def take_tokens(self, decoder: Any, token_ids: Tensor, states: Tensor | None, *, is_alone: bool) -> None:
        if not self.is_repeating and self._zipped:
            self._decoder = ref(decoder)
            self._memory.remember(token_ids)
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
        for layer in layers:
            layer.wait()
        if any(layer.must_choose for layer in layers):
            self._judge(decoder)
        for layer in layers:
            layer.settle()

    def _judge(self, decoder: Any) -> None:
        layers = [layer for layer in self._zipped if layer.evicts]
        memory = self._memory
        new, lead = memory.text()
        if not new.shape[1]:
            return
        seen, pads = memory.cumulative_length, memory.pads
        for layer in layers:
            layer.begin_judging(new.shape[1])
        before = None if pads is None else pads.to(new.device) - (seen - new.shape[1] - lead.shape[1])
        passages = cut_passages(lead, new, before, self.config.repeat_length, self.config.repeat_prompt)
        was_read = False  # not where all rows have nothing but pads
        with frequencies_kept(decoder):
            for passage in passages:
                arguments = self._arguments(decoder, passage, seen, pads)
                decoder(**arguments, **as_argument(self._repeating(passage)))
                was_read = True
        for layer in layers:
            layer.end_judging(was_read)
        memory.forget_text()

    def _repeating(self, passage: Passage) -> KVzipCache:
        """A copy of this cache that takes a repetition and leaves this one as it is."""
        copied = copy.copy(self)
        copied.is_repeating = True
        copied.layers = [
            layer.repeating(passage)
            if isinstance(layer, KVzipLayer)
            else copy.deepcopy(layer, copies_to_take(tensors_beside(layer)))
            for layer in self.layers
        ]
        return copied

    def _arguments(self, decoder: Any, passage: Passage, seen: int, pads: Tensor | None) -> dict[str, Any]:
        """What a decoder is called with to read a passage again, as the continuation of all it has seen."""
        known = inspect.signature(decoder.forward).parameters
        # of a model whose weights are offloaded, which moves what it reads, the device is none
        is_somewhere = decoder.device.type != "meta"
        token_ids = passage.token_ids.to(decoder.device) if is_somewhere else passage.token_ids
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
