"""Models that generate, or prepare caches, in methods of their own, past what tells a cache of a call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    DynamicCache,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    StaticCache,
)

import kvcache_plugins as kvp
from kvcache_plugins import KVCache, build_cache, estimate
from kvcache_plugins.errors import UnsupportedOperationError
from kvcache_plugins.models.cache_argument import as_argument, cache_name, cache_of
from kvcache_plugins.testing.generation import padded_prompt
from kvcache_plugins.testing.models import tiny_model
from tests.models.showing import START, TEXT, TOWER, make

INT8 = {"backend": "int8"}
EVICTING = {"backend": "streaming_llm", "budget": 40}
NEW = 3


def generate(model: PreTrainedModel, **arguments: Any) -> Any:
    return model.generate(**padded_prompt((20, 13)), max_new_tokens=NEW, **arguments)


def asking(cache_config: dict[str, Any]) -> dict[str, Any]:
    return {"cache_implementation": "quantized", "cache_config": dict(cache_config)}


@pytest.mark.skipif("diffusion_gemma" not in CONFIG_MAPPING, reason="this transformers has no DiffusionGemma")
def test_a_denoiser_that_reads_the_layers_of_its_cache_is_refused() -> None:
    """What it calls its encoder fills the cache; its decoder reads `layers[i].keys` and stores nothing."""
    from transformers import DiffusionGemmaForBlockDiffusion

    sizes = {"num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 32, "global_head_dim": 16}
    tower = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = CONFIG_MAPPING["diffusion_gemma"](
        text_config={**TEXT, **sizes, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config=tower,
        canvas_length=8,
    )
    model = DiffusionGemmaForBlockDiffusion(config).eval()
    tokens = padded_prompt((20,))["input_ids"]
    asks = (
        lambda: model.generate(tokens, max_new_tokens=8, **asking(INT8)),
        lambda: model.generate(tokens, max_new_tokens=8, **asking(EVICTING)),
        lambda: build_cache(model, INT8),
        lambda: build_cache(config, EVICTING),
        lambda: build_cache(tiny_model("llama"), INT8).bind(model),
        lambda: estimate(config, INT8, 100),
    )
    for ask in asks:
        with pytest.raises(ValueError, match="read keys and values off the layers of their cache"):
            ask()


class _Scheduler:
    """As much of a noise scheduler as VibeVoice asks for."""

    timesteps = torch.arange(2, 0, -1)

    def set_timesteps(self, num_inference_steps: int) -> None:
        """Does nothing: there are always two."""

    def step(self, noise: torch.Tensor, timestep: int, latent: torch.Tensor) -> Any:
        return SimpleNamespace(prev_sample=latent - 0.1 * noise)


@pytest.mark.skipif("vibevoice" not in CONFIG_MAPPING, reason="this transformers has no VibeVoice")
@pytest.mark.parametrize(
    "backend", [INT8, {"backend": "streaming_llm", "budget": 40}], ids=["int8", "evicting"]
)
def test_a_model_that_makes_two_caches_in_its_own_way_is_refused(backend: dict[str, Any]) -> None:
    """VibeVoice guides by a second cache, for which its method no longer knew the backend."""
    from transformers import VibeVoiceForConditionalGeneration

    audio = {"hidden_size": 16, "num_filters": 8, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}
    config = CONFIG_MAPPING["vibevoice"](
        text_config={**TEXT, "model_type": "qwen2"},
        audio_config=audio,
        semantic_model_config=audio,
        diffusion_head_config={
            "hidden_size": TEXT["hidden_size"],
            "intermediate_size": 64,
            "latent_size": audio["hidden_size"],
        },
        pad_token_id=0,
        eos_token_id=1,
        audio_bos_token_id=2,
        audio_eos_token_id=3,
        audio_token_id=4,
    )
    model = VibeVoiceForConditionalGeneration(config).eval()
    told = {"noise_scheduler": _Scheduler(), "num_diffusion_steps": 2, "return_dict_in_generate": True}
    assert isinstance(generate(model, **told)[cache_name()], DynamicCache)
    for asked in (asking(backend), as_argument(build_cache(model, backend))):
        with pytest.raises(ValueError, match=rf"in a method of its own.*{backend['backend']!r} was not told"):
            generate(model, **told, **asked)


class _Preparing(LlamaForCausalLM):  # type: ignore[misc]  # transformers is not typed
    """A model that takes the preparation of its cache into its own hands."""

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: Any, *args: Any) -> None:
        model_kwargs.setdefault(cache_name(), DynamicCache(config=self.config))


class _Adding(LlamaForCausalLM):  # type: ignore[misc]  # transformers is not typed
    """A model that adds to it."""

    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return super()._prepare_cache_for_generation(*args, **kwargs)


@pytest.mark.skipif(not hasattr(LlamaForCausalLM, "_prefill"), reason="this transformers has no such method")
def test_a_cache_that_nothing_was_told_is_refused() -> None:
    config = tiny_model("llama").config
    preparing, adding = _Preparing(config).eval(), _Adding(config).eval()
    generate(preparing)
    with pytest.raises(ValueError, match="_Preparing prepares its caches in a method of its own"):
        generate(preparing, **as_argument(build_cache(preparing, INT8)))
    cache = build_cache(adding, INT8)
    generate(adding, **as_argument(cache))
    assert cache.packed_layers[0].padding is not None and cache.get_seq_length() == 20 + NEW - 1


def test_a_loop_that_speaks_refuses_what_it_would_ignore() -> None:
    """SpeechT5 takes any argument, looks at none of them, and makes its own cache."""
    from transformers import SpeechT5Config, SpeechT5ForTextToSpeech

    config = SpeechT5Config(
        vocab_size=64, hidden_size=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8,
        speech_decoder_prenet_units=16, speaker_embedding_dim=8, speech_decoder_postnet_units=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = SpeechT5ForTextToSpeech(config).eval()
    tokens = torch.arange(5, 25)[None]
    given: dict[str, Any] = {"speaker_embeddings": torch.ones(1, 8), "maxlenratio": 1.0}
    cache = build_cache(model, INT8)
    chosen = GenerationConfig(**asking(INT8))
    for arguments in (asking(INT8), {"cache_config": INT8}, {"generation_config": chosen}):
        with pytest.raises(
            ValueError, match=r"speech in a loop.*cache_config with backend='int8' would be ig"
        ):
            model.generate(tokens, **given, **arguments)
    with pytest.raises(ValueError, match=r"a cache of the backend 'int8' would be ignored.*=None"):
        model.generate(tokens, **given, **as_argument(cache))
    with pytest.raises(ValueError, match="Did you mean 'int8'"):
        model.generate(tokens, **given, **asking({"backend": "int3"}))
    assert cache.get_seq_length() == 0
    expected = model.generate_speech(tokens, **given)
    assert torch.equal(model.generate(tokens, **given, cache_config=None), expected)


def janus() -> PreTrainedModel:
    """A model that makes images of 16 tokens."""
    tower = {name: value for name, value in TOWER.items() if name != "intermediate_size"}
    config = CONFIG_MAPPING["janus"](
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**tower, "projection_dim": 64, "num_image_tokens": 16},
        vq_config={
            "embed_dim": 8,
            "num_embeddings": 64,
            "latent_channels": 32,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "num_patches": 4,
            "projection_dim": 64,
            "image_token_embed_dim": 64,
        },
    )
    model = make(config)
    model.generation_config.bos_token_id = 1
    model.generation_config.generation_kwargs = {"boi_token_id": START}
    return model


def image(model: PreTrainedModel, prompt: dict[str, torch.Tensor], **options: Any) -> Any:
    """An image for every row, each compared with one of a row that says nothing."""
    given = {"do_sample": False, "guidance_scale": 3.0, "return_dict_in_generate": True, **options}
    return model.generate(**prompt, generation_mode="image", **given)


class TestImages:
    """Janus makes them in a loop of its own, which asks nobody for a cache."""

    model = staticmethod(janus)
    prompt = staticmethod(lambda: padded_prompt((40, 31)))

    @pytest.mark.parametrize("count", [1, 2])
    def test_what_is_asked_for_is_built_and_told_of_pads(self, count: int) -> None:
        model = self.model()
        sampled = {"do_sample": True, "num_return_sequences": count}
        exact = {"backend": "int4", "residual_length": 1024}
        dense = DynamicCache(config=model.config.get_text_config())
        torch.manual_seed(0)
        expected = image(model, self.prompt(), **sampled, **as_argument(dense))
        torch.manual_seed(0)
        got = image(model, self.prompt(), **sampled, **asking(exact))
        assert torch.equal(got.sequences, expected.sequences)
        cache = cache_of(got)
        assert isinstance(cache, KVCache)
        assert cache.get_seq_length() == 40 + 15
        assert cache.packed_layers[0].padding.lengths.tolist() == [*[0] * count, *[9] * count] * 2

    @pytest.mark.parametrize("is_given", [False, True])
    @pytest.mark.parametrize("backend", ["h2o", "streaming_llm"])
    def test_a_padded_row_keeps_what_it_keeps_alone(self, backend: str, is_given: bool) -> None:
        model, together = self.model(), self.prompt()
        alone = {name: value[1:, 9:] for name, value in together.items()}
        config = {"backend": backend, "budget": 20, "chunk_size": 16}
        outputs = []
        for prompt in (together, alone):
            cache = as_argument(build_cache(model, config)) if is_given else asking(config)
            outputs.append(image(model, prompt, **cache))
        assert torch.equal(outputs[0].sequences[1], outputs[1].sequences[0])
        kept = [cache_of(output).kept_positions()[0] for output in outputs]
        assert torch.equal(kept[0][1], kept[1][0] + 9)
        assert "loop of the model's own" in str(cache_of(outputs[0]).report().whole_prompt_reason)

    def test_what_does_not_serve_is_refused(self) -> None:
        model, prompt = self.model(), self.prompt()
        with pytest.raises(ValueError, match="Unknown cache backend 'nonsense'"):
            image(model, prompt, **asking({"backend": "nonsense"}))
        with pytest.raises(UnsupportedOperationError, match="needs `input_ids`, got `inputs_embeds`"):
            image(model, prompt, **asking({"backend": "kvzip", "budget": 20}))
        cache = build_cache(model, INT8)
        image(model, prompt, **as_argument(cache))
        with pytest.raises(ValueError, match=r"has seen 55 tokens. Allowed are a new one"):
            image(model, prompt, **as_argument(cache))
        cache.reset()
        image(model, prompt, **as_argument(cache))

    @pytest.mark.allow_deprecation(
        "Passing .generation_config. together", reason="Janus passes its text on in this way"
    )
    def test_other_caches_and_texts_are_as_they_were(self) -> None:
        model, prompt = self.model(), self.prompt()
        options = {"max_new_tokens": NEW, "return_dict_in_generate": True}
        assert isinstance(cache_of(model.generate(**prompt, **options, **asking(INT8))), kvp.Int8Cache)
        dense = DynamicCache(config=model.config.get_text_config())
        assert cache_of(image(model, prompt, **as_argument(dense))) is dense
        try:
            made = cache_of(image(model, prompt))
        except TypeError:
            pytest.skip("this transformers' Janus cannot make the static cache of its images")
        assert isinstance(made, StaticCache)

    def test_the_method_is_put_back(self) -> None:
        cls = type(self.model())
        wrapped = cls.generate
        kvp.uninstall()
        try:
            assert cls.generate is wrapped.__wrapped__
        finally:
            kvp.install()
        assert cls.generate.__wrapped__ is wrapped.__wrapped__
