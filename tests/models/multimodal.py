"""Small random models of text and images, or sounds, and a padded batch of prompts that show them some.

The towers are as small as the text models of `kvcache_plugins.testing.models`; features are noise. Tokens
that stand for an image have an id of their own, and the second row is padded on the left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, PreTrainedModel

from kvcache_plugins.testing.models import _initialise

LENGTH, PADS = 60, 7
_START, _STOP, _IMAGE = 3, 4, 5
_TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Subject:
    """A model and what it is asked.

    Args:
        model (`PreTrainedModel`): In evaluation mode.
        prompt (`dict`): Arguments of `generate()`.
        features (`str`): Which of them is the image, or the sound.
    """

    model: PreTrainedModel
    prompt: dict[str, Tensor]
    features: str = "pixel_values"

    def with_other_features(self) -> dict[str, Tensor]:
        """The prompt with another image."""
        return {**self.prompt, self.features: -self.prompt[self.features]}

    def text_alone(self) -> dict[str, Tensor]:
        """The prompt with words in the place of its image."""
        tokens = self.prompt["input_ids"]
        words = torch.where((tokens > 0) & (tokens < 20), 21, tokens)
        return {"input_ids": words, "attention_mask": self.prompt["attention_mask"]}


def _model(config: Any) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    _initialise(model, 1)
    assert model.generation_config is not None
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval()


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _prompt(count: int, **features: Tensor) -> dict[str, Tensor]:
    """Two rows, each with `count` tokens of an image after 8 of text."""
    tokens = torch.randint(20, 100, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    tokens[1, :PADS] = 0
    for row, pads in enumerate((0, PADS)):
        tokens[row, pads + 8 : pads + 8 + count] = _IMAGE
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), **features}


def _joined(name: str, text: str, tower: str, key: str = "image_token_id", **config: Any) -> PreTrainedModel:
    """A model put together of a text model and a tower that have families of their own."""
    return _model(
        CONFIG_MAPPING[name](
            text_config={**_TEXT, "model_type": text, **config.pop("text_config", {})},
            vision_config={**_TOWER, "model_type": tower, **config.pop("vision_config", {})},
            **{key: _IMAGE},
            **config,
        )
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
        text_config={**_TEXT, "rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}},
        vision_config=vision_config,
        image_token_id=_IMAGE,
        video_token_id=6,
        vision_start_token_id=_START,
        vision_end_token_id=_STOP,
    )
    prompt = _prompt(16, pixel_values=_noise(128, 3 * 2 * 14 * 14))
    for row, pads in enumerate((0, PADS)):
        prompt["input_ids"][row, pads + 7] = _START
    prompt["image_grid_thw"] = torch.tensor([[1, 8, 8]] * 2)
    prompt["mm_token_type_ids"] = (prompt["input_ids"] == _IMAGE).long()
    return Subject(_model(config), prompt)


def _llava() -> Subject:
    clip = {"projection_dim": 64}
    model = _joined(
        "llava",
        "llama",
        "clip_vision_model",
        "image_token_index",
        vision_config=clip,
        vision_feature_layer=-1,
    )
    return Subject(model, _prompt(16, pixel_values=_noise(2, 3, 56, 56)))


def gemma3(window: int = 32, length: int = LENGTH) -> Subject:
    """Gemma 3: tokens of one image see one another. Of a longer prompt the image is where it was."""
    text = {
        "sliding_window": window,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
    }
    model = _joined(
        "gemma3",
        "gemma3_text",
        "siglip_vision_model",
        "image_token_index",
        text_config=text,
        mm_tokens_per_image=16,
        boi_token_index=_START,
        eoi_token_index=_STOP,
    )
    prompt = _prompt(16, pixel_values=_noise(2, 3, 56, 56))
    more = torch.randint(20, 100, (2, length - LENGTH), generator=torch.Generator().manual_seed(1))
    prompt["input_ids"] = torch.cat((prompt["input_ids"], more), dim=1)
    prompt["attention_mask"] = (prompt["input_ids"] != 0).long()
    prompt["token_type_ids"] = (prompt["input_ids"] == _IMAGE).long()
    return Subject(model, prompt)


def _paligemma() -> Subject:
    tower = {"vision_use_head": False, "projection_dim": 64}
    model = _joined(
        "paligemma",
        "gemma",
        "siglip_vision_model",
        "image_token_index",
        vision_config=tower,
        projection_dim=64,
    )
    prompt = _prompt(16, pixel_values=_noise(2, 3, 56, 56))
    return Subject(model, {**prompt, "token_type_ids": torch.zeros_like(prompt["input_ids"])})


def _idefics3() -> Subject:
    model = _joined("idefics3", "llama", "idefics3_vision", scale_factor=2)
    return Subject(model, _prompt(4, pixel_values=_noise(2, 1, 3, 56, 56)))


def _internvl() -> Subject:
    config = CONFIG_MAPPING["internvl"](
        text_config={**_TEXT, "model_type": "qwen2"},
        vision_config={**_TOWER, "image_size": [56, 56], "patch_size": [14, 14]},
        image_token_id=_IMAGE,
        downsample_ratio=0.5,
    )
    return Subject(_model(config), _prompt(4, pixel_values=_noise(2, 3, 56, 56)))


def _mistral3() -> Subject:
    model = _joined(
        "mistral3",
        "mistral",
        "pixtral",
        "image_token_index",
        vision_config={"head_dim": 16},
        vision_feature_layer=-1,
        spatial_merge_size=2,
    )
    sizes = torch.tensor([[56, 56]] * 2)
    return Subject(model, _prompt(4, pixel_values=_noise(2, 3, 56, 56), image_sizes=sizes))


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
    text = {**_TEXT, "num_hidden_layers": 3, "cross_attention_layers": [1], "rope_parameters": _ROPE}
    config = CONFIG_MAPPING["mllama"](text_config=text, vision_config=tower, image_token_index=_IMAGE)
    model = _model(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("cross_attn_attn_gate", "cross_attn_mlp_gate")):
            parameter.data.fill_(0.7)  # of zero as it is born, the image is not seen
    seen = torch.ones(2, LENGTH, 1, 1, dtype=torch.long)
    seen[:, :8] = 0
    prompt = _prompt(
        1,
        pixel_values=_noise(2, 1, 1, 3, 56, 56),
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
        text_config={**_TEXT, "model_type": "qwen2"}, audio_config=tower, audio_token_index=_IMAGE
    )
    heard = torch.ones(2, 64, dtype=torch.long)
    prompt = _prompt(16, input_features=_noise(2, 8, 64), feature_attention_mask=heard)
    return Subject(_model(config), prompt, "input_features")


def _blip2() -> Subject:
    config = CONFIG_MAPPING["blip-2"](
        text_config={**_TEXT, "model_type": "opt", "ffn_dim": 128, "word_embed_proj_dim": 64},
        vision_config=_TOWER,
        qformer_config={**_TOWER, "encoder_hidden_size": 64, "vocab_size": 128},
        num_query_tokens=8,
        image_token_index=_IMAGE,
    )
    return Subject(_model(config), _prompt(8, pixel_values=_noise(2, 3, 56, 56)))


def _git() -> Subject:
    text = {key: value for key, value in _TEXT.items() if key not in ("num_key_value_heads", "head_dim")}
    config = CONFIG_MAPPING["git"](**text, vision_config=_TOWER)
    return Subject(_model(config), _prompt(0, pixel_values=_noise(2, 3, 56, 56)))


_BUILDERS: dict[str, Callable[[], Subject]] = {
    "blip-2": _blip2,
    "gemma3": gemma3,
    "git": _git,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "llava": _llava,
    "mistral3": _mistral3,
    "mllama": _mllama,
    "paligemma": _paligemma,
    "qwen2_5_vl": functools.partial(_qwen, "qwen2_5_vl", out_hidden_size=64, fullatt_block_indexes=[1]),
    "qwen2_audio": _qwen2_audio,
    "qwen2_vl": functools.partial(_qwen, "qwen2_vl", embed_dim=64),
    "qwen3_vl": functools.partial(
        _qwen, "qwen3_vl", out_hidden_size=64, deepstack_visual_indexes=[0, 1], num_position_embeddings=64
    ),
}
NAMES = tuple(_BUILDERS)


@functools.cache
def subject(name: str) -> Subject:
    """The model of a family and a prompt for it, made once."""
    return _BUILDERS[name]()
