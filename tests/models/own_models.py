"""What users derive from models of transformers, in a file of their own, and what they write anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BloomConfig, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaAttention

__all__ = [
    "AskingAttention",
    "DerivedAttention",
    "OwnBloomConfig",
    "OwnConfig",
    "OwnDecoder",
    "OwnRotations",
    "RewrittenAttention",
    "WrittenOutAttention",
    "with_attention",
]


class DerivedAttention(LlamaAttention):
    """As it was."""


class AskingAttention(LlamaAttention):
    """Does something before what it derives from does the rest."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states * 1.0, *args, **kwargs)


class RewrittenAttention(LlamaAttention):
    """Has a `forward` of its own, of which nothing but this file says how it rotates."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any, *args: Any, **kwargs: Any) -> Any:
        return LlamaAttention.forward(self, hidden_states, position_embeddings, *args, **kwargs)


class WrittenOutAttention(nn.Module):
    """Attention without a function to choose."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.softmax(-1) @ self.k_proj(hidden_states)


class OwnRotations(nn.Module):
    """What rotates, under a name that says nothing of it."""

    def __init__(self, inv_freq: Tensor) -> None:
        super().__init__()
        self.register_buffer("speeds", inv_freq.clone(), persistent=False)

    def forward(self, states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.speeds
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(states.dtype), angles.sin().to(states.dtype)


class OwnDecoder(LlamaModel):
    """As it was."""


class OwnConfig(LlamaConfig):
    """As it was, but for its name."""

    model_type = "own-llama"


class OwnBloomConfig(BloomConfig):
    """As it was, but for its name."""

    model_type = "own-bloom"


def with_attention(model: LlamaForCausalLM, kind: type[LlamaAttention]) -> LlamaForCausalLM:
    """Give the layers of a model attention of another class, of the same weights."""
    for layer_idx, layer in enumerate(model.model.layers):
        made = kind(model.config, layer_idx)
        made.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = made.eval()
    return model
