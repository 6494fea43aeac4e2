"""Small random decoders that are the text part of models of several, and no family of their own.

Those that are one (a Llama beneath a tower) are among `tests.models.families`. Here a decoder is built alone,
from the configuration of the part, by the class that the family's modelling file has for it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from kvcache_plugins.models.cache_argument import CACHE_NAMES
from kvcache_plugins.models.origins import modeling_module
from kvcache_plugins.testing.models import _initialize
from tests.models import families

_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
_BY_AXES: dict[str, Any] = {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}}
_OWN: dict[str, dict[str, Any]] = {
    "cosmos3_edge_text": _BY_AXES,
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [32, 32],
        "moe_num_experts": 4,
        "moe_k": 2,
        "rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]},
    },
    "glm4v_moe_text": {"rope_parameters": {**_BY_AXES["rope_parameters"], "partial_rotary_factor": 1.0}},
    "glm4v_text": _BY_AXES,
    "glm_ocr_text": _BY_AXES,
    "hunyuan_vl_text": {"rope_parameters": {**_ROPE, "mrope_section": [2, 2, 2, 2]}},
    "paddleocr_vl_text": _BY_AXES,
    "qwen2_5_omni_text": _BY_AXES,
    "qwen2_5_vl_text": _BY_AXES,
    "qwen2_vl_text": _BY_AXES,
    "qwen3_omni_moe_text": _BY_AXES,
    "qwen3_vl_moe_text": _BY_AXES,
    "qwen3_vl_text": _BY_AXES,
    "step3p5": {
        "share_expert_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_sliding_attention_heads": 8,
        "rope_parameters": {
            "sliding_attention": _ROPE,
            "full_attention": {**_ROPE, "partial_rotary_factor": 0.5},
        },
    },
}


def _names() -> tuple[str, ...]:
    composed = {*MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    parts = [getattr(CONFIG_MAPPING[name], "sub_configs", {}) for name in composed]
    kinds = {part.get(name) for part in parts for name in ("text_config", "decoder")} - {None, AutoConfig}
    return tuple(sorted({kind.model_type for kind in kinds} & set(CONFIG_MAPPING) - set(families.NAMES)))


NAMES = _names()


def text_part(name: str, most: int = 12_000_000, **overrides: Any) -> PreTrainedModel:
    """Builds the decoder whose `model_type` is `name`, with `most` parameters at most, in evaluation mode.

    Raises:
        families.NotSmall: If it would have more.
        Exception: Whatever a configuration or a model says to sizes it cannot have.
    """
    config = families.small_config(name, **_OWN.get(name, {}) | overrides)
    source = modeling_module(config)
    classes = [
        kind
        for kind in vars(source).values()
        if inspect.isclass(kind)
        and issubclass(kind, PreTrainedModel)
        and kind.config_class is type(config)
        and not set(CACHE_NAMES).isdisjoint(inspect.signature(kind.forward).parameters)
    ]
    model_class = min(classes, key=lambda kind: len(kind.__mro__))  # without what makes it generate
    with torch.device("meta"):
        count = sum(weight.numel() for weight in model_class(config).parameters())
    if count > most:
        raise families.NotSmall(f"{name} has {count:,} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config).float()
    _initialize(model, 1)
    return model.eval()
