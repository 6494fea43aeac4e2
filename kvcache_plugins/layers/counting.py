"""What a layer of either kind owns: its tensors, its entries, and the bytes they would take dense."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from .base import PackedLayer

__all__ = [
    "bytes_of", "dense_length", "dense_size", "host_tensors", "owned_tensors", "passing_bytes",
    "tensors_beside", "tensors_in",
]  # fmt: skip


def dense_length(layer: Any) -> int:
    """Tokens that a layer of transformers' own holds, all or those of a window; 0 if it has no keys.

    A prompt may lie apart from the window of what follows it (Unlimited-OCR).
    """
    keys = [getattr(layer, name, None) for name in ("prefill_keys", "keys")]
    return sum(each.shape[-2] for each in keys if isinstance(each, Tensor) and each.dim() > 1)


def dense_size(layer: Any) -> tuple[int, int]:
    """Count what a layer holds, packed or not.

    Args:
        layer (`CacheLayerMixin`): One of ours, or of transformers'.

    Returns:
        `tuple[int, int]`: Key and value entries, and the bytes of all it has seen in transformers' own class.
    """
    values = num_bytes = 0
    if isinstance(layer, PackedLayer) and layer.is_initialized:
        for part in layer.uniform_layers:
            batch_size, num_heads = part.records.shape[:2]
            per_token = batch_size * num_heads * sum(stream.head_dim for stream in part.streams)
            values += per_token * part.held_length
            num_bytes += per_token * part.dense_length * part.dtype.itemsize
    exact = [tensor for tensor in tensors_beside(layer) if tensor.is_floating_point()]
    values += sum(tensor.numel() for tensor in exact)
    if isinstance(layer, PackedLayer):  # whose memory may have room for more
        return values, num_bytes + sum(tensor.nbytes for tensor in exact)
    # whole storages: what a window still holds of its last call, it would hold in any cache
    return values, num_bytes + bytes_of(exact)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory that tensors lie in, each once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def passing_bytes(layers: Iterable[Any]) -> int:
    """Bytes that layers hold until the next token comes, and then let go.

    A window of transformers' own is a view of all that its last call attended to. After one token that is
    the window and no more; after a prompt, or a block of tokens, these lie in memory with it, and no query
    sees them.

    Args:
        layers (`Iterable[CacheLayerMixin]`): Of any kind; other layers let nothing go.
    """
    passing = 0
    for layer in layers:
        if not isinstance(layer, DynamicSlidingWindowLayer):
            continue
        for states in tensors_in([layer.keys, layer.values]):  # `None` before the first token
            held = max(states.shape[-2], layer.sliding_window) * states[..., :1, :].nbytes
            passing += max(0, states.untyped_storage().nbytes() - held)
    return passing


def owned_tensors(layer: Any) -> Iterable[Tensor]:
    """Every tensor of a layer, packed or not."""
    return layer.tensors().values() if isinstance(layer, PackedLayer) else tensors_in(vars(layer))


def tensors_beside(layer: Any) -> Iterator[Tensor]:
    """Yield what a layer holds as transformers' own do: all of it, or what a packed one holds besides."""
    return tensors_in(layer.beside() if isinstance(layer, PackedLayer) else vars(layer))


def host_tensors(layers: Iterable[Any]) -> Iterator[Tensor]:
    """Yield those tensors of layers on a GPU that rest in the host's memory."""
    for layer in layers:
        device = getattr(layer, "device", None)  # of tokens that came
        if device is not None and device.type != "cpu":
            yield from (tensor for tensor in owned_tensors(layer) if tensor.device.type == "cpu")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in the attributes of a layer of transformers', in lists and dicts too.

    Of a wrapper such as quanto's, whose own storage is a fiction of the full size, what it consists of.
    """
    if isinstance(value, Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is None:
            yield value
        else:
            yield from tensors_in([getattr(value, name) for name in flatten()[0]])
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
