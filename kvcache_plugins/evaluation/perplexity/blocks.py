"""Blocks of tokens that are read at once and yet give what reading one token at a time would give.

Between two changes of what is packed, reading one token at a time attends to fixed codes, to exact recent
tokens, and causally to the new ones; so does a block that ends at the change. How far that is depends on the
layer, before a call, with `T` tokens seen:

* dense layers of transformers: any distance, nothing is packed;
* layers of this package: as long as `packed_length` (see `layers.stream`) does not change. A stream that
  packs every token (int8, int4, float8 and the values of KIVI once their residual window is full) allows one
  token; before that, and where tokens are packed in groups, longer blocks;
* evicting layers besides: until generated tokens are evicted (`evict_at_decode`), and one token where the
  choice rests on the queries of the last call (`snapkv`);
* `quanto` of transformers: the first call is quantized at once; after that whatever is held is quantized
  anew whenever `residual_length` exact tokens have come together, so up to the next such point;
* `hqq` of transformers: the same rule, but one token all the same. Its search for the best zero points stops
  by comparing errors, so that the last digits of the states decide where: blocks move the mean by 1e-4 nats
  (bundled model in fp32, windows of 2048 tokens);
* `fp8` of transformers: any distance. Every token is quantized at once by a scale that the first call has
  fixed, and read from its code even in the call that brings it.

Of any other layer nothing is known.

Models with recurrent layers are always read one token at a time. Whether a longer call goes on from their
states differs between families and releases: Jamba and RecurrentGemma begin anew.

Equal is meant up to rounding. In fp32 the mean stays below 1e-6 nats per token, or a few 1e-6 where a value
on the edge between two codes falls to the other side; in half precision the model's own rounding is far more.
Where a cache evicts, rounding also decides between tokens of equal worth, and another one that stays is no
rounding error any more: with `knorm` all copies of a token are worth as much as each other in the first
layer, which moved single tokens by up to 4e-3 nats (bundled model in fp32, a budget of 128).
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any, NamedTuple

from transformers import cache_utils
from transformers.cache_utils import HQQQuantizedLayer, LinearAttentionCacheLayerMixin, QuantizedLayer

from ...eviction.layer import EvictingLayer
from ...layers.base import PackedLayer
from ...layers.crossing import CrossAttentionLayer
from ...layers.windowed import WindowedLayer

__all__ = ["Block", "exact_blocks", "longest_block", "packed_shares", "room"]

# Both came with releases after 5.17.
_QUANTIZED = getattr(cache_utils, "BaseQuantizedLayer", QuantizedLayer)
_FP8 = getattr(cache_utils, "Fp8QuantizedLayer", ())


class Block(NamedTuple):
    """Tokens `[start, stop)` to be read at once; `is_exact` if that changes nothing, as far as is known."""

    start: int
    stop: int
    is_exact: bool


def exact_blocks(
    cache: Any, start: int, stop: int, block_length: int, *, approximate: bool = False
) -> Iterator[Block]:
    """Yield the blocks in which to read tokens `[start, stop)`, each once the one before it has been read.

    A block is cut where it would reach beyond a point at which what is packed changes. Where a layer is of a
    kind that nothing is known of, blocks have the full length, and are not called exact unless they have one
    token.

    Args:
        cache (`Cache`): Holds the tokens before `start`.
        start (`int`): First token to be read.
        stop (`int`): The one after the last.
        block_length (`int`): Most tokens of a block.
        approximate (`bool`): Cut no block; those that should have been cut are not called exact.
    """
    block_length = longest_block(cache, block_length)
    while start < stop:
        limit = min(block_length, stop - start)
        rooms = [room(layer, limit) for layer in cache.layers]
        exact = min([limit, *(tokens for tokens in rooms if tokens is not None)])
        count = limit if approximate else exact
        yield Block(start, start + count, count == 1 or (count <= exact and None not in rooms))
        start += count


def longest_block(cache: Any, block_length: int) -> int:
    """Return how many tokens may be read at once, of `block_length`: one where layers are recurrent."""
    is_recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
    return 1 if is_recurrent else block_length


def room(layer: Any, limit: int) -> int | None:
    """Return how many tokens a layer may take at once without a change, from 1 to `limit`; None if unknown.

    Args:
        layer (`CacheLayerMixin`): A layer that holds the tokens read so far.
        limit (`int`): Most tokens that are of interest.
    """
    # A class that brings its own `update` follows its own rule.
    if isinstance(layer, PackedLayer):
        if type(layer).update not in (PackedLayer.update, EvictingLayer.update):
            return None
        return layer.room(limit)
    if isinstance(layer, QuantizedLayer):
        if type(layer).update is not QuantizedLayer.update:
            return None
        if isinstance(layer, HQQQuantizedLayer):
            return 1
        # The token that fills the window is read by itself: releases differ in how they count a longer block.
        return max(1, min(limit, layer.residual_length - 1 - _residual_tokens(layer)))
    if isinstance(layer, _FP8):
        return limit
    is_dense = type(layer).__module__ == cache_utils.__name__ and not isinstance(layer, _QUANTIZED)
    return limit if is_dense else None


def packed_shares(cache: Any, count: int) -> list[float]:
    """Return, for each of the next `count` tokens, the share of the tokens it attends to that is in codes.

    It is the mean over the layers that pack; 0 where none does. A token attends to itself and to all before
    it, or to those in its window. A layer of this package reads its packed tokens from codes, without the
    sinks among them and averaged over keys and values; `quanto` and `hqq` read all but their exact recent
    tokens, `fp8` all.

    Args:
        cache (`Cache`): Before the call that brings the tokens.
        count (`int`): Tokens of that call.
    """
    layers = [shares for layer in cache.layers if (shares := _layer_shares(layer, count)) is not None]
    return [fmean(shares) for shares in zip(*layers, strict=True)] if layers else [0.0] * count


def _layer_shares(layer: Any, count: int) -> list[float] | None:
    if isinstance(layer, CrossAttentionLayer) or not hasattr(layer, "get_mask_sizes"):
        return None  # texts have no images, and linear attention has no tokens to attend to
    if isinstance(layer, PackedLayer) and len(layer.uniform_layers) > 1:
        parts = [(part.num_heads, _layer_shares(part, count) or []) for part in layer.uniform_layers]
        heads = sum(number for number, _ in parts)
        of_heads = zip(*([number * share for share in shares] for number, shares in parts), strict=True)
        return [sum(shares) / heads for shares in of_heads]
    attended = range(layer.get_mask_sizes(count)[0] - count + 1, layer.get_mask_sizes(count)[0] + 1)
    if isinstance(layer, PackedLayer):
        if not layer.is_initialized:
            return [0.0] * count
        window = layer.window if isinstance(layer, WindowedLayer) else attended[-1]
        gone = [max(0, tokens - window) for tokens in attended]
        return [_coded_tokens(layer, n) / (tokens - n) for tokens, n in zip(attended, gone, strict=True)]
    if isinstance(layer, QuantizedLayer):
        packed = attended[0] - 1 - _residual_tokens(layer)
    elif isinstance(layer, _FP8):
        return [1.0] * count
    else:
        return None
    return [packed / tokens for tokens in attended]


def _coded_tokens(layer: PackedLayer, gone: int) -> float:
    """Tokens read from codes once the window has left behind so many of those that the next query sees."""
    exact = layer.padding.sink_length - layer.padding.dropped
    hidden = max(exact, layer.stored_length - layer.held_length + gone)
    return fmean(max(0, stream.packed_length - hidden) for stream in layer.streams)


def _residual_tokens(layer: QuantizedLayer) -> int:
    """Exact tokens held; transformers keeps an empty tensor of one dimension where there are none."""
    assert layer.keys is not None
    return int(layer.keys.shape[-2]) if layer.keys.dim() == 4 else 0
