"""KVQuant: non-uniform codes of keys before the rotary embedding and of values, with exact outliers."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..artifacts.codebooks import Codebooks, LayerCodebooks, load_codebooks
from ..cache import KVCache
from ..config import BitsConfig, check_number, check_path_or_id
from ..layers.base import PackedLayer
from ..layers.codec import Codec
from ..layers.nonuniform import (
    ChannelNonUniformCodec,
    TokenNonUniformCodec,
    UnrotatedCodec,
    outliers_per_side,
)
from ..layers.stream import StreamSpec
from ..quantizers.nonuniform import normal_float_codebook
from ..quantizers.outliers import MAX_CAPACITY
from ..quantizers.packing import BLOCK_TOKENS
from ..registry import register_backend

__all__ = ["NORMAL_FLOAT", "KVQuantCache", "KVQuantConfig", "KVQuantLayer"]

NORMAL_FLOAT = "normal_float"
"""Value of `calibration` for levels of a normal distribution, and ranges from a row's own first tokens."""

_OUTLIER_FRACTION = 0.01
_WARMUP_TOKENS = 128
_SQNR_DB = {2: 3.0, 3: 12.0, 4: 17.0}  # of NormalFloat; 2 bits leave it [-1, 0, 0.34, 1]


@dataclass(frozen=True, kw_only=True)
class KVQuantConfig(BitsConfig):
    """Options of [`KVQuantCache`].

    Args:
        nbits (`int`): Bits of keys and values: 2, 3 or 4.
        key_bits (`int`, *optional*), value_bits (`int`, *optional*): Override `nbits`.
        residual_length (`int`): Newest tokens kept exact; up to 63 more are while their block fills.
        sink_length (`int`): First real tokens kept exact. Those that took no part in a calibration may be
            more or fewer: a key far outside of its ranges, packed, is made up for by outliers (and the others
            of its block lack these: up to 4 dB where all channels are thirty times too large). An artifact
            without outliers has none that could, which a warning says.
        outlier_fraction (`float`, *optional*): Share of numbers kept beside their codes. If not given, the
            artifact's, whose ranges depend on it so that no other is accepted; without an artifact, 0.01.
        calibration (`str`): Directory or hub id of an artifact of `kvcache-plugins calibrate`, or
            `"normal_float"` to do without: levels of a normal distribution, and ranges of keys from the first
            128 real tokens of every row behind its sinks, so nothing is packed before those are seen.
    """

    nbits: int = 3
    residual_length: int = 128
    sink_length: int = 1
    outlier_fraction: float | None = field(default=None, metadata={"shown": "of its artifact, or 0.01"})
    calibration: str | None = field(default=None, metadata={"shown": "required"})
    allowed_bits: ClassVar[tuple[int, ...]] = (2, 3, 4)
    block_tokens: ClassVar[int] = BLOCK_TOKENS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.outlier_fraction is not None:
            check_number(self, "outlier_fraction", self.outlier_fraction, minimum=0.0, maximum=0.1)
        what = f"an artifact, as made by `kvcache-plugins calibrate`, or {NORMAL_FLOAT!r} to do without one"
        check_path_or_id(self, "calibration", self.calibration, what)

    @staticmethod
    def sqnr_db_of(nbits: int) -> float:
        return _SQNR_DB[nbits]

    @classmethod
    def tiny(cls) -> KVQuantConfig:
        return cls(residual_length=0, calibration=NORMAL_FLOAT)

    @property
    def is_calibrated(self) -> bool:
        return self.calibration != NORMAL_FLOAT

    @property
    def artifact(self) -> Codebooks | None:
        """What `calibration` names; `None` for [`NORMAL_FLOAT`].

        Raises:
            ArtifactError: If there is no such artifact.
            ValueError: If it was made with another `outlier_fraction` than was given.
        """
        if self.calibration is None or self.calibration == NORMAL_FLOAT:
            return None
        found = load_codebooks(self.calibration)
        if self.outlier_fraction not in (None, found.outlier_fraction):
            raise ValueError(
                f"KVQuantConfig.outlier_fraction must be {found.outlier_fraction}, or not be given: the "
                f"artifact {self.calibration!r} was calibrated with it, and its ranges depend on it; got "
                f"{self.outlier_fraction}."
            )
        return found

    @property
    def outlier_share(self) -> float:
        """The `outlier_fraction` in use, given or not."""
        found = self.artifact
        if found is not None:
            return found.outlier_fraction
        return _OUTLIER_FRACTION if self.outlier_fraction is None else self.outlier_fraction


class KVQuantLayer(PackedLayer):
    """Keys and values `(64, R)`: whole blocks, because a block has one list of outliers."""

    config: KVQuantConfig

    def key_stream(self, head_dim: int) -> StreamSpec:
        bits = self.config.bits_of("key")
        found = self._codebooks()
        codec: Codec
        if found is None:
            codec = ChannelNonUniformCodec(
                bits,
                normal_float_codebook(bits),
                None,
                self._per_side(head_dim),
                fraction=self.config.outlier_share,
                warmup_tokens=_WARMUP_TOKENS,
            )
        else:
            codec = ChannelNonUniformCodec(
                bits,
                found.key_codebook,
                found.key_levels,
                self._per_side(head_dim),
                found.key_lower,
                found.key_upper,
            )
        if self.facts.rotary is not None:
            codec = UnrotatedCodec(codec, self.facts.rotary, self.padding)
        return StreamSpec(codec, BLOCK_TOKENS, self.config.residual_length)

    def value_stream(self, head_dim: int) -> StreamSpec:
        bits = self.config.bits_of("value")
        found = self._codebooks()
        codebook = normal_float_codebook(bits) if found is None else found.value_codebook
        levels = None if found is None else found.value_levels
        codec = TokenNonUniformCodec(bits, codebook, levels, self._per_side(head_dim))
        return StreamSpec(codec, BLOCK_TOKENS, self.config.residual_length)

    def _per_side(self, head_dim: int) -> int:
        fraction, values = self.config.outlier_share, self.num_heads * head_dim
        per_side, most = outliers_per_side(fraction, values), MAX_CAPACITY // (2 * BLOCK_TOKENS)
        if per_side > most:
            raise ValueError(
                f"KVQuantConfig.outlier_fraction must be at most {2 * most / values:.6f} in layer "
                f"{self.layer_idx}, whose tokens have {self.num_heads} heads of {head_dim} channels: the "
                f"list of a block holds {2 * most} outliers of each of them; got {fraction}."
            )
        return per_side

    def _codebooks(self) -> LayerCodebooks | None:
        config, found = self.config, self.config.artifact
        if found is None:
            return None
        return found.for_layer(
            self.layer_idx,
            self.num_heads,
            self.key_dim,
            key_bits=config.bits_of("key"),
            value_bits=config.bits_of("value"),
            rotary=self.facts.rotary,
        )


@register_backend("kvquant")
class KVQuantCache(KVCache):
    """2- to 4-bit non-uniform codes, keys before the rotary embedding, outliers exact beside them.

    Paper: KVQuant, arXiv 2401.18079 (section 3).
    Deviates: an exact recent window; outliers of keys are those numbers of a block whose codes lack most,
        inside of their range or beyond; ranges exclude sinks; keys are turned back by an exactly orthogonal
        map.
    Cost: `nbits + 16 / head_dim + 32 * outlier_fraction` bits per value beyond the exact window. Outliers
        come in whole pairs per token of a layer, at least one where there are any: with 2 heads of 64
        channels a fraction of 0.01 is 0.016.
    Limits: needs a calibration artifact, which serves no tensor parallel model, or
        `calibration="normal_float"`; packs whole blocks of 64 tokens, counted from the beginning of a row,
        pads included: a padded row has other blocks than alone, unless its pads are a multiple of 64. Stores
        evicting caches up to 63 tokens below the budget, where keys rotate only with compact positions. Keys
        are turned back by their slot, so levels and ranges fit less where positions are others: where
        `position_ids` are given that begin elsewhere, and where a model numbers an image's tokens by row and
        column, and behind it. Numbering a text so cost the bundled model, at 3 bits, a divergence of 0.0007
        to 0.0033 nats per token in the place of 0.0003.
    """

    config_class = KVQuantConfig
    undoes_rotation = True
    native_kernels = ("cpu", "cuda")
    layer_class = KVQuantLayer

    @classmethod
    def check_artifacts(cls, config: Any, model_config: Any) -> None:
        found = config.artifact
        if found is None:
            return
        found.check_model(model_config)
        if found.outlier_fraction == 0 and config.sink_length < found.sink_length:
            warnings.warn(
                f"{found.source} has no outliers, and ranges in which the first {found.sink_length} tokens "
                f"took no part; sink_length={config.sink_length} packs some that may lie far beyond these, "
                f"sink_length={found.sink_length} keeps them exact.",
                stacklevel=2,
            )
