"""Folders of models that are damaged: one line that names the folder and what is wrong with it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcache_plugins.cli import main
from kvcache_plugins.evaluation.caches import DENSE, generate
from kvcache_plugins.models.cache_argument import cache_of
from kvcache_plugins.models.pretrained import check_attention, load_config, load_model, load_tokenizer
from kvcache_plugins.testing import tiny_model

WEIGHTS, CONFIG = "model.safetensors", "config.json"
UP = "model.layers.1.mlp.up_proj.weight"


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def describe(folder: Path, **changes: object) -> None:
    facts = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps(facts))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights-cut": (lambda f: os.truncate(f / WEIGHTS, 5000), "weights of .* cannot be loaded"),
    "weights-empty": (lambda f: os.truncate(f / WEIGHTS, 0), "weights of .* cannot be loaded"),
    "a-weight-missing": (lambda f: edit(f, lambda t: t.pop(UP)), f"incomplete: {UP} is missing"),
    "a-weight-of-another-shape": (
        lambda f: edit(f, lambda t: t.update({UP: torch.zeros(3, 3)})),
        rf"{UP} has the shape \(3, 3\) instead of",
    ),
    "a-number-that-is-none": (lambda f: describe(f, num_hidden_layers="x"), "configuration of .* cannot be"),
    "a-number-of-none": (lambda f: describe(f, num_key_value_heads=0), "weights of .* cannot be loaded"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_model(name: str, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    damage, said = DAMAGE[name]
    damage(tmp_path)
    with pytest.raises(ValueError, match=said) as failure:
        load_model(str(tmp_path), load_config(str(tmp_path)))
    assert str(tmp_path) in str(failure.value)


def test_an_adapter_is_to_be_merged_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "base_model_name_or_path": "org/base"}'
    )
    for command in (
        ["eval", "perplexity", "--dataset", "pydoc", "--cache_config", '{"backend": "int8"}'],
        ["train-locret"],
        ["estimate"],
    ):
        output = [] if command == ["estimate"] else ["--output", str(tmp_path / "out")]
        assert main([*command, "--model", str(tmp_path), *output]) == 2
        said = capsys.readouterr().err
        assert f"--model {str(tmp_path)!r} cannot be loaded: it is an adapter of PEFT, not a model" in said
        assert "merge_and_unload()" in said and said.count("\n") == 1
    tiny_model("llama").config.save_pretrained(tmp_path)  # where a model lies as well
    assert load_config(str(tmp_path)).model_type == "llama"


@pytest.mark.parametrize(
    "given", [None, "eager", "sdpa", "flash_attention_2", "kernels-community/flash-attn2"]
)
def test_ways_of_attending_that_transformers_knows(given: str | None) -> None:
    check_attention(given)


def test_a_way_of_attending_that_nobody_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    ours = {"sdpa_observed_by_kvcache_plugins": len}  # of heads that are trained
    monkeypatch.setattr(
        ALL_ATTENTION_FUNCTIONS, "_global_mapping", ALL_ATTENTION_FUNCTIONS._global_mapping | ours
    )
    said = r"^--attn_implementation must be one of eager, .*flash.*, sdpa, .*or .*, got 'sdpaa'\. Did you"
    with pytest.raises(ValueError, match=said) as error:  # other tests may have registered some of their own
        load_model(str(tmp_path), load_config(str(tmp_path)), attn_implementation="sdpaa")
    assert "observed" not in str(error.value)


@pytest.mark.parametrize("kind", [ImportError, ValueError])
def test_a_way_of_attending_that_is_not_here(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a package that is not installed, or of a model that has not learned it."""

    def refuse(*arguments: object, **options: object) -> None:
        raise kind("LlamaForCausalLM does not support Flash Attention 2 yet.")

    tiny_model("llama").save_pretrained(tmp_path)
    config = load_config(str(tmp_path))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    said = (
        rf"^--attn_implementation 'flash_attention_2' cannot be used with --model '{tmp_path}': Llama.* yet"
    )
    with pytest.raises(ValueError, match=said):
        load_model(str(tmp_path), config, attn_implementation="flash_attention_2")


def test_a_whole_model(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), load_config(str(tmp_path)))
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(("content", "reason"), [("{", ""), ("{}", "there is no 'added_tokens' in it")])
def test_a_damaged_tokenizer(content: str, reason: str, tmp_path: Path) -> None:
    tiny_model("llama").config.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=rf"tokenizer of --model .* cannot be loaded: {reason}"):
        load_tokenizer(str(tmp_path))


def test_caches_of_the_generation_config_are_left_out(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.generation_config.cache_implementation = "quantized"
    model.generation_config.cache_config = {"backend": "int8"}
    model.save_pretrained(tmp_path)
    given = json.loads((tmp_path / "generation_config.json").read_text())
    assert given["cache_implementation"] == "quantized"
    (tmp_path / "generation_config.json").write_text(json.dumps(given | {"use_cache": False}))
    loaded = load_model(str(tmp_path), load_config(str(tmp_path)))
    output = generate(loaded, torch.arange(3, 73)[None], DENSE, 4)
    assert type(cache_of(output)) is DynamicCache


@pytest.mark.parametrize(("load", "what"), [(load_config, "configuration"), (load_tokenizer, "tokenizer")])
def test_what_cannot_be_reached_is_named(load: Callable[..., Any], what: str) -> None:
    """What transformers says where there is no network names neither the model nor the option."""
    with pytest.raises(OSError, match=f"The {what} of --model 'nobody/has-this' cannot be found: "):
        load("nobody/has-this", local_files_only=True)


def test_an_error_of_the_system_stays_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied", "config.json")

    monkeypatch.setattr(AutoConfig, "from_pretrained", denied)
    with pytest.raises(PermissionError, match=r"config\.json"):
        load_config(str(tmp_path))
