"""Tokens kept at random: what any choice has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..config import check_integer
from ..device_dtypes import doubled
from ..eviction.cache import EvictingCache
from ..eviction.layer import EvictingLayer
from ..eviction.options import EvictingConfig
from ..models.placement import num_processes
from ..registry import register_backend

__all__ = ["RandomCache", "RandomConfig", "RandomLayer"]

_BITS = 0x7FFFFFFF


@dataclass(frozen=True, kw_only=True)
class RandomConfig(EvictingConfig):
    """Options of [`RandomCache`]; see [`EvictingConfig`].

    Args:
        seed (`int`): Of the random choice. A token's score depends on it, the layer, the head and the
            position, so it is the same in every row and however the tokens arrive.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self, "seed", self.seed)


class RandomLayer(EvictingLayer):
    """Worth of a token: a hash of where it stands.

    Attributes:
        process (`int`): Of the processes that share the heads of a layer, one after another.
    """

    config: RandomConfig
    process = 0

    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        seen, count, heads = self.cumulative_length, keys.shape[2], keys.shape[1]
        positions = torch.arange(seen, seen + count, device=keys.device)[None]
        if self.pads is not None:  # counted from the first real token, so that a padded row is as it is alone
            positions = positions - self.pads.to(keys.device)[:, None]
        own = heads * self.process + torch.arange(heads, device=keys.device)
        streams = own + 1000003 * self.layer_idx + 7919 * self.config.seed
        mixed = _mixed(_mixed(streams)[:, None] + positions[:, None])
        return (doubled(mixed) / _BITS).float().to(keys.device).expand(keys.shape[:3])


def _mixed(numbers: Tensor) -> Tensor:
    """Integers in `[0, 2^31)` that look unrelated to `numbers` (multiply and xor-shift, twice)."""
    for factor in (0x45D9F3B, 0x119DE1F3):
        numbers = ((numbers ^ (numbers >> 15)) * factor) & _BITS
    return numbers ^ (numbers >> 13)


@register_backend("random")
class RandomCache(EvictingCache):
    """Keeps tokens at random, other ones for every head.

    Paper: none; every comparison of evicting caches has such a line.
    Deviates: nowhere; the newest tokens are protected, as in every evicting backend.
    Cost: 8 bytes per token and head beside the storage.
    Limits: a baseline.
    """

    config_class = RandomConfig
    layer_class = RandomLayer

    def attach(self, model: nn.Module) -> None:
        processes = num_processes(model)
        for layer in self.evicting_layers:
            assert isinstance(layer, RandomLayer)
            layer.process = torch.distributed.get_rank() % processes if processes > 1 else 0
