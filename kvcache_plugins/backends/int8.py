"""Symmetric int8: the safe default, for any model and length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..artifacts.scales import load_scales
from ..cache import KVCache
from ..config import BackendConfig, check_choice, check_integer, check_path_or_id
from ..layers.base import PackedLayer
from ..layers.codec import SymmetricCodec
from ..layers.stream import StreamSpec
from ..quantizers.granularity import Granularity, per_block, per_token, per_token_group, per_token_head
from ..quantizers.packing import BLOCK_TOKENS
from ..registry import register_backend

__all__ = ["Int8Cache", "Int8Config", "Int8Layer"]

_GRANULARITIES = ("head", "group", "token", "tensor")
_STATIC_GRANULARITIES = ("head", "tensor")


@dataclass(frozen=True, kw_only=True)
class Int8Config(BackendConfig):
    """Options of [`Int8Cache`].

    Args:
        granularity (`str`): What shares a scale: `"head"` (a token's vector in one kv head), `"group"`
            (`q_group_size` channels of it), `"token"` (a token's vectors in all heads), `"tensor"` (64 tokens
            in all heads).
        q_group_size (`int`): Channels per scale with `granularity="group"`.
        calibration (`str`, *optional*): Directory or hub id of a scales artifact. Scales are then static:
            with `granularity="head"` one per kv head, with `"tensor"` one per layer, for keys and values
            each.
        residual_length (`int`): Newest tokens kept exact.
    """

    granularity: str = "head"
    q_group_size: int = 32
    calibration: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "granularity", self.granularity, _GRANULARITIES)
        check_integer(self, "q_group_size", self.q_group_size, minimum=1)
        if self.granularity != "group" and self.q_group_size != type(self).q_group_size:
            raise ValueError(
                f"Int8Config.q_group_size is for granularity='group', got q_group_size={self.q_group_size} "
                f"with granularity={self.granularity!r}."
            )
        if self.calibration is None:
            return
        check_path_or_id(self, "calibration", self.calibration, "a scales artifact, or None")
        if self.granularity not in _STATIC_GRANULARITIES:
            raise ValueError(
                f"Int8Config.calibration has static scales for granularity in {_STATIC_GRANULARITIES}; got "
                f"granularity={self.granularity!r}, calibration={self.calibration!r}."
            )

    def not_inherited(self, override: Mapping[str, Any]) -> dict[str, Any]:
        has_groups = override.get("granularity", "group") == "group"
        return {} if has_groups else {"q_group_size": type(self).q_group_size}

    @property
    def packs_single_tokens(self) -> bool:
        return self.granularity != "tensor" or self.calibration is not None

    @property
    def sqnr_floor_db(self) -> float:
        # a static scale is that of the largest magnitude in a text, which few tokens come near
        return 39.5 if self.calibration is None else 30.0


class Int8Layer(PackedLayer):
    """Keys and values alike, `(1, R)`; `(64, R)` for `granularity="tensor"` with dynamic scales."""

    config: Int8Config

    def key_stream(self, head_dim: int) -> StreamSpec:
        return self._stream("key", head_dim)

    def value_stream(self, head_dim: int) -> StreamSpec:
        return self._stream("value", head_dim)

    def _stream(self, side: str, head_dim: int) -> StreamSpec:
        static = self._static_scale(side)
        granularity = self._granularity(head_dim) if static is None else per_token_head()
        codec = SymmetricCodec(granularity, static)
        return StreamSpec(codec, granularity.tokens, self.config.residual_length)

    def _static_scale(self, side: str) -> Tensor | None:
        if self.config.calibration is None:
            return None
        scales = load_scales(self.config.calibration)
        return scales.for_layer(self.layer_idx, self.num_heads, side, self.config.granularity, "int8")

    def _granularity(self, head_dim: int) -> Granularity:
        group = self.config.q_group_size
        if self.config.granularity == "group" and head_dim % group:
            raise ValueError(
                f"Int8Config.q_group_size must divide the head dimension {head_dim} of layer "
                f"{self.layer_idx}, got {group}."
            )
        return {
            "head": per_token_head(),
            "group": per_token_group(group),
            "token": per_token(),
            "tensor": per_block(BLOCK_TOKENS),
        }[self.config.granularity]


@register_backend("int8")
class Int8Cache(KVCache):
    """Symmetric int8 with one scale per token and head; no calibration, no exact window needed.

    Paper: the common 8-bit cache of inference engines (per-head dynamic scales).
    Deviates: scales are rounded up to fp16, so no code saturates. `granularity="tensor"` rescales every 64
        tokens: one scale frozen at first sight, as is usual, clips every later token that is larger. So do
        the static scales of a `calibration`, which are those of a text.
    Cost: `8 + 16 / head_dim` bits per value; `8 + 16 / q_group_size` with groups, 8 with static scales. Those
        of `"token"` and `"tensor"`, if dynamic, are stored in the records of every head, so they save less
        than their definition suggests.
    Limits: static scales serve no tensor parallel model.
    """

    config_class = Int8Config
    native_kernels = ("cpu", "cuda")
    layer_class = Int8Layer

    @classmethod
    def check_artifacts(cls, config: Any, model_config: Any) -> None:
        if config.calibration is not None:
            load_scales(config.calibration).check_model(model_config)
