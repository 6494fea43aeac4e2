"""Feeding a model and an evicting cache by hand, and reading what the cache holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...building import build_cache
from ...eviction.cache import EvictingCache
from ...eviction.layer import EvictingLayer
from ...models.cache_argument import as_argument

__all__ = ["bound_cache", "chunks_of", "feed", "heads_of", "ids", "mask_of", "real_positions", "snapshot"]


def ids(length: int, batch: int = 1, seed: int = 0, pads: Sequence[int] | None = None) -> Tensor:
    """Random tokens, none twice in a row: equal tokens have keys of equal norm in the first layer.

    The rows of a padded batch are the ends of the rows without padding.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.stack([torch.randperm(509, generator=generator)[:length] + 3 for _ in range(batch)])
    return tokens if pads is None else tokens * mask_of(length, pads)


def mask_of(length: int, pads: Sequence[int]) -> Tensor:
    """The attention mask of left-padded rows."""
    return (torch.arange(length) >= torch.tensor(pads)[:, None]).long()


def chunks_of(length: int, size: int) -> list[int]:
    """Sizes of the calls in which `generate()` reads a prompt."""
    return [min(size, length - start) for start in range(0, length, size)]


def bound_cache(
    model: Any, config: dict[str, Any], prompt_length: int | None, mask: Tensor | None = None
) -> EvictingCache:
    """A cache that knows what `generate()` would have told it."""
    cache = build_cache(model, config)
    assert isinstance(cache, EvictingCache)
    return cache.bind(model, mask, prompt_length=prompt_length)


@torch.no_grad()
def feed(model: Any, cache: Any, tokens: Tensor, counts: Sequence[int], mask: Tensor | None = None) -> Tensor:
    """Call the model on `tokens` `(B, T)`, `counts` at a time, after what the cache has seen: logits."""
    seen = cache.get_seq_length()
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp_min(0)
    logits, start = [], 0
    for count in counts:
        stop = start + count
        arguments: dict[str, Any] = {}
        if mask is not None and positions is not None:
            arguments["attention_mask"] = mask[:, : seen + stop]
            arguments["position_ids"] = positions[:, seen + start : seen + stop]
        logits.append(model(tokens[:, start:stop], **as_argument(cache), **arguments).logits)
        start = stop
    assert start == tokens.shape[1]
    return torch.cat(logits, dim=1)


def heads_of(layer: Any) -> Iterator[tuple[int, EvictingLayer, int]]:
    """Every head of a layer: its number, what holds its tokens, and its place there."""
    parts = [(part.group.heads, part.layer) for part in getattr(layer, "parts", ())]
    for heads, part in parts or [(range(layer.num_heads), layer)]:
        for place, head in enumerate(heads):
            yield head, part, place


def real_positions(layer: Any) -> list[list[list[int]]]:
    """Positions of the real tokens a layer holds: `[row][head]`."""
    positions = {head: part.ledger.positions[:, place].tolist() for head, part, place in heads_of(layer)}
    held = list(zip(*(positions[head] for head in sorted(positions)), strict=True))
    pads = [0] * len(held) if layer.pads is None else layer.pads.tolist()
    return [[[p for p in head if p >= pad] for head in row] for row, pad in zip(held, pads, strict=True)]


def snapshot(cache: EvictingCache) -> list[dict[str, Tensor]]:
    """A copy of all that the layers hold and know of it."""
    return [{name: t.clone() for name, t in layer.state()[0].items()} for layer in cache.evicting_layers]
