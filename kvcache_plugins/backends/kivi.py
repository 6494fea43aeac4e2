"""KIVI: 2- to 8-bit keys per channel and values per token, with an exact recent window."""

from __future__ import annotations

from dataclasses import dataclass

from ..cache import KVCache
from ..config import BitsConfig, check_choice, check_integer
from ..layers.base import PackedLayer
from ..layers.codec import AffineCodec, Codec, RotatedCodec
from ..layers.stream import StreamSpec
from ..quantizers.granularity import per_channel_group, per_token_group
from ..registry import register_backend

__all__ = ["KIVICache", "KIVIConfig", "KIVILayer"]

_GROUPS = (16, 32, 64, 128)
_SHORTEST_PERIOD = 32


@dataclass(frozen=True, kw_only=True)
class KIVIConfig(BitsConfig):
    """Options of [`KIVICache`].

    Args:
        nbits (`int`): Bits of keys and values: 2, 3, 4 or 8.
        key_bits (`int`, *optional*), value_bits (`int`, *optional*): Override `nbits`.
        q_group_size (`int`): Tokens (keys) and channels (values) sharing one scale: 16, 32, 64 or 128. Where
            it does not divide the head, values use the largest multiple of 16 below it that does.
        residual_length (`int`): Exact window, a multiple of `q_group_size`. Values always have the last
            `residual_length` exact; keys are packed `residual_length` at a time, as in the paper.
        rope_mode (`str`): `"post"` (the paper: keys as the model rotated them), `"block"` (the rotation
            inside a block undone before encoding), `"auto"` (block in layers whose key projection has a
            bias).
    """

    q_group_size: int = 32
    residual_length: int = 128
    rope_mode: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "q_group_size", self.q_group_size, _GROUPS)
        check_integer(self, "residual_length", self.residual_length, multiple_of=self.q_group_size)
        check_choice(self, "rope_mode", self.rope_mode, ("auto", "post", "block"))

    @classmethod
    def tiny(cls) -> KIVIConfig:
        return cls(q_group_size=16, residual_length=32)

    @property
    def packs_single_tokens(self) -> bool:
        return False  # keys of a group share a scale


class KIVILayer(PackedLayer):
    """Keys `(R, 0)`, values `(1, R)`: see `layers.stream`."""

    config: KIVIConfig

    def key_stream(self, head_dim: int) -> StreamSpec:
        config = self.config
        codec: Codec = AffineCodec(config.bits_of("key"), per_channel_group(config.q_group_size))
        rotary = self.facts.rotary
        if self._undoes_rotation() and rotary is not None:
            # a multiple of the group, so that one rotation is common to all keys of a group
            codec = RotatedCodec(codec, rotary, period=max(config.q_group_size, _SHORTEST_PERIOD))
        return StreamSpec(codec, block_length=max(config.residual_length, config.q_group_size))

    def value_stream(self, head_dim: int) -> StreamSpec:
        config = self.config
        granularity = per_token_group(_value_group(config.q_group_size, head_dim))
        return StreamSpec(
            AffineCodec(config.bits_of("value"), granularity), keep_recent=config.residual_length
        )

    def _undoes_rotation(self) -> bool:
        if self.config.rope_mode == "block" and self.facts.rotary is None:
            self.warn(
                f"rope_mode='block': layer {self.layer_idx} has no rotary embedding of a known layout, "
                "so its keys are stored as they come (rope_mode='post')."
            )
        return self.config.rope_mode == "block" or (
            self.config.rope_mode == "auto" and self.facts.has_key_bias
        )


@register_backend("kivi")
class KIVICache(KVCache):
    """2- to 8-bit keys per channel, values per token, and an exact recent window.

    Paper: KIVI, arXiv 2402.02750 (section 3; Algorithm 1).
    Deviates: several new tokens at once follow the same closed form as one at a time; metadata is fp16; pads
        take no part in the statistics; `rope_mode="block"` is not in the paper.
    Cost: `nbits + 32 / q_group_size` bits per value beyond the exact window; `nbits + 1 / 2` for keys with
        `q_group_size=128`, whose metadata is stored with each of the two blocks of a group, and `nbits + 32 /
        head_dim` for values of heads shorter than a group.
    Limits: group sizes 16 to 128; `crop` into a packed group returns its survivors to the window as decoded.
        Groups are counted from the beginning of a row, pads included: a padded row has other groups than
        alone, unless its pads are a multiple of `residual_length`.
    """

    config_class = KIVIConfig
    native_kernels = ("cpu", "cuda")
    layer_class = KIVILayer


def _value_group(q_group_size: int, head_dim: int) -> int:
    """Largest multiple of 16 up to `q_group_size` that divides the head; the head if none does."""
    for size in range(q_group_size, 15, -16):
        if head_dim % size == 0:
            return size
    return head_dim
