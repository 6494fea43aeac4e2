"""Options: what is accepted, how they travel as plain values, and how single layers get their own."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvcache_plugins import BackendConfig, list_backends
from kvcache_plugins.config import (
    check_choice,
    check_integer,
    check_length,
    check_number,
    plain,
    uniform_sqnr_db,
)
from kvcache_plugins.eviction.options import EvictingConfig
from kvcache_plugins.registry import get_backend


@dataclass(frozen=True, kw_only=True)
class ShelfConfig(BackendConfig):
    """A backend's options, as an author would write them."""

    nbits: int = 4
    smooth: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "nbits", self.nbits, (2, 4, 8))
        check_number(self, "smooth", self.smooth, minimum=0.0, maximum=1.0)


CONFIGS = [get_backend(name).config_class for name in list_backends()]
NEEDED: dict[str, dict[str, Any]] = {
    "KVQuantConfig": {"calibration": "normal_float"},
    **{config.__name__: {"budget": 4096} for config in CONFIGS if issubclass(config, EvictingConfig)},
    "LocretConfig": {"budget": 4096, "heads": "heads"},
}
"""Options without a default."""
SINKS = {
    "ExpectedAttentionConfig": 4, "KVQuantConfig": 1, "KVzipConfig": 4, "KnormConfig": 4, "LagKVConfig": 4,
    "SirLLMConfig": 4, "StreamingLLMConfig": 4,
}  # fmt: skip


# -- single checks


def test_choices_accept_their_own() -> None:
    check_choice(ShelfConfig(), "nbits", 4, (2, 4, 8))
    check_choice(ShelfConfig(), "format", "e4m3", ("e4m3", "e5m2"))


@pytest.mark.parametrize("value", [3, 4.0, "4", None, True, [4]])
def test_choices_name_what_is_allowed(value: object) -> None:
    with pytest.raises(ValueError, match=r"ShelfConfig\.nbits must be one of \(1, 2, 4, 8\), got") as failure:
        check_choice(ShelfConfig(), "nbits", value, (1, 2, 4, 8))
    assert repr(value) in str(failure.value)


def test_integers() -> None:
    check_integer(ShelfConfig(), "length", 0)
    check_integer(ShelfConfig(), "length", 96, minimum=32, multiple_of=32)
    with pytest.raises(ValueError, match=r"ShelfConfig\.length must be an integer >= 0, got -1\."):
        check_integer(ShelfConfig(), "length", -1)
    with pytest.raises(ValueError, match=r"an integer >= 32 and a multiple of 32, got 100\."):
        check_integer(ShelfConfig(), "length", 100, minimum=32, multiple_of=32)
    check_integer(ShelfConfig(), "length", 2**31 - 1)
    with pytest.raises(ValueError, match="an integer >= 0 and at most 2147483647, got 2147483648"):
        check_integer(ShelfConfig(), "length", 2**31)
    for value in (True, 1.0, "1", None):
        with pytest.raises(ValueError, match="must be an integer >= 0, got"):
            check_integer(ShelfConfig(), "length", value)


def test_numbers() -> None:
    for value in (0, 1, 0.5):
        check_number(ShelfConfig(), "smooth", value, minimum=0.0, maximum=1.0)
    for value in (-0.01, 1.01, math.nan, math.inf, "0.5", None, True):
        with pytest.raises(ValueError, match=r"ShelfConfig\.smooth must be a number in \[0\.0, 1\.0\], got"):
            check_number(ShelfConfig(), "smooth", value, minimum=0.0, maximum=1.0)


def test_numbers_of_numpy_are_stored_as_pythons() -> None:
    given = ShelfConfig(
        residual_length=np.int64(32),
        nbits=np.uint8(2),
        smooth=np.float32(0.5),
        skip_layers=[np.int32(1)],
        layer_overrides={np.int64(0): {"nbits": np.int16(8)}},
    )
    plainly = ShelfConfig(
        residual_length=32, nbits=2, smooth=0.5, skip_layers=[1], layer_overrides={0: {"nbits": 8}}
    )
    assert given == plainly and json.dumps(given.to_dict()) == json.dumps(plainly.to_dict())
    assert given.for_layer(0, 2).nbits == 8
    check_integer(ShelfConfig(), "length", np.int64(0))
    check_number(ShelfConfig(), "smooth", np.float64(1.0), minimum=0.0, maximum=1.0)
    evicting = get_backend("knorm").config_class.from_dict(
        {
            "budget": np.int64(300),
            "residual_length": np.int64(8),
            "storage": {"backend": "int4", "nbits": np.int8(8)},
        }
    )
    assert json.loads(json.dumps(evicting.to_dict()))["storage"] == {"backend": "int4", "nbits": 8}
    assert [type(value) for value in (evicting.budget, evicting.residual_length)] == [int, int]  # type: ignore[attr-defined]
    assert get_backend("knorm").config_class.from_dict({"budget": np.float32(0.5)}).budget == 0.5  # type: ignore[attr-defined]


def test_only_numbers_are_made_plain() -> None:
    values = [True, 3, 0.5, "1", None, np.zeros(2), np.zeros(2, dtype=bool), object(), 1j]
    for value, found in zip(values, plain(values), strict=True):
        assert found is value
    assert plain(np.bool_(True)) is True and plain([np.bool_(False)]) == [False]
    assert type(plain(np.float64(0.5))) is float


def test_lengths() -> None:
    assert check_length("max_cache_length", None) is None
    assert type(check_length("max_cache_length", np.int64(7))) is int
    assert check_length("max_cache_length", 10**30) == 10**30  # transformers' word for no limit
    for value in (0, -5, 5.5, True, "5"):
        with pytest.raises(
            ValueError, match=r"max_cache_length must be an integer >= 1, or None.* got"
        ) as failure:
            check_length("max_cache_length", value)
        assert repr(value) in str(failure.value)


# -- dictionaries


def test_unknown_options_are_named_with_the_closest() -> None:
    with pytest.raises(
        ValueError, match=r"'nbit' is not an option of ShelfConfig\. Did you mean 'nbits'\?"
    ) as failure:
        ShelfConfig.from_dict({"nbit": 2})
    assert "'smooth'" in str(failure.value) and "got nbit=2" in str(failure.value)
    with pytest.raises(ValueError, match=r"'zzz' is not an option of ShelfConfig\. Its options"):
        ShelfConfig.from_dict({"zzz": None})


def test_what_is_given_to_an_unknown_option_is_told_in_a_line() -> None:
    with pytest.raises(ValueError, match="got model=") as failure:
        ShelfConfig.from_dict({"model": {f"layer {i}": "\n".join("abc") for i in range(100)}})
    assert "\n" not in str(failure.value) and len(str(failure.value)) < 1000


@pytest.mark.parametrize("config_class", CONFIGS, ids=lambda c: c.__name__)
def test_options_survive_json(config_class: type[BackendConfig]) -> None:
    needed = NEEDED.get(config_class.__name__, {})
    for config in (config_class(**needed), config_class.tiny()):
        again = config_class.from_dict(json.loads(json.dumps(config.to_dict())))
        assert again == config and hash(again.skip_layers) == hash(config.skip_layers)
        assert set(config.to_dict()) == set(config_class.option_names())


@pytest.mark.parametrize("config_class", CONFIGS, ids=lambda c: c.__name__)
def test_every_backend_has_the_common_options(config_class: type[BackendConfig]) -> None:
    common = {field.name for field in dataclasses.fields(BackendConfig)}
    assert common == {"kernel", "residual_length", "sink_length", "skip_layers", "layer_overrides", "offload"}
    assert common <= set(config_class.option_names())
    config = config_class(**NEEDED.get(config_class.__name__, {}))
    sinks = SINKS.get(config_class.__name__, 0)
    assert (config.kernel, config.sink_length, config.skip_layers) == ("auto", sinks, ())


def test_published_defaults() -> None:
    defaults = {name: get_backend(name).config_class() for name in ("kivi", "int8", "int4", "float8")}
    assert {name: config.residual_length for name, config in defaults.items()} == {
        "kivi": 128, "int8": 0, "int4": 64, "float8": 0,
    }  # fmt: skip
    assert (defaults["kivi"].nbits, defaults["kivi"].q_group_size, defaults["kivi"].rope_mode) == (
        4,
        32,
        "auto",
    )
    assert (defaults["int4"].nbits, defaults["int4"].smooth, defaults["int8"].granularity) == (4, 0.0, "head")
    assert (defaults["float8"].format, defaults["float8"].scale) == ("e4m3", "token_head")


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ShelfConfig().nbits = 2  # type: ignore[misc]
    assert ShelfConfig().layer_overrides is not ShelfConfig().layer_overrides
    config = ShelfConfig(layer_overrides={"0": {"nbits": 2}})
    config.to_dict()["layer_overrides"]["0"]["nbits"] = 8
    assert config.layer_overrides == {"0": {"nbits": 2}}


# -- common options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kernel": "fast"}, r"kernel must be one of \('auto', 'torch', 'native'\), got 'fast'"),
        ({"residual_length": -1}, "residual_length must be an integer >= 0, got -1"),
        ({"residual_length": 1.5}, r"residual_length must be an integer >= 0, got 1\.5"),
        ({"sink_length": True}, "sink_length must be an integer >= 0, got True"),
        ({"skip_layers": 3}, "skip_layers must be a list of integers, got 3"),
        ({"skip_layers": "03"}, "skip_layers must be a list of integers, got '03'"),
        ({"skip_layers": {0: True}}, r"skip_layers must be a list of integers, got \{0: True\}"),
        ({"skip_layers": [1, "2"]}, "skip_layers must be a list of integers, got '2' in it"),
        ({"skip_layers": [False]}, "skip_layers must be a list of integers, got False in it"),
        ({"layer_overrides": [1]}, r"layer_overrides must be a dict of dicts such as .*got \[1\]"),
        ({"nbits": 3}, r"nbits must be one of \(2, 4, 8\), got 3"),
    ],
    ids=str,
)
def test_wrong_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"ShelfConfig\.{said}"):
        ShelfConfig.from_dict(options)


def test_skipped_layers_count_from_both_ends() -> None:
    config = ShelfConfig(skip_layers=[0, -1, 2])  # type: ignore[arg-type]
    assert config.skipped_layers(4) == {0, 2, 3}
    assert config.to_dict()["skip_layers"] == [0, -1, 2]
    with pytest.raises(ValueError, match=r"skip_layers must name layers from -2 to 1, got 2"):
        config.skipped_layers(2)


# -- options of single layers


def test_overrides_reach_their_layer_only() -> None:
    config = ShelfConfig(
        layer_overrides={"0": {"nbits": 8}, "-1": {"nbits": 2, "sink_length": 3}, 2: {"smooth": 1}}
    )  # type: ignore[dict-item]
    layers = [config.for_layer(index, 5) for index in range(5)]
    assert [layer.nbits for layer in layers] == [8, 4, 4, 4, 2]
    assert [layer.sink_length for layer in layers] == [0, 0, 0, 0, 3]
    assert [layer.smooth for layer in layers] == [0.0, 0.0, 1, 0.0, 0.0]
    assert layers[0].layer_overrides == {}
    assert layers[1] is config


def test_two_overrides_of_one_layer_add_up() -> None:
    config = ShelfConfig(layer_overrides={"1": {"nbits": 8}, "-1": {"smooth": 0.5}})
    assert (config.for_layer(1, 2).nbits, config.for_layer(1, 2).smooth) == (8, 0.5)


def test_two_overrides_of_one_layer_do_not_contradict_each_other() -> None:
    said = r"ShelfConfig\.layer_overrides\['-1'\]: layer 1 is named twice, also with nbits=8.*got nbits=2"
    config = ShelfConfig(layer_overrides={"1": {"nbits": 8}, "-1": {"nbits": 2}})
    with pytest.raises(ValueError, match=said):
        config.for_layer(1, 2)
    same = ShelfConfig(layer_overrides={"1": {"nbits": 8}, "-1": {"nbits": 8}})
    assert same.for_layer(1, 2).nbits == 8


def test_an_override_of_a_layer_that_is_left_dense_says_so() -> None:
    config = ShelfConfig(skip_layers=[-1], layer_overrides={"1": {"nbits": 8}})
    with pytest.raises(ValueError, match=r"layer 1 is left dense by skip_layers=\[-1\].* got {'nbits': 8}"):
        config.for_layer(1, 2)
    assert config.for_layer(0, 2) is config


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"5": {"nbits": 8}}, r"layer_overrides must name layers from -2 to 1, got '5'"),
        ({"first": {"nbits": 8}}, r"layer_overrides must name layers from -2 to 1, got 'first'"),
        ({"1.5": {"nbits": 8}}, r"layer_overrides must name layers from -2 to 1, got '1\.5'"),
        ({"1.0": {"nbits": 8}}, r"layer_overrides must name layers from -2 to 1, got '1\.0'"),
        ({" 1": {"nbits": 8}}, r"layer_overrides must name layers from -2 to 1, got ' 1'"),
        ({1.0: {"nbits": 8}}, r"layer_overrides must name layers from -2 to 1, got 1\.0"),
        ({True: {"nbits": 8}}, r"layer_overrides must name layers from -2 to 1, got True"),
        ({None: {"nbits": 8}}, r"layer_overrides must name layers from -2 to 1, got None"),
        ({"0": 8}, r"layer_overrides\['0'\] must be a dict of options, got 8"),
        (
            {"0": {"nbit": 8}},
            r"layer_overrides\['0'\]: 'nbit' cannot be set for a single layer\. Did you mean 'nbits'\?",
        ),
        (
            {"0": {"kernel": "torch"}},
            r"'kernel' cannot be set for a single layer.*Allowed are .*got kernel='torch'",
        ),
        ({"0": {"skip_layers": [1]}}, r"'skip_layers' cannot be set for a single layer"),
    ],
    ids=str,
)
def test_wrong_overrides(overrides: dict[str, Any], said: str) -> None:
    config = ShelfConfig(layer_overrides=overrides)
    # whichever layer is asked about: nothing waits until its turn comes
    for index in range(2):
        with pytest.raises(ValueError, match=rf"ShelfConfig\.{said}" if said.startswith("layer_") else said):
            config.for_layer(index, 2)


def test_a_layer_of_very_many_digits() -> None:
    # more than Python turns into a number
    with pytest.raises(ValueError, match="layer_overrides must name layers from -2 to 1, got '99"):
        ShelfConfig(layer_overrides={"9" * 5000: {"nbits": 8}}).for_layer(0, 2)


def test_a_wrong_value_in_an_override() -> None:
    config = ShelfConfig(layer_overrides={"1": {"nbits": 5}})
    named = r"ShelfConfig\.layer_overrides\['1'\]"
    with pytest.raises(ValueError, match=rf"^{named}: ShelfConfig\.nbits must be one of \(2, 4, 8\), got 5"):
        config.for_layer(1, 2)
    twice = ShelfConfig(layer_overrides={"1": {"smooth": 2}, "-1": {"residual_length": 8}})
    with pytest.raises(ValueError, match=rf"^{named} and .*\['-1'\]: ShelfConfig\.smooth must be a number"):
        twice.for_layer(1, 2)


def test_a_layer_does_not_inherit_what_its_own_options_leave_without_meaning() -> None:
    groups = {"granularity": "group", "q_group_size": 16}
    config_class: Any = get_backend("int8").config_class
    config = config_class(**groups, layer_overrides={"0": {"granularity": "head"}, "1": {"sink_length": 4}})
    assert config.for_layer(0, 3).granularity == "head"
    assert [config.for_layer(layer, 3).q_group_size for layer in (1, 2)] == [16, 16]
    asked_for = config_class(layer_overrides={"0": {"granularity": "head", "q_group_size": 16}})
    with pytest.raises(ValueError, match=r"layer_overrides\['0'\]: .*q_group_size is for granularity='gr"):
        asked_for.for_layer(0, 3)
    config_class = get_backend("float8").config_class
    config = config_class(scale="head", calibration="x", layer_overrides={"0": {"scale": "token_head"}})
    assert [config.for_layer(layer, 2).calibration for layer in (0, 1)] == [None, "x"]


def test_bits_of_keys_and_values() -> None:
    config_class = get_backend("int4").config_class
    for given, expected in (
        ({}, (4, 4)),
        ({"nbits": 8}, (8, 8)),
        ({"key_bits": 8}, (8, 4)),
        ({"nbits": 8, "value_bits": 2}, (8, 2)),
    ):
        config: Any = config_class.from_dict(given)
        assert (config.bits_of("key"), config.bits_of("value")) == expected
        assert config.sqnr_floor_db == uniform_sqnr_db(min(expected))
    quant: Any = get_backend("kvquant").config_class
    assert quant(calibration="normal_float", key_bits=2).sqnr_floor_db == 3.0
    allowed = {"int4": (2, 4, 8), "kivi": (2, 3, 4, 8), "kvquant": (2, 3, 4)}
    for name, bits in allowed.items():
        for wrong in {1, 2, 3, 4, 5, 8} - {*bits}:
            for option in ("nbits", "key_bits", "value_bits"):
                with pytest.raises(ValueError, match=rf"{option} must be one of .*, got {wrong}"):
                    get_backend(name).config_class.from_dict({option: wrong})


def test_the_promised_quality_of_uniform_codes() -> None:
    # 6 dB a bit, and what Gaussian groups of 128 really reach
    import torch

    from kvcache_plugins.testing import sqnr_db
    from tests.reference.quantizers import asymmetric

    states = torch.randn(64, 128)
    for nbits in (2, 3, 4, 8):
        reached = sqnr_db(states, asymmetric(states, nbits, axis=-1).dequantized)
        assert uniform_sqnr_db(nbits) <= reached <= uniform_sqnr_db(nbits) + 3
