"""Keys unlike the others: a token whose key points where few others do says something of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..eviction.cache import EvictingCache
from ..eviction.layer import EvictingLayer
from ..eviction.options import EvictingConfig
from ..layers.view import StreamView
from ..registry import register_backend

__all__ = ["KeyDiffCache", "KeyDiffConfig", "KeyDiffLayer"]


@dataclass(frozen=True, kw_only=True)
class KeyDiffConfig(EvictingConfig):
    """Options of [`KeyDiffCache`]; see [`EvictingConfig`]."""


class KeyDiffLayer(EvictingLayer):
    """Worth of a token: minus the cosine of its key with the mean direction of all keys held."""

    def ranks(self) -> Tensor:
        stream = self.stored_keys
        tokens = StreamView.of(stream)
        step = stream.slab_tokens
        runs = [(start, min(start + step, tokens.length)) for start in range(0, tokens.length, step)]
        first = self.padding.starts(self.ledger.scores)[:, None]
        mean: Tensor | float = 0.0
        for start, stop in runs:
            directions = F.normalize(tokens.read(start, stop).float(), dim=-1)
            is_real = torch.arange(start, stop, device=directions.device) >= first
            mean = mean + (directions * is_real[:, None, :, None]).sum(2, keepdim=True)
        assert isinstance(mean, Tensor)
        cosines = [F.cosine_similarity(tokens.read(*run).float(), mean, dim=-1) for run in runs]
        return -torch.cat(cosines, dim=2)


@register_backend("keydiff")
class KeyDiffCache(EvictingCache):
    """Keeps the tokens whose keys differ most from the mean direction of the keys.

    Paper: KeyDiff, arXiv 2504.15364.
    Deviates: the newest tokens are protected.
    Cost: 8 bytes per token and head beside the storage; reads the keys twice per eviction.
    Limits: no regard for what is asked.
    """

    config_class = KeyDiffConfig
    layer_class = KeyDiffLayer
