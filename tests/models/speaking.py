"""Small random models that hear and speak by parts of their own: a codec, a second model, codes as tokens."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

from kvcache_plugins.testing.models import _initialize
from tests.models.showing import IMAGE, ROPE, START, STOP, TEXT

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
        _initialize(model.get_submodule(part), seed)
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


def csm() -> PreTrainedModel:
    """A model that speaks in frames of four codes, and whose prompts may be such frames."""
    from transformers import CsmForConditionalGeneration

    sizes = {
        "num_codebooks": 4,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 64,
    }
    config = CONFIG_MAPPING["csm"](
        **sizes,
        intermediate_size=128,
        text_vocab_size=128,
        pad_token_id=0,
        bos_token_id=1,
        audio_token_id=5,
        audio_eos_token_id=6,
        codebook_eos_token_id=62,
        codebook_pad_token_id=63,
        depth_decoder_config={
            **sizes,
            "intermediate_size": 64,
            "backbone_hidden_size": 64,
            "max_position_embeddings": 5,
        },
        codec_config=MIMI,
    )
    model = _build(CsmForConditionalGeneration, config)
    model.depth_decoder.generation_config.update(min_new_tokens=3, max_new_tokens=3, do_sample=False)
    return model


def qwen3_omni() -> PreTrainedModel:
    """A thinker that hears, and a talker that goes on from its hidden states; codes are waves as they are."""
    from transformers import Qwen3OmniMoeForConditionalGeneration

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    text = {**TEXT, **experts, "rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}}
    towers = {
        "vision_config": {
            "depth": 1,
            "hidden_size": 64,
            "num_heads": 4,
            "intermediate_size": 64,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 64,
        },
        "audio_config": {
            "d_model": 64,
            "encoder_layers": 1,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "num_mel_bins": 8,
            "output_dim": 64,
            "downsample_hidden_size": 8,
        },
    }
    shown = {
        "audio_token_id": IMAGE,
        "image_token_id": 12,
        "video_token_id": 13,
        "vision_start_token_id": 10,
        "audio_start_token_id": START,
    }
    config = CONFIG_MAPPING["qwen3_omni_moe"](
        thinker_config={
            **towers,
            **shown,
            "text_config": text,
            "user_token_id": 15,
            "vision_end_token_id": 11,
            "audio_end_token_id": STOP,
        },
        talker_config={
            **shown,
            "text_config": {**text, "vocab_size": 1200, "shared_expert_intermediate_size": 32},
            "code_predictor_config": {**TEXT, "vocab_size": 64, "num_code_groups": 4, "sliding_window": None},
            "num_code_groups": 4,
            "thinker_hidden_size": 64,
            "accept_hidden_layer": 1,
            "codec_eos_token_id": 1190,
            "codec_nothink_id": 101,
            "codec_think_bos_id": 102,
            "codec_think_eos_id": 103,
            "codec_pad_id": 104,
            "codec_bos_id": 105,
            "speaker_id": {"ethan": 106},
            "spatial_merge_size": 2,
        },
        code2wav_config={
            "codebook_size": 64,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_quantizers": 4,
            "upsample_rates": [2],
            "upsampling_ratios": [2],
            "decoder_dim": 32,
        },
        tts_bos_token_id=7,
        tts_eos_token_id=8,
        tts_pad_token_id=9,
        system_token_id=14,
        user_token_id=15,
        im_start_token_id=16,
        im_end_token_id=17,
        assistant_token_id=18,
    )
    model = _build(Qwen3OmniMoeForConditionalGeneration, config, "thinker", "talker")
    for part in (model.thinker, model.talker):
        part.generation_config.update(eos_token_id=None, pad_token_id=0)
    model.code2wav = _Waves()
    return model


class _Waves(torch.nn.Module):
    """Codes as sounds."""

    def chunked_decode(self, codes: torch.Tensor, **_: Any) -> torch.Tensor:
        """The codes, as they are."""
        return codes.float()
