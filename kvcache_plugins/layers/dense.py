"""Transformers' own layers, which a cache keeps among packed ones: what is asked of them as of these."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from ..errors import UnsupportedOperationError

__all__ = [
    "check_states_are_here",
    "cropped",
    "forget_past",
    "repeat_rows",
    "select_rows",
    "tokens_seen",
    "working_states",
]


def tokens_seen(layers: Iterable[Any]) -> set[int]:
    """Return how many tokens layers have seen, of those that count any: recurrent ones do not.

    What an indexer has seen counts too: a model hands its keys over before or after the others. It counts
    alone where a layer borrows the others of an earlier layer.
    """
    counting = [layer for layer in layers if isinstance(layer, CacheLayerMixin)]
    seen = {int(layer.get_seq_length()) for layer in counting if not _keeps_indexer_alone(layer)}
    keys, positions = (
        [found for layer in counting if (found := getattr(layer, name, None)) is not None]
        for name in ("indexer_keys", "indexer_position_ids")
    )
    return seen | {states.shape[1] for states in keys} | {states.shape[-1] for states in positions}


def _keeps_indexer_alone(layer: Any) -> bool:
    """Whether transformers' own layer holds keys of an indexer, and no keys and values."""
    return getattr(layer, "indexer_keys", None) is not None and not layer.is_initialized


def check_states_are_here(verb: str, layers: Iterable[Any]) -> None:
    """Refuse what would leave states behind that a model keeps in its own modules (RecurrentGemma).

    Args:
        verb (`str`): What is about to be done.
        layers (`Iterable[CacheLayerMixin | LinearAttentionLayer]`): All layers of a cache.

    Raises:
        UnsupportedOperationError: If no layer for such states was given any with the tokens of the others.
            Some never are: older releases of transformers have them for layers without states (Nemotron-H).
    """
    layers = list(layers)
    lacking = [index for index, layer in enumerate(layers) if _lacks_states(layer)]
    has_any = len(lacking) < sum(map(_is_for_states, layers))
    seen = max(tokens_seen(layers), default=0) if lacking and not has_any else 0
    if seen:
        raise UnsupportedOperationError(
            f"{verb}: layers {lacking} of this cache are for states of linear attention, and have been given "
            f"none with {seen} tokens: the model keeps them in its own modules, as RecurrentGemma does, and "
            "there this would leave them. Allowed are going on with this text, and reading it again."
        )


def _is_for_states(layer: Any) -> bool:
    """Whether a layer is for states alone."""
    holds_keys = isinstance(layer, CacheLayerMixin)
    return isinstance(layer, LinearAttentionCacheLayerMixin) and not holds_keys


def _lacks_states(layer: Any) -> bool:
    """Whether a layer is for states alone, and has none."""
    if not _is_for_states(layer):
        return False
    flags = (layer.is_conv_states_initialized, layer.is_recurrent_states_initialized)
    return not any(flag for initialized in flags for flag in initialized.values())


def cropped(layer: Any, tokens_to_remove: int) -> dict[str, Any]:
    """Return the attributes that a layer has after its `crop`, and leave it as it is.

    Raises:
        UnsupportedOperationError: If it refuses, as those with a window do that forget what leaves it, or
            has recurrent states, which hold no token apart from the others.
    """
    has_states = isinstance(layer, LinearAttentionCacheLayerMixin)
    if has_states and tokens_to_remove < 0 and any(layer.is_recurrent_states_initialized.values()):
        raise UnsupportedOperationError(
            f"crop({tokens_to_remove}): a {type(layer).__name__} of this cache has recurrent states, from "
            "which no token can be taken back. Allowed is a copy of the cache, made before these tokens were "
            "read."
        )
    is_empty = has_states and not any(layer.is_conv_states_initialized.values())
    if is_empty or (tokens_to_remove == 0 and not getattr(layer, "record_past", False)):
        return dict(vars(layer))
    trial = copy.copy(layer)
    for name, value in vars(layer).items():  # `crop` replaces these and their items, and writes to no tensor
        if isinstance(value, dict):
            setattr(trial, name, dict(value))
    try:
        trial.crop(tokens_to_remove)
    except RuntimeError as error:
        raise UnsupportedOperationError(
            f"crop({tokens_to_remove}): a {type(layer).__name__} of this cache: {error}"
        ) from error
    return dict(vars(trial))


def forget_past(layer: Any) -> None:
    """End what `activate_past_recording` began, after the drafts of a call have been judged."""
    if hasattr(layer, "record_past"):
        layer.record_past = False
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        layer.conv_states.update(working_states(layer))


def working_states(layer: Any) -> dict[int, Tensor]:
    """Return convolution states `(B, channels, taps)` by their numbers, as layers that record nothing need.

    It writes over as many as its kernel has taps. Those that were recorded are as many as there are tokens,
    more or fewer; what is before the first token is zero.

    Args:
        layer (`LinearAttentionLayer`): Which has them.
    """
    missing = {
        index: layer.conv_kernel_size[index] - state.shape[-1]
        for index, state in layer.conv_states.items()
        if state is not None
    }
    states = layer.conv_states
    return {index: F.pad(states[index], (n, 0)) if n else states[index] for index, n in missing.items()}


def select_rows(layer: Any, rows: Tensor) -> None:
    """Keep rows of a layer.

    Args:
        layer (`CacheLayerMixin | LinearAttentionLayer`): The layer. If it has recurrent states, its own verb
            for this is missing, or leaves them as they are.
        rows (`torch.Tensor`): Their indices, int64.
    """
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        layer.reorder_cache(rows)  # type: ignore[arg-type]  # transformers wants another name for int64
    else:
        keys = getattr(layer, "keys", None)
        layer.batch_select_indices(rows if keys is None else rows.to(keys.device))


def repeat_rows(layer: Any, repeats: int) -> None:
    """Repeat every row of a layer, the copies of a row one after the other."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        layer.batch_repeat_interleave(repeats)
        return
    states = [state for kind in (layer.conv_states, layer.recurrent_states) for state in kind.values()]
    count = next((len(state) for state in states if state is not None), 0)
    if count:
        select_rows(layer, torch.arange(count, device="cpu").repeat_interleave(repeats))
