"""A wrong option of any backend is a `ValueError` that names it, when the cache is built."""

from __future__ import annotations

import functools
import inspect
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvcache_plugins import KVCache, build_cache, estimate, list_backends
from kvcache_plugins.eviction.options import EvictingConfig
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import get_backend
from kvcache_plugins.retaining.configuration import RetainingHeadsConfig
from kvcache_plugins.retaining.heads import RetainingHeads
from kvcache_plugins.testing import tiny_model

VALUES: tuple[Any, ...] = (
    None, "", " ", "x", b"x", -1, 0, 1, 1.0, 4.0, 1.5, True, False, math.nan, math.inf, -math.inf, 1e308,
    2**31, 2**70, -(2**70), [], [1], ["x"], (), {}, {"x": 1}, {0: 1}, {"0": None}, {None: {}}, {1.7: {}},
    {True: {}}, set(), object(), torch.tensor(1), torch.tensor(4.0), torch.tensor([1, 2]),
    np.int64(4), np.int32(32), np.float64(0.25), np.float32(0.5), np.bool_(True), [np.int64(1)],
)  # fmt: skip
NEEDED: dict[str, dict[str, Any]] = {"kvquant": {"calibration": "normal_float"}}
FULL = ("int8", "knorm")  # of one backend that packs and one that evicts, also the options they inherit


@functools.cache
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("heads")
    RetainingHeads(RetainingHeadsConfig.from_model(model())).save_pretrained(folder)
    return str(folder)


def _cases() -> list[tuple[str, str]]:
    cases = []
    for name in list_backends():
        config_class = get_backend(name).config_class
        options = config_class.option_names() if name in FULL else inspect.get_annotations(config_class)
        cases += [(name, option) for option in ("backend", *options) if option != "block_tokens"]
    return cases


def _needed(backend: str, heads: str) -> dict[str, Any]:
    needed = {"backend": backend, **NEEDED.get(backend, {})}
    if issubclass(get_backend(backend).config_class, EvictingConfig):
        needed["budget"] = 64
    return needed | ({"heads": heads} if backend == "locret" else {})


def _built(config: dict[str, Any]) -> KVCache | ValueError:
    try:
        return build_cache(model(), config)
    except ValueError as error:
        return error


@pytest.mark.parametrize(("backend", "option"), _cases())
def test_a_value_of_any_type_serves_or_is_refused_by_name(backend: str, option: str, heads: str) -> None:
    prompt = torch.randint(3, 120, (1, 100), generator=torch.Generator().manual_seed(5))
    for value in VALUES:
        found = _built({**_needed(backend, heads), option: value})
        if isinstance(found, ValueError):
            assert option in str(found), f"{value!r}: {found}"
            continue
        held = json.loads(json.dumps(found.config.to_dict()))[option]
        if value is not None:  # which stands for another
            assert held == (list(value) if isinstance(value, (tuple, set)) else value), repr(value)
            assert isinstance(held, bool) == isinstance(value, (bool, np.bool_)), repr(value)
        model().generate(prompt, **as_argument(found), max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize(
    ("backend", "options", "said"),
    [
        ("int4", {"nbits": 4.0}, r"Int4Config\.nbits must be one of \(2, 4, 8\), got 4\.0"),
        ("kivi", {"key_bits": 4.0}, r"KIVIConfig\.key_bits must be one of \(2, 3, 4, 8\), got 4\.0"),
        ("random", {"seed": 2**60}, rf"seed must be an integer >= 0 and at most 2147483647, got {2**60}"),
        ("float8", {"scale": "head", "calibration": 5}, r"Float8Config\.calibration must be .*, got 5"),
        ("float8", {"scale": "head", "calibration": ""}, r"Float8Config\.calibration must be .*, got ''"),
        ("int8", {"calibration": ""}, r"Int8Config\.calibration must be the directory .*, got ''"),
        ("kvquant", {"calibration": ""}, r"KVQuantConfig\.calibration must be .*'normal_float'.*, got ''"),
        (
            "locret",
            {"heads": Path("x")},
            r"heads must be .*, as a string, got (Posix|Windows)Path",
        ),
        (
            "knorm",
            {"storage": {"backend": "hqq"}},
            r"storage=.*'hqq'.*names no backend that can store. Allowed are .*'int8'",
        ),
        ("int8", {"max_cache_length": 9}, r"'max_cache_length' is not an option of Int8Config"),
        ("int8", {"model_or_config": 9}, r"'model_or_config' is not an option of Int8Config"),
        ("int8", {3: 4}, r"3 is not an option of Int8Config.*got 3=4"),
        ("locret", {"heads": ""}, r"LocretConfig\.heads must be the directory or hub id .*, got ''"),
        ("int4", {"layer_overrides": {1.7: {"nbits": 8}}}, r"layer_overrides must name layers .* got 1\.7"),
        ("kivi", {"layer_overrides": {True: {"nbits": 8}}}, r"layer_overrides must name layers .* got True"),
        ("knorm", {"residual_length": ""}, r"residual_length must be an integer >= 0, got ''"),
        ("knorm", {"residual_length": False}, r"residual_length must be an integer >= 0, got False"),
        (
            "knorm",
            {"pool": {"kind": "conv", "weights": "nowhere.safetensors"}},
            r"KnormConfig\.pool: nowhere\.safetensors cannot be read",
        ),
        ("int8", {"skip_layers": {0: 1}}, r"skip_layers must be a list of integers, got \{0: 1\}"),
        ("int8", {"skip_layers": torch.tensor(1)}, r"skip_layers must be a list of integers, got tensor"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_options_say_what_is_allowed(
    backend: str, options: dict[str, Any], said: str, heads: str
) -> None:
    with pytest.raises(ValueError, match=said):
        build_cache(model(), {**_needed(backend, heads), **options})


def test_backends_of_transformers_are_not_said_to_be_unknown() -> None:
    with pytest.raises(ValueError, match=r"'Quanto' is transformers' own.*Allowed here are .*'kivi'"):
        build_cache(model(), {"backend": "Quanto"})


@pytest.mark.parametrize("given", [None, "kivi", [("backend", "dense")]])
def test_options_that_are_no_dict(given: Any) -> None:
    for function in (build_cache, functools.partial(estimate, tokens=9)):
        with pytest.raises(ValueError, match=r"`cache_config` must be a dict such as .*got"):
            function(model(), given)


@pytest.mark.parametrize("evicts", [False, True])
def test_more_outliers_than_a_block_lists(evicts: bool) -> None:
    wide = tiny_model("llama").config
    wide.num_attention_heads, wide.num_key_value_heads, wide.head_dim = 40, 40, 128

    def build(fraction: float) -> KVCache:
        packed = {"backend": "kvquant", "calibration": "normal_float", "outlier_fraction": fraction}
        evicting = {"backend": "knorm", "budget": 1024, "positions": "compact", "storage": packed}
        return build_cache(wide, evicting if evicts else packed)

    with pytest.raises(
        ValueError, match=r"outlier_fraction must be at most 0\.099609 in layer 0.*got 0\.1\."
    ):
        build(0.1)
    states = torch.randn(1, 40, 64, 128)
    build(0.099609).layers[0].update(states, states)


def test_a_missing_backend_is_told_whatever_the_keys_are() -> None:
    with pytest.raises(ValueError, match="needs a 'backend', got only"):
        build_cache(model(), {"nbits": 4, None: 1})  # type: ignore[dict-item]
