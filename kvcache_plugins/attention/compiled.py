"""Attention in the graph of a compiled model, where it is one operator (see `layers.compiled`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..compilation import define_opaque
from ..layers.compiled import are_of_one_update, known_layers

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
        key (`CompiledHandle`): What the update of a layer has left.
        value (`CompiledHandle`): The same.
        attention_mask (`torch.Tensor`, *optional*): As the function takes it.
        scaling (`float`, *optional*): Factor of the logits.
        kwargs: What else the function takes; see `dispatch.forward_over_handles` for what is honoured.

    Returns:
        `tuple[torch.Tensor, None] | None`: `(B, q, Hq, Dv)`, and no attention weights; `None`, and nothing
            has been done, for arguments that the operator cannot be given.
    """
    numbers = [scaling, *(kwargs.get(name) for name in _NUMBERS)]
    tensors = [attention_mask, *(kwargs.get(name) for name in _TENSORS)]
    if (
        not are_of_one_update(key, value)
        or module.training
        or not all(number is None or isinstance(number, (int, float)) for number in numbers)
        or not all(tensor is None or isinstance(tensor, Tensor) for tensor in tensors)
    ):
        return None
    is_causal = kwargs.get("is_causal")
    output = torch.ops.kvcache_plugins.attend_layer(
        key.layers.number,
        key.layer_idx,
        key.token,
        query,
        value.head_dim,
        function,
        getattr(module, "num_key_value_groups", 1),
        bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
        *numbers,
        *tensors,
    )
    return output, None


@cache
def _functions() -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS


def _attend(
    number: Tensor,
    layer_idx: int,
    token: Tensor,
    query: Tensor,
    value_dim: int,
    function: str,
    groups: int,
    is_causal: bool,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    mask: Tensor | None,
    *tensors: Tensor | None,
) -> Tensor:
    taken = known_layers(number).taken
    if layer_idx not in taken:
        raise RuntimeError(
            f"A compiled model attended twice to what an update of layer {layer_idx} returned, which is not "
            "kept. Allowed are models that attend to it once, or are not compiled."
        )
    key, value = taken.pop(layer_idx)  # or a prompt would be there until the next update
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
        **dict(zip(_TENSORS, tensors, strict=True)),
    )
    return output


def _shape(
    number: Tensor, layer_idx: int, token: Tensor, query: Tensor, value_dim: int, *others: Any
) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value_dim)


define_opaque(
    "attend_layer",
    "(Tensor number, int layer_idx, Tensor token, Tensor query, int value_dim, str function, int groups, "
    "bool is_causal, float? scaling, int? sliding_window, float? softcap, Tensor? mask, Tensor? s_aux, "
    "Tensor? sinks, Tensor? alibi_slopes, Tensor? position_bias, Tensor? indices) -> Tensor",
    _attend,
    _shape,
)
