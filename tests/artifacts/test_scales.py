"""Static scales: the files, what is refused, and caches that use them."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, DynamicCache

from kvcache_plugins import ArtifactError, build_cache
from kvcache_plugins.artifacts.model_facts import model_facts
from kvcache_plugins.artifacts.scales import Scales, load_scales, save_scales
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.quantizers.affine import SMALLEST_SCALE
from kvcache_plugins.testing import assert_close, tiny_model
from kvcache_plugins.testing.comparison import relative_rms
from tests.reference.quantizers import FLOAT8_FORMATS

TENSORS, FACTS = "scales.safetensors", "scales.json"
NAN = float("nan")


def some_scales() -> Scales:
    return Scales(
        {0: torch.tensor([4.48, 44.8]), 1: torch.tensor([0.0, 1.0])},
        {0: torch.tensor([1.0, 2.0]), 1: torch.tensor([3.0, 4.0])},
        {"model": {"model_type": "llama"}, "num_layers": 2},
    )


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    save_scales(tmp_path / "scales", some_scales())
    return tmp_path / "scales"


# -- the files


def test_round_trip(artifact: Path) -> None:
    loaded, made = load_scales(str(artifact)), some_scales()
    for side in ("key_absmax", "value_absmax"):
        assert getattr(loaded, side).keys() == getattr(made, side).keys() == {0, 1}
        for index, tensor in getattr(made, side).items():
            read = getattr(loaded, side)[index]
            assert read.dtype == torch.float32 and torch.equal(read, tensor)
    assert loaded.facts["model"] == {"model_type": "llama"}
    assert (loaded.facts["kind"], loaded.facts["format_version"]) == ("kv_scales", 1)
    assert sorted(path.name for path in artifact.iterdir()) == [FACTS, TENSORS]


def test_other_dtypes_are_stored_as_fp32(tmp_path: Path) -> None:
    absmax = torch.tensor([1.5, 3.0], dtype=torch.bfloat16)
    save_scales(tmp_path, Scales({0: absmax}, {0: absmax.double()}))
    loaded = load_scales(str(tmp_path))
    assert loaded.key_absmax[0].dtype == loaded.value_absmax[0].dtype == torch.float32


def test_an_artifact_that_changed_is_read_again(artifact: Path) -> None:
    assert load_scales(str(artifact)) is load_scales(str(artifact))  # every layer of a cache asks
    save_scales(artifact, Scales({7: torch.ones(1)}, {7: torch.ones(1)}))
    for name in (TENSORS, FACTS):
        os.utime(artifact / name, (1, 1))  # two writes may fall into one tick of the file system's clock
    assert load_scales(str(artifact)).key_absmax.keys() == {7}


@pytest.mark.parametrize("format", ["e4m3", "e5m2", "int8"])
def test_scales_follow_from_magnitudes(format: str) -> None:
    largest = {"int8": 127.0} | {name: limit for name, (_, limit) in FLOAT8_FORMATS.items()}
    scales = some_scales()
    head = scales.for_layer(0, 2, "key", "head", format)
    assert head.shape == (1, 2, 1, 1) and head.dtype == torch.float32
    assert torch.equal(head.flatten(), torch.tensor([4.48, 44.8]) / largest[format])
    tensor = scales.for_layer(0, 2, "value", "tensor", format)
    assert tensor.shape == (1, 1, 1, 1)
    assert tensor.item() == torch.tensor(2.0).div(largest[format]).item()
    # a head that was silent during calibration divides by the smallest scale, not by zero
    assert scales.for_layer(1, 2, "key", "head", format).flatten()[0] == SMALLEST_SCALE


# -- what is refused


def test_a_layer_without_scales(artifact: Path) -> None:
    with pytest.raises(ArtifactError, match=r"has layers \[0, 1\], but layer 5 needs one"):
        load_scales(str(artifact)).for_layer(5, 2, "key", "head", "e4m3")
    model = tiny_model("llama", num_hidden_layers=3)
    save_scales(artifact, dataclasses.replace(some_scales(), facts={}))
    with pytest.raises(ArtifactError, match=r"scales has layers \[0, 1\], but layer 2 needs one"):
        build_cache(model, {"backend": "float8", "scale": "head", "calibration": str(artifact)})


USES: dict[str, dict[str, Any]] = {
    "int8": {"backend": "int8"},
    "float8": {"backend": "float8", "scale": "tensor"},
    "storage": {"backend": "h2o", "budget": 64, "storage": {"backend": "int8"}},
    "windows": {"backend": "h2o", "budget": 64, "storage": {"backend": "float8", "scale": "head"}},
}


def _calibrated(use: str, calibration: str) -> dict[str, Any]:
    config = dict(USES[use])
    if "storage" in config:
        return config | {"storage": config["storage"] | {"calibration": calibration}}
    return config | {"calibration": calibration}


@pytest.mark.parametrize("use", USES)
def test_scales_of_another_model(use: str, tmp_path: Path) -> None:
    # of the same heads, and of more layers than are asked for
    model = tiny_model("gemma2" if use == "windows" else "llama")
    absmax = {layer_idx: torch.ones(2) for layer_idx in range(6)}
    other = tiny_model("qwen2", num_hidden_layers=6, hidden_size=128)
    facts: tuple[Any, ...] = (
        dict(sorted(model_facts(other.config).items())),
        {"model_type": "llama"},
        "llama",
    )
    for number, wrong in enumerate(facts):
        folder = str(tmp_path / f"other{number}")
        save_scales(folder, Scales(absmax, absmax, {"model": wrong}))
        for known in (model, model.config):
            with pytest.raises(ArtifactError, match=r"other\d was made for the model .*, not for") as failure:
                build_cache(known, _calibrated(use, folder))
            assert repr(wrong) in str(failure.value) and repr(model_facts(model.config)) in str(failure.value)
    for number, right in enumerate(({"model": model_facts(model.config)}, {})):  # or it does not say
        save_scales(tmp_path / f"own{number}", Scales(absmax, absmax, right))
        build_cache(model, _calibrated(use, str(tmp_path / f"own{number}")))


@pytest.mark.parametrize("use", ["int8", "storage"])
def test_scales_of_another_model_for_one_layer(use: str, tmp_path: Path) -> None:
    model, absmax = tiny_model("llama"), {layer_idx: torch.ones(2) for layer_idx in range(2)}
    save_scales(tmp_path, Scales(absmax, absmax, {"model": model_facts(tiny_model("qwen2").config)}))
    config = _calibrated(use, str(tmp_path))
    name = "storage" if use == "storage" else "calibration"
    overrides = {"layer_overrides": {"1": {name: config[name]}}}
    with pytest.raises(ArtifactError, match="'model_type': 'qwen2'"):
        build_cache(model, USES[use] | overrides)


def test_the_bundled_scales_serve_the_bundled_model() -> None:
    models = Path(__file__).resolve().parents[2] / "examples" / "models"
    config = AutoConfig.from_pretrained(models / "tiny-llama-books")
    assert load_scales(str(models / "tiny-llama-books-kvquant3")).facts["model"] == model_facts(config)
    for use in ("int8", "float8", "storage"):
        build_cache(config, _calibrated(use, str(models / "tiny-llama-books-kvquant3")))


def _edit_facts(folder: Path, **changes: Any) -> None:
    facts = json.loads((folder / FACTS).read_text()) | changes
    (folder / FACTS).write_text(json.dumps(facts))


DAMAGE: dict[str, tuple[Any, str, str]] = {
    # what is done, the file to be named, what else is said
    "facts-missing": (lambda folder: (folder / FACTS).unlink(), FACTS, "No such file"),
    "tensors-missing": (lambda folder: (folder / TENSORS).unlink(), TENSORS, "No such file"),
    "facts-not-json": (lambda folder: (folder / FACTS).write_text("{"), FACTS, ""),
    "facts-not-text": (lambda folder: (folder / FACTS).write_bytes(b"\xff\xfe\x00"), FACTS, ""),
    "facts-not-an-object": (lambda folder: (folder / FACTS).write_text("[1]"), FACTS, "json object, got [1]"),
    "tensors-cut": (lambda folder: os.truncate(folder / TENSORS, 40), TENSORS, ""),
    "tensors-empty": (lambda folder: os.truncate(folder / TENSORS, 0), TENSORS, ""),
    "newer-version": (lambda folder: _edit_facts(folder, format_version=2), FACTS, "got 'kv_scales' and 2"),
    "other-kind": (lambda folder: _edit_facts(folder, kind="codebooks"), FACTS, "'codebooks'"),
    "not-finite": (
        lambda folder: save_file({"layers.0.key_absmax": torch.tensor([NAN])}, folder / TENSORS),
        TENSORS,
        "layers.0.key_absmax",
    ),
    "no-heads": (
        lambda folder: save_file({"layers.0.key_absmax": torch.tensor(3.0)}, folder / TENSORS),
        TENSORS,
        "layers.0.key_absmax must be a magnitude for each kv head, got 3.0",
    ),
    "below-zero": (
        lambda folder: save_file({"layers.0.key_absmax": torch.tensor([-1.0])}, folder / TENSORS),
        TENSORS,
        "layers.0.key_absmax must be a magnitude",
    ),
    "other-tensors": (
        lambda folder: save_file({"lm_head": torch.ones(2)}, folder / TENSORS),
        TENSORS,
        "lm_head",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_names_the_file(artifact: Path, name: str) -> None:
    damage, file, said = DAMAGE[name]
    damage(artifact)
    with pytest.raises(ArtifactError) as failure:
        load_scales(str(artifact))
    assert str(artifact / file) in str(failure.value)
    assert said in str(failure.value)
    with pytest.raises(ArtifactError):  # a failure is not remembered as a success
        load_scales(str(artifact))


def test_neither_a_directory_nor_a_repository(tmp_path: Path) -> None:
    for name in ("no/such-repository", str(tmp_path / "missing")):
        with pytest.raises(ArtifactError, match="neither a directory nor a hub repository") as failure:
            load_scales(name)
        assert repr(name) in str(failure.value)


# -- caches


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def prompt() -> Tensor:
    return torch.randint(3, 120, (2, 100), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def calibration(model: Any, prompt: Tensor, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Magnitudes of the prompt itself, as a calibration run would collect them."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt, **as_argument(cache))
    absmax = {
        side: {i: getattr(layer, side).abs().amax(dim=(0, 2, 3)) for i, layer in enumerate(cache.layers)}
        for side in ("keys", "values")
    }
    folder = tmp_path_factory.mktemp("scales")
    save_scales(folder, Scales(absmax["keys"], absmax["values"], {"num_layers": 2}))
    return str(folder)


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scheme", ["head", "tensor"])
class TestCaches:
    @pytest.fixture
    def config(self, calibration: str, scheme: str, format: str) -> dict[str, Any]:
        return {
            "backend": "float8",
            "kernel": "torch",
            "scale": scheme,
            "format": format,
            "calibration": calibration,
        }

    def test_what_is_read_is_close(self, model: Any, prompt: Tensor, config: dict[str, Any]) -> None:
        cache, dense = build_cache(model, config), DynamicCache(config=model.config)
        with torch.no_grad():
            for past in (cache, dense):
                model(prompt, **as_argument(past))
        bound = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}[config["format"]]
        for packed, exact in zip(cache.packed_layers, dense.layers, strict=True):
            for stream, states in zip(packed.streams, (exact.keys, exact.values), strict=True):
                assert stream.packed_length == 100
                read = stream.decode(0, 100)
                error = relative_rms(states, read)
                assert 0.01 < error < bound / 1.5
                # half an ulp of each number, down to the smallest normal one
                static = stream.codec.static_scale
                tiny = static * bound * {"e4m3": 2.0**-6, "e5m2": 2.0**-14}[config["format"]]
                assert ((read - states).abs() <= torch.maximum(states.abs() * bound, tiny) * 1.001).all()

    def test_logits_are_close(self, model: Any, prompt: Tensor, config: dict[str, Any]) -> None:
        cache, dense = build_cache(model, config), DynamicCache(config=model.config)
        token = torch.tensor([[5], [6]])
        with torch.no_grad():
            for past in (cache, dense):
                model(prompt, **as_argument(past))
            got, exact = (model(token, **as_argument(past)).logits for past in (cache, dense))
        # these random networks amplify what they are given about fourfold
        assert 1e-4 < relative_rms(exact, got) < {"e4m3": 0.2, "e5m2": 0.4}[config["format"]]
        assert cache.report().fallback_reads == 0

    def test_scales_take_no_room(self, model: Any, prompt: Tensor, config: dict[str, Any]) -> None:
        cache = build_cache(model, config)
        with torch.no_grad():
            model(prompt[:, :64], **as_argument(cache))
        for layer in cache.packed_layers:
            assert list(layer.records.layout.fields) == ["key_codes", "value_codes"]
            assert layer.records.data.shape == (2, 2, 1, 2 * 64 * 16)

    def test_later_larger_values_saturate(self, model: Any, config: dict[str, Any], scheme: str) -> None:
        layer = build_cache(model, config).packed_layers[1]
        keys, values = torch.full((1, 2, 5, 16), 1e6), torch.full((1, 2, 5, 16), -1e6)
        layer.update(keys, values)
        absmax = load_scales(config["calibration"])
        for stream, side, sign in zip(
            layer.streams, (absmax.key_absmax, absmax.value_absmax), (1, -1), strict=True
        ):
            expected = side[1] if scheme == "head" else side[1].max().expand(2)
            read = stream.decode(0, 5)
            assert_close("saturated", sign * expected.view(1, 2, 1, 1).expand_as(read), read, 1e-6)


def test_per_head_and_per_tensor_differ(model: Any, prompt: Tensor, calibration: str) -> None:
    reads = []
    for scheme in ("head", "tensor"):
        cache = build_cache(model, {"backend": "float8", "scale": scheme, "calibration": calibration})
        with torch.no_grad():
            model(prompt, **as_argument(cache))
        reads.append(cache.packed_layers[0].stored_keys.decode(0, 100))
    assert not torch.equal(*reads)


def test_a_dynamic_scale_needs_no_artifact_and_takes_none(model: Any, calibration: str) -> None:
    with pytest.raises(ValueError, match=r"calibration is needed for scale='head'.*only for these"):
        build_cache(model, {"backend": "float8", "calibration": calibration})


@pytest.mark.parametrize("use", ["int8", "float8", "storage"])
def test_heads_that_processes_share_are_refused(
    use: str, model: Any, calibration: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = build_cache(model, _calibrated(use, calibration))
    monkeypatch.setattr(model, "_tp_size", 2)
    with pytest.raises(ValueError, match=r"has an artifact for all heads of a layer.*2 processes by tp_plan"):
        cache.bind(model)


@pytest.mark.parametrize("scheme", ["head", "tensor"])
def test_an_artifact_of_other_heads(tmp_path: Path, scheme: str) -> None:
    absmax = {layer_idx: torch.ones(3) for layer_idx in range(2)}
    save_scales(tmp_path, Scales(absmax, absmax))
    with pytest.raises(ArtifactError, match=r"made for 3 kv heads in layer 0, which has 2"):
        build_cache(tiny_model("llama"), {"backend": "float8", "scale": scheme, "calibration": str(tmp_path)})
