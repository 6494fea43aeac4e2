"""The dispatch: what reaches us, what reaches transformers, and what is refused before any work is done."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import json
import math
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import (
    Cache,
    DynamicCache,
    FlaubertConfig,
    FlaubertWithLMHeadModel,
    GenerationConfig,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    StaticCache,
    XLMConfig,
    XLMWithLMHeadModel,
)
from transformers import cache_utils as host
from transformers.generation import utils as generation_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

import kvcache_plugins as kvp
from kvcache_plugins import integration
from kvcache_plugins.generation_calls import ready_to_build
from kvcache_plugins.kernels import loader
from kvcache_plugins.models.cache_argument import as_argument, cache_of
from kvcache_plugins.testing import tiny_model
from tests.models.families import small_model

INPUTS = torch.arange(5, 45)[None]
SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture
def no_forward(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a forward pass was run before the bad option was refused")

    monkeypatch.setattr(model.model.layers[0], "forward", refuse)


def generate(model: Any, cache_config: Any, **kwargs: Any) -> Any:
    return model.generate(
        INPUTS,
        max_new_tokens=4,
        do_sample=False,
        cache_implementation="quantized",
        cache_config=cache_config,
        return_dict_in_generate=True,
        **kwargs,
    )


@pytest.mark.parametrize("name", ["kivi", "KIVI", "Int8", "int4", "float8"])
def test_our_names_reach_us(model: Any, name: str) -> None:
    cache = cache_of(generate(model, {"backend": name}))
    assert isinstance(cache, kvp.KVCache) and isinstance(cache, Cache)
    assert cache.backend == name.lower()


@pytest.mark.parametrize("name", ["quanto", "hqq"])
def test_transformers_names_reach_transformers(model: Any, name: str) -> None:
    pytest.importorskip("optimum.quanto" if name == "quanto" else "hqq")
    options = {"axis_key": 1, "axis_value": 1} if name == "hqq" else {}
    cache = cache_of(generate(model, {"backend": name, "nbits": 4, "q_group_size": 16, **options}))
    assert type(cache) is host.QuantizedCache


@pytest.mark.skipif(
    not hasattr(host, "Fp8QuantizedLayer"), reason="this release of transformers has no fp8 cache"
)
@pytest.mark.parametrize("name", ["fp8", "FP8"])
def test_fp8_reaches_transformers(model: Any, name: str) -> None:
    cache = cache_of(generate(model, {"backend": name}))
    assert type(cache) is host.QuantizedCache
    assert {type(layer) for layer in cache.layers} == {host.Fp8QuantizedLayer}
    with pytest.raises(ValueError, match=r"fp8.*does not support \['nbits'\]"):  # in transformers' own words
        generate(model, {"backend": name, "nbits": 4})


@pytest.mark.allow_deprecation("torch.jit.script", reason="hqq compiles with it when it is imported")
def test_published_hqq_example_runs_as_written(model: Any) -> None:
    pytest.importorskip("hqq")
    published = {
        "backend": "HQQ", "nbits": 4, "q_group_size": 128, "residual_length": 64, "device": model.device,
    }  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = cache_of(generate(model, published))
    assert type(cache) is host.QuantizedCache
    assert sum("'device'" in str(w.message) for w in caught) == 1


def test_keys_of_older_tutorials_are_dropped_for_ours_too(model: Any) -> None:
    with pytest.warns(UserWarning, match="compute_dtype.*device"):
        cache = cache_of(
            generate(model, {"backend": "int8", "device": "cpu", "compute_dtype": torch.float16})
        )
    assert isinstance(cache, kvp.Int8Cache)


def test_without_a_backend_transformers_default_serves(model: Any) -> None:
    pytest.importorskip("optimum.quanto")
    assert type(cache_of(generate(model, {"q_group_size": 16}))) is host.QuantizedCache


@pytest.mark.parametrize(
    ("cache_config", "said"),
    [
        ({"backend": "kiwi"}, ["kiwi", "'kivi'", "int8"]),
        ({"backend": "kvi", "nbits": 2}, ["kvi", "'kivi'"]),
        ({"backend": 3}, ["backend", "3", "kivi"]),
        ({"backend": "kivi", "nbit": 4}, ["nbit", "'nbits'", "residual_length"]),
        ({"backend": "kivi", "nbits": 5}, ["nbits", "5", "(2, 3, 4, 8)"]),
        ({"backend": "kivi", "nbits": True}, ["nbits", "True", "(2, 3, 4, 8)"]),
        ({"backend": "kivi", "value_bits": "4"}, ["value_bits", "'4'", "(2, 3, 4, 8)"]),
        ({"backend": "kivi", "q_group_size": 48}, ["q_group_size", "48", "(16, 32, 64, 128)"]),
        ({"backend": "kivi", "residual_length": 100}, ["residual_length", "100", "multiple of 32"]),
        ({"backend": "kivi", "budget": 128}, ["budget", "128", "residual_length"]),
        ({"backend": "kivi", "rope_mode": "pre"}, ["rope_mode", "'pre'", "block"]),
        ({"backend": "int4", "nbits": 3}, ["nbits", "3", "(2, 4, 8)"]),
        ({"backend": "int4", "smooth": 2}, ["smooth", "2", "[0.0, 1.0]"]),
        ({"backend": "int8", "granularity": "row"}, ["granularity", "'row'", "tensor"]),
        ({"backend": "float8", "format": "e3m4"}, ["format", "'e3m4'", "e5m2"]),
        ({"backend": "float8", "scale": "head"}, ["calibration", "None", "scale='head'"]),
        ({"backend": "float8", "scale": "head", "calibration": "no/such-artifact"}, ["no/such-artifact"]),
        ({"backend": "int8", "skip_layers": [7]}, ["skip_layers", "7", "-2 to 1"]),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_bad_options_stop_before_any_forward(
    model: Any, no_forward: None, cache_config: dict[str, Any], said: list[str]
) -> None:
    with pytest.raises(ValueError, match=re.escape(said[0])) as failure:
        generate(model, cache_config)
    for part in said:
        assert part in str(failure.value)


def test_group_that_does_not_divide_the_head(model: Any, no_forward: None) -> None:
    with pytest.raises(ValueError, match=r"q_group_size must divide the head dimension 16.*got 24"):
        generate(model, {"backend": "int8", "granularity": "group", "q_group_size": 24})


@pytest.mark.parametrize("config", [["kivi"], "kivi", GenerationConfig()], ids=["list", "str", "object"])
def test_a_config_that_is_not_a_dict(model: Any, no_forward: None, config: object) -> None:
    with pytest.raises(ValueError, match=r"cache_config.*dict.*got"):
        generate(model, config)
    with pytest.raises(ValueError, match=r"cache_config.*dict.*got"):
        kvp.build_cache(model, config)  # type: ignore[arg-type]


def test_native_kernel_without_one(
    model: Any, no_forward: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(loader, "_library", None)
    monkeypatch.setattr(loader, "_failure", None)
    monkeypatch.setenv("KVCACHE_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setenv("KVCACHE_NO_BUILD", "1")
    with pytest.raises(kvp.KernelUnavailableError, match=r"kernel='native'.*kivi.*kernel='torch'"):
        generate(model, {"backend": "kivi", "kernel": "native"})


def test_a_model_with_a_cache_of_its_own_is_refused() -> None:
    # transformers takes no notice of `cache_implementation` there, and would go on with a dense cache.
    model = MiniMaxForCausalLM(MiniMaxConfig(**SMALL, num_local_experts=2))
    with pytest.raises(ValueError, match=r"MiniMaxForCausalLM .*backend='int8' would be ignored"):
        generate(model.eval(), {"backend": "int8"})


def test_a_model_without_a_cache_is_refused() -> None:
    sizes = {"vocab_size": 128, "emb_dim": 32, "n_layers": 1, "n_heads": 2}
    for model in (
        OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=128, n_embd=32, n_layer=1, n_head=2)),
        XLMWithLMHeadModel(XLMConfig(**sizes)),
        FlaubertWithLMHeadModel(FlaubertConfig(**sizes)),
    ):
        with pytest.raises(ValueError, match=r"Model takes no cache.*backend='int8' would be ignored"):
            generate(model.eval(), {"backend": "int8"})


def test_generation_that_is_to_use_no_cache_is_refused(model: Any) -> None:
    """Evolla's configuration says so, and any user can."""
    with pytest.raises(ValueError, match=r"use_cache is False.*Allowed is use_cache=True"):
        generate(model, {"backend": "int8"}, use_cache=False)


def test_a_backend_that_nothing_would_look_at_is_refused(model: Any, no_forward: None) -> None:
    with pytest.raises(ValueError, match=r"'KIVI', which would be ignored.*cache_implementation='quantized'"):
        model.generate(INPUTS, max_new_tokens=4, cache_config={"backend": "KIVI"})


def test_hybrid_is_no_word_for_it(model: Any, no_forward: None) -> None:
    with pytest.raises(
        ValueError, match=r"'kivi', which would be ignored.*'hybrid', which transformers takes"
    ):
        model.generate(
            INPUTS, max_new_tokens=4, cache_implementation="hybrid", cache_config={"backend": "kivi"}
        )


@pytest.mark.parametrize(
    "implementation", ["static", "offloaded", "offloaded_static", "sliding_window", "hybrid_chunked"]
)
def test_a_backend_beside_another_implementation_is_refused(
    model: Any, no_forward: None, implementation: str
) -> None:
    run = functools.partial(model.generate, INPUTS, max_new_tokens=4, cache_implementation=implementation)
    message = rf"'kivi', which would be ignored: cache_implementation='{implementation}'.*cache_config=None"
    with pytest.raises(ValueError, match=message):
        run(cache_config={"backend": "kivi"})
    with pytest.raises(ValueError, match=r"Unknown cache backend 'kivvi'\. Did you mean 'kivi'"):
        run(cache_config={"backend": "kivvi"})
    with pytest.raises(ValueError, match=r"must be a plain dict .*, got 'kivi' \(str\)"):
        run(cache_config="kivi")


def test_an_unknown_backend_that_nothing_would_look_at_is_refused(model: Any, no_forward: None) -> None:
    run = functools.partial(model.generate, INPUTS, max_new_tokens=4)
    with pytest.raises(ValueError, match=r"Unknown cache backend 'kivvi'\. Did you mean 'kivi'"):
        run(cache_config={"backend": "kivvi"})
    with pytest.raises(ValueError, match=r"given a DynamicCache, .*ignored: .*'kivvi'"):
        run(cache_config={"backend": "kivvi"}, **as_argument(DynamicCache(config=model.config)))
    for given in ({}, as_argument(DynamicCache(config=model.config))):
        with pytest.raises(ValueError, match=r"must be a plain dict .*, got 'kivi' \(str\)"):
            run(cache_config="kivi", **given)


def test_what_files_call_dense_is_the_ordinary_cache(model: Any, no_forward: None) -> None:
    for run in (generate, kvp.build_cache):
        with pytest.raises(ValueError, match=r"'Dense' is what .*leave out cache_implementation"):
            run(model, {"backend": "Dense"})


@pytest.mark.parametrize("backend", ["quanto", "HQQ", "fp8"])
def test_options_that_transformers_does_not_have(model: Any, no_forward: None, backend: str) -> None:
    message = rf"'skip_layers' is no option of transformers' own cache, the backend '{backend}'\. Its options"
    with pytest.raises(ValueError, match=rf"{message} are \['nbits', .*, got skip_layers=\[0\]"):
        generate(model, {"backend": backend, "nbits": 4, "skip_layers": [0]})
    with pytest.raises(ValueError, match=r"Did you mean 'q_group_size'\?"):
        generate(model, {"backend": backend, "group_size": 32})


@pytest.mark.parametrize(
    ("cache_config", "message"),
    [
        ({"Backend": "kivi", "nbits": 2}, r"'Backend' is no option.* Did you mean 'backend'\?.*'kivi'"),
        ({"backned": "kivi"}, r"'backned' is no option of transformers' default.* Did you mean 'backend'\?"),
        ({"nbits": 2, "rope_mode": "block"}, r"names no 'backend', and 'rope_mode' is no option.*\['nbits',"),
        ({3: 4}, "names no 'backend', and 3 is no option"),
        ({"backend": "int8", 3: 4}, r"3 is not an option of Int8Config\. Its options are .*, got 3=4"),
        ({"backend": "int8", "config": 1}, "'config' is not an option of Int8Config"),
        ({"backend": "int8", "max_cache_length": 9}, "'max_cache_length' is not an option of Int8Config"),
    ],
)
def test_keys_that_are_no_options(
    model: Any, no_forward: None, cache_config: dict[Any, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generate(model, cache_config)


@pytest.mark.parametrize("backend", ["int8", "knorm"])
def test_lengths_are_checked_where_they_are_told(model: Any, backend: str) -> None:
    config: dict[str, Any] = {"backend": backend, **({"budget": 32} if backend == "knorm" else {})}
    for value in (0, -5, 5.5, "5", True):
        with pytest.raises(ValueError, match="max_cache_length must be an integer >= 1, or None"):
            kvp.build_cache(model, config, max_cache_length=value)  # type: ignore[arg-type]
        for name in ("max_cache_length", "prompt_length"):
            with pytest.raises(ValueError, match=f"{name} must be an integer >= 1, or None"):
                kvp.build_cache(model, config).bind(model, **{name: value})
    cache: Any = kvp.build_cache(model, config, max_cache_length=np.int64(50))  # type: ignore[arg-type]
    assert cache.packed_layers[0].final_length == 50
    cache.bind(model, max_cache_length=np.int64(60), prompt_length=np.int64(40))
    with pytest.raises(ValueError, match=r"bind: expected the transformers model .* got LlamaConfig"):
        cache.bind(model.config)
    for length in (30.0, math.inf, 10**30):  # transformers asks no more than that it can be compared
        out = model.generate(
            INPUTS[:, :20], max_length=length, stopping_criteria=[stop_at(30)], **as_argument(cache)
        )
        assert out.shape[1] == 30
        cache.reset()


def stop_at(length: int) -> Any:
    """A criterion that a text of so many tokens meets."""
    return lambda input_ids, scores, **_: torch.full((len(input_ids),), input_ids.shape[1] >= length)


@pytest.mark.parametrize("is_given", [True, False], ids=["given", "the-models-own"])
def test_continuous_batching_refuses_what_it_would_ignore(is_given: bool, no_forward: None) -> None:
    model = tiny_model("llama")
    config = GenerationConfig(cache_implementation="quantized", cache_config={"backend": "int4"})
    if not is_given:
        model.generation_config = config
    message = r"generate_batch.*backend='int4' would be ignored\. Allowed there is cache_config=None"
    with pytest.raises(ValueError, match=message):
        model.generate_batch([[5, 6, 7]], generation_config=config if is_given else None)
    with pytest.raises(ValueError, match=message):
        model.init_continuous_batching(config if is_given else None)
    config.cache_config = {"backend": "kivy"}
    with pytest.raises(ValueError, match=r"Unknown cache backend 'kivy'\. Did you mean 'kivi'"):
        model.init_continuous_batching(config if is_given else None)
    config.cache_config = {"backend": "hqq"}  # transformers' business
    model.init_continuous_batching(generation_config=config)


@pytest.mark.parametrize("through", ["generate_batch", "generate"])
def test_continuous_batching_refuses_what_it_never_looks_at(through: str, monkeypatch: Any) -> None:
    """It takes any argument by name, and uses `max_new_tokens`."""
    model, begun = tiny_model("llama"), []
    monkeypatch.setattr(
        type(model), "continuous_batching_context_manager", lambda *_, **__: begun.append(1) or nullcontext()
    )
    run: Any = functools.partial(model.generate_batch, [[5, 6, 7]], generation_config=GenerationConfig())
    if through == "generate":
        run = functools.partial(model.generate, INPUTS[:1], cache_implementation="paged")
    ours = {"cache_implementation": "quantized", "cache_config": {"backend": "int8"}}
    if through == "generate":
        del ours["cache_implementation"]
    with pytest.raises(ValueError, match=r"generate_batch.*backend='int8' would be ignored"):
        run(**ours, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"Unknown cache backend 'kvi'\. Did you mean 'kivi'"):
        run(cache_config={"backend": "kvi"}, max_new_tokens=2)
    cache = kvp.build_cache(model, {"backend": "int8"})
    with pytest.raises(ValueError, match=r"a cache of the backend 'int8' would be ignored.*=None; generate"):
        run(**as_argument(cache), max_new_tokens=2)
    assert not begun
    kvp.uninstall()
    try:
        for name in ("generate_batch", "init_continuous_batching"):
            assert name not in vars(generation_utils.GenerationMixin)
    finally:
        kvp.install()


def test_options_beside_a_cache_are_those_of_that_cache(model: Any, no_forward: None) -> None:
    """Transformers would not look at them, and neither would the user who has forgotten one of the two."""
    cache, ours = kvp.build_cache(model, {"backend": "int8"}), {"backend": "kivi", "nbits": 2}
    for given in (cache, DynamicCache(config=model.config)):
        with pytest.raises(ValueError, match=r"given a .*ignored: cache_config=.'backend': 'kivi', .*one of"):
            model.generate(INPUTS, max_new_tokens=2, cache_config=ours, **as_argument(given))
    for other in ({"backend": "int8", "residual_length": 8}, {"backend": "quanto"}, {"nbits": 4}):
        with pytest.raises(ValueError, match="a cache of the backend 'int8', and another one's options"):
            model.generate(INPUTS, max_new_tokens=2, cache_config=other, **as_argument(cache))
    config = GenerationConfig(cache_implementation="quantized", cache_config=ours, max_new_tokens=2)
    with pytest.raises(ValueError, match="a cache of the backend 'int8', and another one's options"):
        model.generate(INPUTS, generation_config=config, **as_argument(cache))


def test_a_backend_is_no_mistake_where_another_cache_is_chosen(model: Any) -> None:
    settings = {"max_new_tokens": 2, "return_dict_in_generate": True}
    run, ours = functools.partial(model.generate, INPUTS, **settings), {"backend": "kivi"}
    assert type(cache_of(run(cache_config=ours, cache_implementation="dynamic"))) is DynamicCache
    for not_ours in ("quanto", "dense"):  # to judge
        assert type(cache_of(run(cache_config={"backend": not_ours}))) is DynamicCache
    given = kvp.build_cache(model, ours)
    same = {"backend": "KIVI", "nbits": 4, "device": "cpu"}  # its own options
    assert cache_of(run(cache_config=same, **as_argument(given))) is given
    dense = DynamicCache(config=model.config)
    for not_ours in ("quanto", "dense"):
        dense.reset()
        assert cache_of(run(cache_config={"backend": not_ours}, **as_argument(dense))) is dense
    default = tiny_model("llama")
    default.generation_config.cache_implementation, default.generation_config.cache_config = "quantized", ours
    other = kvp.build_cache(default, {"backend": "int8"})  # what a model was saved with is for other calls
    for options in ({"generation_config": GenerationConfig(**settings)}, {**settings, "cache_config": ours}):
        other.reset()
        assert cache_of(default.generate(INPUTS, **as_argument(other), **options)) is other
    assert isinstance(cache_of(default.generate(INPUTS, **settings)), kvp.KIVICache)
    for other_kind, found in ((None, DynamicCache), ("dynamic", DynamicCache), ("static", StaticCache)):
        turned_off = default.generate(INPUTS, cache_implementation=other_kind, **settings)
        assert type(cache_of(turned_off)) is found
    with pytest.raises(ValueError, match=r"'int8', which would be ignored: cache_implementation='static'"):
        default.generate(INPUTS, cache_implementation="static", cache_config={"backend": "int8"}, **settings)
    saved = GenerationConfig(cache_implementation="quantized", cache_config=ours, **settings)
    saved.cache_implementation = "dynamic"
    assert type(cache_of(model.generate(INPUTS, saved))) is DynamicCache


@pytest.mark.parametrize("is_given", [False, True], ids=["", "given"])
@pytest.mark.parametrize("how", ["use_cache", "checkpointing"])
def test_a_cache_that_would_not_be_used_is_refused(how: str, is_given: bool) -> None:
    model = tiny_model("llama")
    cache: dict[str, Any] = {"cache_implementation": "quantized", "cache_config": {"backend": "int8"}}
    if is_given:
        cache = as_argument(kvp.build_cache(model, {"backend": "int8"}))
    if how == "use_cache":
        with pytest.raises(ValueError, match=r"use_cache is False.*'int8'.* of no use.*use_cache=True"):
            model.generate(INPUTS, max_new_tokens=4, use_cache=False, **cache)
        return
    expected = model.generate(INPUTS, max_new_tokens=4, do_sample=False)
    model.train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    if Version(transformers.__version__) < Version("5.24"):
        with pytest.raises(ValueError, match=r"training mode with gradient checkpointing.*'int8'.*eval"):
            model.generate(INPUTS, max_new_tokens=4, **cache)
    else:
        out = model.generate(INPUTS, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, **cache)
        assert torch.equal(out.sequences, expected)
        assert cache_of(out).get_seq_length() == expected.shape[1] - 1
        cache_of(out).reset()
    model.eval()  # as transformers' Trainer does before it generates
    assert torch.equal(model.generate(INPUTS, max_new_tokens=4, do_sample=False, **cache), expected)


def test_a_prompt_without_anything_new_is_refused(model: Any) -> None:
    cache = kvp.build_cache(model, {"backend": "kivi"})
    first = model.generate(INPUTS, **as_argument(cache), max_new_tokens=4)
    assert cache.get_seq_length() == 43
    for prompt in (INPUTS, INPUTS[:, :7], first[:, :43]):
        with pytest.raises(ValueError, match=rf"has {prompt.shape[1]} tokens, .*seen 43 .*reset"):
            model.generate(prompt, **as_argument(cache), max_new_tokens=4)
    assert cache.get_seq_length() == 43
    # the last token alone, with the mask, and the numbers, of all
    settings = {"max_new_tokens": 4, "do_sample": False}
    copied = copy.deepcopy(cache)
    got = model.generate(
        first[:, 43:], attention_mask=torch.ones_like(first), position_ids=torch.tensor([[43]]),
        **as_argument(cache), **settings,
    )  # fmt: skip
    assert torch.equal(got[:, 1:], model.generate(first, **as_argument(copied), **settings)[:, 44:])


def test_a_stopped_answer_goes_on_as_the_message_says(model: Any) -> None:
    cache, steps = kvp.build_cache(model, {"backend": "int8"}), []
    settings: Any = {"do_sample": False, "eos_token_id": None}
    whole = model.generate(INPUTS, **as_argument(copy.deepcopy(cache)), max_new_tokens=12, **settings)

    def stop(*_: Any) -> None:
        steps.append(1)
        if len(steps) == 9:
            raise RuntimeError("stopped")

    with model.register_forward_hook(stop), pytest.raises(RuntimeError, match="stopped"):
        model.generate(INPUTS, **as_argument(cache), max_new_tokens=12, **settings)
    seen = cache.get_seq_length()
    assert seen == INPUTS.shape[1] + 8
    with pytest.raises(ValueError, match=r"where a call was stopped, this cache after its `crop\(-1\)`"):
        model.generate(whole[:, :seen], **as_argument(cache), max_new_tokens=4, **settings)
    cache.crop(-1)
    rest = model.generate(whole[:, :seen], **as_argument(cache), max_new_tokens=4, **settings)
    assert torch.equal(rest, whole)


def test_guidance_keeps_a_second_cache(model: Any) -> None:
    with pytest.warns(UserWarning, match="guidance_scale=1.5 keeps what it compares with in a second, "):
        generate(model, {"backend": "int8"}, guidance_scale=1.5)


def test_building_a_cache_silences_no_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What silences them for a while silences those of other threads, and two at once for good."""
    models = [tiny_model("llama"), tiny_model("gemma2", sliding_window=1024)]
    silenced: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(warnings, "catch_warnings", lambda **given: silenced.append(given) or nullcontext())
        for model in models:
            for backend in ("int8", "int4", "kivi"):
                kvp.build_cache(model.config, {"backend": backend})
    assert not silenced


def test_a_cache_of_another_model_is_refused(model: Any) -> None:
    for other, said in (
        (tiny_model("llama", num_hidden_layers=3), r"with 3 layers, and LlamaForCausalLM has 2"),
        (tiny_model("llama", head_dim=32), r"with \{\(2, 32, 32\)\} heads.*has \{\(2, 16, 16\)\}"),
    ):
        cache = kvp.build_cache(other, {"backend": "int8"})
        with pytest.raises(ValueError, match=rf"{said}.*cache of its own"):
            model.generate(INPUTS, **as_argument(cache), max_new_tokens=4)
    cache = kvp.build_cache(copy.deepcopy(model.config), {"backend": "int8"})
    model.generate(INPUTS, **as_argument(cache), max_new_tokens=2)
    assert cache.get_seq_length() == 41


def test_a_cache_whose_forward_was_interrupted_is_refused(model: Any) -> None:
    cache = kvp.build_cache(model, {"backend": "int8"})

    def interrupt(*args: Any) -> None:
        if cache.get_seq_length() == 43:
            raise KeyboardInterrupt

    handle = model.model.layers[0].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.generate(INPUTS, **as_argument(cache), max_new_tokens=9)
    handle.remove()
    settings = {"max_new_tokens": 4, "do_sample": False}
    for prompt in (INPUTS, INPUTS.repeat(1, 2)):  # tried again, and gone on with
        with pytest.raises(ValueError, match=r"seen from 42 to 43 tokens.*interrupted.*reset"):
            model.generate(prompt, **as_argument(cache), **settings)
    cache.reset()
    again = model.generate(INPUTS, **as_argument(cache), **settings)
    new = kvp.build_cache(model, {"backend": "int8"})
    assert torch.equal(again, model.generate(INPUTS, **as_argument(new), **settings))


def test_our_attention_on_a_model_that_takes_none() -> None:
    model = tiny_model("bloom", attn_implementation="kvcache_plugins")
    with pytest.raises(ValueError, match=r"'kvcache_plugins' was set on BloomForCausalLM, .* 'eager'"):
        generate(model, {"backend": "int8"})


def test_something_that_is_neither_model_nor_config() -> None:
    with pytest.raises(ValueError, match=r"model or its configuration, got str"):
        kvp.build_cache("llama", {"backend": "kivi"})
    with pytest.raises(ValueError, match=r"got the module DataParallel, which has none\. .* `\.module`\.$"):
        kvp.build_cache(torch.nn.DataParallel(tiny_model("llama")), {"backend": "int8"})


def test_cache_and_config_survive_json(model: Any) -> None:
    config = GenerationConfig(
        cache_implementation="quantized",
        cache_config={"backend": "kivi", "layer_overrides": {"0": {"nbits": 8}}, "skip_layers": [-1]},
        max_new_tokens=4,
        do_sample=False,
        return_dict_in_generate=True,
    )
    again = GenerationConfig.from_dict(json.loads(json.dumps(config.to_dict(), default=str)))
    cache = cache_of(model.generate(INPUTS, generation_config=again))
    assert cache.packed_layers[0].config.nbits == 8


def test_generate_does_not_change_the_users_config(model: Any) -> None:
    options = {"backend": "kivi", "nbits": 2}
    generate(model, options)
    assert options == {"backend": "kivi", "nbits": 2}


def test_a_kept_cache_goes_before_the_models_own_choice(model: Any) -> None:
    """Transformers would refuse the second turn of a model that is saved with a cache of ours."""
    own = copy.deepcopy(model)
    own.generation_config.update(cache_implementation="quantized", cache_config={"backend": "int8"})
    settings = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    first = own.generate(INPUTS, **settings)
    assert cache_of(first).backend == "int8"
    prompt = torch.cat([first.sequences, INPUTS], dim=1)
    second = own.generate(prompt, **as_argument(cache_of(first)), **settings)
    assert cache_of(second) is cache_of(first)
    other = kvp.build_cache(own, {"backend": "kivi"})
    assert cache_of(own.generate(INPUTS, **as_argument(other), **settings)) is other
    assert own.generation_config.cache_implementation == "quantized"
    asked = {"cache_implementation": "quantized", "cache_config": {"backend": "kivi"}}
    with pytest.raises(ValueError, match="another one's options"):  # of what the call itself asks for
        own.generate(prompt, **as_argument(cache_of(first)), **asked, **settings)


def test_what_a_call_asks_for_is_as_it_was_once_a_cache_is_built(model: Any) -> None:
    own = GenerationConfig(cache_implementation="quantized", cache_config={"backend": "int8"})
    call = copy.deepcopy(own)
    given = call.cache_config
    kept = as_argument(kvp.build_cache(model, {"backend": "int8"}))
    with ready_to_build(SimpleNamespace(config=model.config, generation_config=own), call, kept):
        assert call.cache_implementation is None  # beside a cache
        call.cache_config.clear()  # as some releases do
    assert call.cache_implementation == "quantized"
    assert call.cache_config is given == {"backend": "int8"}


def test_generate_binds_padding_and_final_length(model: Any) -> None:
    inputs = torch.arange(5, 65).view(2, 30)
    mask = torch.ones_like(inputs)
    mask[1, :7] = 0
    out = model.generate(
        inputs,
        attention_mask=mask,
        max_new_tokens=5,
        num_beams=2,
        cache_implementation="quantized",
        cache_config={"backend": "int8"},
        return_dict_in_generate=True,
    )
    layer = cache_of(out).packed_layers[0]
    assert layer.padding.lengths.tolist() == [0, 0, 7, 7]
    assert layer.final_length == 34


def test_uninstall_restores_transformers_and_install_comes_back(model: Any) -> None:
    prepare = generation_utils.GenerationMixin._prepare_cache_for_generation
    wrapped = ALL_ATTENTION_FUNCTIONS["sdpa"]
    kvp.uninstall()
    try:
        assert generation_utils.GenerationMixin._prepare_cache_for_generation is prepare.__wrapped__  # type: ignore[attr-defined]
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is wrapped.__wrapped__  # type: ignore[attr-defined]
        assert "kvcache_plugins" not in ALL_ATTENTION_FUNCTIONS
        assert "kvcache_plugins" not in ALL_MASK_ATTENTION_FUNCTIONS
        with pytest.raises(ValueError, match="kivi"):
            generate(model, {"backend": "kivi"})
        if host.is_optimum_quanto_available():
            assert (
                type(cache_of(generate(model, {"backend": "quanto", "q_group_size": 16})))
                is host.QuantizedCache
            )
    finally:
        kvp.install()
    kvp.install()  # a second call changes nothing
    assert isinstance(cache_of(generate(model, {"backend": "kivi"})), kvp.KIVICache)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"].__wrapped__ is wrapped.__wrapped__  # type: ignore[attr-defined]


def test_a_changed_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kvp.uninstall()
    try:
        with monkeypatch.context() as patch:
            patch.delattr(generation_utils.GenerationMixin, "_prepare_cache_for_generation")
            with pytest.raises(
                kvp.IncompatibleTransformersError, match=r"_prepare_cache_for_generation.*transformers \d"
            ):
                kvp.install()
    finally:
        kvp.uninstall()
        kvp.install()


def test_a_dispatch_that_cannot_be_installed_is_not_installed_in_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare = generation_utils.GenerationMixin._prepare_cache_for_generation
    kvp.uninstall()
    try:
        with monkeypatch.context() as patch:
            patch.delattr(AttentionInterface, "get_interface")  # what is asked for last
            for _ in range(2):
                with pytest.raises(kvp.IncompatibleTransformersError, match="get_interface"):
                    kvp.install()
                assert generation_utils.GenerationMixin._prepare_cache_for_generation is prepare.__wrapped__  # type: ignore[attr-defined]
                assert "__wrapped__" not in vars(host.QuantizedCache.__init__)
                assert not integration._undo
        kvp.install()
        assert "kvcache_plugins" in ALL_ATTENTION_FUNCTIONS
    finally:
        kvp.uninstall()
        kvp.install()


class TestSeamsOfModulesThatAreNotLoadedYet:
    """The watcher, with a module of its own."""

    NAME = "kvcache_plugins_test_flaky"

    @pytest.fixture(autouse=True)
    def watcher(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        (tmp_path / f"{self.NAME}.py").write_text(
            "import os\nif os.environ.get('FLAKY'): raise ImportError('not yet')\nseams = []\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        watcher = integration._ImportWatcher()
        watcher.pending = {self.NAME: lambda module: module.seams.append("seam")}  # type: ignore[attr-defined]
        monkeypatch.setattr(sys, "meta_path", [watcher, *sys.meta_path])
        yield watcher
        sys.modules.pop(self.NAME, None)

    def test_they_are_installed_once(self, watcher: Any) -> None:
        assert importlib.util.find_spec(self.NAME) is not None  # asking where it is, is not importing it
        module = importlib.import_module(self.NAME)
        assert module.seams == ["seam"] and not watcher.pending

    def test_a_module_that_fails_at_first_gets_its_seam(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FLAKY", "1")
        with pytest.raises(ImportError, match="not yet"):
            importlib.import_module(self.NAME)
        monkeypatch.delenv("FLAKY")
        assert importlib.import_module(self.NAME).seams == ["seam"]

    def test_a_seam_that_fails_fails_again(self, watcher: Any) -> None:
        def refuse(module: Any) -> None:
            raise kvp.IncompatibleTransformersError("no such seam")

        watcher.pending[self.NAME] = refuse
        for _ in range(2):
            with pytest.raises(kvp.IncompatibleTransformersError, match="no such seam"):
                importlib.import_module(self.NAME)

    def test_what_was_uninstalled_meanwhile_is_left_alone(self, watcher: Any) -> None:
        spec = importlib.util.find_spec(self.NAME)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        watcher.pending = {}
        spec.loader.exec_module(module)
        assert module.seams == []

    def test_a_finder_that_asks_all_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Asking(MetaPathFinder):
            def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
                found = (
                    finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self
                )
                return next((spec for spec in found if spec is not None), None)

        monkeypatch.setattr(sys, "meta_path", [sys.meta_path[0], Asking(), *sys.meta_path[1:]])
        assert importlib.import_module(self.NAME).seams == ["seam"]


@pytest.mark.allow_deprecation(
    "Passing .generation_config. together", reason="transformers drafts in this way"
)
@pytest.mark.parametrize("backend", ["kivi", "int8"])
def test_a_drafting_model_keeps_its_cache(model: Any, backend: str) -> None:
    tokens = torch.randint(3, 120, (1, 90), generator=torch.Generator().manual_seed(0))
    # Drafted tokens are verified several at a time, so they are packed a little later than one by one; with
    # the exact window of kivi nothing is packed at all, and int8's error is too small to matter here.
    options: dict[str, Any] = {"backend": backend, "residual_length": 4096 if backend == "kivi" else 32}
    arguments = {
        "max_new_tokens": 60,
        "do_sample": False,
        "cache_implementation": "quantized",
        "cache_config": options,
    }
    drafted = model.generate(tokens, assistant_model=tiny_model("llama", seed=0), **arguments)
    assert torch.equal(drafted, model.generate(tokens, **arguments))


@pytest.mark.allow_deprecation(
    "Passing .generation_config. together", reason="transformers drafts in this way"
)
def test_a_call_that_verifies_drafts_reads_its_own_tokens_exactly(model: Any) -> None:
    """So drafts change nothing where the exact window holds all that is read, and something elsewhere."""
    tokens = torch.randint(3, 120, (1, 90), generator=torch.Generator().manual_seed(0))
    assistant = tiny_model("llama", seed=0)
    own = assistant.generation_config
    own.cache_implementation, own.assistant_confidence_threshold = "dynamic", 0.0  # all its drafts are right
    num_read = tokens.shape[1] + 29  # the last new token is not

    def logits(window: int | None, **drafts: Any) -> torch.Tensor:
        """Of 30 new tokens `(30, vocabulary)`, with a window or the dense cache."""
        cache: dict[str, Any] = {}
        if window is not None:
            options = {"backend": "int4", "nbits": 2, "residual_length": window}
            cache = {"cache_implementation": "quantized", "cache_config": options}
        settings = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, **cache, **drafts}
        out = model.generate(tokens, **settings, output_logits=True, return_dict_in_generate=True)
        return torch.cat(list(out.logits))

    dense, drafts = logits(None), {"assistant_model": assistant, "num_assistant_tokens": 5}
    torch.testing.assert_close(logits(num_read, **drafts), logits(num_read), atol=1e-4, rtol=1e-4)
    drafted, plain = logits(0, **drafts), logits(0)
    torch.testing.assert_close(drafted[:3], dense[:3], atol=1e-4, rtol=1e-4)  # of the call with the prompt
    assert (plain[1:3] - dense[1:3]).norm() > 0.01 * dense[1:3].norm()


@pytest.mark.parametrize("backend", ["int8", "knorm"])
def test_a_call_without_drafts_packs_again_after_one_with_them(model: Any, backend: str) -> None:
    tokens = torch.randint(3, 120, (1, 60), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    config = {"backend": "int8"}
    if backend == "knorm":
        config = {"backend": "knorm", "budget": 40, "evict_at_decode": True, "storage": config}

    def two_turns(**drafts: Any) -> Any:
        cache = kvp.build_cache(model, config)
        first = model.generate(tokens, **as_argument(cache), max_new_tokens=8, do_sample=False, **drafts)
        turn = torch.cat([first, tokens[:, :90]], dim=1)
        model.generate(turn, **as_argument(cache), max_new_tokens=90, do_sample=False)
        return cache

    drafted, plain = two_turns(prompt_lookup_num_tokens=3), two_turns()
    assert drafted.get_seq_length() == plain.get_seq_length()
    for one, other in zip(drafted.packed_layers, plain.packed_layers, strict=True):
        assert one.stored_keys.packed_length == other.stored_keys.packed_length > 0
        assert one.held_length == other.held_length


def test_drafts_for_a_text_that_has_been_read_in_part_are_refused(model: Any) -> None:
    """Transformers would read all of it again behind that part, with its own caches too."""
    tokens = torch.randint(3, 120, (1, 60), generator=torch.Generator().manual_seed(0))
    cache = kvp.build_cache(model, {"backend": "int8"})
    first = model.generate(tokens, **as_argument(cache), max_new_tokens=8, do_sample=False)
    turn = torch.cat([first, tokens[:, :20]], dim=1)
    for drafts in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": tiny_model("llama", seed=0)}):
        with pytest.raises(ValueError, match=r"prompt_lookup_num_tokens.*seen 67 tokens"):
            model.generate(turn, **as_argument(cache), max_new_tokens=8, do_sample=False, **drafts)
    assert cache.get_seq_length() == 67
    model.generate(turn, **as_argument(cache), max_new_tokens=8, do_sample=False)
    cache.reset()
    model.generate(turn, **as_argument(cache), max_new_tokens=8, do_sample=False, prompt_lookup_num_tokens=3)
    assert cache.get_seq_length() == turn.shape[1] + 7


@pytest.mark.allow_deprecation(
    "Passing .generation_config. together", reason="transformers drafts in this way"
)
@pytest.mark.parametrize(
    ("own", "cache_config", "used", "said"),
    [
        (None, {"backend": "int8"}, {"int8"}, None),
        (None, {"backend": "int8", "skip_layers": [2]}, set(), "skip_layers must name layers from -2 to 1"),
        ("quantized", {"backend": "int8", "skip_layers": [2]}, {"float8"}, None),
        ("dynamic", {"backend": "int8", "skip_layers": [2]}, set(), None),
        ("none", {"backend": "int8"}, set(), "keeps its past in a class of its own"),
    ],
    ids=["of-its-target", "no-such-layer", "its-own", "dense", "of-another-class"],
)
def test_an_assistant_has_a_cache_that_fits_it(
    own: str | None, cache_config: Any, used: set[str], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, assistant = tiny_model("llama", num_hidden_layers=3), tiny_model("llama", seed=1)
    if own == "none":
        monkeypatch.setattr(assistant, "_supports_default_dynamic_cache", lambda: False)
    elif own is not None:
        assistant.generation_config.cache_implementation = own
        assistant.generation_config.cache_config = {"backend": "float8"} if own == "quantized" else None
    bound: dict[int, set[str]] = {id(target): set(), id(assistant): set()}
    bind = kvp.KVCache.bind

    def watched(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        bound[id(model)].add(self.backend)
        return bind(self, model, *args, **kwargs)

    recorded, crop = [], kvp.KVCache.crop

    def cropped(self: Any, *args: Any) -> None:
        recorded.extend(layer.record_past for layer in self.packed_layers)
        crop(self, *args)

    monkeypatch.setattr(kvp.KVCache, "bind", watched)
    monkeypatch.setattr(kvp.KVCache, "crop", cropped)
    settings = {"cache_implementation": "quantized", "cache_config": cache_config}
    run = functools.partial(target.generate, INPUTS, max_new_tokens=9, do_sample=False, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        drafted = run(assistant_model=assistant)
    assert torch.equal(drafted, run())
    assert recorded and all(recorded), "what is rejected has been packed"
    assert (bound[id(target)], bound[id(assistant)]) == ({"int8"}, used)
    found = [str(one.message) for one in caught if "LlamaForCausalLM drafts" in str(one.message)]
    assert len(found) == (said is not None) and all(str(said) in text for text in found)


@pytest.mark.allow_deprecation(
    "Passing .generation_config. together", reason="transformers drafts in this way"
)
def test_an_assistant_that_cannot_show_its_queries_drafts_with_a_dense_cache(model: Any) -> None:
    settings = {"cache_implementation": "quantized", "cache_config": {"backend": "tova", "budget": 30}}
    run = functools.partial(model.generate, INPUTS[:1], max_new_tokens=9, do_sample=False, **settings)
    with pytest.warns(
        UserWarning, match="GPTNeoForCausalLM drafts with a dense cache.* must see the queries"
    ):
        run(assistant_model=small_model("gpt_neo"))


def test_other_caches_are_left_alone(model: Any) -> None:
    cache = DynamicCache(config=model.config)
    model.generate(INPUTS, **as_argument(cache), max_new_tokens=3)
    assert type(cache) is DynamicCache
    out = model.generate(INPUTS, max_new_tokens=3, return_dict_in_generate=True)
    assert type(cache_of(out)) is DynamicCache


@pytest.mark.parametrize("backend", ["kivi", "knorm"])
def test_caches_can_be_copied(model: Any, backend: str) -> None:
    config = {"backend": backend, **({"budget": 30} if backend == "knorm" else {})}
    prompt = torch.randint(3, 120, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        cache = cache_of(model.generate(
            prompt, do_sample=False, max_new_tokens=2, return_dict_in_generate=True,
            cache_implementation="quantized", cache_config=config,
        ))  # fmt: skip
        copied = copy.deepcopy(cache)
    answers = [model(prompt[:, :3], **as_argument(one)).logits for one in (cache, copied)]
    assert type(copied) is type(cache) and torch.equal(*answers)


def test_empty_caches_of_transformers_can_be_copied(model: Any) -> None:
    pytest.importorskip("optimum.quanto")
    from transformers import QuantizedCache

    copied = copy.deepcopy(QuantizedCache("quanto", model.config))
    assert type(copied) is QuantizedCache and len(copied.layers) == len(model.model.layers)
