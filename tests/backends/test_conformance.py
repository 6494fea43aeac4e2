"""Every registered backend, and the options that change its storage, through the conformance suite."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import Tensor

from kvcache_plugins import list_backends
from kvcache_plugins.backends.locret import LocretLayer
from kvcache_plugins.eviction.layer import EvictingLayer
from kvcache_plugins.registry import get_backend
from kvcache_plugins.retaining.configuration import RetainingHeadsConfig
from kvcache_plugins.retaining.heads import RetainingHeads
from kvcache_plugins.testing import BackendConformance
from kvcache_plugins.testing.models import tiny_model

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "kivi": {
        "2bit-g32": {"nbits": 2, "q_group_size": 32, "residual_length": 32},
        "3bit-block": {"nbits": 3, "rope_mode": "block"},
        "8bit-g64": {"nbits": 8, "q_group_size": 64, "residual_length": 64},
        "k4v2-g128": {"key_bits": 4, "value_bits": 2, "q_group_size": 128, "residual_length": 128},
        "no-window": {"residual_length": 0},
    },
    "int8": {
        "group": {"granularity": "group", "q_group_size": 8},
        "token": {"granularity": "token"},
        "tensor": {"granularity": "tensor"},
    },
    "int4": {"smooth": {"smooth": 0.5}, "k8v4": {"key_bits": 8}, "8bit": {"nbits": 8}, "2bit": {"nbits": 2}},
    "float8": {"e5m2": {"format": "e5m2"}},
    "knorm": {
        "int4-keys8": {"storage": {"backend": "int4", "key_bits": 8}, "residual_length": 16},
        "float8": {"storage": {"backend": "float8"}},
    },
    "kvquant": {
        "2bit-window": {"nbits": 2, "residual_length": 32},
        "4bit-no-outliers": {"nbits": 4, "outlier_fraction": 0.0},
        "k4v2": {"key_bits": 4, "value_bits": 2, "outlier_fraction": 0.05},
    },
}


def _cases() -> list[Any]:
    cases = []
    for name in list_backends():
        tiny = get_backend(name).config_class.tiny().to_dict()
        for label, options in {"tiny": {}, **VARIANTS.get(name, {})}.items():
            cases.append(pytest.param({"backend": name, **tiny, **options}, id=f"{name}-{label}"))
    return cases


@pytest.fixture(params=_cases())
def cache_config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Untrained retaining heads for the suite's model."""
    folder = tmp_path_factory.mktemp("heads")
    RetainingHeads(RetainingHeadsConfig.from_model(tiny_model("llama"))).save_pretrained(folder)
    return str(folder)


@functools.cache
def _model() -> Any:
    """One for all tests, none of which changes it."""
    return tiny_model("llama")


def _score_or_guess(self: LocretLayer, keys: Tensor, values: Tensor) -> Tensor:
    """Scores of tokens that a test hands to a layer, which no projection was computed for."""
    try:
        return _score(self, keys, values)
    except RuntimeError:
        return EvictingLayer.score(self, keys, values)


_score = LocretLayer.score


class TestConformance(BackendConformance):
    @pytest.fixture
    def model(self) -> Any:
        return _model()

    @pytest.fixture
    def cache_config(
        self, cache_config: dict[str, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> dict[str, Any]:
        if cache_config["backend"] == "locret":
            monkeypatch.setattr(LocretLayer, "score", _score_or_guess)
            return cache_config | {"heads": request.getfixturevalue("heads")}
        return cache_config
