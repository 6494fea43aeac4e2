"""int8 with static scales: against the formula, written without the library's quantizer."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache_plugins import ArtifactError, build_cache
from kvcache_plugins.artifacts.scales import Scales, save_scales
from kvcache_plugins.attention.description import describe
from kvcache_plugins.backends.int8 import Int8Config, Int8Layer
from kvcache_plugins.cache import KVCache
from kvcache_plugins.kernels import loader
from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing import BackendConformance
from kvcache_plugins.testing.comparison import relative_rms
from kvcache_plugins.testing.models import tiny_model

KEY_ABSMAX = {0: [4.0, 5.5], 1: [3.0, 6.0]}
VALUE_ABSMAX = {0: [5.0, 4.5], 1: [7.0, 2.5]}
GRANULARITIES = ("head", "tensor")


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("scales")
    key, value = ({i: torch.tensor(t) for i, t in side.items()} for side in (KEY_ABSMAX, VALUE_ABSMAX))
    save_scales(folder, Scales(key, value))
    return str(folder)


@pytest.fixture(params=GRANULARITIES)
def config(request: pytest.FixtureRequest, calibration: str) -> dict[str, Any]:
    return {"backend": "int8", "granularity": request.param, "calibration": calibration}


def states(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 2, 2, tokens, 16, generator=generator).mul(1.3)
    return keys, values


def stored(number: float, absmax: list[float], head: int, granularity: str) -> float:
    """What is read of a number: the nearest of 255 evenly spaced ones up to the largest magnitude seen."""
    largest = absmax[head] if granularity == "head" else max(absmax)
    step = largest / 127
    return max(-127, min(127, round(number / step))) * step


def filled(config: dict[str, Any], keys: Tensor, values: Tensor) -> Int8Layer:
    layer = build_cache(tiny_model("llama"), config).packed_layers[1]
    assert isinstance(layer, Int8Layer)
    layer.update(keys, values)
    return layer


def test_codes_are_multiples_of_one_step(config: dict[str, Any]) -> None:
    keys, values = states(70)
    keys[0, 0, 3, 2], values[1, 1, 69, 15] = 100.0, -1e4  # beyond what was seen: saturates
    layer = filled({**config, "kernel": "torch"}, keys, values)
    for stream, exact, absmax in zip(
        layer.streams, (keys, values), (KEY_ABSMAX[1], VALUE_ABSMAX[1]), strict=True
    ):
        read = stream.decode(0, 70)
        for head in range(2):
            expected = [
                stored(x, absmax, head, config["granularity"]) for x in exact[:, head].flatten().tolist()
            ]
            assert torch.allclose(read[:, head].flatten(), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_scales_take_no_room(config: dict[str, Any]) -> None:
    layer = filled(config, *states(64))
    assert list(layer.records.layout.fields) == ["key_codes", "value_codes"]
    assert layer.records.data.shape == (2, 2, 1, 2 * 64 * 16)


def test_a_token_is_packed_as_it_comes(config: dict[str, Any]) -> None:
    """Dynamic scales of `granularity="tensor"` wait for 64 tokens; a static one is there already."""
    keys, values = states(70)
    whole, apart = filled(config, keys, values), filled(config, keys[:, :, :5], values[:, :, :5])
    assert apart.stored_keys.packed_length == 5 and whole.stored_keys.packed_length == 70
    apart.update(keys[:, :, 5:], values[:, :, 5:])
    for one, other in zip(whole.streams, apart.streams, strict=True):
        assert torch.equal(one.decode(0, 70), other.decode(0, 70))


def test_the_kernels_read_it(config: dict[str, Any]) -> None:
    if not loader.try_load():
        pytest.skip("no native kernels here")
    model = tiny_model("llama")
    prompt = torch.randint(3, 120, (2, 100), generator=torch.Generator().manual_seed(5))
    logits, used = [], []
    for kernel in ("native", "torch"):
        cache = build_cache(model, {**config, "kernel": kernel})
        with torch.no_grad():
            model(prompt, **as_argument(cache))
            logits.append(model(prompt[:, :1], **as_argument(cache)).logits)
        used.append({layer.kernel for layer in cache.packed_layers})
    assert used == [{"cpu"}, {"torch"}]
    assert relative_rms(logits[1], logits[0]) < 1e-4


def test_what_the_kernels_read_of_scales_goes_with_the_cache(config: dict[str, Any]) -> None:
    layer = filled(config, *states(70))
    handle = layer.update(*states(1))[0]
    assert isinstance(handle, KVHandle)
    side = describe(handle.tokens)
    assert side is not None and side.static_scale is not None
    scales = weakref.ref(side.static_scale)
    del layer, handle, side
    gc.collect()
    assert scales() is None


def test_it_is_saved_and_found_again(config: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache = build_cache(model, config)
    for layer in cache.packed_layers:
        layer.update(*states(70))
    cache.save_pretrained(tmp_path)
    loaded = KVCache.from_pretrained(tmp_path, model)
    for one, other in zip(cache.packed_layers, loaded.packed_layers, strict=True):
        assert torch.equal(one.stored_keys.decode(0, 70), other.stored_keys.decode(0, 70))


@pytest.mark.parametrize("granularity", ["head", "token", "tensor"])
def test_a_group_size_is_for_groups(granularity: str) -> None:
    with pytest.raises(ValueError, match=r"q_group_size is for granularity='group', got q_group_size=16"):
        Int8Config(granularity=granularity, q_group_size=16)


@pytest.mark.parametrize("granularity", ["group", "token"])
def test_only_some_granularities_have_static_scales(granularity: str) -> None:
    with pytest.raises(ValueError, match=r"Int8Config\.calibration") as failure:
        Int8Config(granularity=granularity, calibration="somewhere")
    for part in ("calibration", repr(granularity), "'somewhere'", "('head', 'tensor')"):
        assert part in str(failure.value)


@pytest.mark.parametrize("calibration", ["", 3])
def test_a_calibration_is_a_name(calibration: Any) -> None:
    with pytest.raises(ValueError, match=r"Int8Config\.calibration must be .* got"):
        Int8Config(calibration=calibration)


def test_a_missing_artifact_is_named() -> None:
    config = {"backend": "int8", "calibration": "no/such-artifact"}
    with pytest.raises(ArtifactError, match="no/such-artifact"):
        filled(config, *states(3))


class TestConformance(BackendConformance):
    @pytest.fixture
    def cache_config(self, config: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
        """No magnitude of the suite's states reaches 8."""
        absmax = {index: torch.tensor([8.0, 7.5]) for index in range(8)}
        save_scales(tmp_path, Scales(absmax, absmax))
        return {**config, "calibration": str(tmp_path)}

    @pytest.fixture(params=[64, 80, 24], ids=lambda head_dim: f"D{head_dim}")
    def states(self, request: pytest.FixtureRequest) -> tuple[Tensor, Tensor]:
        """Of as many heads as were calibrated."""
        return self.random_states(2, request.param, self.tokens)
