"""Small random models of text and images, or sounds, one of every kind that has shown something new."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from tests.models.showing import (
    IMAGE,
    LENGTH,
    ROPE,
    START,
    STOP,
    TEXT,
    TOWER,
    Subject,
    join,
    make,
    noise,
    prompt_of,
)


def _qwen(name: str, **tower: Any) -> Subject:
    vision_config = {
        "depth": 2,
        "num_heads": 4,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "hidden_size": 64,
        **tower,
    }
    config = CONFIG_MAPPING[name](
        text_config={**TEXT, "rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
        vision_config=vision_config,
        image_token_id=IMAGE,
        video_token_id=6,
        vision_start_token_id=START,
        vision_end_token_id=STOP,
    )
    prompt = prompt_of(16, START, pixel_values=noise(128, 3 * 2 * 14 * 14))
    prompt["image_grid_thw"] = torch.tensor([[1, 8, 8]] * 2)
    prompt["mm_token_type_ids"] = (prompt["input_ids"] == IMAGE).long()
    return Subject(make(config), prompt)


def _llava() -> Subject:
    clip = {"projection_dim": 64}
    model = join(
        "llava",
        "llama",
        "clip_vision_model",
        "image_token_index",
        vision_config=clip,
        vision_feature_layer=-1,
    )
    return Subject(model, prompt_of(16, pixel_values=noise(2, 3, 56, 56)))


def gemma3(window: int = 32, length: int = LENGTH) -> Subject:
    """Gemma 3: tokens of one image see one another. Of a longer prompt the image is where it was."""
    text = {
        "sliding_window": window,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
    }
    model = join(
        "gemma3",
        "gemma3_text",
        "siglip_vision_model",
        "image_token_index",
        text_config=text,
        mm_tokens_per_image=16,
        boi_token_index=START,
        eoi_token_index=STOP,
    )
    prompt = prompt_of(16, pixel_values=noise(2, 3, 56, 56))
    more = torch.randint(20, 100, (2, length - LENGTH), generator=torch.Generator().manual_seed(1))
    prompt["input_ids"] = torch.cat((prompt["input_ids"], more), dim=1)
    prompt["attention_mask"] = (prompt["input_ids"] != 0).long()
    prompt["token_type_ids"] = (prompt["input_ids"] == IMAGE).long()
    return Subject(model, prompt)


def _paligemma() -> Subject:
    tower = {"vision_use_head": False, "projection_dim": 64}
    model = join(
        "paligemma",
        "gemma",
        "siglip_vision_model",
        "image_token_index",
        vision_config=tower,
        projection_dim=64,
    )
    prompt = prompt_of(16, pixel_values=noise(2, 3, 56, 56))
    return Subject(model, {**prompt, "token_type_ids": torch.zeros_like(prompt["input_ids"])})


def _idefics3() -> Subject:
    model = join("idefics3", "llama", "idefics3_vision", scale_factor=2)
    return Subject(model, prompt_of(4, pixel_values=noise(2, 1, 3, 56, 56)))


def _internvl() -> Subject:
    config = CONFIG_MAPPING["internvl"](
        text_config={**TEXT, "model_type": "qwen2"},
        vision_config={**TOWER, "image_size": [56, 56], "patch_size": [14, 14]},
        image_token_id=IMAGE,
        downsample_ratio=0.5,
    )
    return Subject(make(config), prompt_of(4, pixel_values=noise(2, 3, 56, 56)))


def _mistral3() -> Subject:
    model = join(
        "mistral3",
        "mistral",
        "pixtral",
        "image_token_index",
        vision_config={"head_dim": 16},
        vision_feature_layer=-1,
        spatial_merge_size=2,
    )
    sizes = torch.tensor([[56, 56]] * 2)
    return Subject(model, prompt_of(4, pixel_values=noise(2, 3, 56, 56), image_sizes=sizes))


def _mllama() -> Subject:
    """Its image is in layers of cross-attention, of which the padded row sees 17 tokens like the other."""
    tower = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 4,
        "image_size": 56,
        "patch_size": 14,
        "vision_output_dim": 128,
        "intermediate_layers_indices": [0],
        "max_num_tiles": 1,
        "supported_aspect_ratios": [[1, 1]],
    }
    text = {**TEXT, "num_hidden_layers": 3, "cross_attention_layers": [1], "rope_parameters": ROPE}
    config = CONFIG_MAPPING["mllama"](text_config=text, vision_config=tower, image_token_index=IMAGE)
    model = make(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("cross_attn_attn_gate", "cross_attn_mlp_gate")):
            parameter.data.fill_(0.7)  # of zero as it is born, the image is not seen
    seen = torch.ones(2, LENGTH, 1, 1, dtype=torch.long)
    seen[:, :8] = 0
    prompt = prompt_of(
        1,
        pixel_values=noise(2, 1, 1, 3, 56, 56),
        aspect_ratio_ids=torch.ones(2, 1, dtype=torch.long),
        aspect_ratio_mask=torch.ones(2, 1, 1, dtype=torch.long),
        cross_attention_mask=seen,
    )
    return Subject(model, prompt)


def _qwen2_audio() -> Subject:
    tower = {
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "num_mel_bins": 8,
        "max_source_positions": 32,
    }
    config = CONFIG_MAPPING["qwen2_audio"](
        text_config={**TEXT, "model_type": "qwen2"}, audio_config=tower, audio_token_index=IMAGE
    )
    heard = torch.ones(2, 64, dtype=torch.long)
    prompt = prompt_of(16, input_features=noise(2, 8, 64), feature_attention_mask=heard)
    return Subject(make(config), prompt, "input_features")


def _blip2() -> Subject:
    config = CONFIG_MAPPING["blip-2"](
        text_config={**TEXT, "model_type": "opt", "ffn_dim": 128, "word_embed_proj_dim": 64},
        vision_config=TOWER,
        qformer_config={**TOWER, "encoder_hidden_size": 64, "vocab_size": 128},
        num_query_tokens=8,
        image_token_index=IMAGE,
    )
    return Subject(make(config), prompt_of(8, pixel_values=noise(2, 3, 56, 56)))


def _git() -> Subject:
    text = {key: value for key, value in TEXT.items() if key not in ("num_key_value_heads", "head_dim")}
    config = CONFIG_MAPPING["git"](**text, vision_config=TOWER)
    return Subject(make(config), prompt_of(0, pixel_values=noise(2, 3, 56, 56)))


def _fuyu() -> Subject:
    config = CONFIG_MAPPING["fuyu"](
        **TEXT, text_config={**TEXT, "model_type": "persimmon"}, patch_size=14, image_token_id=IMAGE
    )
    return Subject(make(config), prompt_of(16, image_patches=noise(2, 16, 3 * 14 * 14)), "image_patches")


def _gemma4() -> Subject:
    """Gemma 4: tokens of one image see one another, in windows only."""
    text = {
        "model_type": "gemma4_text",
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 16,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 32,
        "use_bidirectional_attention": "vision",
    }
    tower = {"pooling_kernel_size": 2, "position_embedding_size": 16, "patch_size": 4, "head_dim": 16}
    config = CONFIG_MAPPING["gemma4"](
        text_config={**TEXT, **text},
        vision_config={**TOWER, **tower, "num_key_value_heads": 4},
        audio_config=None,
        image_token_id=IMAGE,
        boi_token_id=START,
        eoi_token_id=STOP,
    )
    prompt = prompt_of(16, pixel_values=noise(2, 64, 48).sigmoid())
    rows, columns = torch.arange(64) // 8, torch.arange(64) % 8
    prompt["image_position_ids"] = torch.stack((columns, rows), dim=-1).expand(2, -1, -1)
    prompt["mm_token_type_ids"] = (prompt["input_ids"] == IMAGE).long()
    return Subject(make(config), prompt)


def _granite4_vision() -> Subject:
    """Its layers of text are shown an image one after the other, and it is encoded without a summary."""
    model = join(
        "granite4_vision",
        "granite4_vision_text",
        "siglip_vision_model",
        "image_token_index",
        qformer_config={**TOWER, "encoder_hidden_size": 64, "model_type": "blip_2_qformer"},
        image_grid_pinpoints=[[56, 56]],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        downsample_rate="1/2",
        deepstack_layer_map=[[0, 0], [1, 1]],
        spatial_target_layers=[],
    )
    sizes = torch.tensor([[56, 56]] * 2)
    return Subject(model, prompt_of(10, pixel_values=noise(2, 2, 3, 56, 56), image_sizes=sizes))


def _kosmos2() -> Subject:
    """It makes its masks by itself, for all tokens that were ever seen."""
    text = {"embed_dim": 64, "layers": 2, "attention_heads": 4, "ffn_dim": 128}
    config = CONFIG_MAPPING["kosmos-2"](text_config={**TEXT, **text}, vision_config=TOWER, latent_query_num=8)
    prompt = prompt_of(8, pixel_values=noise(2, 3, 56, 56))
    prompt["image_embeds_position_mask"] = (prompt["input_ids"] == IMAGE).long()
    return Subject(make(config), prompt)


def _ovis2() -> Subject:
    """Tokens before and after an image are replaced by what its encoder says, too."""
    tower = {**TOWER, "vocab_size": 64, "num_visual_indicator_tokens": 5}
    tower |= {"hidden_stride": 1}
    config = CONFIG_MAPPING["ovis2"](
        text_config={**TEXT, "model_type": "qwen2"},
        vision_config=tower,
        vocab_size=128,
        hidden_size=64,
        image_token_id=IMAGE,
        visual_indicator_token_ids=[10, 11, 12, 13, 14],
    )
    return Subject(make(config), prompt_of(16, 10, 11, pixel_values=noise(2, 3, 56, 56)))


def phi4_multimodal(switch: int = 4096) -> Subject:
    """Phi-4: sounds, and images, have names of their own. Frequencies change at `switch` tokens."""
    rope = {**ROPE, "rope_type": "longrope", "partial_rotary_factor": 1.0}
    factors = {"long_factor": [1.0] * 8, "short_factor": [1.0] * 8}
    ears = {"hidden_size": 64, "intermediate_size": 64, "num_blocks": 1, "num_attention_heads": 4}
    ears |= {"input_size": 16, "ext_pw_out_channel": 64, "nemo_conv_channels": 8}
    config = CONFIG_MAPPING["phi4_multimodal"](
        **{key: value for key, value in TEXT.items() if key != "head_dim"},
        original_max_position_embeddings=switch,
        rope_parameters={**rope, **factors, "original_max_position_embeddings": switch},
        vision_config={**TOWER, "crop_size": 56, "image_token_id": 8},
        audio_config={**ears, "depthwise_separable_out_channel": 64, "audio_token_id": IMAGE},
    )
    model = make(config)
    assert model.generation_config is not None
    model.generation_config.suppress_tokens = [IMAGE]  # it would look for a sound where it writes one
    prompt = prompt_of(8, audio_input_features=noise(2, 64, 16), audio_embed_sizes=torch.tensor([8, 8]))
    prompt["audio_attention_mask"] = torch.ones(2, 64, dtype=torch.bool)
    return Subject(model, prompt, "audio_input_features")


def _qwen2_5_omni() -> Subject:
    """It numbers pads, and what it hears, by time, row and column too."""
    tower = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
    tower |= {"n_window": 32, "output_dim": 64}
    config = CONFIG_MAPPING["qwen2_5_omni_thinker"](
        vision_start_token_id=10,
        vision_end_token_id=11,
        text_config={**TEXT, "rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
        vision_config={"depth": 1, "hidden_size": 64, "num_heads": 4, "out_hidden_size": 64},
        audio_config={**tower, "num_mel_bins": 8, "max_source_positions": 32},
        audio_token_index=IMAGE,
        audio_start_token_id=START,
        audio_end_token_id=STOP,
    )
    heard = torch.ones(2, 64, dtype=torch.long)
    prompt = prompt_of(16, START, STOP, input_features=noise(2, 8, 64), feature_attention_mask=heard)
    return Subject(make(config), prompt, "input_features")


def _kimi_k25() -> Subject:
    """Its text model caches latents."""
    config = CONFIG_MAPPING["kimi_k25"](
        text_config={
            **TEXT,
            "model_type": "deepseek_v3",
            "num_key_value_heads": 4,
            "first_k_dense_replace": 2,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
        },
        vision_config={**TOWER, "pos_emb_height": 8, "pos_emb_width": 8},
        projection_hidden_size=64,
        image_token_id=IMAGE,
        video_token_id=6,
        vision_start_token_id=START,
        vision_end_token_id=STOP,
    )
    prompt = prompt_of(16, pixel_values=noise(128, 3, 14, 14))
    prompt["image_grid_thw"] = torch.tensor([[1, 8, 8]] * 2)
    return Subject(make(config), prompt)


def _video_llama_3() -> Subject:
    """Tokens of a video that look like those of the frame before are left out; here none is."""
    config = CONFIG_MAPPING["video_llama_3"](
        text_config={**TEXT, "model_type": "qwen2"},
        vision_config={**TOWER, "model_type": "video_llama_3_vision"},
        video_token_id=IMAGE,
    )
    prompt = prompt_of(16, pixel_values_videos=noise(128, 3 * 14 * 14))
    prompt["video_grid_thw"] = torch.tensor([[2, 4, 8]] * 2)
    prompt["video_merge_sizes"] = torch.tensor([2, 2])
    prompt["video_compression_mask"] = torch.ones(32, dtype=torch.bool)
    return Subject(make(config), prompt, "pixel_values_videos")


def blip() -> Subject:
    """BLIP: a cache of text and one of images, in a class of transformers."""
    config = CONFIG_MAPPING["blip"](
        text_config={**TEXT, "encoder_hidden_size": 64, "eos_token_id": 2, "sep_token_id": 2},
        vision_config=TOWER,
        projection_dim=64,
    )
    return Subject(make(config), prompt_of(0, pixel_values=noise(2, 3, 56, 56)))


_BUILDERS: dict[str, Callable[[], Subject]] = {
    "blip-2": _blip2,
    "fuyu": _fuyu,
    "gemma3": gemma3,
    "gemma4": _gemma4,
    "git": _git,
    "granite4_vision": _granite4_vision,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "kimi_k25": _kimi_k25,
    "kosmos-2": _kosmos2,
    "llava": _llava,
    "mistral3": _mistral3,
    "mllama": _mllama,
    "ovis2": _ovis2,
    "paligemma": _paligemma,
    "phi4_multimodal": phi4_multimodal,
    "qwen2_5_omni_thinker": _qwen2_5_omni,
    "qwen2_5_vl": functools.partial(_qwen, "qwen2_5_vl", out_hidden_size=64, fullatt_block_indexes=[1]),
    "qwen2_audio": _qwen2_audio,
    "qwen2_vl": functools.partial(_qwen, "qwen2_vl", embed_dim=64),
    "qwen3_vl": functools.partial(
        _qwen, "qwen3_vl", out_hidden_size=64, deepstack_visual_indexes=[0, 1], num_position_embeddings=64
    ),
    "video_llama_3": _video_llama_3,
}
NAMES = tuple(_BUILDERS)


@functools.cache
def subject(name: str) -> Subject:
    """The model of a family and a prompt for it, made once."""
    return _BUILDERS[name]()
