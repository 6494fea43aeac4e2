"""Caches go by the name that the installed Transformers has for them, and are found under every name."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

import kvcache_plugins as kvp
from kvcache_plugins.generation_calls import bind_cache
from kvcache_plugins.models.cache_argument import (
    CACHE_NAMES,
    as_argument,
    by_name,
    cache_name,
    cache_of,
    given_cache,
)
from kvcache_plugins.testing import tiny_model
from kvcache_plugins.testing.generation import padded_prompt

PACKAGE = Path(kvp.__file__).parent
IS_RENAMED = Version(transformers.__version__) >= Version("5.24")
CONFIGS: dict[str, dict[str, Any]] = {
    "int8": {"backend": "int8"},
    "compact": {"backend": "streaming_llm", "budget": 24, "chunk_size": 16, "positions": "compact"},
    "kvzip": {"backend": "kvzip", "budget": 24, "chunk_size": 16},  # sees the tokens of a call
    "sirllm": {"backend": "sirllm", "budget": 24, "chunk_size": 16},  # and its logits
}


def test_arguments_by_name() -> None:
    class Named(torch.nn.Module):
        def forward(self, first: int, second: int = 0, **others: int) -> None: ...

    class Nameless(torch.nn.Module):
        def forward(self, *args: int, **others: int) -> None: ...

    assert by_name(Named(), (1, 2), {"third": 3}) == {"first": 1, "second": 2, "third": 3}
    assert by_name(Named(), (1,), {"second": 2}) == {"first": 1, "second": 2}
    assert by_name(Nameless(), (), {"third": 3}) == {"third": 3}
    for module, count in ((Named(), 2), (Nameless(), 0)):
        with pytest.raises(TypeError, match=f"was given 3 arguments by position, and has names for {count}"):
            by_name(module, (1, 2, 3), {})


def test_the_name_is_that_of_the_installed_release() -> None:
    assert cache_name() == ("cache" if IS_RENAMED else "past_key_values")
    kv_cache = DynamicCache()
    assert as_argument(kv_cache) == {cache_name(): kv_cache}
    output = CausalLMOutputWithPast(**as_argument(kv_cache))
    assert cache_of(output) is kv_cache
    assert cache_of(tiny_model("llama")(torch.tensor([[1, 2]]), **as_argument(kv_cache))) is kv_cache


@pytest.mark.parametrize("name", [*CACHE_NAMES, "layer_past", "past_key_value"])
def test_a_cache_is_found_under_every_name(name: str) -> None:
    kv_cache = DynamicCache()
    assert given_cache({"input_ids": None, name: kv_cache}) is kv_cache
    assert given_cache({**dict.fromkeys(CACHE_NAMES), name: kv_cache}, (torch.ones(1),)) is kv_cache


def test_a_cache_is_found_among_positions() -> None:
    kv_cache = DynamicCache()
    assert given_cache({"cache": None}, (torch.ones(1), None, kv_cache)) is kv_cache
    assert given_cache({"cache": None}, (torch.ones(1), None)) is None
    assert given_cache({}) is None


# Ours, so that a release that renames caches again does not pass by unnoticed, as one did.
@pytest.mark.parametrize("backend", CONFIGS)
@pytest.mark.parametrize("name", CACHE_NAMES if IS_RENAMED else CACHE_NAMES[1:])
@pytest.mark.allow_deprecation(r".past_key_values.*deprecated", reason="what users have written still works")
def test_both_names_bind_a_cache(name: str, backend: str) -> None:
    """Padding, the model's hooks and compact positions: what a cache that is not found would not have."""
    model, prompt = tiny_model("llama"), padded_prompt((44, 31))
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "return_dict_in_generate": True}
    asked = {"cache_implementation": "quantized", "cache_config": CONFIGS[backend]}
    expected = model.generate(**prompt, **settings, **asked)
    kv_cache = kvp.build_cache(model, CONFIGS[backend])
    output = model.generate(**prompt, **settings, **{name: kv_cache})
    assert output.sequences.tolist() == expected.sequences.tolist()
    for one in (kv_cache, cache_of(expected)):
        layer = one.packed_layers[0]
        pads: Tensor = layer.pads if one.evicts else layer.padding.lengths
        assert pads.tolist() == [0, 13]
        assert one.get_seq_length() == 49


def test_a_release_that_renames_caches_again_is_told() -> None:
    model, config = tiny_model("llama"), {"backend": "int8"}
    asked = SimpleNamespace(cache_implementation="quantized", cache_config=config)
    kwargs = {"some_new_name": kvp.build_cache(model, config)}
    with pytest.raises(kvp.IncompatibleTransformersError, match=r"another name than any of .*'cache'"):
        bind_cache(model, asked, kwargs, None, None)
    others = SimpleNamespace(cache_implementation="quantized", cache_config={"backend": "quanto"})
    for config_of_call in (others, SimpleNamespace(cache_implementation=None, cache_config=None)):
        bind_cache(model, config_of_call, dict(kwargs), None, None)  # none of ours was asked for


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_package_leaves_names_to_one_file(path: Path) -> None:
    if path.name == "cache_argument.py":
        pytest.skip("it is that file")
    for node in ast.walk(ast.parse(path.read_text())):
        names = [
            getattr(node, "attr", None),
            getattr(node, "value", None) if isinstance(node, ast.Constant) else None,
            *(keyword.arg for keyword in getattr(node, "keywords", ())),
        ]
        assert not {"past_key_values", "cache_params"} & set(filter(lambda n: isinstance(n, str), names))
