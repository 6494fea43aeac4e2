"""Tiny random causal language models of many families, built from configs: nothing is downloaded.

They stand in for the real checkpoints wherever a test needs "a Transformers model": each is the unmodified
modelling code of its family with a few thousand weights, so it decodes a token in milliseconds and still goes
through the real masks, rotary embeddings, grouped queries, sliding windows, recurrent layers and
mixture-of-experts blocks.

```python
>>> from kvcache_plugins.testing.models import ARCHITECTURES, tiny_model

>>> model = tiny_model("gemma3_text", attn_implementation="sdpa", num_hidden_layers=4)
```
"""

from __future__ import annotations

import inspect
import math
import zlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ARCHITECTURES", "tiny_model"]

# Offered to every family; `_config_kwargs` drops what a family's config does not know (GPT-2 has no kv heads,
# for example). No end-of-sequence token: a generation always has the length that was asked for.
_COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}

_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ALTERNATING = ["sliding_attention", "full_attention"]

# One row per family: what it needs beyond, or other than, `_COMMON`.
_FAMILIES: dict[str, dict[str, Any]] = {
    "bloom": {},
    "codegen": {"rotary_dim": 8, "pad_token_id": 0},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.5},
    # Multi-head latent attention caches one latent (as keys) and one rotary key (as values) for all heads.
    "deepseek_v3": {
        **_EXPERTS,
        "num_experts": None,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    },
    "exaone4": {"sliding_window": 16, "layer_types": _ALTERNATING},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    # Every layer has attention and a recurrent branch side by side.
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16},
    "gemma": {},
    "gemma2": {"sliding_window": 16, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 16, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 16},
    # Full attention has larger heads than the sliding windows.
    "gemma4_text": {
        "sliding_window": 16,
        "layer_types": _ALTERNATING,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 128,
    },
    "glm4": {},
    "gpt2": {},
    "gpt_neox": {},
    # YaRN scales the rotary cosines and sines, which plain rotary embeddings never show.
    "gpt_oss": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "sliding_window": 16,
        "layer_types": _ALTERNATING,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gptj": {"rotary_dim": 8},
    "granite": {"attention_multiplier": 0.25},
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4},
    "mpt": {"max_seq_len": 8192, "use_cache": True},
    "olmo2": {},
    "opt": {"ffn_dim": 128},
    "phi": {"partial_rotary_factor": 0.5},
    # A window as long as the context never hides a token: a sliding layer by name, a full one in fact.
    "phi3": {"sliding_window": 8192},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": dict(_EXPERTS),
    "qwen3_next": {
        **_EXPERTS,
        "layer_types": ["linear_attention", "full_attention"],
        "shared_expert_intermediate_size": 32,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "smollm3": {"num_hidden_layers": 4},
    "stablelm": {},
    "starcoder2": {},
}

ARCHITECTURES: tuple[str, ...] = tuple(sorted(_FAMILIES))


def _config_kwargs(config_class: type, name: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Merges common settings, the family's row and the overrides, under the family's own field names."""
    fields = set(inspect.signature(config_class).parameters)
    aliases: dict[str, str] = getattr(config_class, "attribute_map", {})
    common = {key: value for key, value in _COMMON.items() if aliases.get(key, key) in fields}
    merged: dict[str, Any] = {}
    for source in (common, _FAMILIES[name], overrides):
        merged.update({aliases.get(key, key): value for key, value in source.items()})
    layer_types, layers_key = merged.get("layer_types"), aliases.get("num_hidden_layers", "num_hidden_layers")
    if layer_types is not None and len(layer_types) != merged[layers_key]:
        # `num_hidden_layers=4` on a hybrid family repeats its pattern.
        merged["layer_types"] = [layer_types[i % len(layer_types)] for i in range(merged[layers_key])]
    return merged


@torch.no_grad()
def _initialize(model: PreTrainedModel, seed: int) -> None:
    """Overwrites the weights with a seeded draw of our own.

    The families' own initialization (std 0.02) makes such a small network a constant: the residual stream is
    the embedding and, with tied weights, every token predicts itself. Matrices here keep the scale of what
    they multiply, so that attention moves the logits, and vectors (norm weights, biases, sink logits) are
    moved off their neutral value so that forgetting one shows.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() < 2:
            parameter.copy_(parameter.float() + 0.1 * noise)
        elif id(parameter) in embeddings:
            parameter.copy_(0.5 * noise)
        else:
            parameter.copy_(noise * (2.0 / math.sqrt(parameter.shape[-1])))


def tiny_model(
    name: str,
    *,
    attn_implementation: str | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **config_overrides: Any,
) -> PreTrainedModel:
    """Builds a tiny random model of one family, in evaluation mode, on the CPU.

    Args:
        name (`str`): One of `ARCHITECTURES` (the family's `model_type`).
        attn_implementation (`str`, *optional*): `"sdpa"`, `"eager"`, ...; `None` leaves the choice to
            Transformers.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): Type of weights and activations. The
            weights of two dtypes are the same numbers, rounded.
        seed (`int`, *optional*, defaults to 0): Seed of the weights; the global random state stays as it was.
        config_overrides: Fields of the family's config, by their own or by their common name
            (`num_hidden_layers`, `hidden_size`, ...).

    Returns:
        `PreTrainedModel`: 2 to 4 layers of 64 channels and 4 heads over 128 tokens; hybrid families have at
        least one full attention layer and one sliding (16 tokens) or linear one.

    Raises:
        ValueError: If `name` is not in `ARCHITECTURES`.
    """
    if name not in _FAMILIES:
        raise ValueError(f"name must be one of {', '.join(ARCHITECTURES)}; got {name!r}")
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config_class = CONFIG_MAPPING[name]
    config = config_class(**_config_kwargs(config_class, name, config_overrides))
    with torch.random.fork_rng(devices=[]):
        # For the few vectors that do not start out constant, such as the decay rates of recurrent layers.
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=attn_implementation, dtype=dtype
        )
    # Families that are the same network on paper still get different weights.
    _initialize(model, seed + zlib.crc32(name.encode()))
    model.eval()
    return model
