"""Caches that must see what a model is called with, or what it makes of it, not only keys and values.

Three hooks see one call, and leave what they see with the cache that takes part in it, so that several
threads may use one model:

```
before the model    its tokens: a model of text and images embeds them itself
after the decoder   the states before the head
after the model     its logits; all is forgotten, also if the call failed
```

The model is what was called from outside. A part of it that caches were built for by itself has the hooks of
a model, too, which do nothing while it serves another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..compilation import outside_graphs
from ..errors import UnsupportedOperationError
from ..layers.storing import storing
from ..models.cache_argument import given_cache
from ..models.decoder import decoder_of
from ..models.hooks import add_hooks
from ..models.placeholders import find_features, find_placeholder
from .cache import EvictingCache

__all__ = ["CallWatchingCache", "TokenWatchingCache"]


@dataclass(frozen=True)
class _Call:
    """What has been seen of a call so far."""

    model: nn.Module
    token_ids: Tensor | None
    states: Tensor | None = None
    autocast_dtype: torch.dtype | None = None
    """In which products were computed inside; hooks after a wrapped `forward` may be outside of it again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # copies of a cache that was interrupted in a call take no model with them


class TokenWatchingCache(EvictingCache, ABC):
    """A cache that is told, when a decoder has read tokens, which ones."""

    purpose: ClassVar[str]
    """What the backend does with them, for messages."""
    _call: _Call | None = None

    def attach(self, model: nn.Module) -> None:
        add_hooks(decoder_of(model), after=_after_decoder)
        add_hooks(model, before=_begin, after=_end)

    def check_tokens(self, model: Any, token_ids: Tensor, arguments: dict[str, Any]) -> None:
        """Refuse tokens `(B, n)`, and what a model is called with beside them, that are no text.

        What layers of cross-attention hold is not among the tokens (Mllama).
        """
        found = find_placeholder(model.config, token_ids)
        if found is None and not any(plan.is_cross_attention for plan in self._plans):
            found = find_features(arguments)
        if found is not None:
            raise UnsupportedOperationError(
                f"The backend {self.backend!r} {self.purpose}, and this prompt has {found}, which stand for "
                "images or sounds. Allowed is text."
            )

    @abstractmethod
    def take_tokens(self, decoder: Any, token_ids: Tensor, states: Tensor | None, *, is_alone: bool) -> None:
        """Do what is to be done once tokens have been read.

        Args:
            decoder (`PreTrainedModel`): What has read them.
            token_ids (`torch.Tensor` of shape `(B, n)`): The tokens.
            states (`torch.Tensor` of shape `(B, n, hidden_size)`, *optional*): What it made of them, if it
                hands that out.
            is_alone (`bool`): Whether it was called by itself, and not by a model that holds it.
        """

    def finish_call(self, model: Any, call: _Call, logits: Tensor | None, index: int) -> None:
        """Do what is to be done once a model has finished; see [`CallWatchingCache.take_call`]."""

    def needs_tokens(self) -> UnsupportedOperationError:
        """What is to be raised where embeddings are given in the place of tokens."""
        return self._unsupported("`input_ids`", "`inputs_embeds`")

    def _unsupported(self, needs: str, got: str) -> UnsupportedOperationError:
        return UnsupportedOperationError(
            f"The backend {self.backend!r} {self.purpose} and needs {needs}, got {got}."
        )


class CallWatchingCache(TokenWatchingCache):
    """A cache that is told, at the end of every call, of the tokens, states and logits."""

    def attach(self, model: nn.Module) -> None:
        if not _has_head(model):
            raise ValueError(
                f"The backend {self.backend!r} needs a model with a language-model head, got "
                f"{type(model).__name__}."
            )
        super().attach(model)

    @abstractmethod
    def take_call(self, model: Any, token_ids: Tensor, states: Tensor, logits: Tensor, index: int) -> None:
        """Do what is to be done once a model has read tokens.

        Args:
            model (`PreTrainedModel`): The model.
            token_ids (`torch.Tensor` of shape `(B, n)`): The tokens.
            states (`torch.Tensor` of shape `(B, n, hidden_size)`): What its decoder made of them.
            logits (`torch.Tensor` of shape `(B, vocab_size)`): What it made of one of the states.
            index (`int`): Which, from the beginning or, if negative, from the end.
        """

    def take_tokens(self, decoder: Any, token_ids: Tensor, states: Tensor | None, *, is_alone: bool) -> None:
        if is_alone:
            raise self._unsupported("logits", f"a call of {type(decoder).__name__} alone, without the head")
        if states is None:
            raise self._unsupported(
                "the states before the head", f"a {type(decoder).__name__}, which does not hand them out"
            )
        if states.shape[1] != token_ids.shape[1]:
            raise self._unsupported(
                "one state for each token",
                f"{states.shape[1]} for {token_ids.shape[1]} tokens from a {type(decoder).__name__}",
            )

    def finish_call(self, model: Any, call: _Call, logits: Tensor | None, index: int) -> None:
        if call.token_ids is None or call.states is None or logits is None:
            raise self._unsupported(
                "logits and the states before the head", f"a {type(model).__name__}, which showed none"
            )
        device, dtype = call.states.device.type, call.autocast_dtype
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            self.take_call(model, call.token_ids, call.states, logits[:, -1], index)


def _with_a_cache(hook: Callable[..., None]) -> Callable[..., None]:
    """Call a hook for calls that a cache takes part in which is told of them; compiled models stop for it."""
    told = outside_graphs(hook)

    @wraps(hook)
    def called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> None:
        cache = given_cache(kwargs, args)
        if isinstance(cache, TokenWatchingCache):
            told(cache, module, _token_argument(args, kwargs), kwargs, *output)

    return called


@_with_a_cache
def _begin(
    cache: TokenWatchingCache, model: nn.Module, token_ids: Tensor | None, kwargs: dict[str, Any]
) -> None:
    if cache._call is not None and _serves(model, cache._call.model):
        return
    if token_ids is None and "inputs_embeds" in kwargs:  # said before the model reads them
        raise cache.needs_tokens()
    if token_ids is not None:
        cache.check_tokens(model, token_ids, kwargs)
    cache._call = _Call(model, token_ids)


def _has_head(model: nn.Module) -> bool:
    return getattr(model, "get_output_embeddings", lambda: None)() is not None


def _serves(part: nn.Module, model: nn.Module) -> bool:
    """Whether a call of `part` belongs to that of `model`, which began before."""
    return part is not model and any(module is part for module in model.modules())


@_with_a_cache
def _after_decoder(
    cache: TokenWatchingCache,
    decoder: nn.Module,
    token_ids: Tensor | None,
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    if output is None:
        return
    call, cache._call = cache._call, None  # what follows may fail
    if token_ids is None and call is not None:
        token_ids = call.token_ids
    if token_ids is None:
        raise cache.needs_tokens()
    states = _output(output, "last_hidden_state")
    with storing():
        is_alone = call is None or (call.model is decoder and not _has_head(decoder))
        cache.take_tokens(decoder, token_ids, states, is_alone=is_alone)
    if call is not None:
        cache._call = replace(
            call, token_ids=token_ids, states=states, autocast_dtype=_autocast_dtype(states)
        )


def _autocast_dtype(states: Tensor | None) -> torch.dtype | None:
    kind = "cpu" if states is None else states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


@_with_a_cache
def _end(
    cache: TokenWatchingCache,
    model: nn.Module,
    token_ids: Tensor | None,
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    if cache._call is not None and _serves(model, cache._call.model):
        return
    call, cache._call = cache._call, None  # what was seen of a call is of no later one
    if output is None or call is None:
        return
    kept = kwargs.get("logits_to_keep")
    index = int(kept[-1]) if isinstance(kept, Tensor) else -1
    with storing():
        cache.finish_call(model, call, _output(output, "logits"), index)


def _token_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    return kwargs.get("input_ids", args[0] if args else None)


def _output(output: Any, name: str) -> Tensor | None:
    found: Tensor | None = output[0] if isinstance(output, tuple) else getattr(output, name, None)
    return found
