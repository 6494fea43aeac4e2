"""Which layers are packed, why the others are not, and the shape of what each hands to its cache."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    DynamicCache,
    FalconConfig,
    GPTBigCodeConfig,
    Llama4TextConfig,
    MistralConfig,
    Phi3Config,
)
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvcache_plugins import build_cache, estimate
from kvcache_plugins.layers.base import PackedLayer
from kvcache_plugins.layers.counting import bytes_of, owned_tensors
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.decoder import decoder_config
from kvcache_plugins.models.facts import describe_layers
from kvcache_plugins.models.layer_plan import key_value_heads, plan_layers
from kvcache_plugins.models.short_windows import ShortWindowLayer
from kvcache_plugins.testing.models import ARCHITECTURES, tiny_model
from tests.models.families import NAMES, greedy, small_model

SLIDING = "sliding_attention: holds at most 16 tokens already"
LINEAR = "linear_attention: not a growing key/value cache of full attention"
HYBRID: dict[str, dict[int, str]] = {
    "exaone4": {0: SLIDING, 2: SLIDING},
    "gemma2": {0: SLIDING, 2: SLIDING},
    "gemma3_text": {0: SLIDING, 2: SLIDING},
    "gemma4_text": {0: SLIDING, 2: SLIDING},
    "gpt_oss": {0: SLIDING, 2: SLIDING},
    "qwen3_next": {0: LINEAR, 2: LINEAR},
}


def reasons(config: Any, skipped: frozenset[int] = frozenset()) -> dict[int, str]:
    plans = plan_layers(config, skipped)
    return {index: plan.dense_reason for index, plan in enumerate(plans) if plan.dense_reason is not None}


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("bark", r"model\.semantic and model\.coarse_acoustics"), ("encodec", "models with a text decoder")],
)
@pytest.mark.parametrize("options", [{"backend": "int8"}, {"backend": "knorm", "budget": 64}], ids=str)
def test_a_model_without_one_text_decoder_is_refused(
    name: str, allowed: str, options: dict[str, Any]
) -> None:
    config = CONFIG_MAPPING[name]()
    message = rf"model_type='{name}'\) names no layers of a text decoder.*{allowed}"
    with pytest.raises(ValueError, match=message):
        build_cache(config, options)
    with pytest.raises(ValueError, match=message):
        estimate(config, options, 100)


def test_the_text_decoders_of_bark_are_served() -> None:
    config = CONFIG_MAPPING["bark"]()
    for part in (config.semantic_config, config.coarse_acoustics_config):
        assert len(build_cache(part, {"backend": "int8"}).packed_layers) == part.num_layers


@pytest.mark.parametrize("name", HYBRID)
def test_hybrid_models_keep_their_other_layers(name: str) -> None:
    model = tiny_model(name, num_hidden_layers=4)
    assert reasons(model.config) == HYBRID[name]
    cache = build_cache(model, {"backend": "int8"})
    assert cache.report().dense_layers == HYBRID[name]
    own = DynamicCache(config=model.config)
    for index, layer in enumerate(cache.layers):
        if index in HYBRID[name]:
            of_own = DynamicSlidingWindowLayer if type(layer) is ShortWindowLayer else type(layer)
            assert of_own is type(own.layers[index])
            assert getattr(layer, "sliding_window", None) == getattr(
                own.layers[index], "sliding_window", None
            )
        else:
            assert isinstance(layer, PackedLayer) and layer.layer_idx == index
    assert [i for i, kernel in enumerate(cache.report().kernel) if kernel == "dense"] == sorted(HYBRID[name])


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - set(HYBRID)))
def test_every_layer_of_the_other_families_is_packed(name: str) -> None:
    config = decoder_config(tiny_model(name).config)
    assert reasons(config) == {}
    assert len(plan_layers(config)) == config.num_hidden_layers


@pytest.mark.parametrize(
    ("window", "context", "packed"),
    [(4096, 4096, True), (8192, 4096, True), (4095, 4096, False), (None, 4096, True)],
    ids=["window=context", "window>context", "window<context", "no-window"],
)
@pytest.mark.parametrize("config_class", [Phi3Config, MistralConfig])
def test_a_window_as_long_as_the_context_is_full_attention(
    config_class: Any, window: int | None, context: int, packed: bool
) -> None:
    config = config_class(num_hidden_layers=3, sliding_window=window, max_position_embeddings=context)
    expected = (
        {} if packed else dict.fromkeys(range(3), f"sliding_attention: holds at most {window} tokens already")
    )
    assert reasons(config) == expected


def test_chunked_attention() -> None:
    options = {"num_hidden_layers": 2, "layer_types": ["chunked_attention", "full_attention"]}
    short = Llama4TextConfig(attention_chunk_size=64, max_position_embeddings=4096, **options)
    assert reasons(short) == {0: "chunked_attention: holds at most 64 tokens already"}
    long = Llama4TextConfig(attention_chunk_size=4096, max_position_embeddings=4096, **options)
    assert reasons(long) == {}


def test_layers_the_user_skips() -> None:
    config = tiny_model("gemma2", num_hidden_layers=4).config
    # A layer that is dense anyway keeps its own reason.
    assert reasons(config, frozenset({0, 1})) == {0: SLIDING, 1: "skip_layers", 2: SLIDING}
    cache = build_cache(config, {"backend": "kivi", "skip_layers": [-1]})
    assert cache.report().dense_layers == {0: SLIDING, 2: SLIDING, 3: "skip_layers"}
    assert len(cache.packed_layers) == 1


def test_a_cache_that_packs_nothing_says_so() -> None:
    config = tiny_model("gemma2").config
    with pytest.warns(UserWarning, match=r"'int8' packs none of the 2 layers.*'skip_layers', '.*at most 16"):
        build_cache(config, {"backend": "int8", "skip_layers": [1]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_cache(config, {"backend": "int8"})


@pytest.mark.parametrize("name", [name for name in ("mamba", "mamba2", "falcon_mamba") if name in NAMES])
def test_a_model_without_attention_is_refused(name: str) -> None:
    """Transformers passes its states on by another name, by which no cache of this package is found."""
    model = small_model(name)
    cache_config = {"backend": "kivi"}
    for ask in (
        lambda: build_cache(model, cache_config),
        lambda: build_cache(model.config, cache_config),
        lambda: estimate(model.config, cache_config, 64),
        lambda: greedy(model, (20,), 2, cache_config),
    ):
        with pytest.raises(ValueError, match=rf"type '{name}' have no layer that keeps keys and values"):
            ask()
    with pytest.raises(ValueError, match=r"Config has no attention heads"):
        key_value_heads(model.config, 0)


def sized_model(name: str) -> Any:
    """One whose windowed layers have heads of another number and size than the others."""
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this release has no {name}")
    own = {"swa_num_attention_heads": 8, "swa_num_key_value_heads": 4, "swa_head_dim": 32}
    return small_model(name, **(own if "inkling" in name else {}))


def states_beside(layer: Any) -> list[Any]:
    """Those of branches, which no estimate counts."""
    return [state for state in getattr(layer, "conv_states", {}).values() if state is not None]


def test_layers_with_heads_of_their_own() -> None:
    # Gemma 4's full attention has heads of another size than its sliding windows, and so another rotation.
    model = tiny_model("gemma4_text")
    *_, plan = plan_layers(model.config)
    assert plan.layer_type == "full_attention" and plan.dense_reason is None
    _, key_dim, value_dim = key_value_heads(model.config, 1)
    assert (key_dim, value_dim) == (32, 32) != key_value_heads(model.config, 0)[1:]
    rotary = describe_layers(model, model.config, plan_layers(model.config))[1].rotary
    assert rotary is not None and rotary.rotary_dim <= key_dim


WITH_SIZES_OF_THEIR_OWN = ["cpmant", "inkling2_loop_text", "inkling2_text", "inkling_text", "mimo_v2_flash"]


@pytest.mark.parametrize("name", [*ARCHITECTURES, *WITH_SIZES_OF_THEIR_OWN])
def test_key_value_heads_are_what_arrives(name: str) -> None:
    model = tiny_model(name) if name in ARCHITECTURES else sized_model(name)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.randint(3, 100, (1, 5)), **as_argument(cache))
    checked = 0
    for index, layer in enumerate(cache.layers):
        if getattr(layer, "keys", None) is not None:
            arrived = (layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3])
            assert key_value_heads(decoder_config(model.config), index) == arrived
            checked += 1
    assert checked > 0


@pytest.mark.parametrize("config", [{"backend": "dense"}, {"backend": "int8"}], ids=lambda c: c["backend"])
@pytest.mark.parametrize("name", [name for name in WITH_SIZES_OF_THEIR_OWN if name != "cpmant"])
def test_estimate_knows_sizes_of_their_own(name: str, config: dict[str, Any]) -> None:
    """But for CPM-Ant, which reads tokens of its own before a prompt."""
    model = sized_model(name)
    is_dense = config["backend"] == "dense"
    cache = DynamicCache(config=model.config) if is_dense else build_cache(model, config)
    prompt = torch.randint(3, 100, (1, 100))
    model.generate(prompt, **as_argument(cache), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    held = bytes_of(
        tensor
        for layer in cache.layers
        for tensor in owned_tensors(layer)
        if not any(tensor is state for state in states_beside(layer))
    )
    assert held == estimate(model, config, tokens=100, new_tokens=3)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (FalconConfig(hidden_size=128, num_attention_heads=8), (1, 16, 16)),
        (FalconConfig(hidden_size=128, num_attention_heads=8, multi_query=False), (8, 16, 16)),
        (
            FalconConfig(
                hidden_size=128, num_attention_heads=8, new_decoder_architecture=True, num_kv_heads=2
            ),
            (8, 16, 16),
        ),
        (GPTBigCodeConfig(n_embd=128, n_head=8), (1, 16, 16)),
        (GPTBigCodeConfig(n_embd=128, n_head=8, multi_query=False), (8, 16, 16)),
    ],
    ids=["falcon-7b", "falcon-multi-head", "falcon-40b", "bigcode", "bigcode-multi-head"],
)
def test_multi_query_families(config: Any, expected: tuple[int, int, int]) -> None:
    assert key_value_heads(config, 0) == expected
