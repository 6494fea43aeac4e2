"""The fixtures of the suite: a tiny model, a fresh cache and layer, random states of several shapes."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from ...building import build_cache
from ...cache import KVCache
from ...layers.base import PackedLayer
from ...registry import get_backend
from ..models import tiny_model

__all__ = ["Fixtures", "refuse_to_evict"]

_LONGEST = 1200
"""Tokens that a layer is fed at most."""


class Fixtures:
    """What the tests of one backend are given; `cache_config` says which backend."""

    batch_size: ClassVar[int] = 2
    tokens: ClassVar[int] = 333

    @pytest.fixture
    def cache_config(self) -> dict[str, Any]:
        """The backend and its options."""
        raise NotImplementedError("Give the suite a `cache_config` fixture.")

    @pytest.fixture(autouse=True)
    def _keeps_every_token(self, cache_config: dict[str, Any]) -> None:
        """Refuse a backend that would evict some of what it is fed, or that packs nothing."""
        refuse_to_evict(cache_config)

    @pytest.fixture
    def model(self) -> Any:
        """A tiny model, of a family with grouped queries and rotary embeddings."""
        return tiny_model("llama")

    @pytest.fixture
    def cache(self, model: Any, cache_config: dict[str, Any]) -> KVCache:
        """A fresh cache of the backend."""
        cache = build_cache(model, cache_config)
        assert isinstance(cache, KVCache)
        return cache

    @pytest.fixture
    def layer(self, cache: KVCache) -> PackedLayer:
        """Its first layer."""
        return cache.packed_layers[0]

    @pytest.fixture(params=[(2, 64), (3, 80), (1, 128), (4, 24)], ids=lambda s: f"H{s[0]}-D{s[1]}")
    def states(self, request: pytest.FixtureRequest) -> tuple[Tensor, Tensor]:
        """Random keys and values, with channels of very different size as keys have them."""
        heads, head_dim = request.param
        return self.random_states(heads, head_dim, self.tokens)

    def random_states(self, heads: int, head_dim: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Random keys and values of shape `(batch_size, heads, tokens, head_dim)`."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.batch_size, heads, tokens, head_dim)
        keys = torch.randn(shape, generator=generator)
        return keys, torch.randn(shape, generator=generator)


def refuse_to_evict(cache_config: dict[str, Any]) -> None:
    """Fail where a backend would evict some of what the suite feeds it, or would not pack it."""
    if not get_backend(cache_config["backend"]).evicts:
        return
    budget, storage = cache_config.get("budget", _LONGEST), cache_config.get("storage")
    if budget < _LONGEST or storage is None:
        pytest.fail(
            "BackendConformance asks what every backend owes while it keeps all that it is given, packed, so "
            f"an evicting one needs a budget of at least {_LONGEST} tokens and a storage, as its "
            f"config_class.tiny() has them, got budget={budget!r} and storage={storage!r}; what it owes once "
            "it evicts is asked by EvictionConformance.",
            pytrace=False,
        )
