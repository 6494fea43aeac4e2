"""Saved caches whose options name an artifact: it is found from elsewhere, and must be the same."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvcache_plugins import ArtifactError, KVCache, build_cache
from kvcache_plugins.artifacts.codebooks import load_codebooks, save_codebooks
from kvcache_plugins.artifacts.scales import load_scales, save_scales
from kvcache_plugins.backends import kvquant
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.quantizers.nonuniform import normal_float_codebook

MODEL = Path(__file__).resolve().parents[1] / "examples" / "models" / "tiny-llama-books"
BUNDLED = f"{MODEL}-kvquant3"
KVQUANT = {"backend": "kvquant", "calibration": "made", "residual_length": 0}
USES: dict[str, dict[str, Any]] = {
    "kvquant": KVQUANT,
    "int8": {"backend": "int8", "calibration": "made"},
    "float8": {"backend": "float8", "scale": "head", "calibration": "made"},
    "one-layer": {"backend": "int8", "layer_overrides": {"2": {"calibration": "made"}}},
    "storage": {"backend": "streaming_llm", "budget": 200, "positions": "compact", "storage": KVQUANT},
}


@cache
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def calibrated(folder: Path, factor: float = 1.0) -> None:
    """The bundled calibration, of ranges that are wider."""
    codebooks, scales = load_codebooks(BUNDLED), load_scales(BUNDLED)
    tensors = {
        name: tensor * factor if name.endswith(("lower", "upper")) else tensor
        for name, tensor in codebooks.tensors.items()
    }
    sides = (scales.key_absmax, scales.value_absmax)
    keys, values = ({index: absmax * factor for index, absmax in side.items()} for side in sides)
    save_codebooks(folder, dataclasses.replace(codebooks, tensors=tensors))
    save_scales(folder, dataclasses.replace(scales, key_absmax=keys, value_absmax=values))


def read(kv_cache: KVCache, count: int, seed: int) -> Tensor:
    ids = torch.randint(3, 2000, (1, count), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        logits: Tensor = model()(ids, **as_argument(kv_cache)).logits
    return logits


@pytest.fixture
def saved(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KVCache:
    """A cache whose artifact is named from where it was made, saved into the folder `cache` beside that."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    calibrated(Path("made"))
    made = build_cache(model(), USES[request.param]).bind(model())
    read(made, 256, seed=0)
    made.save_pretrained("cache")
    return made


def assert_loads(folder: str, kv_cache: KVCache) -> None:
    loaded = KVCache.from_pretrained(folder, model())
    assert torch.equal(read(loaded, 8, seed=1), read(kv_cache, 8, seed=1))


@pytest.mark.parametrize("saved", USES, indirect=True)
def test_from_another_directory(saved: KVCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_loads("here/cache", saved)


@pytest.mark.parametrize("saved", ["kvquant"], indirect=True)
def test_moved_with_its_artifact(saved: KVCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").rename(tmp_path / "there")
    monkeypatch.chdir(tmp_path / "there")
    assert_loads("cache", saved)
    monkeypatch.chdir(tmp_path)
    missing = r"there/cache/cache\.json: calibration='made' is neither.* artifacts=\{'made': PATH\} says"
    with pytest.raises(ArtifactError, match=missing):
        KVCache.from_pretrained("there/cache", model())
    loaded = KVCache.from_pretrained("there/cache", model(), artifacts={"made": "there/made"})
    read(loaded, 8, seed=1)  # as the other has
    assert torch.equal(read(loaded, 8, seed=2), read(saved, 8, seed=2))
    with pytest.raises(ValueError, match=r"of those that there/cache names, \['made'\]; got \['other'\]"):
        KVCache.from_pretrained("there/cache", model(), artifacts={"other": "there/made"})


@pytest.mark.parametrize("saved", ["kvquant", "storage"], indirect=True)
def test_saved_from_another_directory(
    saved: KVCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved.save_pretrained("later")
    assert_loads("later", saved)


@pytest.mark.parametrize("saved", ["kvquant"], indirect=True)
def test_where_one_says_it_lies_counts_before_where_it_lay(saved: KVCache, tmp_path: Path) -> None:
    calibrated(tmp_path / "copied")
    calibrated(Path("made"), factor=1.5)
    loaded = KVCache.from_pretrained("cache", model(), artifacts={"made": str(tmp_path / "copied")})
    assert torch.equal(read(loaded, 8, seed=1), read(saved, 8, seed=1))


@pytest.mark.parametrize("saved", USES, indirect=True)
def test_an_artifact_that_was_replaced(saved: KVCache) -> None:
    calibrated(Path("made"), factor=1.5)
    with pytest.raises(ArtifactError, match=r"layer \d was packed with another calibration .*here/made"):
        KVCache.from_pretrained("cache", model())
    calibrated(Path("made"))
    assert_loads("cache", saved)


@pytest.mark.parametrize("saved", ["kvquant"], indirect=True)
@pytest.mark.parametrize(
    ("fact", "said"),
    [
        ("artifact_paths", r"cache\.json lacks \['artifact_paths'\]"),
        ("artifact_checksums", r"does not hold all of layer 0: KeyError\('artifact_checksums'\)"),
    ],
)
def test_facts_that_are_missing(saved: KVCache, fact: str, said: str) -> None:
    path = Path("cache", "cache.json")
    path.write_text(path.read_text().replace(f'"{fact}"', '"other"'))
    with pytest.raises(ArtifactError, match=said):
        KVCache.from_pretrained("cache", model())


@pytest.mark.parametrize("saved", ["kvquant"], indirect=True)
def test_damaged_paths(saved: KVCache) -> None:
    path = Path("cache", "cache.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"artifact_paths": 5}))
    with pytest.raises(ArtifactError, match=r"cache/cache\.json"):
        KVCache.from_pretrained("cache", model())


OWN_LEVELS: dict[str, dict[str, Any]] = {
    "kvquant": KVQUANT | {"calibration": "normal_float"},
    "storage": USES["storage"] | {"storage": KVQUANT | {"calibration": "normal_float"}},
}


def _mirrored(nbits: int) -> Tensor:
    return -normal_float_codebook(nbits).flip(0)


@pytest.mark.parametrize("name", OWN_LEVELS)
def test_saved_by_other_levels_of_this_package(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:  # which had those of a normal distribution the other way round
        earlier.setattr(kvquant, "normal_float_codebook", _mirrored)
        made = build_cache(model(), OWN_LEVELS[name]).bind(model())
        read(made, 256, seed=0)
        made.save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match=r"layer 0 was packed by other levels than this version has"):
        KVCache.from_pretrained(tmp_path, model())


@pytest.mark.parametrize("name", OWN_LEVELS)
def test_saved_by_the_levels_of_this_package(name: str, tmp_path: Path) -> None:
    made = build_cache(model(), OWN_LEVELS[name]).bind(model())
    read(made, 256, seed=0)
    made.save_pretrained(tmp_path)
    assert_loads(str(tmp_path), made)
