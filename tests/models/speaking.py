"""Small random models that hear and speak by parts of their own: a codec, a second model, codes as tokens."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

from kvcache_plugins.testing.models import _initialise

MIMI: dict[str, Any] = {
    "model_type": "mimi",
    "num_filters": 4,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "codebook_size": 64,
    "codebook_dim": 8,
    "num_quantizers": 4,
    "num_semantic_quantizers": 1,
    "vector_quantization_hidden_dimension": 8,
    "upsampling_ratios": [2, 2],
    "num_residual_layers": 1,
    "audio_channels": 1,
    "frame_rate": 12.5,
    "sampling_rate": 1000,
    "upsample_groups": 32,
}


def _build(model_class: type[PreTrainedModel], config: Any, *parts: str) -> PreTrainedModel:
    """A model whose weights, or those of the parts that are named, are our own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config).eval()
    for seed, part in enumerate(parts or ("",), 1):
        _initialise(model.get_submodule(part), seed)
    return model


def kyutai() -> PreTrainedModel:
    """A model that hears: its codec prepares a cache by its own, saved generation configuration."""
    from transformers import KyutaiSpeechToTextForConditionalGeneration

    config = CONFIG_MAPPING["kyutai_speech_to_text"](
        codebook_vocab_size=65,
        vocab_size=100,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=750,
        sliding_window=375,
        ffn_dim=128,
        num_codebooks=4,
        audio_bos_token_id=64,
        audio_pad_token_id=360,
        pad_token_id=3,
        bos_token_id=1,
        eos_token_id=None,
        codec_config={**MIMI, "use_streaming": True},
    )
    return _build(KyutaiSpeechToTextForConditionalGeneration, config)
