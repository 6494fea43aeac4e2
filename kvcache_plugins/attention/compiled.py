"""A layer's update and attention in the graph of a compiled model: one operator (see `layers.compiled`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..compilation import define_opaque
from ..layers.compiled import known_layers, update_of

__all__ = ["attend_in_graph"]

_NUMBERS = ("sliding_window", "softcap")
_TENSORS = ("s_aux", "sinks", "alibi_slopes", "position_bias", "indices")


@dataclass
class _Module:
    """What attention functions read of the module that calls them."""

    is_causal: bool
    num_key_value_groups: int
    training: bool = False


def attend_in_graph(
    function: str,
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    scaling: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None] | None:
    """Put an attention function into the graph that is being made.

    Args:
        function (`str`): Its name among the attention functions of transformers.
        module (`torch.nn.Module`): The attention module.
        query (`torch.Tensor` of shape `(B, Hq, q, D)`): Queries of the newest tokens.
        key (`CompiledHandle`): The keys of an update.
        value (`CompiledHandle`): Its values.
        attention_mask (`torch.Tensor`, *optional*): As the function takes it.
        scaling (`float`, *optional*): Factor of the logits.
        kwargs: What else the function takes; see `dispatch.forward_over_handles` for what is honoured.

    Returns:
        `tuple[torch.Tensor, None] | None`: `(B, q, Hq, Dv)`, and no attention weights; `None`, and nothing
            has been done, for arguments that the operator cannot be given.
    """
    update = update_of(key, value)
    numbers = [scaling, *(kwargs.get(name) for name in _NUMBERS)]
    others = [kwargs.get(name) for name in _TENSORS]
    if (
        update is None
        or update.is_taken
        or module.training
        or not all(number is None or isinstance(number, (int, float)) for number in numbers)
        or not all(tensor is None or isinstance(tensor, Tensor) for tensor in (attention_mask, *others))
    ):
        return None
    update.is_taken = True
    is_causal = kwargs.get("is_causal")
    output = torch.ops.kvcache_plugins.update_and_attend(
        update.layers.number,
        update.layer_idx,
        update.seen,
        update.key_states,
        update.value_states,
        query,
        function,
        getattr(module, "num_key_value_groups", 1),
        bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
        *numbers,
        attention_mask,
        others if any(tensor is not None for tensor in others) else [],
    )
    return output, None


@cache
def _functions() -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS


def _update_and_attend(
    number: Tensor,
    layer_idx: int,
    seen: int,
    key_states: Tensor,
    value_states: Tensor,
    query: Tensor,
    function: str,
    groups: int,
    is_causal: bool,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    mask: Tensor | None,
    others: list[Tensor | None],
) -> Tensor:
    key, value = known_layers(number).update(layer_idx, seen, key_states, value_states)
    output: Tensor
    output, _ = _functions()[function](
        _Module(is_causal, groups),
        query,
        key,
        value,
        mask,
        scaling=scaling,
        is_causal=is_causal,
        sliding_window=sliding_window,
        softcap=softcap,
        **dict(zip(_TENSORS, others, strict=False)),  # none at all, as a rule
    )
    return output


def _shape(
    number: Tensor,
    layer_idx: int,
    seen: int,
    key_states: Tensor,
    value_states: Tensor,
    query: Tensor,
    *options: Any,
) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value_states.shape[3])


define_opaque(
    "update_and_attend",
    "(Tensor number, int layer_idx, SymInt seen, Tensor key_states, Tensor value_states, Tensor query, "
    "str function, int groups, bool is_causal, float? scaling, int? sliding_window, float? softcap, "
    "Tensor? mask, Tensor?[] others) -> Tensor",
    _update_and_attend,
    _shape,
)
