"""8-bit floating point codes with dynamic or calibrated scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..artifacts.scales import load_scales
from ..cache import KVCache
from ..config import BackendConfig, check_choice, check_path_or_id
from ..layers.base import PackedLayer
from ..layers.codec import Float8Codec
from ..layers.stream import StreamSpec
from ..quantizers.float8 import FLOAT8_DTYPES
from ..quantizers.granularity import per_token_head
from ..registry import register_backend

__all__ = ["Float8Cache", "Float8Config", "Float8Layer"]


@dataclass(frozen=True, kw_only=True)
class Float8Config(BackendConfig):
    """Options of [`Float8Cache`].

    Args:
        format (`str`): `"e4m3"` or `"e5m2"`.
        scale (`str`): `"token_head"` (dynamic, one per token and head), or static from `calibration`:
            `"head"` (one per kv head), `"tensor"` (one per layer, for keys and values each).
        calibration (`str`, *optional*): Directory or hub id of a scales artifact; needed for the static
            scales.
        residual_length (`int`): Newest tokens kept exact.
    """

    format: str = "e4m3"
    scale: str = "token_head"
    calibration: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "format", self.format, tuple(FLOAT8_DTYPES))
        check_choice(self, "scale", self.scale, ("token_head", "head", "tensor"))
        if self.calibration is not None:
            check_path_or_id(self, "calibration", self.calibration, "a scales artifact, or None")
        if (self.scale == "token_head") != (self.calibration is None):
            raise ValueError(
                "Float8Config.calibration is needed for scale='head' and scale='tensor', and only for these; "
                f"got scale={self.scale!r}, calibration={self.calibration!r}."
            )

    def not_inherited(self, override: Mapping[str, Any]) -> dict[str, Any]:
        return {"calibration": None} if override.get("scale") == "token_head" else {}

    @property
    def sqnr_floor_db(self) -> float:
        return 31.0 if self.format == "e4m3" else 25.0


class Float8Layer(PackedLayer):
    """Keys and values `(1, R)`."""

    config: Float8Config

    def key_stream(self, head_dim: int) -> StreamSpec:
        return self._stream("key")

    def value_stream(self, head_dim: int) -> StreamSpec:
        return self._stream("value")

    def _stream(self, side: str) -> StreamSpec:
        codec = Float8Codec(self.config.format, per_token_head(), self._static_scale(side))
        return StreamSpec(codec, keep_recent=self.config.residual_length)

    def _static_scale(self, side: str) -> Tensor | None:
        if self.config.calibration is None:
            return None
        scales = load_scales(self.config.calibration)
        return scales.for_layer(self.layer_idx, self.num_heads, side, self.config.scale, self.config.format)


@register_backend("float8")
class Float8Cache(KVCache):
    """8-bit floating point, e4m3 or e5m2, with scales per token and head, or static ones.

    Paper: the 8-bit floating point caches of vLLM and TensorRT-LLM (OCP formats).
    Deviates: scales are dynamic by default, so no later token is clipped; they are rounded up to fp16.
    Cost: `8 + 16 / head_dim` bits per value; 8 with static scales.
    Limits: e5m2 has two bits of mantissa; int8 is more accurate for keys and values without outliers inside a
        head. Static scales serve no tensor parallel model.
    """

    config_class = Float8Config
    native_kernels = ("cpu", "cuda")
    layer_class = Float8Layer

    @classmethod
    def check_artifacts(cls, config: Any, model_config: Any) -> None:
        if config.calibration is not None:
            load_scales(config.calibration).check_model(model_config)
