"""Trained retaining heads: small networks that say, when a token is read, how much it will matter later."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..config import BackendConfig, check_path_or_id
from ..errors import UnsupportedOperationError
from ..eviction.cache import EvictingCache
from ..eviction.layer import EvictingLayer
from ..eviction.options import EvictingConfig
from ..models.decoder import decoder_only_config, split_model_or_config
from ..models.facts import LayerFacts, refuse_split_heads
from ..registry import register_backend
from ..retaining.loading import load_heads
from ..retaining.projections import ProjectionTap

__all__ = ["LocretCache", "LocretConfig", "LocretLayer"]


@dataclass(frozen=True, kw_only=True)
class LocretConfig(EvictingConfig):
    """Options of [`LocretCache`]; see [`EvictingConfig`].

    From a `cache_config` without `budget`, it and what else is not given of `chunk_size`,
    `stabilizer_length` and `local_length` are what the heads were trained for (their `defaults`).

    Args:
        heads (`str`): Directory or hub id of retaining heads, as made by `kvcache-plugins train-locret`.
    """

    budget: int | float | None = field(default=None, metadata={"shown": "of its heads"})
    heads: str | None = field(default=None, metadata={"shown": "required"})

    def __post_init__(self) -> None:
        what = "retaining heads, as made by `kvcache-plugins train-locret`"
        check_path_or_id(self, "heads", self.heads, what)
        super().__post_init__()

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> LocretConfig:
        heads = options.get("heads")
        if options.get("budget") is None and isinstance(heads, str) and heads:
            given = {name: value for name, value in options.items() if name != "budget"}
            options = (load_heads(heads).config.defaults or {}) | given
        return super().from_dict(options)

    @classmethod
    def tiny(cls) -> LocretConfig:
        return cls(budget=8192, storage={"backend": "int8"}, heads="heads")


class LocretLayer(EvictingLayer):
    """Worth of a token: what its retaining head makes of its query, key and value projections.

    Attributes:
        heads (`str`): Where the heads are: an absolute path, or the name of a hub repository.
    """

    reads_model = True
    config: LocretConfig

    def __init__(self, config: BackendConfig, layer_idx: int, facts: LayerFacts) -> None:
        super().__init__(config, layer_idx, facts)
        self._tap: _Tap | None = None
        # a relative path is of the directory in which the cache is built, which may not stay the current one
        heads = str(self.config.heads)
        self.heads = str(Path(heads).resolve()) if Path(heads).is_dir() else heads

    def attach(self, tap: ProjectionTap) -> None:
        """Say where the projections of the layer can be taken from."""
        self._tap = _Tap(tap)

    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        if keys.is_meta or not self.evicts:
            return super().score(keys, values)
        tap = None if self._tap is None else self._tap()
        if tap is None:
            raise UnsupportedOperationError(
                f"Layer {self.layer_idx} was not told which model it serves, whose projections the retaining "
                "heads read: pass the cache to `generate()`, or call `cache.bind(model)` before the first "
                "forward."
            )
        return load_heads(self.heads).score(self.layer_idx, tap.take(self.layer_idx)).to(keys.device)


class _Tap(weakref.ref[ProjectionTap]):
    """Where projections are taken from. Copies share it; pickles, which leave the model, go without it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Tap:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


@register_backend("locret")
class LocretCache(EvictingCache):
    """Keeps the tokens that trained retaining heads score highest.

    Paper: Locret, arXiv 2410.01805.
    Deviates: the local window counts against the budget and is protected where it lies, so the end of the
        prompt is not read apart; positions stay absolute unless `positions="compact"`; what is kept may be
        packed, and then keeps its codes.
    Cost: 8 bytes per token and head beside the storage; the heads take 1 to 9 % of the model's weights.
    Limits: needs heads trained for the model (`kvcache-plugins train-locret`), and all heads of a layer in
        one process, so no tensor parallel model.
    """

    config_class = LocretConfig
    layer_class = LocretLayer

    def __init__(self, model_or_config: Any, *, max_cache_length: int | None = None, **options: Any) -> None:
        super().__init__(model_or_config, max_cache_length=max_cache_length, **options)
        self._check_heads(self.model_config)

    def attach(self, model: nn.Module) -> None:
        refuse_split_heads(model, self.backend)
        config = decoder_only_config(split_model_or_config(model)[1])
        if config is not self.model_config:
            self._check_heads(config)
        tap = ProjectionTap.of(model).attach(_reads_projections)
        for layer in self.evicting_layers:
            assert isinstance(layer, LocretLayer)
            layer.attach(tap)

    def _check_heads(self, config: Any) -> None:
        """Raise `ValueError` unless the heads of every layer were made for such a model."""
        names = {layer.heads for layer in self.evicting_layers if isinstance(layer, LocretLayer)}
        for name in sorted(names):
            load_heads(name).check_model(config)


def _reads_projections(cache: Any) -> bool:
    return isinstance(cache, LocretCache)
