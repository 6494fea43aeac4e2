"""Calls of `generate()` that give an encoder-decoder model a cache which has read something before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Blip2Config,
    EncoderDecoderCache,
    InstructBlipConfig,
    LogitsProcessor,
    PreTrainedConfig,
    T5Config,
    WhisperForCausalLM,
)

import kvcache_plugins as kvp
from kvcache_plugins.models.cache_argument import as_argument, given_cache
from tests.models.encoders import decoded, encoder_decoder, source, target
from tests.models.rounded import Rounded

INT8 = {"backend": "int8"}


@pytest.fixture(params=["bart", "t5"])
def model(request: pytest.FixtureRequest) -> Any:
    return encoder_decoder(request.param)


@pytest.fixture
def given() -> dict[str, Tensor]:
    return source("bart")


def generate(model: Any, given: dict[str, Tensor], cache: Any, count: int = 12, **options: Any) -> Tensor:
    found: Tensor = model.generate(
        **given, **as_argument(cache), do_sample=False, max_new_tokens=count, min_new_tokens=count, **options
    )
    return found


def test_another_text_needs_another_cache(model: Any, given: dict[str, Tensor]) -> None:
    """Transformers' own cache goes on with the first one, without a word."""
    cache = kvp.build_cache(model, INT8)
    generate(model, given, cache)
    other = {name: tensor.flip(1) for name, tensor in given.items()}
    with pytest.raises(ValueError, match=r"The prompt has 1 tokens, and its cache has seen 12 .*`reset\(\)`"):
        generate(model, other, cache)
    shorter = {name: tensor[:, :100] for name, tensor in given.items()}
    with pytest.raises(
        ValueError, match=r"has read 100 tokens, and this cache .*'int8' holds 150 .*`reset\(\)`"
    ):
        generate(model, shorter, cache)
    assert cache.get_seq_length() == 12
    cache.reset()
    expected = generate(model, shorter, kvp.build_cache(model, INT8))
    assert generate(model, shorter, cache).tolist() == expected.tolist()


@pytest.mark.parametrize("has_mask", [False, True])
def test_a_text_goes_on(model: Any, given: dict[str, Tensor], has_mask: bool) -> None:
    """Without a mask transformers has the model read again what its cache holds."""
    expected = generate(model, given, EncoderDecoderCache(Rounded({0, 1}), Rounded({0, 1})), 30)
    cache = kvp.build_cache(model, INT8)
    begun = generate(model, given, cache, 20)
    mask = {"decoder_attention_mask": torch.ones_like(begun)} if has_mask else {}
    found = generate(model, given, cache, 10, decoder_input_ids=begun, **mask)
    assert found.tolist() == expected.tolist() and cache.get_seq_length() == 30


def test_a_mask_of_another_text(model: Any, given: dict[str, Tensor]) -> None:
    cache = kvp.build_cache(model, INT8)
    decoded(model, given, cache, target(8), [8])
    shorter = {name: tensor[:, :140] for name, tensor in given.items()}  # of which one row has padding
    with pytest.raises(ValueError, match=r"is for 140 tokens of what the encoder .* layer 0 holds 150"):
        decoded(model, shorter, cache, target(3), [3])


class Saying(LogitsProcessor):
    """Has a model write some tokens, the last one again and again, whatever it thinks itself."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        said = torch.full_like(scores, -torch.inf)
        said[:, self.tokens[0]] = 0
        self.tokens = self.tokens[1:] or self.tokens
        return said


@pytest.mark.allow_deprecation("Passing `generation_config` together", reason="Whisper calls generate() so")
@pytest.mark.parametrize("way", ["again", "long", "fallback", "timestamps"])
def test_a_cache_hears_one_recording_once(way: str) -> None:
    model, heard = encoder_decoder("whisper", max_target_positions=64), source("whisper")
    cache = kvp.build_cache(model, INT8)
    options: dict[str, Any] = {"return_timestamps": False, "max_new_tokens": 12, "do_sample": False}
    if way in ("long", "timestamps"):
        model.generation_config.no_timestamps_token_id = 100
        model.generation_config.max_initial_timestamp_index = 5
        options["return_timestamps"] = True
    if way == "timestamps":
        options["logits_processor"] = [Saying([101, 7, 105, 105, 8])]  # and no time where it ends
    elif way == "long":  # than the 30 seconds that are heard at once
        waves = torch.randn(1, 8, 7000, generator=torch.Generator().manual_seed(0))
        heard = {"input_features": waves, "attention_mask": torch.ones(1, 7000, dtype=torch.long)}
    elif way == "fallback":  # to another temperature, which hears it again
        heard = {name: tensor[:1] for name, tensor in heard.items()}
        options |= {"temperature": (0.0, 0.4), "logprob_threshold": 1.0, "compression_ratio_threshold": 100.0}
    elif way == "again":
        model.generate(**heard, **options, **as_argument(cache))
    message = r"cache has seen 1\d before.* 30 seconds.*return_timestamps=True.*='quantized' instead"
    with pytest.raises(ValueError, match=message):
        model.generate(**heard, **options, **as_argument(cache))
    asked = {"cache_implementation": "quantized", "cache_config": INT8}
    assert model.generate(**heard, **options, **asked) is not None  # which makes one for every time


@pytest.mark.allow_deprecation("Passing `generation_config` together", reason="assistants are called so")
def test_an_assistant_that_is_a_decoder_alone_drafts_with_a_dense_cache() -> None:
    """As those of Distil-Whisper, which read what the target's encoder has heard."""
    model = encoder_decoder("whisper")
    heard = {name: tensor[:1] for name, tensor in source("whisper").items()}
    assistant = WhisperForCausalLM(copy.deepcopy(encoder_decoder("whisper", decoder_layers=1).config)).eval()
    options = {"return_timestamps": False, "max_new_tokens": 20, "do_sample": False}
    asked = {"cache_implementation": "quantized", "cache_config": INT8}
    expected = model.generate(**heard, **options, **asked)
    drafting = []
    assistant.register_forward_pre_hook(
        lambda module, args, kwargs: drafting.append(given_cache(kwargs)), with_kwargs=True
    )
    with pytest.warns(UserWarning, match="WhisperForCausalLM drafts with a dense cache.* a decoder alone"):
        found = model.generate(**heard, **options, **asked, assistant_model=assistant)
    assert found.tolist() == expected.tolist()
    assert drafting and not any(hasattr(cache, "kv_bytes") for cache in drafting)


@pytest.mark.allow_deprecation("Passing `generation_config` together", reason="assistants are called so")
@pytest.mark.parametrize("is_own", [False, True])
def test_an_assistant_that_hands_back_a_dense_cache_drafts_with_one(is_own: bool) -> None:
    """Whisper's own `generate()` does, so that only the first drafts could be made with another."""
    model = encoder_decoder("whisper")
    heard = {name: tensor[:1] for name, tensor in source("whisper").items()}
    assistant = encoder_decoder("whisper", decoder_layers=1)
    options = {"return_timestamps": False, "max_new_tokens": 20, "do_sample": False}
    asked = {"cache_implementation": "quantized", "cache_config": INT8}
    expected = model.generate(**heard, **options, **asked)
    if is_own:
        assistant.generation_config.update(**asked)
    drafting = []
    assistant.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: drafting.append(given_cache(kwargs)), with_kwargs=True
    )
    with pytest.warns(
        UserWarning, match=r"WhisperForConditionalGeneration drafts with a dense cache, .* hands back one"
    ) as warned:
        found = model.generate(**heard, **options, **asked, assistant_model=assistant)
    assert len([warning for warning in warned if "drafts with" in str(warning.message)]) == 1
    assert found.tolist() == expected.tolist()
    assert drafting and not any(hasattr(cache, "kv_bytes") for cache in drafting)


# -- what configurations say of a decoder


@pytest.mark.parametrize("config_class", [Blip2Config, InstructBlipConfig])
def test_an_encoder_that_is_part_of_the_text_model(config_class: type[PreTrainedConfig]) -> None:
    """BLIP-2 says that its T5 has an encoder, InstructBLIP does not; neither is written to."""
    text = T5Config(d_model=32, d_kv=16, num_heads=2, num_layers=1, num_decoder_layers=3, vocab_size=64)
    config = config_class(text_config=text.to_dict())
    before = config.to_dict()
    cache = kvp.build_cache(config, INT8)
    assert isinstance(cache, kvp.KVEncoderDecoderCache) and len(cache.packed_layers) == 6
    assert kvp.estimate(config, INT8, 10, encoder_tokens=40) > 0
    assert config.to_dict() == before and config.text_config.num_layers == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "overrides"), [("dia", {}), ("switch_transformers", {"d_kv": 24})])
def test_predicted_bytes_of_other_heads(name: str, overrides: dict[str, Any]) -> None:
    """Dia reads its encoder with heads of another kind; Switch names the size of a head as T5 does."""
    model, given = encoder_decoder(name, **overrides), source(name, (120,))
    if name == "dia":
        given = {key: tensor[:1] for key, tensor in given.items()}
    for config in (INT8, {"backend": "kivi", "residual_length": 0}):
        cache = kvp.build_cache(model, config)
        model.generate(**given, **as_argument(cache), do_sample=False, max_new_tokens=9, min_new_tokens=9)
        rows, encoder_tokens = len(next(iter(given.values()))), cache.cross_attention_cache.get_seq_length()
        options = {"batch_size": rows, "encoder_tokens": encoder_tokens}
        assert kvp.estimate(model, config, cache.get_seq_length(), **options) == cache.kv_bytes()


# -- padding of what the encoder reads


@pytest.mark.parametrize(
    "config", [{"backend": "int4", "sink_length": 4}, {"backend": "kvquant", "calibration": "normal_float"}]
)
def test_sinks_are_the_first_real_tokens(config: dict[str, Any]) -> None:
    model = encoder_decoder("t5")
    states = torch.randn(2, 4, 290, 16, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 290, dtype=torch.long)
    mask[1, :64] = 0
    cache = kvp.build_cache(model, config).bind(model, encoder_attention_mask=mask)
    count = cache.config.sink_length
    assert count > 0
    cache.cross_attention_cache.batch_select_indices(torch.tensor([1, 0]))  # before anything was read
    cache.cross_attention_cache.update(states[[1, 0]], 2 * states[[1, 0]], 0)
    keys = cache.cross_attention_cache.layers[0].keys.dense()
    assert cache.cross_attention_cache.layers[0].stored_keys.packed_length > 64 + count
    assert torch.equal(keys[0, :, 64 : 64 + count], states[1, :, 64 : 64 + count])
    assert torch.equal(keys[1, :, :count], states[0, :, :count])
    assert not torch.equal(keys[1, :, count : count + 9], states[0, :, count : count + 9])


@pytest.mark.parametrize("pads", [240, 162])  # 128 tokens, the first of which is a sink, are one too few
def test_rows_too_short_to_learn_from_are_packed_all_the_same(pads: int) -> None:
    """What the encoder has read does not grow, so that nothing can wait for more of it."""
    model = encoder_decoder("t5")
    states = torch.randn(2, 4, 290, 16, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 290, dtype=torch.long)
    mask[1, :pads] = 0
    cache = kvp.build_cache(model, {"backend": "kvquant", "calibration": "normal_float"})
    cache.bind(model, encoder_attention_mask=mask).cross_attention_cache.update(states, 2 * states, 0)
    assert cache.cross_attention_cache.layers[0].stored_keys.packed_length == 256


def test_a_reset_forgets_what_was_said_of_padding() -> None:
    model, given = encoder_decoder("t5"), source("bart")
    cache = kvp.build_cache(model, {"backend": "kivi", "nbits": 2, "residual_length": 0})
    cache.bind(model, encoder_attention_mask=given["attention_mask"])
    assert all(layer.real_tokens is not None for layer in cache.cross_attention_cache.layers)
    cache.reset()
    assert all(layer.real_tokens is None for layer in cache.cross_attention_cache.layers)
