"""KVQuant's artifact: the files, and what is refused, with both sides of every mismatch named."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvcache_plugins import ArtifactError
from kvcache_plugins.artifacts import codebooks as module
from kvcache_plugins.artifacts.card import model_card
from kvcache_plugins.artifacts.codebooks import (
    Codebooks,
    LayerCodebooks,
    load_codebooks,
    push_to_hub,
    save_codebooks,
)
from kvcache_plugins.artifacts.model_facts import model_facts, rotary_facts
from kvcache_plugins.artifacts.scales import Scales, load_scales
from kvcache_plugins.models.rotary import Rotary
from kvcache_plugins.testing import tiny_model

TENSORS, FACTS, CARD = "kvquant.safetensors", "kvquant.json", "README.md"
ROTARY = Rotary((1.0, 0.1, 0.01, 0.001))
HEADS, CHANNELS = 2, 16


@pytest.fixture(scope="module")
def config() -> Any:
    return tiny_model("llama").config


def some_tensors() -> dict[str, Tensor]:
    tensors = {}
    for index in range(2):
        prefix = f"layers.{index}"
        tensors[f"{prefix}.key_lower"] = -torch.rand(HEADS, CHANNELS)
        tensors[f"{prefix}.key_upper"] = torch.rand(HEADS, CHANNELS)
        for bits in (2, 3):
            for side in ("key", "value"):
                tensors[f"{prefix}.{side}_codebook_{bits}"] = torch.rand(2**bits).sort().values * 2 - 1
        tensors[f"{prefix}.value_levels_2"] = torch.randn(4)
    return tensors


@pytest.fixture
def made(config: Any) -> Codebooks:
    facts = {
        "nbits": [2, 3],
        "outlier_fraction": 0.01,
        "sink_length": 1,
        "weight": "fisher_scale",
        "model": model_facts(config),
        "rope": {"0": rotary_facts(ROTARY), "1": None},
    }
    return Codebooks(some_tensors(), facts)


@pytest.fixture
def artifact(tmp_path: Path, made: Codebooks) -> Path:
    save_codebooks(tmp_path / "artifact", made)
    return tmp_path / "artifact"


def layer_of(codebooks: Codebooks, index: int = 0, **changes: Any) -> LayerCodebooks:
    wanted = {"num_heads": HEADS, "head_dim": CHANNELS, "key_bits": 3, "value_bits": 2, "rotary": ROTARY}
    return codebooks.for_layer(index, **(wanted | changes))


# -- the files


def test_round_trip(artifact: Path, made: Codebooks, config: Any) -> None:
    loaded = load_codebooks(str(artifact))
    assert loaded.tensors.keys() == made.tensors.keys()
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in made.tensors.items())
    assert (loaded.nbits, loaded.outlier_fraction, loaded.sink_length) == ([2, 3], 0.01, 1)
    assert (loaded.facts["kind"], loaded.facts["format_version"]) == ("kvquant", 1)
    assert sorted(path.name for path in artifact.iterdir()) == [CARD, FACTS, TENSORS]
    loaded.check_model(config)


def test_a_layer_gets_its_own(artifact: Path, made: Codebooks) -> None:
    found = layer_of(load_codebooks(str(artifact)), 1, rotary=None)
    expected = {
        "key_lower": "key_lower",
        "key_upper": "key_upper",
        "key_codebook": "key_codebook_3",
        "value_codebook": "value_codebook_2",
        "value_levels": "value_levels_2",
    }
    for field, name in expected.items():
        assert torch.equal(getattr(found, field), made.tensors[f"layers.1.{name}"]), field
    assert found.key_levels is None


def test_levels_to_decode_with_are_those_of_a_sides_own_bits(tmp_path: Path, made: Codebooks) -> None:
    levels = {f"layers.0.key_levels_{bits}": torch.randn(2**bits) for bits in (2, 3)}
    save_codebooks(tmp_path / "normed", replace(made, tensors={**made.tensors, **levels}))
    loaded = load_codebooks(str(tmp_path / "normed"))
    for key_bits, value_bits in ((2, 3), (3, 2)):
        found = layer_of(loaded, key_bits=key_bits, value_bits=value_bits)
        assert torch.equal(found.key_levels, levels[f"layers.0.key_levels_{key_bits}"])
        assert (found.value_levels is None) == (value_bits == 3), "the values have some of two bits alone"


def test_levels_may_be_repeated(tmp_path: Path, made: Codebooks) -> None:
    """As those of fewer distinct numbers than levels are."""
    levels = torch.tensor([-1.0, 0.5, 0.5, 0.5])
    save_codebooks(tmp_path / "few", replace(made, tensors={**made.tensors, LEVELS: levels}))
    assert torch.equal(load_codebooks(str(tmp_path / "few")).tensors[LEVELS], levels)


def test_scales_may_lie_beside(tmp_path: Path, made: Codebooks) -> None:
    save_codebooks(tmp_path / "both", made, Scales({0: torch.ones(2)}, {0: torch.ones(2)}))
    assert load_scales(str(tmp_path / "both")).key_absmax.keys() == {0}
    assert load_codebooks(str(tmp_path / "both")).nbits == [2, 3]


def test_the_card_says_what_it_is(artifact: Path) -> None:
    card = (artifact / CARD).read_text()
    assert card.startswith("---\n") and "`llama`: 2 layers, 2 kv heads of 16 channels" in card
    assert '"nbits": 3' in card and "| bits | 2, 3 |" in card
    card = model_card({**load_codebooks(str(artifact)).facts, "nbits": [2, 4]})
    assert '"nbits": 4' in card and "| bits | 2, 4 |" in card


def test_an_artifact_that_changed_is_read_again(artifact: Path, made: Codebooks) -> None:
    assert load_codebooks(str(artifact)) is load_codebooks(str(artifact))  # every layer of a cache asks
    save_codebooks(artifact, replace(made, facts={**made.facts, "sink_length": 5}))
    for name in (TENSORS, FACTS):
        os.utime(artifact / name, (1, 1))  # two writes may fall into one tick of the file system's clock
    assert load_codebooks(str(artifact)).sink_length == 5


def test_a_failed_save_leaves_nothing(
    tmp_path: Path, made: Codebooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(facts: Any) -> str:
        raise OSError("disk full")

    monkeypatch.setattr(module, "model_card", fail)
    with pytest.raises(OSError, match="disk full"):
        save_codebooks(tmp_path / "artifact", made)
    assert list(tmp_path.iterdir()) == []


def test_push_checks_and_uploads(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[Any] = []
    monkeypatch.setattr(module, "push", lambda *args, **options: pushed.append((args, options)) or "address")
    assert push_to_hub(artifact, "me/llama-kvquant") == "address"
    (directory, files, repo_id), options = pushed[0]
    assert (directory, repo_id, options) == (artifact, "me/llama-kvquant", {})
    assert {TENSORS, FACTS, CARD, "scales.safetensors", "scales.json"} == set(files)
    with pytest.raises(ArtifactError, match=FACTS):
        push_to_hub(tmp_path, "me/nothing")
    assert len(pushed) == 1


# -- what does not belong together


def test_another_model(artifact: Path) -> None:
    loaded = load_codebooks(str(artifact))
    with pytest.raises(ArtifactError, match=r"'llama'.*not for.*'qwen2'"):
        loaded.check_model(tiny_model("qwen2").config)
    with pytest.raises(ArtifactError, match=r"'num_layers': 2.*not for.*'num_layers': 3"):
        loaded.check_model(tiny_model("llama", num_hidden_layers=3).config)
    # of the same family, depth and heads
    with pytest.raises(ArtifactError, match="'fingerprint'"):
        loaded.check_model(tiny_model("llama", intermediate_size=96).config)
    with pytest.raises(ArtifactError, match="'fingerprint'"):
        loaded.check_model(tiny_model("llama", num_attention_heads=8, head_dim=16).config)


@pytest.mark.parametrize(
    ("rotary", "shown"),
    [
        (None, "no rotary embedding"),
        (replace(ROTARY, interleaved=True), "interleaved pairs"),
        (replace(ROTARY, inv_freq=(1.0, 0.1, 0.01, 0.00101)), r"0\.001\].*0\.00101\]"),
        (replace(ROTARY, inv_freq=(1.0, 0.1)), r"\[1, 0\.1\]"),
    ],
)
def test_another_rotation(artifact: Path, rotary: Rotary | None, shown: str) -> None:
    with pytest.raises(ArtifactError, match=rf"layer 0.*half-split pairs of frequencies \[1, .*{shown}"):
        layer_of(load_codebooks(str(artifact)), rotary=rotary)


def test_the_same_rotation_computed_elsewhere(artifact: Path) -> None:
    rounded = tuple(frequency * (1 + 1e-7) for frequency in ROTARY.inv_freq)
    layer_of(load_codebooks(str(artifact)), rotary=replace(ROTARY, inv_freq=rounded))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_same_rotation_in_a_model_that_was_cast(artifact: Path, dtype: torch.dtype) -> None:
    cast = torch.tensor(ROTARY.inv_freq).to(dtype)
    assert cast.tolist() != pytest.approx(ROTARY.inv_freq, rel=1e-4)
    layer_of(load_codebooks(str(artifact)), rotary=replace(ROTARY, inv_freq=tuple(cast.tolist())))
    other = (1.0, *torch.nextafter(cast, torch.ones_like(cast))[1:].tolist())
    with pytest.raises(ArtifactError, match="other rotary parameters"):
        layer_of(load_codebooks(str(artifact)), rotary=replace(ROTARY, inv_freq=other))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_artifact_of_a_model_that_was_cast(artifact: Path, dtype: torch.dtype) -> None:
    """It turned keys back by the frequencies it had turned them by, so it serves the model as it was."""
    cast = torch.tensor(ROTARY.inv_freq).to(dtype).tolist()
    _edit_facts(artifact, rope={"0": {"interleaved": False, "inv_freq": cast}})
    layer_of(load_codebooks(str(artifact)))
    with pytest.raises(ArtifactError, match="other rotary parameters"):
        layer_of(
            load_codebooks(str(artifact)), rotary=replace(ROTARY, inv_freq=(*ROTARY.inv_freq[:3], 0.00102))
        )


@pytest.mark.parametrize("rope", ["x", [1], {"interleaved": False}, {"interleaved": False, "inv_freq": "x"}])
def test_damaged_rotary_parameters(artifact: Path, rope: Any) -> None:
    _edit_facts(artifact, rope={"0": rope})
    with pytest.raises(ArtifactError, match="rotary parameters of layer 0 are damaged"):
        layer_of(load_codebooks(str(artifact)))


def test_a_rotation_where_there_was_none(artifact: Path) -> None:
    with pytest.raises(ArtifactError, match=r"layer 1: no rotary embedding.*the model's are half-split"):
        layer_of(load_codebooks(str(artifact)), 1)


@pytest.mark.parametrize("which", ["key_bits", "value_bits"])
def test_bits_it_does_not_have(artifact: Path, which: str) -> None:
    with pytest.raises(ArtifactError, match=r"levels for nbits \[2, 3\], not for 4"):
        layer_of(load_codebooks(str(artifact)), **{which: 4})


def test_other_heads_and_layers(artifact: Path) -> None:
    loaded = load_codebooks(str(artifact))
    with pytest.raises(ArtifactError, match=r"made for keys of \(2, 16\).*layer 0, which has \(4, 16\)"):
        layer_of(loaded, num_heads=4)
    with pytest.raises(ArtifactError, match=r"has layers \[0, 1\], but layer 7 needs one"):
        layer_of(loaded, 7)


# -- damage


def _edit_facts(folder: Path, **changes: Any) -> None:
    facts = json.loads((folder / FACTS).read_text()) | changes
    (folder / FACTS).write_text(json.dumps({key: value for key, value in facts.items() if value is not None}))


def _edit_tensors(folder: Path, changes: dict[str, Tensor]) -> None:
    """Write other tensors, and the facts that go with them."""
    save_file(load_file(folder / TENSORS) | changes, folder / TENSORS)
    _edit_facts(folder, tensors_sha256=hashlib.sha256((folder / TENSORS).read_bytes()).hexdigest())


LEVELS = "layers.0.key_codebook_2"
DAMAGE: dict[str, tuple[Any, str, str]] = {
    # what is done, the file to be named, what else is said
    "facts-missing": (lambda f: (f / FACTS).unlink(), FACTS, "No such file"),
    "tensors-missing": (lambda f: (f / TENSORS).unlink(), TENSORS, "No such file"),
    "facts-not-json": (lambda f: (f / FACTS).write_text("{"), FACTS, ""),
    "tensors-cut": (lambda f: os.truncate(f / TENSORS, 1000), TENSORS, ""),
    "tensors-empty": (lambda f: os.truncate(f / TENSORS, 0), TENSORS, ""),
    "other-tensors": (lambda f: save_file(some_tensors(), f / TENSORS), TENSORS, "sha256"),
    "newer-version": (lambda f: _edit_facts(f, format_version=2), FACTS, "got 'kvquant' and 2"),
    "other-kind": (lambda f: _edit_facts(f, kind="kv_scales"), FACTS, "'kv_scales'"),
    "facts-incomplete": (lambda f: _edit_facts(f, rope=None, nbits=None), FACTS, "lacks ['nbits', 'rope']"),
    "digest-missing": (
        lambda f: _edit_facts(f, tensors_sha256=None), FACTS, "lacks ['tensors_sha256']",
    ),
    "bits-no-list": (lambda f: _edit_facts(f, nbits=3), FACTS, "nbits must be of type list, got 3"),
    "share-no-number": (
        lambda f: _edit_facts(f, outlier_fraction=[]), FACTS, "outlier_fraction must be of type float | int",
    ),
    "share-too-large": (lambda f: _edit_facts(f, outlier_fraction=7), FACTS, "outlier_fraction within"),
    "sinks-below-none": (lambda f: _edit_facts(f, sink_length=-1), FACTS, "sink_length at least 0"),
    "bits-no-numbers": (lambda f: _edit_facts(f, nbits=[2, "3"]), FACTS, "nbits must be integers"),
    "not-finite": (
        lambda f: _edit_tensors(f, {LEVELS: torch.tensor([-1.0, 0.0, float("nan"), 1.0])}), TENSORS, LEVELS,
    ),
    "not-increasing": (
        lambda f: _edit_tensors(f, {LEVELS: torch.tensor([-1.0, 0.5, 0.0, 1.0])}), TENSORS, "increasing",
    ),
    "beyond-one": (
        lambda f: _edit_tensors(f, {LEVELS: torch.tensor([-1.0, 0.0, 0.5, 1.5])}), TENSORS, "[-1, 1]",
    ),
    "too-few-levels": (lambda f: _edit_tensors(f, {LEVELS: torch.zeros(3)}), TENSORS, "4 levels, got (3,)"),
    "half": (lambda f: _edit_tensors(f, {LEVELS: torch.zeros(4).half()}), TENSORS, "float16"),
    "unknown-name": (lambda f: _edit_tensors(f, {"lm_head": torch.zeros(4)}), TENSORS, "'lm_head'"),
    "range-of-two-shapes": (
        lambda f: _edit_tensors(f, {"layers.0.key_upper": torch.ones(HEADS, 1)}), TENSORS, "of the shape of",
    ),
    "range-upside-down": (
        lambda f: _edit_tensors(f, {"layers.0.key_upper": torch.full((HEADS, CHANNELS), -9.0)}), TENSORS,
        "layers.0.key_upper",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_names_the_file(artifact: Path, name: str) -> None:
    damage, file, said = DAMAGE[name]
    damage(artifact)
    with pytest.raises(ArtifactError) as failure:
        load_codebooks(str(artifact))
    assert str(artifact / file) in str(failure.value)
    assert said in str(failure.value)
    with pytest.raises(ArtifactError):  # a failure is not remembered as a success
        load_codebooks(str(artifact))


def test_damaged_tensors_are_not_written(tmp_path: Path, made: Codebooks) -> None:
    tensors = {**made.tensors, LEVELS: torch.full((4,), float("inf"))}
    with pytest.raises(ArtifactError, match=LEVELS):
        save_codebooks(tmp_path / "artifact", replace(made, tensors=tensors))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_tensor_is_named(artifact: Path) -> None:
    tensors = load_file(artifact / TENSORS)
    del tensors["layers.1.value_codebook_2"]
    save_file(tensors, artifact / TENSORS)
    _edit_facts(artifact, tensors_sha256=hashlib.sha256((artifact / TENSORS).read_bytes()).hexdigest())
    with pytest.raises(ArtifactError, match=r"'layers\.1\.value_codebook_2' is missing"):
        layer_of(load_codebooks(str(artifact)), 1, rotary=None)


def test_neither_a_directory_nor_a_repository(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="neither a directory nor a hub repository"):
        load_codebooks(str(tmp_path / "missing"))
