"""Wrong heads, models and storages: refused before any token is processed, and both sides named."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import kvcache_plugins
from kvcache_plugins.backends.locret import LocretConfig
from kvcache_plugins.errors import ArtifactError, UnsupportedOperationError
from kvcache_plugins.models.cache_argument import as_argument, cache_of
from kvcache_plugins.models.facts import LayerFacts
from kvcache_plugins.registry import get_backend
from kvcache_plugins.retaining.configuration import RetainingHeadsConfig
from kvcache_plugins.retaining.heads import RetainingHeads
from kvcache_plugins.testing.models import tiny_model
from tests.eviction.feeding import chunks_of, feed, ids, model_of
from tests.eviction.locret_feeding import bound_locret, heads_of, locret

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"


def _refused(config: dict[str, Any], message: str, error: type[Exception] = ValueError) -> None:
    """Whoever builds the cache: by hand for the model, for its configuration, or `generate()`."""
    model: Any = model_of()
    for model_or_config in (model, model.config):
        with pytest.raises(error, match=message):
            kvcache_plugins.build_cache(model_or_config, config)
    with pytest.raises(error, match=message):
        model.generate(
            ids(40), max_new_tokens=2, do_sample=False, cache_implementation="quantized", cache_config=config
        )


@pytest.mark.usefixtures("_no_forward")
@pytest.mark.parametrize("heads", [None, "", 3, ["a"]], ids=repr)
def test_heads_that_are_no_name(heads: Any) -> None:
    _refused({"backend": "locret", "budget": 24, "heads": heads}, r"heads must be .* train-locret.*, got")
    for options in ({"budget": 24}, {}):
        _refused({"backend": "locret", **options}, r"heads must be the directory or hub id.* got None")


@pytest.mark.usefixtures("_no_forward")
def test_heads_that_are_not_there(tmp_path: Path) -> None:
    for name in (str(tmp_path / "missing"), "nobody/no-such-heads"):
        _refused(
            {"backend": "locret", "budget": 24, "heads": name},
            rf"heads='{name}' is neither a directory nor a hub repository",
            ArtifactError,
        )


@pytest.mark.usefixtures("_no_forward")
@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("", "holds no retaining heads: there is no config.json"),
        ("tiny-llama-books-kvquant3", "holds no retaining heads: there is no config.json"),
        ("tiny-llama-books", r"must hold retaining heads \(model_type 'locret_heads'\), got .* 'llama'"),
    ],
)
def test_folders_of_something_else(folder: str, message: str) -> None:
    name = str(MODELS / folder)
    _refused({"backend": "locret", "budget": 24, "heads": name}, f"heads='{name}' {message}", ArtifactError)


@pytest.mark.usefixtures("_no_forward")
@pytest.mark.parametrize(
    "damage", ["no-weights", "cut-weights", "nan", "cut-config", "other-width", "no-options"]
)
def test_damaged_heads(damage: str, tmp_path: Path) -> None:
    heads = RetainingHeads(RetainingHeadsConfig.from_model(model_of(), hidden_dim=8))
    if damage == "nan":
        heads.layers[1].fc1.weight.data[3, 4] = torch.nan
    heads.save_pretrained(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    if damage == "no-weights":
        weights.unlink()
    if damage == "cut-weights":
        weights.write_bytes(weights.read_bytes()[:100])
    if damage == "cut-config":
        config.write_text(config.read_text(encoding="utf-8")[:50], encoding="utf-8")
    if damage == "other-width":
        facts = json.loads(config.read_text(encoding="utf-8"))
        config.write_text(json.dumps(facts | {"hidden_dim": 16}), encoding="utf-8")
    if damage == "no-options":
        facts = json.loads(config.read_text(encoding="utf-8"))
        config.write_text(json.dumps(facts | {"defaults": "x"}), encoding="utf-8")
    options = {"backend": "locret", "budget": 24, "heads": str(tmp_path)}
    _refused(options, rf"{tmp_path}.*(cannot be (read|loaded)|not finite)", ArtifactError)


@pytest.mark.usefixtures("_no_forward")
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"num_hidden_layers": 3}, "num_hidden_layers=3.*num_hidden_layers=2"),
        ({"num_key_value_heads": 4}, "num_key_value_heads=4.*num_key_value_heads=2"),
        ({"head_dim": 32}, "head_dim=32.*head_dim=16"),
        ({"num_attention_heads": 8}, "num_attention_heads=8.*num_attention_heads=4"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_heads_of_another_model(other: dict[str, Any], message: str) -> None:
    heads = heads_of(model_of(**other))
    _refused({"backend": "locret", "budget": 24, "heads": heads}, f"heads were made for .*{message}")


@pytest.mark.usefixtures("_no_forward")
def test_heads_of_the_bundled_model_name_it() -> None:
    heads = str(MODELS / "tiny-llama-books-locret")
    message = "made for tiny-llama-books with num_hidden_layers=6.*LlamaConfig has num_hidden_layers=2"
    _refused({"backend": "locret", "budget": 24, "heads": heads}, message)


@pytest.mark.usefixtures("_no_forward")
@pytest.mark.parametrize(
    ("storage", "message"),
    [
        ({"backend": "kivi"}, r"storage=.*kivi.*cannot evict single tokens.*'int8'.*'int4', 'float8'"),
        ({"backend": "int8", "granularity": "tensor"}, "cannot evict single tokens.*'int4', 'float8'"),
        (
            {"backend": "locret", "heads": "x", "budget": 9},
            "storage must name a backend that keeps every token",
        ),
        ({"backend": "int9"}, r"no backend that can store. Did you mean 'int8'\? Allowed are codes .*'int4'"),
        ({"backend": "hqq"}, "no backend that can store. Allowed are codes .*'int8'"),
        ({"backend": 8}, "no backend that can store. Allowed are codes .*'int8'"),
        ({"backend": "kvquant", "calibration": "normal_float"}, "(must be |needs positions=)'compact'"),
    ],
)
@pytest.mark.parametrize("budget", [128, 1000])  # the storage is at fault before a budget that is too small
def test_storages_that_do_not_go_with_eviction(storage: dict[str, Any], message: str, budget: int) -> None:
    _refused(locret(model_of(), budget=budget, storage=storage), message)


@pytest.mark.usefixtures("_no_forward")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "many"}, "budget must be a number of tokens"),
        (
            {"budget": 8, "stabilizer_length": 8},
            r"budget must exceed .* 8 newest tokens \(stabilizer_length\)",
        ),
        ({"budget": 8, "local_length": 9}, r"budget must exceed .* 9 newest tokens \(local_length\)"),
        ({"head": "x"}, "'head' is not an option of LocretConfig.*heads"),
        ({"positions": "compact", "storage": {"backend": "int8"}}, "compact.*storage must be None"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    _refused(locret(model_of(), **options), message)


def test_without_a_budget_the_heads_say_what_suits_them() -> None:
    heads = MODELS / "tiny-llama-books-locret"
    trained = json.loads((heads / "config.json").read_text())["defaults"]
    given = {"heads": str(heads)}
    names = ("budget", "chunk_size", "stabilizer_length", "local_length")

    def chosen(**options: Any) -> dict[str, Any]:
        config = LocretConfig.from_dict(given | options)
        return {name: getattr(config, name) for name in names}

    assert chosen() == chosen(budget=None) == trained
    assert chosen(chunk_size=50, local_length=8) == trained | {"chunk_size": 50, "local_length": 8}
    # a budget of one's own comes with the defaults of the backend
    assert chosen(budget=96) == {"budget": 96, "chunk_size": 1024} | dict.fromkeys(names[2:])
    with pytest.raises(ArtifactError, match="heads='nowhere' is neither"):
        LocretConfig.from_dict({"heads": "nowhere"})


# --- the model that a cache serves


def test_a_cache_that_knows_no_model() -> None:
    model: Any = model_of()
    cache = kvcache_plugins.build_cache(model.config, locret(model))
    with pytest.raises(
        UnsupportedOperationError, match=r"Layer 0 was not told which model.*cache\.bind\(model"
    ):
        feed(model, cache, ids(77), [77])
    assert cache.get_seq_length() == 0
    cache.bind(model, prompt_length=77)
    got = feed(model, cache, ids(77), chunks_of(77, 16))
    assert torch.equal(got, feed(model, bound_locret(model, 77), ids(77), chunks_of(77, 16)))


def test_a_cache_for_a_configuration_is_told_by_generate() -> None:
    model: Any = tiny_model("llama", attn_implementation="sdpa", vocab_size=512)  # without hooks
    answers = [
        model.generate(
            ids(77, 2), max_new_tokens=8, do_sample=False, return_dict_in_generate=True, output_logits=True,
            **as_argument(kvcache_plugins.build_cache(model_or_config, locret(model))),
        )
        for model_or_config in (model.config, model)
    ]  # fmt: skip
    assert cache_of(answers[0]).num_held() == 24 + 7
    assert torch.equal(torch.stack(answers[0].logits), torch.stack(answers[1].logits))


def test_a_relative_path_is_of_where_the_cache_was_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = model_of()
    options = locret(model)
    (tmp_path / "heads").symlink_to(options["heads"])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    cache = kvcache_plugins.build_cache(model, {**options, "heads": "heads"})
    monkeypatch.chdir(tmp_path / "elsewhere")
    cache.bind(model, prompt_length=77)
    got = feed(model, copy.deepcopy(cache), ids(77), chunks_of(77, 16))
    assert torch.equal(got, feed(model, bound_locret(model, 77), ids(77), chunks_of(77, 16)))


@pytest.mark.parametrize("has_hooks", [False, True])
def test_the_forward_of_another_model(has_hooks: bool) -> None:
    model, other = model_of(), tiny_model("llama", attn_implementation="sdpa", vocab_size=512, seed=3)
    cache = bound_locret(model, 77)
    if has_hooks:
        bound_locret(other, 77)
    with pytest.raises(RuntimeError, match="projections of layer 0 were not caught"):
        feed(other, cache, ids(77), [77])
    assert cache.get_seq_length() == 0
    got = feed(model, cache, ids(77), chunks_of(77, 16))
    assert torch.equal(got, feed(model, bound_locret(model, 77), ids(77), chunks_of(77, 16)))


def test_a_layer_that_is_handed_keys_outside_of_its_model() -> None:
    layer = bound_locret(model_of(), 77).evicting_layers[0]
    with pytest.raises(RuntimeError, match="taken once, while the attention layer runs"):
        layer.update(*[torch.zeros(1, 2, 9, 16)] * 2)
    assert layer.get_seq_length() == 0


def test_an_option_file() -> None:
    # Plain values only: what is written to JSON and read again gives the same cache.
    model: Any = model_of()
    config = GenerationConfig(
        cache_implementation="quantized", max_new_tokens=4, do_sample=False, return_dict_in_generate=True,
        cache_config=locret(model, storage={"backend": "int8"}, layer_overrides={"0": {"budget": 30}}),
    )  # fmt: skip
    again = GenerationConfig.from_dict(json.loads(json.dumps(config.to_dict(), default=str)))
    cache = cache_of(model.generate(ids(77), generation_config=again))
    assert [layer.held_length for layer in cache.evicting_layers] == [33, 27]
    options = {"backend": "locret", **json.loads(json.dumps(cache.config.to_dict()))}
    assert kvcache_plugins.build_cache(model, options).config == cache.config


@pytest.mark.usefixtures("_no_forward")
@pytest.mark.parametrize("heads", ["missing", "of-another-model"])
def test_heads_of_a_single_layer(heads: str, tmp_path: Path) -> None:
    names = {
        "missing": str(tmp_path / "missing"),
        "of-another-model": heads_of(model_of(num_hidden_layers=3)),
    }
    _refused(locret(model_of(), layer_overrides={"1": {"heads": names[heads]}}), "heads")


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "kivi"},
        {"backend": "int4"},
        {"backend": "float8"},
        {"backend": "kvquant", "calibration": "normal_float"},
        *({"backend": "int8", "granularity": name} for name in ("head", "group", "token", "tensor")),
    ],
    ids=str,
)
def test_configurations_know_what_their_codecs_can(options: dict[str, Any]) -> None:
    cache_class = get_backend(options.pop("backend"))
    config = cache_class.config_class.from_dict(options)
    layer = cache_class.layer_class(config, 0, LayerFacts(None))
    layer.num_heads = 2
    codecs = [layer.key_stream(64).codec, layer.value_stream(64).codec]
    gathers = all(codec.is_gatherable or codec.unit_tokens == config.block_tokens > 1 for codec in codecs)
    assert config.packs_single_tokens == gathers
