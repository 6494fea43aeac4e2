"""Every registered backend that evicts, and options that change what is held, through their suite."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache_plugins import list_backends
from kvcache_plugins.registry import get_backend
from kvcache_plugins.retaining.configuration import RetainingHeadsConfig
from kvcache_plugins.retaining.heads import RetainingHeads
from kvcache_plugins.testing import EvictionConformance
from tests.eviction.feeding import model_of

INT8, K8V4 = {"backend": "int8"}, {"backend": "int4", "key_bits": 8, "value_bits": 4, "residual_length": 6}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "expected_attention": {
        "compact": {"positions": "compact", "future_length": 40},
        "heads": {"head_floor": 0.2, "future_length": 40},
    },
    "h2o": {
        "k8v4": {"sink_length": 2, "local_length": 6, "stabilizer_length": 6, "storage": K8V4},
        "heads-k8v4": {
            "head_floor": 0.2, "sink_length": 2, "local_length": 6, "stabilizer_length": 6, "storage": K8V4,
        },
    },
    "keydiff": {"ragged": {"layer_overrides": {"0": {"budget": 40}}, "skip_layers": [1]}},
    "knorm": {"int8": {"storage": INT8}, "merged": {"pool": "merge"}},
    "kvzip": {"heads-int8": {"head_floor": 0.2, "storage": INT8}},
    "lagkv": {
        "float8": {"storage": {"backend": "float8"}},
        "compact": {"lag_size": 4, "positions": "compact"},
    },
    "locret": {"int8": {"storage": INT8}},
    "snapkv": {"heads": {"head_floor": 0.2}},
    "streaming_llm": {"compact": {"positions": "compact"}},
}  # fmt: skip
COUNTING = ("expected_attention", "h2o", "sirllm")
"""Backends that, as they say, remember what tokens that were cropped have looked at or predicted."""
CASES = [
    pytest.param({"backend": name, **options}, id=f"{name}-{label}" if options else name)
    for name in list_backends()
    if get_backend(name).evicts
    for label, options in {"plain": {}, **VARIANTS.get(name, {})}.items()
]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Untrained retaining heads for the suite's model."""
    folder = tmp_path_factory.mktemp("heads")
    config = RetainingHeadsConfig.from_model(model_of())
    RetainingHeads(config).save_pretrained(folder)
    return str(folder)


class TestConformance(EvictionConformance):
    @pytest.fixture
    def model(self, cache_config: dict[str, Any]) -> Any:
        return model_of(num_hidden_layers=3 if "layer_overrides" in cache_config else 2)

    @pytest.fixture(params=CASES)
    def cache_config(self, request: pytest.FixtureRequest) -> dict[str, Any]:
        given = {"heads": request.getfixturevalue("heads")} if request.param["backend"] == "locret" else {}
        return {**request.param, **given}

    @pytest.fixture
    def forgets_rejected_tokens(self, cache_config: dict[str, Any]) -> bool:
        return cache_config["backend"] not in COUNTING
