"""KVQuant with an artifact: its share of outliers is the cache's, and its sinks need not be."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from kvcache_plugins import KVCache, build_cache, estimate
from kvcache_plugins.backends.kvquant import KVQuantConfig
from kvcache_plugins.models.cache_argument import as_argument

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama-books"
BUNDLED = MODEL.with_name(f"{MODEL.name}-kvquant3")
TOKENS = 256


@cache
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@cache
def states() -> list[tuple[Tensor, Tensor]]:
    """Keys and values of every layer, of tokens drawn at random."""
    dense = DynamicCache(config=model().config)
    ids = torch.randint(3, 2000, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model()(ids, **as_argument(dense))
    return [(layer.keys, layer.values) for layer in dense.layers]


def artifact(folder: Path, **facts: Any) -> str:
    """The bundled artifact, which says other things of itself."""
    made = folder / "-".join(f"{name}{value}" for name, value in facts.items())
    shutil.copytree(BUNDLED, made)
    known = json.loads((made / "kvquant.json").read_text())
    (made / "kvquant.json").write_text(json.dumps(known | facts))
    return str(made)


def uses(calibration: str, **options: Any) -> dict[str, dict[str, Any]]:
    packed = {"backend": "kvquant", "calibration": calibration, "residual_length": 0, **options}
    evicting = {"backend": "streaming_llm", "budget": TOKENS, "positions": "compact", "storage": packed}
    return {"cache": packed, "storage": evicting}


def filled(config: dict[str, Any]) -> KVCache:
    found = build_cache(model(), config)
    for layer, (keys, values) in zip(found.packed_layers, states(), strict=True):
        layer.set_prompt_length(TOKENS)
        layer.final_length = None
        layer.update(keys, values)
    return found


@pytest.mark.parametrize("use", ["cache", "storage"])
def test_the_share_of_outliers_is_the_artifacts(use: str, tmp_path: Path) -> None:
    made = artifact(tmp_path, outlier_fraction=0.05)
    found = filled(uses(made)[use])
    given = filled(uses(made, outlier_fraction=0.05)[use])
    for layer, same in zip(found.packed_layers, given.packed_layers, strict=True):
        for stream, other in zip(layer.streams, same.streams, strict=True):
            assert stream.codec.outlier_capacity == 2 * round(0.05 / 2 * 2 * 64) * 64
            assert torch.equal(stream.decode(0, TOKENS), other.decode(0, TOKENS))
    assert found.kv_bytes() == given.kv_bytes() == found.report().kv_bytes
    size = estimate(model(), uses(made)[use], TOKENS)
    assert size == estimate(model(), uses(made, outlier_fraction=0.05)[use], TOKENS)
    assert size > estimate(model(), uses(str(BUNDLED))[use], TOKENS)
    found.save_pretrained(tmp_path / "saved")
    loaded = KVCache.from_pretrained(tmp_path / "saved", model())
    assert loaded.config == found.config
    for layer, same in zip(found.packed_layers, loaded.packed_layers, strict=True):
        assert torch.equal(layer.stored_keys.decode(0, TOKENS), same.stored_keys.decode(0, TOKENS))


@pytest.mark.parametrize("use", ["cache", "storage"])
def test_another_share_of_outliers_is_refused(use: str, tmp_path: Path) -> None:
    made = artifact(tmp_path, outlier_fraction=0.05)
    said = rf"KVQuantConfig\.outlier_fraction must be 0\.05, or not .*{re.escape(made)}.* got 0\.01\."
    with pytest.raises(ValueError, match=said):
        build_cache(model(), uses(made, outlier_fraction=0.01)[use])


def test_a_layer_of_another_artifact_has_its_share(tmp_path: Path) -> None:
    made = artifact(tmp_path, outlier_fraction=0.05)
    options = {"layer_overrides": {"1": {"calibration": made}, "2": {"calibration": "normal_float"}}}
    caches = [build_cache(model(), uses(str(BUNDLED))["cache"] | options)]
    shares = [layer.config.outlier_share for layer in caches[0].packed_layers]  # type: ignore[attr-defined]
    assert shares == [0.01, 0.05, *[0.01] * 4]
    with pytest.raises(ValueError, match=r"outlier_fraction must be 0\.05, .* got 0\.01\."):
        build_cache(model(), uses(str(BUNDLED), outlier_fraction=0.01)["cache"] | options)


def test_without_an_artifact_it_is_a_hundredth() -> None:
    assert KVQuantConfig(calibration="normal_float").outlier_share == 0.01
    assert KVQuantConfig(calibration="normal_float", outlier_fraction=0).outlier_share == 0
    for fraction in (None, 0.05):  # also of the numbers outside of ranges that are learnt
        config = uses("normal_float", outlier_fraction=fraction)["cache"]
        codec: Any = build_cache(model(), config).packed_layers[0].key_stream(64).codec
        assert codec.inner.fraction == (fraction or 0.01)
    sizes = {
        fraction: estimate(model(), uses("normal_float", outlier_fraction=fraction)["cache"], TOKENS)
        for fraction in (None, 0.01, 0.05)
    }
    assert sizes[None] == sizes[0.01] < sizes[0.05]


# ---- sinks ----


def sqnr_db(exact: Tensor, read: Tensor) -> float:
    return float(10 * torch.log10(exact.square().sum() / (exact - read).square().sum()))


@pytest.mark.parametrize("channels", [4, 64])
def test_outliers_make_up_for_a_sink_that_is_packed(channels: int) -> None:
    read = {sinks: build_cache(model(), uses(str(BUNDLED), sink_length=sinks)["cache"]) for sinks in (0, 1)}
    for index, (keys, values) in enumerate(states()):
        keys = keys.clone()
        keys[:, :, 0, :channels] *= 30  # ranges know no such keys
        decoded = {}
        for sinks, found in read.items():
            found.layers[index].update(keys, values)
            decoded[sinks] = found.packed_layers[index].stored_keys.decode(0, TOKENS)
        assert torch.equal(decoded[1][:, :, 0], keys[:, :, 0])
        assert sqnr_db(keys[:, :, 0], decoded[0][:, :, 0]) > 20
        own = [sqnr_db(keys[:, :, 1:64], decoded[sinks][:, :, 1:64]) for sinks in (0, 1)]
        assert 0 <= own[1] - own[0] < {4: 1.0, 64: 5.0}[channels]
        assert torch.equal(decoded[0][:, :, 64:], decoded[1][:, :, 64:])


@pytest.mark.parametrize("use", ["cache", "storage"])
@pytest.mark.parametrize(("fraction", "made_with", "sinks"), [(0.01, 4, 0), (0.0, 4, 4), (0.0, 4, 3)])
def test_only_without_outliers_are_missing_sinks_told(
    fraction: float, made_with: int, sinks: int, use: str, tmp_path: Path
) -> None:
    made = artifact(tmp_path, outlier_fraction=fraction, sink_length=made_with)
    config = uses(made)[use] | {"sink_length": sinks}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        build_cache(model(), config)
    messages = [str(warning.message) for warning in told if "sink_length" in str(warning.message)]
    if fraction == 0 and sinks < made_with:
        assert len(messages) == 1 and "sink_length=3 packs" in messages[0] and made in messages[0]
    else:
        assert messages == []
