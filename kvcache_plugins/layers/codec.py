"""Codecs: how a run of tokens of one tensor becomes codes and metadata. No notion of "key" or "cache"."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.layout import FORMATS
from ..models.rotary import Rotary
from ..quantizers import affine, float8
from ..quantizers.granularity import Granularity
from ..quantizers.outliers import Outliers
from ..quantizers.packing import BLOCK_TOKENS
from .padding import Padding

__all__ = [
    "CODE_BITS",
    "AffineCodec",
    "Codec",
    "Encoded",
    "Float8Codec",
    "RotatedCodec",
    "ScaledCodec",
    "SymmetricCodec",
    "WrappedCodec",
    "check_codec",
    "check_encoded",
    "code_format_of",
]

CODE_BITS = (1, 2, 3, 4, 8)
"""Widths of codes that are packed."""


class Encoded(NamedTuple):
    """Codes and metadata of a run of tokens.

    Args:
        codes (`torch.Tensor`): uint8 `(B, H, T, D)`.
        metadata (`dict[str, torch.Tensor]`): fp32 tensors `(B, H, rows, width)`, one row per group of tokens.
            They are stored as fp16 until a number is beyond its range, and those under 6e-8 become 0.
        outliers (`Outliers`, *optional*): What the codes of whole blocks lack.
    """

    codes: Tensor
    metadata: dict[str, Tensor]
    outliers: Outliers | None = None


def check_codec(codec: Codec) -> None:
    """Raise `ValueError` for codes of a width that nothing packs."""
    if codec.nbits not in CODE_BITS:
        raise ValueError(f"{type(codec).__name__}.nbits must be one of {CODE_BITS}, got {codec.nbits}.")


def check_encoded(codec: Codec, encoded: Encoded) -> None:
    """Raise `ValueError` for codes and metadata that are not what a codec has announced."""
    codes, found = encoded.codes, sorted(encoded.metadata)
    if codes.dtype != torch.uint8:
        raise ValueError(f"{type(codec).__name__} must make codes of torch.uint8, got {codes.dtype}.")
    if found != sorted(codec.metadata_names):
        raise ValueError(
            f"{type(codec).__name__} must make the metadata {sorted(codec.metadata_names)}, its "
            f"metadata_names, got {found}."
        )


class Codec(ABC):
    """Encodes and decodes runs of tokens of one tensor.

    A run starts at a token (slot) that is a multiple of `unit_tokens` and holds a multiple of them. Encoding
    a run in one piece or in several gives the same result.

    Attributes:
        nbits (`int`): Bits per code, one of `CODE_BITS`.
        granularity (`Granularity`): What shares a scale.
        metadata_names (`tuple[str, ...]`): Names of the metadata tensors.
        warmup_tokens (`int`): Real tokens of every row, beside its sinks, that must have been seen before
            the first is encoded.
        outlier_capacity (`int`): Outliers kept of a block of a row, over all its heads; 0 for none.
        turned_by (`Rotary`, *optional*): The rotation that keys are coded without, wholly or in part.
    """

    nbits: int
    granularity: Granularity
    metadata_names: tuple[str, ...] = ()
    warmup_tokens: int = 0
    outlier_capacity: int = 0
    turned_by: Rotary | None = None

    @property
    def group_tokens(self) -> int:
        """Consecutive tokens that share metadata."""
        return self.granularity.tokens

    @property
    def unit_tokens(self) -> int:
        """Consecutive tokens that are encoded together: a group, or whole blocks where these share a list."""
        return self.group_tokens

    @property
    def is_gatherable(self) -> bool:
        """Whether a token can leave the cache without re-encoding its neighbours."""
        return self.unit_tokens == 1

    @property
    def follows_slots(self) -> bool:
        """Whether a token is rotated by the slot it is decoded from, wherever it was when it was encoded."""
        return False

    @property
    def interleaved(self) -> bool:
        """Whether the pairs of channels that key codes are laid out by are neighbours.

        They are rotary pairs if keys must be turned. Otherwise they are always neighbours, so that metadata
        of both lie together, too.
        """
        return self.turned_by is None or self.turned_by.interleaved

    @property
    def rows_per_block(self) -> int:
        """Metadata rows stored with a block; those of a longer group are stored with each of its blocks."""
        return BLOCK_TOKENS // min(self.group_tokens, BLOCK_TOKENS)

    @property
    def stored_granularity(self) -> Granularity:
        """The granularity of stored metadata rows: groups within a block, per head."""
        return Granularity(min(self.group_tokens, BLOCK_TOKENS), self.granularity.channels)

    @abstractmethod
    def encode(self, states: Tensor, position: int, valid: Tensor | None = None) -> Encoded:
        """Encode fp32 `states` of shape `(B, H, T, D)` whose first token is slot `position`.

        Args:
            states (`torch.Tensor`): fp32 values.
            position (`int`): Slot of the first token.
            valid (`torch.Tensor` of shape `(B, T)`, *optional*): Tokens that take part in the statistics.
        """

    @abstractmethod
    def decode(self, encoded: Encoded, position: int) -> Tensor:
        """Return fp32 values `(B, H, T, D)`; metadata rows as stored, see `stored_granularity`."""

    def calibrate(self, states: Tensor, valid: Tensor) -> None:
        """Look at the first tokens, once, before anything is encoded. Only called if `warmup_tokens` > 0.

        Args:
            states (`torch.Tensor` of shape `(B, H, T, D)`): fp32 values from slot 0 on.
            valid (`torch.Tensor` of shape `(B, T)`): The first `warmup_tokens` real tokens of every row
                behind its sinks, which are never encoded.
        """

    def batch_state(self) -> dict[str, Tensor]:
        """Tensors the codec learnt from this cache's tokens, batch first; they follow the batch."""
        return {}

    def load_batch_state(self, state: dict[str, Tensor]) -> None:
        """Replace what `batch_state` returns."""

    def static_state(self) -> dict[str, Tensor]:
        """Tensors of an artifact by which codes are read. A saved cache needs the same, and has no copy."""
        return {}

    def place(self, device: torch.device) -> None:
        """Bring what the codec holds to the device of the tokens, before the first: a step must not wait."""

    def with_padding(self, padding: Padding) -> Codec:
        """The codec of a stream that has moved its tokens and has other pads; this one stays as it is."""
        return self

    def stored_rows(self, metadata: Tensor) -> Tensor:
        """Expand freshly chosen metadata `(B, 1 or H, rows, width)` to the rows stored in blocks."""
        repeats = self.group_tokens // self.stored_granularity.tokens
        return metadata.repeat_interleave(repeats, dim=2) if repeats > 1 else metadata


class AffineCodec(Codec):
    """Asymmetric uniform codes with a scale and a minimum per group (see `quantizers.affine`)."""

    metadata_names = ("scale", "minimum")

    def __init__(self, nbits: int, granularity: Granularity) -> None:
        self.nbits, self.granularity = nbits, granularity

    def encode(self, states: Tensor, position: int, valid: Tensor | None = None) -> Encoded:
        scale, minimum = affine.choose_qparams_asymmetric(states, self.granularity, self.nbits, valid)
        codes = affine.quantize_asymmetric(states, scale, minimum, self.granularity, self.nbits, valid)
        return Encoded(codes, {"scale": self.stored_rows(scale), "minimum": self.stored_rows(minimum)})

    def decode(self, encoded: Encoded, position: int) -> Tensor:
        metadata = encoded.metadata
        return affine.dequantize_asymmetric(
            encoded.codes, metadata["scale"], metadata["minimum"], self.stored_granularity
        )


class _ScaleOnlyCodec(Codec):
    """Codes with one scale per group and no offset.

    Args:
        granularity (`Granularity`): What shares a scale.
        static_scale (`torch.Tensor`, *optional*): fp32 scales broadcastable to `(1, H, 1, 1)`, chosen
            offline. They take no room in the blocks; values beyond `largest_code` times them saturate.
    """

    nbits = 8
    largest_code: float

    def __init__(self, granularity: Granularity, static_scale: Tensor | None = None) -> None:
        self.granularity, self.static_scale = granularity, static_scale
        self.metadata_names = () if static_scale is not None else ("scale",)

    def static_state(self) -> dict[str, Tensor]:
        return {} if self.static_scale is None else {"scale": self.static_scale}

    def place(self, device: torch.device) -> None:
        if self.static_scale is not None:
            self._static_on(device)

    def _choose_scale(self, states: Tensor, valid: Tensor | None) -> Tensor:
        if self.static_scale is None:
            return affine.choose_qparams_symmetric(states, self.granularity, valid, self.largest_code)
        return self._static_on(states.device)

    def _static_on(self, device: torch.device) -> Tensor:
        assert self.static_scale is not None
        if self.static_scale.device != device:
            self.static_scale = self.static_scale.to(device)
        return self.static_scale

    def _stored(self, codes: Tensor, scale: Tensor) -> Encoded:
        return Encoded(codes, {} if self.static_scale is not None else {"scale": self.stored_rows(scale)})

    def _stored_scale(self, encoded: Encoded) -> Tensor:
        if self.static_scale is None:
            return encoded.metadata["scale"]
        return self._static_on(encoded.codes.device)


class SymmetricCodec(_ScaleOnlyCodec):
    """Symmetric int8 codes, biased by 128 (see `quantizers.affine`)."""

    largest_code = 127.0

    def encode(self, states: Tensor, position: int, valid: Tensor | None = None) -> Encoded:
        scale = self._choose_scale(states, valid)
        return self._stored(affine.quantize_symmetric(states, scale, self.granularity, valid), scale)

    def decode(self, encoded: Encoded, position: int) -> Tensor:
        return affine.dequantize_symmetric(
            encoded.codes, self._stored_scale(encoded), self.stored_granularity
        )


class Float8Codec(_ScaleOnlyCodec):
    """8-bit floating point codes (see `quantizers.float8`)."""

    def __init__(self, format: str, granularity: Granularity, static_scale: Tensor | None = None) -> None:
        super().__init__(granularity, static_scale)
        self.format, self.largest_code = format, float8.FLOAT8_MAX[format]

    def encode(self, states: Tensor, position: int, valid: Tensor | None = None) -> Encoded:
        scale = self._choose_scale(states, valid)
        codes = float8.quantize_float8(states, scale, self.granularity, self.format, valid)
        return self._stored(codes, scale)

    def decode(self, encoded: Encoded, position: int) -> Tensor:
        scale = self._stored_scale(encoded)
        return float8.dequantize_float8(encoded.codes, scale, self.stored_granularity, self.format)


def code_format_of(codec: Codec) -> int | None:
    """How native kernels call the codes of a codec; `None` for codecs they do not know, or wrapped ones."""
    if type(codec) is AffineCodec and codec.nbits in (2, 3, 4, 8):
        return FORMATS["affine"]
    if type(codec) is SymmetricCodec:
        return FORMATS["symmetric"]
    return FORMATS[codec.format] if type(codec) is Float8Codec else None


class WrappedCodec(Codec):
    """A codec that encodes something computed from the tokens by another codec."""

    def __init__(self, inner: Codec) -> None:
        self.inner = inner
        self.nbits, self.granularity, self.metadata_names = (
            inner.nbits,
            inner.granularity,
            inner.metadata_names,
        )
        self.warmup_tokens, self.outlier_capacity = inner.warmup_tokens, inner.outlier_capacity
        self.turned_by = inner.turned_by

    @property
    def unit_tokens(self) -> int:
        return self.inner.unit_tokens

    def static_state(self) -> dict[str, Tensor]:
        return self.inner.static_state()

    def place(self, device: torch.device) -> None:
        self.inner.place(device)


class RotatedCodec(WrappedCodec):
    """Block-relative keys: the rotation *inside* a block is undone before encoding and redone after decoding.

    With `delta(t) = t mod period`, stored is `R(-delta(t)) K_t = R(p(t0)) k_t`: every key of a block carries
    the same rotation, so a channel that is constant before the rotation (a projection bias) is constant
    within the block, and the group's minimum absorbs it. No absolute position is needed, so left padding does
    not matter.
    """

    def __init__(self, inner: Codec, rotary: Rotary, period: int) -> None:
        super().__init__(inner)
        self.rotary = self.turned_by = rotary
        self.period = period

    def _turn(self, states: Tensor, position: int, *, undo: bool) -> Tensor:
        tables = self.rotary.block_tables(self.period, states.device)
        deltas = torch.arange(position, position + states.shape[2], device=states.device) % self.period
        cos, sin = (table[deltas] for table in tables)
        return self.rotary.turn(states, cos, -sin if undo else sin)

    def encode(self, states: Tensor, position: int, valid: Tensor | None = None) -> Encoded:
        return self.inner.encode(self._turn(states, position, undo=True), position, valid)

    def decode(self, encoded: Encoded, position: int) -> Tensor:
        return self._turn(self.inner.decode(encoded, position), position, undo=False)


class ScaledCodec(WrappedCodec):
    """Channels divided by a factor learnt from the first tokens: SmoothAttention (QServe, section 4.2).

    `lambda_c = max |K_c|^exponent` over the first `warmup_tokens` real tokens of a row behind its sinks, the
    same for both channels of a rotary pair, because the rotation moves magnitude between them. Dividing K and
    multiplying Q by `lambda` leaves the scores as they are, so this is a property of the storage alone.
    """

    def __init__(self, inner: Codec, exponent: float, rotary: Rotary | None, warmup_tokens: int) -> None:
        super().__init__(inner)
        self.exponent, self.rotary, self.warmup_tokens = exponent, rotary, warmup_tokens
        self.factors: Tensor | None = None

    def calibrate(self, states: Tensor, valid: Tensor) -> None:
        usable = valid[:, None, :, None] & torch.isfinite(states)
        largest = torch.where(usable, states.abs(), 0.0).amax(2, keepdim=True)
        if self.rotary is not None:
            first, second = self.rotary.pairs(largest)
            paired = torch.maximum(first, second)
            first.copy_(paired)
            second.copy_(paired)
        # A silent channel needs no smoothing, and must not be divided by zero.
        self.factors = torch.where(largest > 0, largest.clamp_min(1e-5), 1.0).pow(self.exponent)

    def encode(self, states: Tensor, position: int, valid: Tensor | None = None) -> Encoded:
        assert self.factors is not None
        return self.inner.encode(states / self.factors, position, valid)

    def decode(self, encoded: Encoded, position: int) -> Tensor:
        assert self.factors is not None
        return self.inner.decode(encoded, position).mul_(self.factors)

    def batch_state(self) -> dict[str, Tensor]:
        return {} if self.factors is None else {"factors": self.factors}

    def load_batch_state(self, state: dict[str, Tensor]) -> None:
        self.factors = state.get("factors")
