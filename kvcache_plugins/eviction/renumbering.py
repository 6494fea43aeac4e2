"""Compact positions: what is kept moves up, so that no position exceeds what is held.

Keys are stored rotated by their position. When a slot moves by `delta`, its key is rotated by `delta` more;
the model is told positions that count from what is held, by a hook on its decoder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..compilation import outside_graphs
from ..layers.padding import Padding, first_slots
from ..models.cache_argument import by_name, given_cache
from ..models.hooks import add_hooks
from ..models.rotary import Rotary

if TYPE_CHECKING:
    from .layer import EvictingLayer

__all__ = ["count_from_what_is_held", "next_positions", "turn_to_slots"]


def turn_to_slots(
    keys: Tensor, index: Tensor, rotary: Rotary, before: Padding, after: Padding, first_slot: int = 0
) -> None:
    """Rotate keys that moved from the slots `index` to those from `first_slot` on, in place.

    A slot's position is its distance from the first real token of the row. Angles and products are fp32, so
    a key that moves many times in bf16 is rounded as often.

    Args:
        keys (`torch.Tensor` of shape `(B, H, K, D)`): Keys that were moved, still rotated as before.
        index (`torch.Tensor` of shape `(B, H, K)`): Where they came from.
        rotary (`Rotary`): The model's rotation.
        before (`Padding`): Pads before the move.
        after (`Padding`): Pads after it.
        first_slot (`int`): Where the first of them is now.
    """
    slots = torch.arange(first_slot, first_slot + keys.shape[2], device=keys.device)
    slots = slots - after.starts(keys)[:, None]
    moved = (index - before.starts(keys)[:, None, None]) - slots[:, None]
    moved = torch.where(slots[:, None] >= 0, moved, 0)  # pads carry no position
    if keys.is_meta or not bool(moved.any()):
        return
    cos, sin = rotary.tables(torch.arange(int(moved.max()) + 1, device=keys.device))
    keys.copy_(rotary.turn(keys.float(), cos[moved], -sin[moved]))


def next_positions(layer: EvictingLayer, batch_size: int, count: int, device: torch.device) -> Tensor:
    """Positions `(B, count)` of the next tokens: distances from the first real token that is held."""
    slots = torch.arange(layer.held_length, layer.held_length + count, device=device)
    first = first_slots(layer.padding.lengths, device)
    return (slots - first[:, None]).clamp_min(0).expand(batch_size, -1)


def count_from_what_is_held(decoder: nn.Module) -> None:
    """Make `decoder` number new tokens after those its cache holds, if that has compact positions.

    Other caches are left alone. Doing it twice changes nothing.
    """
    add_hooks(decoder, before=_renumbered)


def _renumbered(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    layer = getattr(given_cache(kwargs, args), "compact_layer", None)
    if layer is None:
        return None
    given = by_name(decoder, args, kwargs)
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if tokens is None:
        return None
    return (), {**given, "position_ids": _positions_of(layer, tokens, given.get("position_ids"))}


@outside_graphs
def _positions_of(layer: EvictingLayer, tokens: Tensor, given: Any) -> Tensor:
    """Positions of new tokens `(B, n, ...)`, in the place of those that were `given`."""
    _check_positions(layer, given)
    return next_positions(layer, tokens.shape[0], tokens.shape[1], tokens.device)


def _check_positions(layer: EvictingLayer, positions: Any) -> None:
    """Refuse tokens that a model numbers by time, row and column (M-RoPE), unless all three are the same.

    What an image takes of each is not its number of tokens, so moving up by slots would reorder it. Numbers
    of pads, which differ in some models, mean nothing.
    """
    if not isinstance(positions, Tensor) or positions.dim() != 3 or positions.shape[-1] == 1:
        return  # what follows an image is numbered from its end, but comes after a call that shows it
    slots = torch.arange(layer.held_length, layer.held_length + positions.shape[-1], device=positions.device)
    is_real = slots >= layer.padding.starts(positions[0])[:, None]
    if bool(((positions != positions[:1]) & is_real).any()):
        raise ValueError(
            f"{type(layer.config).__name__}.positions='compact' numbers tokens one by one, and this prompt "
            "has images, which its model numbers by time, row and column; allowed for such a prompt is "
            "'absolute'."
        )
