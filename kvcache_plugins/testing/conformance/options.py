"""Options: accepted, refused by name, per layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ...building import build_cache
from ...cache import KVCache
from ...models.cache_argument import as_argument
from .fixtures import Fixtures

__all__ = ["OptionConformance"]


class OptionConformance(Fixtures):
    """Round trip, wrong values, skipped and overridden layers."""

    def test_options_round_trip(self, cache: KVCache) -> None:
        config = type(cache).config_class.from_dict(cache.config.to_dict())
        assert config == cache.config

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("residual_length", -1), ("residual_length", "many"), ("sink_length", 1.5), ("kernel", "fast"),
            ("skip_layers", 3), ("skip_layers", [99]), ("layer_overrides", {"99": {}}),
            ("layer_overrides", [1]), ("layer_overrides", {"0": {"no_such_option": 1}}),
            ("no_such_option", 1), ("budget", 128),
        ],
    )  # fmt: skip
    def test_wrong_options_are_named(
        self, model: Any, cache_config: dict[str, Any], option: str, value: object
    ) -> None:
        if option == "budget" and option in build_cache(model, cache_config).config.option_names():
            pytest.skip("an evicting backend has a budget")
        with pytest.raises(ValueError, match=option) as failure:
            build_cache(model, {**cache_config, option: value})
        assert repr(value).strip("[]{}").split(":")[0] in str(failure.value)

    def test_layers_can_be_skipped_and_overridden(self, model: Any, cache_config: dict[str, Any]) -> None:
        options = {"skip_layers": [-1], "layer_overrides": {"0": {"residual_length": 4096}}}
        cache = build_cache(model, {**cache_config, **options})
        with torch.no_grad():
            model(torch.randint(3, 120, (1, 200)), **as_argument(cache))
            model(torch.randint(3, 120, (1, 1)), **as_argument(cache))
        assert cache.report().dense_layers == {len(cache.layers) - 1: "skip_layers"}
        assert cache.packed_layers[0].stored_keys.packed_length == 0
