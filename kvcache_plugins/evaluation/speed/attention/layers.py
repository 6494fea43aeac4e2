"""The cache layer whose decode step is measured: built, filled, its bytes, and the step itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig

from ....cache import KVCache
from ....eviction.layer import EvictingLayer
from ....layers.base import PackedLayer
from ....layers.crossing import CrossAttentionLayer
from ....layers.handle import KVHandle
from ....layers.windowed import WindowedLayer
from ...caches import cache_bytes, new_cache
from .dense_attention import exact_attention, max_rel_error
from .states import AttentionShape, States

__all__ = ["LayerStep", "filled_layer", "find_layer", "layer_bytes", "period_of"]


class LayerStep:
    """One decode step of a cache layer, ours or transformers': append, encode, attend.

    Args:
        layer: It holds the past already.
        states (`States`): The query, and the key and value of the new token.
    """

    def __init__(self, layer: Any, states: States) -> None:
        self.layer, self.query, self.new = layer, states.query, states.new

    def __call__(self) -> Tensor:
        return self.attend(*self.append())

    def append(self) -> tuple[Tensor, Tensor]:
        """Take the new token and return what attention reads."""
        keys, values = self.layer.update(*self.new)
        return keys, values

    def attend(self, keys: Tensor, values: Tensor) -> Tensor:
        """Attend as transformers' models do."""
        return F.scaled_dot_product_attention(self.query, keys, values, enable_gqa=True)

    def error(self, keys: Tensor, values: Tensor) -> float:
        """Compare attention with that in fp32 over the same tokens, decoded."""
        exact = exact_attention(self.query, _decoded(keys), _decoded(values))
        return max_rel_error(self.attend(keys, values), exact)

    @property
    def kernel(self) -> str:
        """What served the last attention."""
        return self.layer.kernel if isinstance(self.layer, PackedLayer) else "transformers"


def find_layer(cache: Any, cache_config: dict[str, Any]) -> Any:
    """Return the first layer a cache packs that attends to all tokens.

    Raises:
        ValueError: If there is none, or if it would be offloaded or needs a model to evict.
    """
    if not isinstance(cache, KVCache):
        return cache.layers[0]
    if cache.config.offload:
        raise ValueError(
            f"--cache_config {cache_config!r}: offload must be false for `bench attention`, which measures "
            "one layer: alone in its cache, it makes room for no other. `bench generate` measures whole "
            "models."
        )
    for layer in cache.packed_layers:
        if isinstance(layer, EvictingLayer) and (layer.scored_after != "update" or layer.reads_model):
            raise ValueError(
                f"--cache_config {cache_config!r}: {cache.backend!r} chooses by what a model shows it, and "
                "`bench attention` measures one layer without a model. Allowed are backends that judge a "
                "token by its key and value, such as 'knorm', or the storage alone; `bench generate` "
                "measures whole models."
            )
        if not isinstance(layer, (CrossAttentionLayer, WindowedLayer)):
            return layer
    raise ValueError(
        f"--cache_config {cache_config!r} packs no layer of this model that attends to all tokens, so there "
        "is nothing to time; `bench generate` measures whole models."
    )


def filled_layer(
    config: PreTrainedConfig,
    cache_config: dict[str, Any],
    shape: AttentionShape,
    states: States,
    room: Callable[[int], int],
) -> Any:
    """Build a layer that holds the past.

    Args:
        config (`PreTrainedConfig`): The decoder's.
        cache_config (`dict`): The cache.
        shape (`AttentionShape`): Of the states.
        states (`States`): Whose past it holds.
        room (`Callable`): Given the period of encoding, the tokens that will come, for which room is made.
    """
    layer = find_layer(new_cache(config, cache_config), cache_config)
    if isinstance(layer, PackedLayer):
        layer.final_length = shape.length + room(period_of(layer, shape))
    layer.update(*states.past)
    return layer


def period_of(layer: Any, shape: AttentionShape) -> int:
    """Tokens after which the encoding of a packed layer repeats itself; 1 for others."""
    if not isinstance(layer, PackedLayer):
        return 1
    streams = layer.key_stream(shape.key_dim), layer.value_stream(shape.value_dim)
    return max(stream.block_length for stream in streams)


def layer_bytes(
    config: PreTrainedConfig, cache_config: dict[str, Any], shape: AttentionShape, layer: Any
) -> int:
    """Bytes of a layer that holds the tokens of one step and has room for no more."""
    if not isinstance(layer, PackedLayer):
        return cache_bytes([layer])
    fresh = find_layer(new_cache(config, cache_config, max_cache_length=shape.length + 1), cache_config)
    rows, heads = shape.batch_size, shape.num_key_value_heads
    with torch.device("meta"):  # where tensors have a shape and no data
        for tokens in (shape.length, 1):
            keys = torch.empty(rows, heads, tokens, shape.key_dim, dtype=shape.dtype)
            fresh.update(keys, torch.empty(rows, heads, tokens, shape.value_dim, dtype=shape.dtype))
    return int(fresh.kv_bytes)


def _decoded(states: Tensor) -> Tensor:
    return states.tokens.dense(torch.float32) if isinstance(states, KVHandle) else states
