"""Asymmetric low-bit codes per token and head, as LMDeploy and QServe store them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..cache import KVCache
from ..config import BitsConfig, check_number
from ..layers.base import PackedLayer
from ..layers.codec import AffineCodec, Codec, ScaledCodec
from ..layers.stream import StreamSpec
from ..quantizers.granularity import per_token_head
from ..registry import register_backend

__all__ = ["Int4Cache", "Int4Config", "Int4Layer"]

_SMOOTHING_WINDOW = 64
"""First real tokens of a row, behind its sinks, from which the smoothing factors are taken: nothing is packed
before all of them are there, so the factors do not depend on how the prompt was fed."""
_LARGE_BIAS = 5.0
"""Key bias from which per-token codes of 4 bits are visibly worse: unit-variance keys with six channels
biased by 10 have four times the logit error of per-channel codes, by 100 forty times."""


@dataclass(frozen=True, kw_only=True)
class Int4Config(BitsConfig):
    """Options of [`Int4Cache`].

    Args:
        nbits (`int`): Bits of keys and values: 2, 4 or 8.
        key_bits (`int`, *optional*), value_bits (`int`, *optional*): Override `nbits`.
        residual_length (`int`): Newest tokens kept exact.
        smooth (`float`): SmoothAttention's exponent in [0, 1] for the keys; 0 is off, QServe uses 0.5. The
            factors come from the first 64 real tokens of every row behind its sinks, so nothing is packed
            before those are seen.
    """

    residual_length: int = 64
    smooth: float = 0.0
    allowed_bits: ClassVar[tuple[int, ...]] = (2, 4, 8)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "smooth", self.smooth, minimum=0.0, maximum=1.0)

    @classmethod
    def tiny(cls) -> Int4Config:
        return cls(residual_length=16)


class Int4Layer(PackedLayer):
    """Keys and values `(1, R)`."""

    config: Int4Config

    def key_stream(self, head_dim: int) -> StreamSpec:
        config = self.config
        bits = config.bits_of("key")
        codec: Codec = AffineCodec(bits, per_token_head())
        if config.smooth > 0:
            codec = ScaledCodec(codec, config.smooth, self.facts.rotary, _SMOOTHING_WINDOW)
        largest = self.facts.key_bias_max
        if bits <= 4 and largest is not None and largest >= _LARGE_BIAS:
            self.warn(
                f"Layer {self.layer_idx} adds a bias of up to {largest:.3g} to its keys; {bits}-bit codes "
                "per token lose much of what remains. Use {'backend': 'kivi'}, or 8-bit keys "
                "({'key_bits': 8})."
            )
        return StreamSpec(codec, keep_recent=config.residual_length)

    def value_stream(self, head_dim: int) -> StreamSpec:
        codec = AffineCodec(self.config.bits_of("value"), per_token_head())
        return StreamSpec(codec, keep_recent=self.config.residual_length)


@register_backend("int4")
class Int4Cache(KVCache):
    """4-bit (or 2-, 8-bit) codes with a scale and a minimum per token and head, and an exact recent window.

    Paper: LMDeploy's TurboMind `quant_policy` 4 and 8; SmoothAttention from QServe, arXiv 2405.04532, section
        4.2.
    Deviates: the minimum is stored in fp16 rather than a zero point in the model's dtype; the exact window;
        smoothing factors are taken from the cache's own tokens and folded into the storage, so no weight is
        edited.
    Cost: `nbits + 32 / head_dim` bits per value beyond the exact window.
    Limits: keys with a large bias (Qwen 2, Qwen 2.5) need 8-bit keys, or `kivi`.
    """

    config_class = Int4Config
    native_kernels = ("cpu", "cuda")
    layer_class = Int4Layer
