"""Small random models of every decoder-only family that Transformers has, from their configurations alone.

Beside the zoo of `kvcache_plugins.testing.models`, which is chosen and described: here the names come from
Transformers, so that a new family is tried the day it appears. One set of sizes is offered to all; a
configuration takes what it knows.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvcache_plugins.models.cache_argument import cache_name
from kvcache_plugins.testing.generation import padded_prompt
from kvcache_plugins.testing.models import _COMMON, _FAMILIES, _initialize

_LINEAR = ["linear_attention", "full_attention"]
_SLIDING = ["sliding_attention", "full_attention"]
_LATENT: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4}
_INKLING: dict[str, Any] = {
    "layer_types": ["hybrid_sliding", "hybrid"],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "rel_extent": 64,
    "unpadded_vocab_size": 128,
    "n_layers_per_attn_res_block": 2,
}
_EMBEDDED_LAYERS: dict[str, Any] = {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16}

_SIZES: dict[str, Any] = {
    **_COMMON,
    # experts
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    # latent and indexed attention
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 24,
    # recurrent branches
    "mamba_d_state": 16,
    "mamba_d_ssm": 128,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_n_groups": 1,
    "mamba_dt_rank": 4,
    "ssm_state_size": 16,
    "n_groups": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "sliding_window": 16,
    # other names of the same
    "ffn_dim": 128,
    "ffn_hidden_size": 128,
    "d_model": 64,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "num_decoder_layers": 2,
    "num_decoder_attention_heads": 4,
    "decoder_ffn_dim": 128,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "use_cache": True,
}
# What a family needs beyond; a list of kinds of layer makes the model four layers deep.
_OWN: dict[str, dict[str, Any]] = {
    "afmoe": {"layer_types": _SLIDING},
    "axk1": _LATENT,
    "axk2": _LATENT,
    "bailing_hybrid": {"layer_types": _LINEAR, **_LATENT},
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "cohere2": {"layer_types": _SLIDING},
    "cohere_compass_text": {
        "layer_types": _SLIDING,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in _SLIDING},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "cohere2_moe": {"layer_types": _SLIDING},
    "deepseek_v2": _LATENT,
    "deepseek_v32": _LATENT,
    "dots3_note_text": _LATENT,
    "dory": {"layer_types": _SLIDING, "n_input_layers": 1, "n_output_layers": 1, "n_recurrent_loops": 3},
    "exaone_moe": {"layer_types": _SLIDING},
    "gemma3n_text": {
        **_EMBEDDED_LAYERS,
        "layer_types": _SLIDING,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": None,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    },
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "inkling2_loop_text": {**_INKLING, "loop_layer_index_start": 2, "loop_layer_index_end": 4},
    "inkling2_text": _INKLING,
    "inkling_text": {"layer_types": ["hybrid_sliding", "hybrid"]},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 32},
    "kimi_linear": {"layer_types": _LINEAR, "linear_head_dim": 16, "linear_num_heads": 4, **_LATENT},
    "mamba2": {"num_heads": 8, "expand": 2},
    "longcat_flash": {
        "num_layers": 1,
        "head_dim": 16,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 32,
        **_LATENT,
    },
    "minicpm3": _LATENT,
    "ministral3": {"sliding_window": None},
    "nemotron_h": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "attention", "mamba", "attention"]},
    "olmo3": {"layer_types": _SLIDING},
    # makes tables of positions by positions in every call
    "prophetnet": {"max_position_embeddings": 128},
    "qwen3_5_moe_text": {"layer_types": _LINEAR, "head_dim": 32},
    "qwen3_5_text": {"layer_types": _LINEAR, "head_dim": 32},
    "qwen4_exp_text": {
        "layer_types": _LINEAR,
        "head_dim": 32,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 24,
        "indexer_compress_ratio": 4,
        "hc_count": 2,
        "hc_lowrank": 8,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "sarvam_mla": _LATENT,
    "roc_bert": {"shape_vocab_size": 128, "pronunciation_vocab_size": 128},
    "xmod": {"default_language": "en_XX"},
    "youtu": _LATENT,
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_head_dim": 32,
        "n_mamba_heads": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "attention_head_dim": 32,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "num_mem_blocks": 1,
    },
}
_OF_PLAIN_PARTS = frozenset({"dbrx", "mpt"})
"""Families whose configuration has parts that describe no other model."""

LISTED_FOR = "5.23"
"""The release whose broken families tests name; in others, families come, go and change."""
NAMES: tuple[str, ...] = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


class NotSmall(Exception):
    """A family whose configuration does not take our sizes."""


@contextmanager
def as_far_as_it_can_be_built(name: str, broken: Collection[str]) -> Iterator[None]:
    """Skips what is not small, and what fails if it is `broken` or the release was not looked through."""
    try:
        yield
    except NotSmall as error:
        pytest.skip(str(error))
    except Exception as error:
        if name not in broken and transformers.__version__.startswith(LISTED_FOR):
            raise
        pytest.skip(f"without us: {type(error).__name__}")


def small_config(name: str, **overrides: Any) -> Any:
    """The configuration of `model_type` `name` with those of our sizes that it knows, and `overrides`."""
    config_class = CONFIG_MAPPING[name]
    fields = set(inspect.signature(config_class).parameters)
    aliases: dict[str, str] = getattr(config_class, "attribute_map", {})
    sizes = {aliases.get(key, key): value for key, value in _SIZES.items() if aliases.get(key, key) in fields}
    for own in (_FAMILIES.get(name, {}), _OWN.get(name, {})):
        sizes |= {aliases.get(key, key): value for key, value in own.items()}
    depth = aliases.get("num_hidden_layers", "num_hidden_layers")
    if name in _OWN and "layer_types" in sizes:
        sizes |= {"layer_types": sizes["layer_types"] * 2, depth: 4}
    return config_class(**sizes | overrides)


def small_model(name: str, most: int = 12_000_000, **overrides: Any) -> PreTrainedModel:
    """Builds a model of `model_type` `name` with `most` parameters at most, in evaluation mode.

    `overrides` are fields of the family's configuration, by their own names.

    Raises:
        NotSmall: If it would have more, or is made of several models, whose decoder is a family of its own.
        Exception: Whatever a configuration or a model says to sizes it cannot have.
    """
    config_class = CONFIG_MAPPING[name]
    if getattr(config_class, "sub_configs", None) and name not in _OF_PLAIN_PARTS:
        raise NotSmall(f"{name} is made of several models")
    config = small_config(name, **overrides)
    if config.get_text_config(decoder=True) is not config:
        raise NotSmall(f"{name} is half of an encoder-decoder")
    if (getattr(config, "hidden_size", None) or 64) > 1024:
        raise NotSmall(f"{name} has {config.hidden_size} channels")  # some allocate even on the device 'meta'
    with torch.device("meta"):
        count = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if count > most:
        raise NotSmall(f"{name} has {count:,} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _initialize(model, 1)
    return model.eval()


def greedy(
    model: Any,
    lengths: tuple[int, ...],
    new_tokens: int,
    cache_config: dict[str, Any] | None = None,
    **cache: Any,
) -> tuple[Tensor, Tensor, Any]:
    """Continue a padded batch: new tokens `(B, n)`, their logits `(B, n, vocabulary)` and the cache."""
    if cache_config is not None:
        cache = {"cache_implementation": "quantized", "cache_config": cache_config}
    output = model.generate(
        **padded_prompt(lengths),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
        **cache,
    )
    return output.sequences[:, -new_tokens:], torch.stack(output.logits, dim=1), output.get(cache_name())
