"""Models that generate, or prepare caches, in methods of their own, past what tells a cache of a call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, DynamicCache, LlamaForCausalLM, PreTrainedModel

from kvcache_plugins import build_cache, estimate
from kvcache_plugins.models.cache_argument import as_argument, cache_name
from kvcache_plugins.testing.generation import padded_prompt
from kvcache_plugins.testing.models import tiny_model
from tests.models.showing import TEXT

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
