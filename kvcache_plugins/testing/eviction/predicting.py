"""What `estimate` predicts, without data: the bytes that are then taken, whatever the storage."""

from __future__ import annotations

from typing import Any

import pytest

from ...building import build_cache
from ...estimation import estimate
from ...models.cache_argument import cache_of
from ...registry import get_backend
from .feeding import ids
from .fixtures import EvictionFixtures

__all__ = ["PredictionConformance"]

_STORAGES: tuple[dict[str, Any] | None, ...] = (
    None,
    {"backend": "int8"},
    {"backend": "int4", "residual_length": 8},
    {"backend": "float8"},
    {"backend": "kvquant", "calibration": "normal_float", "residual_length": 0},
)


class PredictionConformance(EvictionFixtures):
    """Layers that are given shapes alone, over every storage, with and without sinks."""

    @pytest.mark.parametrize("storage", _STORAGES, ids=lambda given: (given or {}).get("backend", "dense"))
    def test_what_is_predicted_is_taken(
        self, model: Any, cache_config: dict[str, Any], storage: dict[str, Any] | None
    ) -> None:
        block = 1 if storage is None else get_backend(storage["backend"]).config_class.block_tokens
        # room for a block that fills, and for one that is missing
        config = {**cache_config, "budget": 40 + 2 * block, "chunk_size": 50 + block, "storage": storage}
        if block > 1:
            config["positions"] = "compact"
        try:
            build_cache(model, {**config, "sink_length": 0})
        except ValueError as error:
            pytest.skip(f"does not go together: {error}")
        prompt, new = 2 * (50 + block), 3
        without_sinks = estimate(model, {**config, "sink_length": 0}, prompt, 2, new_tokens=new)
        cache = cache_of(
            model.generate(
                ids(prompt, 2), cache_implementation="quantized", cache_config={**config, "sink_length": 4},
                max_new_tokens=new, do_sample=False, return_dict_in_generate=True,
            )
        )  # fmt: skip
        predicted = estimate(model, {**config, "sink_length": 4}, prompt, 2, new_tokens=new)
        assert predicted >= without_sinks > 0
        if cache.config.is_uneven:
            return  # how many blocks are not filled depends on the tokens
        if block == 1:
            assert predicted == cache.kv_bytes()
        else:  # lists of outliers grow by what has moved
            assert predicted <= cache.kv_bytes()
