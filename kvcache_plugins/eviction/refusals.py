"""What a layer refuses in the middle of a text, or as soon as it is told how long that will be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UnsupportedOperationError

if TYPE_CHECKING:
    from ..models.frequencies import Change
    from .layer import EvictingLayer

__all__ = ["check_frequencies", "check_shown", "check_text"]


def check_shown(layer: EvictingLayer) -> None:
    """Raise `UnsupportedOperationError` if attention has not shown what there is to choose by."""
    if layer._has_missed:
        raise UnsupportedOperationError(
            f"Layer {layer.layer_idx} was not shown by its model what it needs to choose from: "
            f"scores come after the {layer.scored_after!r} of every call. The model's attention function "
            "must be 'sdpa', a flash or flex one, or 'kvcache_plugins' (model.set_attn_implementation), "
            "without dropout (model.eval()), the cache bound to it (`cache.bind`) before the first call."
        )


def check_frequencies(layer: EvictingLayer, phase: str, count: int) -> None:
    """Refuse tokens with which something would be evicted, and turned by other frequencies than it has.

    Nothing has been changed by then. As long as nothing is evicted, nothing is turned.

    Args:
        layer (`EvictingLayer`): Which is to take them.
        phase (`str`): Whether they are a chunk of a prompt, its end, or generated.
        count (`int`): How many.

    Raises:
        ValueError: Naming the rotation, and what is allowed.
    """
    # `estimate`, which runs on shapes alone, gives no prompt in chunks
    if layer.change is None or not layer.evicts or layer.device.type == "meta":
        return
    length = count + (layer.held_length if _is_compact(layer) else layer.cumulative_length)
    layer.budget_for(count)
    if length > layer.change.length and layer._exceeds(phase, count):
        raise _refusal(layer, layer.change, length)


def check_text(layer: EvictingLayer, prompt_length: int, final_length: int | None) -> None:
    """Refuse a text that `check_frequencies` would refuse, in whatever chunks it came, before it is read.

    Args:
        layer (`EvictingLayer`): Which is to take it.
        prompt_length (`int`): Tokens after which its prompt, or the next turn of it, has been read.
        final_length (`int`, *optional*): Tokens of the end.

    Raises:
        ValueError: Naming the rotation, and what is allowed.
    """
    if layer.change is None or layer.change.can_be_told:
        return
    budget, step, longest = layer.budget_for(prompt_length), layer.config.decode_slack + 1, 0
    if prompt_length > budget:
        longest = budget + 1 if _is_compact(layer) else prompt_length
    # of generated tokens, the first are evicted then, and others after every `step`
    first = max(prompt_length, budget) + step
    if layer.config.evict_at_decode and final_length is not None and final_length >= first:
        longest = budget + step if _is_compact(layer) else final_length - (final_length - first) % step
    if longest > layer.change.length:
        raise _refusal(layer, layer.change, longest)


def _is_compact(layer: EvictingLayer) -> bool:
    return layer.config.positions == "compact"


def _refusal(layer: EvictingLayer, change: Change, length: int) -> ValueError:
    """What is raised where `length` tokens are held, or have been read, when something is evicted."""
    name = type(layer.config).__name__
    if _is_compact(layer):
        turns, has = f"{name}.positions='compact' turns kept keys", f"{length} tokens are held"
        allowed = "'absolute', and so small a `budget` and `chunk_size` that no more are held then"
    else:
        turns, has = f"{name.removesuffix('Config')} turns queries back", f"{length} tokens have been read"
        allowed = "shorter texts, and backends that take queries as they are, such as 'snapkv'"
    told = ", and `bind` with the `prompt_length` before anything is read" if change.can_be_told else ""
    return ValueError(
        f"{turns} by the frequencies of texts of up to {change.length} tokens, and this model "
        f"(rope_type={change.rope_type!r}) has others for longer ones; {has} when something is evicted. "
        f"Allowed are {allowed}{told}."
    )
