"""What one decode step of attention is measured on: the shape of a layer, and random states of that shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ....models.decoder import decoder_only_config
from ....models.layer_plan import caches_latents, key_value_heads
from ....models.presets import preset_config
from ....models.pretrained import load_config
from ..options import AttentionOptions

__all__ = ["AttentionShape", "States", "heads_of", "layer_config"]


@dataclass(frozen=True)
class AttentionShape:
    """An attention layer, whose query is `(B, Hq, 1, D)`, with keys and values `(B, Hkv, T, D)`.

    Args:
        batch_size (`int`): Rows.
        num_attention_heads (`int`), num_key_value_heads (`int`): Heads.
        key_dim (`int`), value_dim (`int`): Channels of a head.
        length (`int`): Tokens held before the step.
        dtype (`torch.dtype`): Of the states.
    """

    batch_size: int
    num_attention_heads: int
    num_key_value_heads: int
    key_dim: int
    value_dim: int
    length: int
    dtype: torch.dtype

    @property
    def values(self) -> int:
        """Numbers held after the step."""
        width = self.key_dim + self.value_dim
        return self.batch_size * self.num_key_value_heads * (self.length + 1) * width

    @property
    def dense_bytes(self) -> int:
        """Bytes of them without packing."""
        return self.values * self.dtype.itemsize


@dataclass(frozen=True)
class States:
    """The query and the dense keys and values, whose last token is the new one.

    Args:
        query (`torch.Tensor` of shape `(B, Hq, 1, D)`): The new token's.
        keys (`torch.Tensor` of shape `(B, Hkv, T + 1, D)`): With the new token's.
        values (`torch.Tensor` of shape `(B, Hkv, T + 1, Dv)`): With the new token's.
    """

    query: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def random(cls, shape: AttentionShape, device: torch.device | str = "cpu", seed: int = 0) -> States:
        """Draw states of a shape on a device."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(heads: int, tokens: int, width: int) -> Tensor:
            size = (shape.batch_size, heads, tokens, width)
            return torch.empty(size, dtype=shape.dtype, device=device).normal_(generator=generator)

        heads, tokens = shape.num_key_value_heads, shape.length + 1
        return cls(
            # a longer query makes attention attend to something, instead of averaging everything to nothing
            2 * normal(shape.num_attention_heads, 1, shape.key_dim),
            normal(heads, tokens, shape.key_dim),
            normal(heads, tokens, shape.value_dim),
        )

    @property
    def past(self) -> tuple[Tensor, Tensor]:
        """Keys and values held before the step."""
        return self.keys[:, :, :-1], self.values[:, :, :-1]

    @property
    def new(self) -> tuple[Tensor, Tensor]:
        """Copies of the key and value of the new token."""
        return self.keys[:, :, -1:].clone(), self.values[:, :, -1:].clone()


def layer_config(options: AttentionOptions) -> PreTrainedConfig:
    """Return the configuration of the decoder whose layer is measured.

    Raises:
        ValueError: If its layers cache latents, which are not the keys and values that are measured, or it is
            half of an encoder-decoder model.
    """
    if options.preset is not None:
        whole = preset_config(options.preset)
    else:
        assert options.model is not None
        whole = load_config(options.model)
    config: PreTrainedConfig = decoder_only_config(whole, "bench attention")
    if caches_latents(config):
        given = f"--preset {options.preset}" if options.preset is not None else f"--model {options.model}"
        raise ValueError(
            f"{given} caches latents, of which its layers make keys and values; `bench attention` measures "
            "layers that cache keys and values. Allowed are other models, or `bench generate`, which "
            "measures any."
        )
    return config


def heads_of(config: PreTrainedConfig) -> dict[str, int]:
    """Return the heads of the first layer and their channels, by their names in [`AttentionShape`]."""
    kv_heads, key_dim, value_dim = key_value_heads(config, 0)
    return {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": kv_heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
    }
