"""Models that users derive from those of transformers, or write parts of anew: served alike, or refused."""

from __future__ import annotations

import sys
import types
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AttentionInterface, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import kvcache_plugins as kvp
from kvcache_plugins.cache import KVCache
from kvcache_plugins.models.cache_argument import as_argument, cache_of
from kvcache_plugins.models.decoder import decoder_config
from kvcache_plugins.models.facts import (
    LayerFacts,
    biases_by_distance,
    describe_layers,
    exchanges_attention,
    weighs_rotated_keys,
)
from kvcache_plugins.models.layer_plan import plan_layers
from kvcache_plugins.models.origins import forward_names, is_of_family
from kvcache_plugins.prompt_chunks import why_read_whole
from kvcache_plugins.testing.models import tiny_model
from tests.models.multimodal import gemma3
from tests.models.own_models import (
    AskingAttention,
    DerivedAttention,
    OwnBloomConfig,
    OwnConfig,
    OwnDecoder,
    OwnRotations,
    RewrittenAttention,
    WrittenOutAttention,
    with_attention,
)
from tests.models.test_longrope import SWITCH, phi3

COMPACT = {"backend": "streaming_llm", "budget": 40, "chunk_size": None, "positions": "compact"}
EVICTING = {"backend": "knorm", "budget": 90, "chunk_size": 32}


def facts_of(model: nn.Module) -> list[LayerFacts]:
    config = decoder_config(model.config)
    return describe_layers(model, config, plan_layers(config))


def tokens_of(count: int) -> Tensor:
    return torch.randint(3, 120, (1, count), generator=torch.Generator().manual_seed(1))


def generated(model: Any, tokens: Tensor, config: dict[str, Any], count: int = 3) -> tuple[Tensor, KVCache]:
    """Logits `(count, V)` of generated tokens, and the cache."""
    output = model.generate(
        tokens, cache_implementation="quantized", cache_config=config, max_new_tokens=count, do_sample=False,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return torch.cat(output.logits), cache_of(output)


def of_what_is_kept(model: Any, tokens: Tensor, count: int = 3) -> Tensor:
    """The same of one layer that reads, in a row, what `COMPACT` keeps of a prompt."""
    kept = torch.cat([tokens[:, :4], tokens[:, -36:]], dim=1)
    found = [model(tokens).logits[0, -1]]
    for _ in range(count - 1):
        kept = torch.cat([kept, found[-1].argmax()[None, None]], dim=1)
        found.append(model(kept).logits[0, -1])
    return torch.stack(found)


# --- rotation


@pytest.mark.parametrize("kind", [DerivedAttention, AskingAttention])
@torch.no_grad()
def test_attention_that_is_derived_rotates_as_it_did(kind: type) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    expected = facts_of(model)
    assert expected[0].rotary is not None
    derived = with_attention(model, kind)
    assert facts_of(derived) == expected
    tokens = tokens_of(120)
    got, _ = generated(derived, tokens, COMPACT)
    torch.testing.assert_close(got, of_what_is_kept(derived, tokens), atol=1e-4, rtol=1e-4)


def with_own_rotations(model: Any) -> Any:
    model.model.rotary_emb = OwnRotations(model.model.rotary_emb.inv_freq)
    return model


@pytest.mark.parametrize("write_anew", [with_own_rotations, lambda m: with_attention(m, RewrittenAttention)])
def test_rotations_that_are_written_anew_are_not_known(write_anew: Any) -> None:
    model = write_anew(tiny_model("llama"))
    assert all(fact.rotary is None and fact.is_rotation_unknown for fact in facts_of(model))
    with pytest.raises(
        ValueError, match="and nothing done to keys after them, which a LlamaForCausalLM does"
    ):
        generated(model, tokens_of(120), COMPACT)
    with pytest.raises(ValueError, match="positions='compact' needs rotary position embeddings"):
        kvp.build_cache(model, COMPACT)
    for config in (
        {"backend": "kvquant", "calibration": "normal_float"},
        {"backend": "expected_attention", "budget": 40},
    ):
        with pytest.warns(UserWarning, match="LlamaForCausalLM is written in a way of its own"):
            generated(model, tokens_of(60), config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # others need no rotation
        generated(model, tokens_of(60), {"backend": "int8"})


def test_models_without_rotations_are_not_said_to_hide_them() -> None:
    for name in ("gpt2", "bloom", "llama", "gptj"):
        assert not any(fact.is_rotation_unknown for fact in facts_of(tiny_model(name)))


@torch.no_grad()
def test_a_decoder_that_is_given_its_cache_by_position() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    tokens = tokens_of(120)
    found = []
    for by_position in (False, True):
        cache = kvp.build_cache(model, COMPACT).bind(model, prompt_length=120)
        numbers = torch.arange(120)[None]
        for new in (tokens, tokens[:, :1]):
            if by_position:
                states = model.model(new, None, numbers[:, : new.shape[1]], cache)
            else:
                states = model.model(input_ids=new, **as_argument(cache))
        found.append(states.last_hidden_state)
    assert torch.equal(*found)


@torch.no_grad()
def test_a_decoder_that_is_given_a_long_text_by_position() -> None:
    model = phi3()
    tokens = tokens_of(SWITCH + 20)
    found = []
    for by_position in (False, True):
        cache = kvp.build_cache(model, {"backend": "int8"}).bind(model, prompt_length=tokens.shape[1])
        assert cache.reads_long_text
        for chunk in tokens.split(SWITCH, dim=1):
            if by_position:
                states = model.model(chunk, None, None, cache)
            else:
                states = model.model(input_ids=chunk, **as_argument(cache))
        found.append(states.last_hidden_state)
    assert torch.equal(*found)


# --- chunks


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8}


@pytest.mark.parametrize(
    "rotation",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {**LONG, "factor": 4.0, "original_max_position_embeddings": 128},
    ],
    ids=["dynamic", "longrope"],
)
def test_rotations_that_follow_the_length_of_a_call(rotation: dict[str, Any]) -> None:
    model = tiny_model("llama", rope_parameters=rotation, max_position_embeddings=128)
    for length, is_whole in ((120, False), (200, True)):
        _, cache = generated(model, tokens_of(length), EVICTING)
        assert (cache.whole_prompt_reason is not None) == is_whole
        reason = why_read_whole(model, {}, is_first=True, rotated_length=length)
        assert reason == cache.whole_prompt_reason
    assert "frequencies follow the longest text" in str(reason)
    assert why_read_whole(model, {}, is_first=True) == reason  # of a length nobody knows
    plain = tiny_model("llama", max_position_embeddings=128)
    assert why_read_whole(plain, {}, is_first=True) is None


def test_images_of_a_derived_model_see_later_tokens() -> None:
    found = gemma3()
    model, prompt = found.model, dict(found.prompt)
    derived = type("Derived", (type(model),), {"__module__": __name__})
    for kind in (type(model), derived):
        model.__class__ = kind
        reason = why_read_whole(model, {**prompt, "mm_encoder_outputs": {"image": {}}}, is_first=True)
        assert reason == "tokens of an image, or of the whole prompt, see later ones"


@pytest.mark.parametrize("origin", ["no-file", "builtins"])
def test_a_class_that_was_typed_in(origin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As into a notebook, whose module has no source that could be looked at."""
    if origin == "no-file":
        monkeypatch.setitem(sys.modules, "typed_in", types.ModuleType("typed_in"))
        origin = "typed_in"
    model = tiny_model("llama")
    model.__class__ = type("Typed", (LlamaForCausalLM,), {"__module__": origin})
    _, cache = generated(model, tokens_of(120), EVICTING)
    assert cache.whole_prompt_reason is None


def test_attention_functions_without_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is masked as if nothing came before it where transformers makes no mask."""

    def attend(*args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(*args, **kwargs)

    tokens = tokens_of(150)
    config = {"backend": "knorm", "budget": 149, "chunk_size": 48}
    model = tiny_model("llama")
    expected, cache = generated(model, tokens, config)
    assert cache.whole_prompt_reason is None
    AttentionInterface.register("tests-unmasked", attend)
    AttentionInterface.register("tests-masked", attend)
    AttentionMaskInterface.register("tests-masked", sdpa_mask)
    for name, is_whole in (("tests-unmasked", True), ("tests-masked", False)):
        model.set_attn_implementation(name)
        got, cache = generated(model, tokens, config)
        assert (cache.whole_prompt_reason is not None) == is_whole
        torch.testing.assert_close(got[0], expected[0], atol=1e-3, rtol=1e-3)


# --- attention


def test_a_derived_decoder_asks_for_its_attention_as_it_did() -> None:
    model = tiny_model("llama", attn_implementation="eager")
    model.model.__class__ = OwnDecoder
    assert exchanges_attention(model)
    generated(model, tokens_of(120), {"backend": "h2o", "budget": 40})
    for layer in model.model.layers:
        layer.self_attn = WrittenOutAttention(model.config, 0)
    assert not exchanges_attention(model)


def test_names_that_a_forward_is_written_with() -> None:
    model = tiny_model("llama")
    attention = model.model.layers[0].self_attn
    assert "rotate_half" in forward_names(attention)
    for kind, is_known in ((DerivedAttention, True), (AskingAttention, True), (RewrittenAttention, False)):
        names = forward_names(kind(model.config, 0))
        assert ("rotate_half" in names) == is_known


# --- configurations


def test_derived_configurations_are_of_their_family() -> None:
    assert is_of_family(OwnBloomConfig(), {"bloom"}) and not is_of_family(OwnBloomConfig(), {"mpt"})
    assert biases_by_distance(OwnBloomConfig())
    with pytest.raises(ValueError, match="add a bias to every logit"):
        kvp.build_cache(OwnBloomConfig(), EVICTING)
    hunyuan = CONFIG_MAPPING["hunyuan_v1_dense"]
    assert weighs_rotated_keys(type("Own", (hunyuan,), {"model_type": "own"})())
    minimax = type("Own", (CONFIG_MAPPING["minimax"],), {"model_type": "own"})
    with pytest.raises(ValueError, match="keep their past in a class of their own"):
        kvp.build_cache(minimax(), {"backend": "int8"})
    kvp.build_cache(OwnConfig(num_hidden_layers=2), COMPACT)  # of which the file has no other name for models


def test_fewer_layers_than_the_configuration_says() -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    model.model.layers = model.model.layers[:2]
    with pytest.raises(ValueError, match="has 2 layers, and its configuration says num_hidden_layers=4"):
        generated(model, tokens_of(60), {"backend": "int8"})
    model.config.num_hidden_layers = 2
    _, cache = generated(model, tokens_of(60), {"backend": "int8"})
    assert len(cache.layers) == 2


# --- calls


def test_a_model_that_accelerate_has_prepared() -> None:
    from accelerate import Accelerator

    tokens, config = tokens_of(120), {"backend": "sirllm", "budget": 60}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, cache = generated(tiny_model("llama"), tokens, config)
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(tiny_model("llama"))
    got, prepared = generated(model, tokens, config)
    torch.testing.assert_close(got, expected.to(got.dtype))
    for layer, held in cache.kept_positions().items():
        assert torch.equal(prepared.kept_positions()[layer], held)


def test_masks_of_four_dimensions_where_layers_hold_different_tokens() -> None:
    model = tiny_model("llama")
    mask = torch.ones(1, 1, 120, 120, dtype=torch.bool).tril()
    config = {"backend": "snapkv", "budget": 60, "window_length": 8}
    kvp.build_cache(model, config).bind(model, mask, prompt_length=120)
    with pytest.raises(ValueError, match="attention_mask has 4 dimensions, and layers that hold different"):
        kvp.build_cache(model, {**config, "head_floor": 0.2}).bind(model, mask, prompt_length=120)


def test_attention_dropout_is_named_where_it_hides_the_queries() -> None:
    model = tiny_model("llama", attention_dropout=0.5).train()
    with pytest.raises(kvp.UnsupportedOperationError, match=r"without dropout \(model.eval\(\)\)"):
        generated(model, tokens_of(120), {"backend": "h2o", "budget": 40})
