"""Shapes of well-known models, so that a prediction or a benchmark needs neither weights nor a download."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["PRESETS", "preset_config"]

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2-7b": (
        "llama",
        {
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "intermediate_size": 11008,
            "vocab_size": 32000,
            "max_position_embeddings": 4096,
        },
    ),
    "llama3-8b": (
        "llama",
        {
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
        },
    ),
    # heads of 64 channels
    "llama3.2-1b": (
        "llama",
        {
            "num_hidden_layers": 16,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 8192,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
    ),
    "mistral-7b": (
        "mistral",
        {
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "sliding_window": None,
            "intermediate_size": 14336,
            "vocab_size": 32000,
            "max_position_embeddings": 32768,
        },
    ),
    "qwen2.5-7b": (
        "qwen2",
        {
            "num_hidden_layers": 28,
            "hidden_size": 3584,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
            "vocab_size": 152064,
            "max_position_embeddings": 32768,
        },
    ),
    # every other layer looks back 4096 tokens; runs `eager`, for its softcap
    "gemma2-9b": (
        "gemma2",
        {
            "num_hidden_layers": 42,
            "hidden_size": 3584,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "intermediate_size": 14336,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
        },
    ),
    # five of six layers look back 512 tokens
    "gemma3-1b": (
        "gemma3_text",
        {
            "num_hidden_layers": 26,
            "hidden_size": 1152,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "intermediate_size": 6912,
            "vocab_size": 262144,
            "max_position_embeddings": 32768,
        },
    ),
    # five of six layers look back 1024 tokens
    "gemma3-12b": (
        "gemma3_text",
        {
            "num_hidden_layers": 48,
            "hidden_size": 3840,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 1024,
            "intermediate_size": 15360,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
        },
    ),
    # every other layer looks back 128 tokens; runs `eager`, for its sink logits
    "gpt-oss-20b": (
        "gpt_oss",
        {
            "num_hidden_layers": 24,
            "hidden_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "vocab_size": 201088,
            "max_position_embeddings": 131072,
        },
    ),
    # caches a latent of 512 numbers and a rotated key of 64 per token and layer
    "deepseek-v2-lite": (
        "deepseek_v2",
        {
            "num_hidden_layers": 27,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "vocab_size": 102400,
            "max_position_embeddings": 163840,
        },
    ),
    # an encoder-decoder: its encoder reads, and every layer of its decoder keeps keys and values of that
    "flan-t5-large": (
        "t5",
        {
            "num_layers": 24,
            "num_decoder_layers": 24,
            "d_model": 1024,
            "d_kv": 64,
            "d_ff": 2816,
            "num_heads": 16,
            "feed_forward_proj": "gated-gelu",
            "vocab_size": 32128,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "decoder_start_token_id": 0,
        },
    ),
    "tiny": (
        "llama",
        {
            "num_hidden_layers": 2,
            "hidden_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 512,
            "vocab_size": 2048,
            "max_position_embeddings": 4096,
        },
    ),
}
"""Model type, then the fields of its configuration that decide the shape of a cache and the model's size."""

_LAYERS = {"num_hidden_layers", "num_layers", "num_decoder_layers"}
"""Fields that count layers."""


def preset_config(name: str, num_layers: int | None = None) -> PreTrainedConfig:
    """Build the configuration of a preset, in bfloat16.

    Args:
        name (`str`): One of `PRESETS`.
        num_layers (`int`, *optional*): Layers, of encoder and decoder each; the model's own number by
            default.
    """
    from transformers import AutoConfig

    model_type, fields = PRESETS[name]
    if num_layers is not None:
        fields = fields | dict.fromkeys(_LAYERS & fields.keys(), num_layers)
    config: PreTrainedConfig = AutoConfig.for_model(model_type, **fields, dtype="bfloat16")
    return config
