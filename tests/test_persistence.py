"""Saved caches: they continue bit for bit, and say clearly when they cannot be saved or do not fit."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.cache_utils import DynamicLayer

import kvcache_plugins as kvp
from kvcache_plugins import ArtifactError, KVCache, UnsupportedOperationError, build_cache
from kvcache_plugins.artifacts.scales import Scales, save_scales
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing import tiny_model

TENSORS, FACTS = "cache.safetensors", "cache.json"
KIVI = {"backend": "kivi", "residual_length": 32, "q_group_size": 16, "kernel": "torch"}
INT8 = {"backend": "int8", "kernel": "torch"}


def prefilled(model: Any, config: dict[str, Any], length: int = 90, pads: int = 0) -> KVCache:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, :pads] = 0
    cache = build_cache(model, config).bind(model, mask)
    with torch.no_grad():
        model(torch.randint(3, 120, (2, length)), attention_mask=mask, **as_argument(cache))
        # sliding windows and the exact window have moved on
        for step in range(3):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            model(torch.full((2, 1), 5 + step), attention_mask=mask, **as_argument(cache))
    return cache


def continued(model: Any, cache: KVCache, pads: int = 0) -> Tensor:
    """Logits of 40 more tokens, one by one and several at once: enough to pack and to slide again."""
    tokens = torch.randint(3, 120, (2, 40), generator=torch.Generator().manual_seed(1))
    logits = []
    with torch.no_grad():
        for part in tokens.split([1, 1, 7, 30, 1], dim=1):
            mask = torch.ones(2, cache.get_seq_length() + part.shape[1], dtype=torch.long)
            mask[1, :pads] = 0
            logits.append(model(part, attention_mask=mask, **as_argument(cache)).logits)
    return torch.cat(logits, dim=1)


def assert_continues(model: Any, cache: KVCache, folder: Path, pads: int = 0) -> KVCache:
    cache.save_pretrained(folder)
    loaded = KVCache.from_pretrained(folder, model)
    assert type(loaded) is type(cache) and loaded.config == cache.config
    assert loaded.get_seq_length() == cache.get_seq_length()
    expected = continued(model, copy.deepcopy(cache), pads)
    assert torch.equal(continued(model, loaded, pads), expected)
    return loaded


# -- what continues


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "gpt_oss", "exaone4"])
@pytest.mark.parametrize("config", [KIVI, INT8], ids=lambda c: c["backend"])
def test_hybrid_models_with_sliding_layers(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(name, num_hidden_layers=4)
    cache = prefilled(model, config)
    loaded = assert_continues(model, cache, tmp_path)
    assert loaded.report().dense_layers == cache.report().dense_layers != {}
    for layer, other in zip(cache.layers, KVCache.from_pretrained(tmp_path, model).layers, strict=True):
        assert type(layer) is type(other) and layer.get_seq_length() == other.get_seq_length()
        if hasattr(layer, "sliding_window"):
            assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values)


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
@pytest.mark.parametrize("config", [KIVI, INT8], ids=lambda c: c["backend"])
def test_recurrent_states(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    # alone, and beside keys and values
    assert_continues(tiny_model(name), prefilled(tiny_model(name), config), tmp_path)


CASES: dict[str, dict[str, Any]] = {
    "kivi-block": {**KIVI, "nbits": 2, "rope_mode": "block"},
    "padding-and-sinks": {**KIVI, "sink_length": 3},
    "int4-smooth": {"backend": "int4", "kernel": "torch", "residual_length": 64, "smooth": 0.5},
    "int8-tensor": {**INT8, "granularity": "tensor", "residual_length": 5},
    "skipped-and-overridden": {**KIVI, "skip_layers": [-1], "layer_overrides": {"0": {"nbits": 8}}},
    "nothing-packed-yet": {**KIVI, "residual_length": 1024},
}


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_state(name: str, tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    cache = prefilled(model, CASES[name], pads=13)
    loaded = assert_continues(model, cache, tmp_path, pads=13)
    assert loaded.packed_layers[0].padding.lengths.tolist() == [0, 13]


def test_static_scales_are_found_again(tmp_path: Path) -> None:
    model = tiny_model("llama")
    absmax = {index: torch.tensor([4.0, 5.0]) for index in range(2)}
    save_scales(tmp_path / "scales", Scales(absmax, absmax))
    config = {
        "backend": "float8",
        "kernel": "torch",
        "scale": "head",
        "calibration": str(tmp_path / "scales"),
    }
    assert_continues(model, prefilled(model, config), tmp_path / "cache")


def test_wide_metadata_stays_wide(tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache = build_cache(model, INT8)
    for layer in cache.packed_layers:
        layer.update(torch.randn(2, 2, 70, 16) * 1e9, torch.randn(2, 2, 70, 16))
    cache.save_pretrained(tmp_path)
    loaded = KVCache.from_pretrained(tmp_path, model)
    for one, other in zip(cache.packed_layers, loaded.packed_layers, strict=True):
        assert other.records.layout.metadata_bytes == 4
        assert torch.equal(one.stored_keys.decode(0, 70), other.stored_keys.decode(0, 70))


def test_the_dtype_is_the_models(tmp_path: Path) -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    loaded = assert_continues(model, prefilled(model, KIVI), tmp_path)
    assert loaded.packed_layers[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "config", [KIVI, INT8, {"backend": "knorm", "budget": 64}], ids=lambda c: c["backend"]
)
def test_a_model_of_another_dtype(config: dict[str, Any], tmp_path: Path) -> None:
    cache = prefilled(tiny_model("llama", dtype=torch.bfloat16), config)
    cache.save_pretrained(tmp_path)
    model = tiny_model("llama")
    loaded = continued(model, KVCache.from_pretrained(tmp_path, model))
    assert torch.equal(loaded, continued(model, cache)) and loaded.dtype == torch.float32


def test_an_empty_cache(tmp_path: Path) -> None:
    model = tiny_model("llama")
    build_cache(model, KIVI).save_pretrained(tmp_path)
    loaded = KVCache.from_pretrained(tmp_path, model)
    assert loaded.get_seq_length() == 0
    torch.manual_seed(0)
    expected = continued(model, prefilled(model, KIVI))
    torch.manual_seed(0)
    with torch.no_grad():
        model(torch.randint(3, 120, (2, 90)), **as_argument(loaded))
        for step in range(3):
            model(torch.full((2, 1), 5 + step), **as_argument(loaded))
    assert torch.equal(continued(model, loaded), expected)


def test_a_configuration_is_enough_to_load(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    cache = prefilled(model, {**KIVI, "rope_mode": "auto"})
    cache.save_pretrained(tmp_path)
    loaded = KVCache.from_pretrained(tmp_path, model.config)
    assert torch.equal(continued(model, loaded), continued(model, cache))


@pytest.mark.parametrize(
    "config", [INT8, *({"backend": name, "budget": 64} for name in ("h2o", "expected_attention", "sirllm"))]
)
def test_what_is_loaded_in_inference_mode_goes_on_outside(config: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache = prefilled(model, config)
    cache.save_pretrained(tmp_path)
    with torch.inference_mode():
        loaded = KVCache.from_pretrained(tmp_path, model)
    assert torch.equal(continued(model, loaded), continued(model, cache))


def test_one_document_many_questions(tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache = prefilled(model, KIVI)
    cache.save_pretrained(tmp_path)
    first, second = (KVCache.from_pretrained(tmp_path, model) for _ in range(2))
    expected = continued(model, first)
    assert torch.equal(continued(model, second), expected)
    assert first.get_seq_length() == 133
    assert KVCache.from_pretrained(tmp_path, model).get_seq_length() == 93


def test_packed_on_disk_and_saved_whole(tmp_path: Path) -> None:
    cache = prefilled(tiny_model("llama"), INT8)
    cache.save_pretrained(tmp_path / "deep" / "er")
    folder = tmp_path / "deep" / "er"
    assert sorted(path.name for path in folder.iterdir()) == [FACTS, TENSORS]
    assert (folder / TENSORS).stat().st_size < 1.2 * cache.kv_bytes()
    # saving again replaces
    other = prefilled(tiny_model("llama"), KIVI, length=70)
    other.save_pretrained(folder)
    assert KVCache.from_pretrained(folder, tiny_model("llama")).get_seq_length() == 73


# -- what does not


OTHERS: dict[str, dict[str, Any]] = {
    "more-layers": {"num_hidden_layers": 3},
    "more-heads": {"num_key_value_heads": 4},
    "wider-heads": {"head_dim": 32},
    "other-rotation": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_of_another_shape(name: str, tmp_path: Path) -> None:
    prefilled(tiny_model("llama"), KIVI).save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match=r"was saved for the model .*, not for .*") as failure:
        KVCache.from_pretrained(tmp_path, tiny_model("llama", **OTHERS[name]))
    saved, given = str(failure.value).split("not for")
    assert str(tmp_path) in saved and saved.split("the model")[1].strip(" ,") != given.strip(" .")


def test_a_model_of_another_family_is_named_beside_the_right_one(tmp_path: Path) -> None:
    prefilled(tiny_model("llama"), KIVI).save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match=r"'llama'.*not for.*'qwen2'"):
        KVCache.from_pretrained(tmp_path, tiny_model("qwen2"))


class Unknown(DynamicLayer):
    """A kind of layer that this package has never heard of."""


def test_a_layer_of_an_unknown_kind_cannot_be_saved(tmp_path: Path) -> None:
    cache = prefilled(tiny_model("gemma2"), INT8)
    cache.layers[0] = Unknown()
    states = torch.ones(2, 2, cache.get_seq_length(1), 16)
    cache.layers[0].update(states, states)
    with pytest.raises(
        UnsupportedOperationError, match=r"save_pretrained: layer 0, of type Unknown, .* not saved"
    ):
        cache.save_pretrained(tmp_path)
    assert not (tmp_path / TENSORS).exists() and not (tmp_path / FACTS).exists()


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_a_recurrent_state_that_is_missing(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    prefilled(model, INT8).save_pretrained(tmp_path)
    lost = next(key for key in load_file(tmp_path / TENSORS) if key.endswith("conv_states.0"))
    _drop_tensor(tmp_path, lost)
    with pytest.raises(ArtifactError, match=r"does not hold all of layer 0: KeyError\('conv_states.0'\)"):
        KVCache.from_pretrained(tmp_path, model)


def _edit(folder: Path, edit: Any) -> None:
    facts = json.loads((folder / FACTS).read_text())
    edit(facts)
    (folder / FACTS).write_text(json.dumps(facts))


def _drop_tensor(folder: Path, name: str) -> None:
    with safe_open(folder / TENSORS, framework="pt") as file:
        facts = file.metadata()
    tensors = load_file(folder / TENSORS)
    del tensors[name]
    save_file(tensors, folder / TENSORS, metadata=facts)


def _flip(folder: Path, place: int) -> None:
    """Flip one bit of the numbers, which begin behind the header and its length."""
    data = bytearray((folder / TENSORS).read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + place if place >= 0 else place] ^= 1
    (folder / TENSORS).write_bytes(data)


DAMAGE: dict[str, Any] = {
    "first-bit-flipped": lambda folder: _flip(folder, 0),
    "some-bit-flipped": lambda folder: _flip(folder, 1000),
    "last-bit-flipped": lambda folder: _flip(folder, -1),
    "no-checksums-of-tensors": lambda folder: _edit(folder, lambda facts: facts.update(checksums=5)),
    "checksums-missing": lambda folder: _edit(folder, lambda facts: facts.pop("checksums")),
    "one-checksum-missing": lambda folder: _edit(folder, lambda facts: facts["checksums"].popitem()),
    "facts-missing": lambda folder: (folder / FACTS).unlink(),
    "tensors-missing": lambda folder: (folder / TENSORS).unlink(),
    "facts-not-json": lambda folder: (folder / FACTS).write_text("{"),
    "facts-not-an-object": lambda folder: (folder / FACTS).write_text("[]"),
    "tensors-cut": lambda folder: os.truncate(folder / TENSORS, (folder / TENSORS).stat().st_size - 5),
    "older-version": lambda folder: _edit(folder, lambda facts: facts.update(format_version=2)),
    "newer-version": lambda folder: _edit(folder, lambda facts: facts.update(format_version=4)),
    "no-model": lambda folder: _edit(folder, lambda facts: facts.pop("model")),
    "no-layers": lambda folder: _edit(folder, lambda facts: facts.update(layers=[])),
    "no-length": lambda folder: _edit(folder, lambda facts: facts["layers"][1].pop("cumulative_length")),
    "no-lengths": lambda folder: _edit(folder, lambda facts: facts["layers"][0].update(packed_lengths=None)),
    "no-options": lambda folder: _edit(folder, lambda facts: facts.update(options=None)),
    "wrong-options": lambda folder: _edit(folder, lambda facts: facts["options"].update(nbits=5)),
    "other-lengths": lambda folder: _edit(
        folder, lambda facts: facts["layers"][0]["packed_lengths"].update(key=0)
    ),
    "a-tensor-missing": lambda folder: _drop_tensor(folder, "layers.1.value_tail"),
    "records-missing": lambda folder: _drop_tensor(folder, "layers.0.records"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage(name: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    prefilled(model, KIVI).save_pretrained(tmp_path)
    DAMAGE[name](tmp_path)
    with pytest.raises(ArtifactError) as failure:
        KVCache.from_pretrained(tmp_path, model)
    assert str(tmp_path) in str(failure.value)


@pytest.mark.parametrize("written", [0, 1], ids=["nothing", "the-tensors"])
def test_a_second_save_that_fails(written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = tiny_model("llama"), tmp_path / "cache"
    first, second = prefilled(model, INT8), prefilled(model, INT8, length=70)
    first.save_pretrained(folder)
    replace, left = Path.replace, [written]

    def failing(path: Path, target: Path) -> Path:
        if Path(target).parent == folder:  # where a file takes the place of the old one
            if not left[0]:
                raise OSError("No space left on device")
            left[0] -= 1
        return replace(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", failing)
        with pytest.raises(OSError, match="No space left"):
            second.save_pretrained(folder)
    if written:
        with pytest.raises(ArtifactError, match="of two caches"):
            KVCache.from_pretrained(folder, model)
    else:
        assert torch.equal(continued(model, KVCache.from_pretrained(folder, model)), continued(model, first))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]
    second.save_pretrained(folder)
    assert torch.equal(continued(model, KVCache.from_pretrained(folder, model)), continued(model, second))


def test_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="save_pretrained needs the path of a directory, got ''"):
        build_cache(tiny_model("llama"), INT8).save_pretrained("")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="nowhere"):
        KVCache.from_pretrained(tmp_path / "nowhere", tiny_model("llama"))
    with pytest.raises(ValueError, match="model or its configuration"):
        kvp.KVCache.from_pretrained(tmp_path, "llama")
