"""Wrong options of evicting caches: refused before any token, naming option, value and what is allowed."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from transformers.generation.candidate_generator import _MapInputEmbedding

import kvcache_plugins
from kvcache_plugins.errors import UnsupportedOperationError
from kvcache_plugins.eviction.options import EvictingConfig
from kvcache_plugins.models.cache_argument import cache_of
from kvcache_plugins.registry import get_backend
from kvcache_plugins.testing import tiny_model
from tests.eviction.feeding import EVICTING, NEEDS_QUERIES, bound_cache, feed, ids, model_of
from tests.eviction.locret_feeding import locret
from tests.models.families import small_model

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "budget-missing": ({"budget": None}, r"budget must be a number of tokens >= 1, or .* got None"),
    "budget-zero": ({"budget": 0}, r"budget must be .* got 0\."),
    "budget-negative": ({"budget": -5}, r"budget must be .* got -5\."),
    "budget-one-and-a-half": ({"budget": 1.5}, r"budget must be .* got 1\.5\."),
    "budget-true": ({"budget": True}, r"budget must be .* got True\."),
    "budget-text": ({"budget": "x"}, r"budget must be .* got 'x'\."),
    "budget-nan": ({"budget": float("nan")}, r"budget must be .* got nan\."),
    "budget-no-fraction": ({"budget": 0.0}, r"budget must be .* got 0\.0\."),
    "budget-below-sinks": ({"budget": 4, "sink_length": 4}, r"budget must exceed .*: 4 sinks.* 4 "),
    "budget-below-local": ({"local_length": 30}, r"must exceed .* 30 newest tokens \(local_length\).* 24 "),
    "budget-below-stabilizers": (
        {"stabilizer_length": 22, "sink_length": 2},
        r"budget must exceed .* 2 sinks and 22 newest tokens \(stabilizer_length\).* 24 ",
    ),
    "budget-below-window": (
        {"storage": {"backend": "int4", "residual_length": 64}, "sink_length": 0},
        r"budget must exceed .* 64 newest tokens \(the residual_length of the storage\).* 24 ",
    ),
    "budget-below-own-window": (
        {"storage": {"backend": "int8"}, "residual_length": 24, "sink_length": 0},
        r"budget must exceed .* 24 newest tokens \(the residual_length of the storage\)",
    ),
    "chunk-zero": ({"chunk_size": 0}, r"chunk_size must be an integer >= 1, got 0"),
    "chunk-text": ({"chunk_size": "16"}, r"chunk_size must be an integer >= 1, got '16'"),
    "chunk-true": ({"chunk_size": True}, r"chunk_size must be an integer >= 1, got True"),
    "local-negative": ({"local_length": -1}, r"local_length must be an integer >= 0, got -1"),
    "stabilizer-fraction": ({"stabilizer_length": 0.5}, r"stabilizer_length must be .* >= 0, got 0\.5"),
    "sinks-negative": ({"sink_length": -1}, r"sink_length must be an integer >= 0, got -1"),
    "positions": ({"positions": "relative"}, r"must be one of \('absolute', 'compact'\), got 'relative'"),
    "evict-at-decode": ({"evict_at_decode": "yes"}, r"evict_at_decode must be true or false, got 'yes'"),
    "unknown-option": ({"bugdet": 24}, r"'bugdet' is not an option of .*budget.* got bugdet=24"),
    "window-of-no-storage": (
        {"residual_length": 8},
        r"residual_length is the exact window of a packed storage.* local_length .* got 8\.",
    ),
    "window-of-no-storage-in-one-layer": (
        {"layer_overrides": {"0": {"residual_length": 8}}}, r"residual_length is the exact window",
    ),
    "window-twice": (
        {"storage": {"backend": "int8", "residual_length": 6}, "residual_length": 4},
        r"storage=.*'residual_length': 6} has another residual_length than the one beside it, 4\. Allowed is",
    ),
    "window-twice-in-one-layer": (
        {
            "storage": {"backend": "int8", "residual_length": 6},
            "layer_overrides": {"1": {"residual_length": 4}},
        },
        r"layer_overrides\['1'\]: .* has another residual_length than the one beside it, 4",
    ),
    "storage-unknown": ({"storage": {"backend": "int5"}}, r"int5.*int4|int4.*int5"),
    "storage-text": ({"storage": "int8"}, r"storage must be a dict .* or None, got 'int8'"),
    "storage-nameless": ({"storage": {"nbits": 4}}, r"storage must be a dict .* got \{'nbits': 4\}"),
    "storage-evicting": (
        {"storage": {"backend": "h2o", "budget": 10}},
        r"storage must name a backend that keeps every token, got \{'backend': 'h2o'",
    ),
    "storage-evicting-without-its-budget": (
        {"storage": {"backend": "streaming_llm"}},
        r"storage must name a backend that keeps every token, .*'streaming_llm'}\. Allowed .*'int8'.*'int4'",
    ),
    "storage-nested-skips": (
        {"storage": {"backend": "int8", "skip_layers": [0]}},
        r"storage takes no 'skip_layers': give it beside `storage`, got \[0\]",
    ),
    "storage-nested-overrides": (
        {"storage": {"backend": "int8", "layer_overrides": {}}},
        r"storage takes no 'layer_overrides'",
    ),
    "storage-nested-kernel": ({"storage": {"backend": "int8", "kernel": "torch"}}, "takes no 'kernel'"),
    "storage-more-sinks": (
        {"storage": {"backend": "int8", "sink_length": 8}, "sink_length": 2},
        r"storage keeps 8 sinks .* sink_length=2",
    ),
    "storage-bad-option": ({"storage": {"backend": "int8", "granularity": "row"}}, "granularity .* 'row'"),
    "skipped-layer": ({"skip_layers": [7]}, r"skip_layers must name layers from -2 to 1, got 7"),
    "override-budget": ({"layer_overrides": {"0": {"budget": 0}}}, r"budget must be .* got 0\."),
    "override-chunk-size": (
        {"layer_overrides": {"0": {"chunk_size": 8}}}, "'chunk_size' cannot be set for a single layer",
    ),
    "override-positions": (
        {"layer_overrides": {"0": {"positions": "compact"}}}, "'positions' cannot be set for a single layer",
    ),
    "override-chunks": ({"layer_overrides": {"0": {"bugdet": 2}}}, "'bugdet' cannot be set for a single"),
}  # fmt: skip


@pytest.mark.usefixtures("_no_forward")
@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("backend", ["knorm", "h2o"])
def test_wrong_options(backend: str, name: str) -> None:
    options, message = BAD[name]
    config = {"backend": backend, "budget": 24, **options}
    with pytest.raises(ValueError, match=message):
        kvcache_plugins.build_cache(model_of(), config)
    with pytest.raises(ValueError, match=message):
        model_of().generate(
            ids(40), max_new_tokens=2, cache_implementation="quantized", cache_config=config, do_sample=False
        )


@pytest.mark.usefixtures("_no_forward")
@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("snapkv", {"window_length": 0}, r"window_length must be an integer >= 1, got 0"),
        ("snapkv", {"kernel_size": 4}, r"kernel_size must be odd, got 4"),
        ("snapkv", {"kernel_size": 0}, r"kernel_size must be an integer >= 1, got 0"),
        (
            "snapkv",
            {"budget": 8, "sink_length": 4},
            r"budget must exceed what is protected: 4 sinks and 4 newest tokens \(window_length\); got a "
            "budget of 8",
        ),
        ("h2o", {"normalize": 1}, r"normalize must be true or false, got 1"),
        ("expected_attention", {"future_length": 0}, r"future_length must be an integer >= 1, got 0"),
        ("expected_attention", {"epsilon": -0.1}, r"epsilon must be a number in \[0.0, 1.0\], got -0.1"),
        ("expected_attention", {"use_covariance": 1}, r"use_covariance must be true or false, got 1"),
        ("expected_attention", {"use_value_norm": "no"}, r"use_value_norm must be true or false, got 'no'"),
        (
            "expected_attention",
            {"use_value_norm": False, "epsilon": 0.02},
            r"epsilon changes nothing without use_value_norm; allowed is 0, got 0.02",
        ),
        ("lagkv", {"lag_size": 1}, r"lag_size must be an integer >= 2, got 1"),
        ("lagkv", {"lag_size": 4.0}, r"lag_size must be an integer >= 2, got 4\.0"),
        ("random", {"seed": "a"}, r"seed must be an integer >= 0, got 'a'"),
        ("streaming_llm", {"seed": 1}, r"'seed' is not an option of StreamingLLMConfig"),
    ],
)
def test_wrong_options_of_one_backend(backend: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvcache_plugins.build_cache(model_of(), {"backend": backend, "budget": 24, **options})


@pytest.mark.usefixtures("_no_forward")
@pytest.mark.parametrize("backend", NEEDS_QUERIES)
def test_queries_are_not_seen_where_attention_is_written_into_the_model(backend: str) -> None:
    model = small_model("gpt_neo")
    message = rf"{backend}.*queries.*attention of GPTNeoForCausalLM, written into the model.*'knorm'"
    with pytest.raises(ValueError, match=message):
        bound_cache(model, {"backend": backend, "budget": 24}, 40)
    with pytest.raises(ValueError, match="written into the model"):
        model.generate(
            ids(40), max_new_tokens=2, cache_implementation="quantized",
            cache_config={"backend": backend, "budget": 24},
        )  # fmt: skip


@pytest.mark.usefixtures("_no_forward")
@pytest.mark.parametrize("options", [{"skip_layers": [1]}, {"layer_overrides": {"-1": {"budget": 30}}}])
def test_layers_that_differ_are_refused_there_too(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"different numbers of tokens.*written into the model"):
        bound_cache(small_model("gpt_neo"), {"backend": "knorm", "budget": 24, **options}, 40)


@pytest.mark.usefixtures("_no_forward")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backend": "h2o", "budget": 24}, "the backend 'h2o' must see the queries"),
        ({"backend": "knorm", "budget": 24, "skip_layers": [-1]}, "different numbers of tokens"),
    ],
    ids=["queries", "uneven"],
)
def test_models_that_take_values_apart_are_refused_there_too(
    options: dict[str, Any], said: str, attention: str
) -> None:
    model = small_model("diffllama")
    model.set_attn_implementation(attention)
    with pytest.raises(ValueError, match=rf"{said}.*attention of DiffLlamaForCausalLM, written into"):
        kvcache_plugins.build_cache(model, options).bind(model)


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"budget": 1}, "1 sinks; got a budget of 1 tokens"),
        (
            {"budget": 8, "local_length": 7},
            r"1 sinks and 7 newest tokens \(local_length\); got a",
        ),
    ],
)
def test_what_is_protected_is_named_only_where_it_is(options: dict[str, Any], given: str) -> None:
    with pytest.raises(ValueError, match=f"budget must exceed what is protected: {given}"):
        kvcache_plugins.build_cache(model_of(), {"backend": "knorm", "sink_length": 1, **options})


@pytest.mark.parametrize("storage", [None, {"backend": "int4"}], ids=["exact", "packed"])
@pytest.mark.parametrize("backend", ["knorm", "h2o"])
def test_a_fraction_leaves_room_beside_what_is_protected(
    backend: str, storage: dict[str, Any] | None
) -> None:
    """Of any prompt, however short, at least one token more is kept; as few as that, and no fewer."""
    config = get_backend(backend).config_class.from_dict({"budget": 0.05, "storage": storage})
    assert isinstance(config, EvictingConfig)
    for length in (*range(1, 200), 4000):
        budget, share = config.budget_of(length), math.ceil(0.05 * length)
        config.check_budget(budget)
        if budget != share:
            assert budget > share
            with pytest.raises(ValueError, match="budget must exceed what is protected"):
                config.check_budget(budget - 1)


def test_a_fraction_of_a_short_prompt() -> None:
    # 20 % of 40 tokens are 8, all of which are protected
    config = {"backend": "knorm", "budget": 0.2, "sink_length": 4, "local_length": 4}
    output = model_of().generate(
        ids(40), max_new_tokens=1, cache_implementation="quantized", cache_config=config, do_sample=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert cache_of(output).evicting_layers[0].held_length == 9
    with pytest.raises(ValueError, match=r"budget must exceed .* 4 sinks and 4 newest .* 8 tokens"):
        kvcache_plugins.build_cache(model_of(), {**config, "budget": 8})


def test_a_fraction_of_an_unknown_prompt_is_taken_of_the_first_call() -> None:
    model = model_of()
    cache = kvcache_plugins.build_cache(model, {"backend": "knorm", "budget": 0.5})
    feed(model, cache, ids(40), [40])
    assert cache.evicting_layers[0].held_length == 20  # type: ignore[attr-defined]
    feed(model, cache, ids(20, seed=1), [20])
    assert cache.evicting_layers[0].held_length == 20  # type: ignore[attr-defined]


def test_a_whole_number_written_as_a_float() -> None:
    assert kvcache_plugins.build_cache(model_of(), {"backend": "knorm", "budget": 24.0}).config.budget == 24  # type: ignore[attr-defined]


def test_masks_with_holes() -> None:
    # transformers looks a mask up by slots, which move when something is evicted.
    model, mask = model_of(), torch.ones(2, 40, dtype=torch.long)
    mask[0, :5] = 0
    mask[1, 13] = 0
    cache = kvcache_plugins.build_cache(model, {"backend": "knorm", "budget": 24})
    with pytest.raises(ValueError, match=r"attention_mask .* row 1.*left"):
        cache.bind(model, mask, prompt_length=40)
    right = torch.ones(2, 40, dtype=torch.long)
    right[0, -3:] = 0
    with pytest.raises(ValueError, match=r"attention_mask .* row 0.*left"):
        cache.bind(model, right, prompt_length=40)
    with pytest.raises(ValueError, match="attention_mask"):
        model.generate(
            ids(40, 2), attention_mask=mask, max_new_tokens=2, do_sample=False,
            cache_implementation="quantized", cache_config={"backend": "knorm", "budget": 24},
        )  # fmt: skip


def test_masks_with_holes_where_generated_tokens_evict() -> None:
    # The prompt is within the budget, but what follows moves its slots.
    mask = torch.ones(1, 20, dtype=torch.long)
    mask[0, 7] = 0
    cache = kvcache_plugins.build_cache(
        model_of(), {"backend": "knorm", "budget": 24, "evict_at_decode": True}
    )
    with pytest.raises(ValueError, match=r"attention_mask .* row 0.*left"):
        cache.bind(model_of(), mask, prompt_length=20)


def test_masks_with_holes_are_fine_where_nothing_is_evicted() -> None:
    model, mask = model_of(), torch.ones(2, 40, dtype=torch.long)
    mask[1, 13:16] = 0
    got, expected = (
        model.generate(
            ids(40, 2), attention_mask=mask, max_new_tokens=8, do_sample=False, **arguments
        )
        for arguments in (
            {"cache_implementation": "quantized", "cache_config": {"backend": "knorm", "budget": 40}},
            {},
        )
    )  # fmt: skip
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("family", "options"),
    [("bloom", {}), ("mpt", {}), ("falcon", {"alibi": True})],
    ids=["bloom", "mpt", "falcon"],
)
def test_models_that_bias_logits_by_distance(family: str, options: dict[str, Any]) -> None:
    # They work the biases out for all tokens seen, or as if those held were the newest.
    config = tiny_model(family, **options).config
    for backend in EVICTING:
        with pytest.raises(
            ValueError, match=rf"'{backend}' evicts tokens, and models of type '{family}' .*'int8'"
        ):
            kvcache_plugins.build_cache(config, {"backend": backend, "budget": 24})
    kvcache_plugins.build_cache(config, {"backend": "int8"})
    kvcache_plugins.build_cache(tiny_model("falcon").config, {"backend": "knorm", "budget": 24})


@pytest.mark.parametrize("backend", NEEDS_QUERIES)
def test_queries_that_were_not_shown(backend: str) -> None:
    # The layer alone, without attention: it cannot know what was attended to, and must not guess.
    layer = bound_cache(model_of(), {"backend": backend, "budget": 24}, 60).evicting_layers[0]
    states = torch.randn(1, 2, 30, 16)
    layer.update(states, states)
    with pytest.raises(NotImplementedError, match="attention function must be 'sdpa'"):
        layer.update(states, states)


@pytest.mark.parametrize("backend", EVICTING)
def test_configurations_survive_json(backend: str) -> None:
    config = {
        "backend": backend,
        "budget": 24,
        "storage": {"backend": "int8"},
        "layer_overrides": {"0": {"budget": 30}},
    }
    cache = kvcache_plugins.build_cache(model_of(), json.loads(json.dumps(config)))
    again = kvcache_plugins.build_cache(
        model_of(), {"backend": backend, **json.loads(json.dumps(cache.config.to_dict()))}
    )
    assert again.config == cache.config
    assert [layer.config.budget for layer in again.evicting_layers] == [30, 24]  # type: ignore[attr-defined]


def test_layers_that_differ_need_an_attention_function_of_ours_under_eager() -> None:
    config = {"backend": "h2o", "budget": 24, "chunk_size": 32, "layer_overrides": {"1": {"budget": 30}}}
    expected = (
        bound_cache(model_of("llama", "sdpa"), config, 80),
        bound_cache(model_of("llama", "eager"), config, 80),
    )
    tokens = ids(84)
    logits = [
        feed(model_of("llama", attention), cache, tokens, [32, 32, 16, 1, 1, 1, 1])
        for attention, cache in zip(("sdpa", "eager"), expected, strict=True)
    ]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0.0)
    cache = bound_cache(model_of("gpt2", "eager"), config, 80)
    message = r"Layer 1 holds 62 tokens, and the model's mask is for 56.*set_attn_implementation"
    with pytest.raises(UnsupportedOperationError, match=message):
        feed(model_of("gpt2", "eager"), cache, tokens, [32, 32, 16])


def test_heads_that_processes_share_have_lots_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, states = model_of(), torch.zeros(1, 2, 9, 16)
    cache = kvcache_plugins.build_cache(model, {"backend": "random", "budget": 24})
    whole = cache.layers[1].score(states, states)
    monkeypatch.setattr(model, "_tp_size", 2)
    for process in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda process=process: process)
        cache.bind(model)
        half = cache.layers[1].score(states[:, :1], states[:, :1])
        torch.testing.assert_close(half, whole[:, process, None], rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["locret", "tova"])
def test_heads_that_processes_share_are_refused_where_all_count_together(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of()
    options = locret(model) if backend == "locret" else {"backend": backend, "budget": 24}
    cache = kvcache_plugins.build_cache(model, options)
    monkeypatch.setattr(model, "_tp_size", 2)
    with pytest.raises(ValueError, match=f"'{backend}' judges a token by all heads .* over 2 processes"):
        cache.bind(model)


def test_assistants_that_embed_the_last_token_alone() -> None:
    """Those of a target with another tokenizer: two tokens of a second call would be one."""
    model = tiny_model("llama")
    options = {"backend": "knorm", "budget": 24}
    cache = kvcache_plugins.build_cache(model, options).bind(model)
    model.set_input_embeddings(_MapInputEmbedding(model.get_input_embeddings(), torch.arange(128)))
    with pytest.raises(ValueError, match=r"'knorm' reads .* LlamaForCausalLM.* last token alone.* 'int8'"):
        cache.bind(model)
    kvcache_plugins.build_cache(model, {"backend": "int8"}).bind(model)
