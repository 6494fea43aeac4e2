"""Codecs of KVQuant: non-uniform levels with outliers beside them (arXiv 2401.18079).

Blocks of 64 tokens are encoded together, because a block has one list of outliers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..models.rotary import Rotary
from ..quantizers.affine import round_to_half
from ..quantizers.granularity import Granularity, per_token
from ..quantizers.nonuniform import boundaries_of, dequantize_nonuniform, quantize_nonuniform
from ..quantizers.outliers import add_outliers, are_largest, choose_outliers
from ..quantizers.packing import BLOCK_TOKENS
from .codec import Codec, Encoded, WrappedCodec
from .padding import Padding

__all__ = [
    "ChannelNonUniformCodec",
    "NonUniformCodec",
    "TokenNonUniformCodec",
    "UnrotatedCodec",
    "outliers_per_side",
]


def outliers_per_side(fraction: float, values: int) -> int:
    """Outliers above, and as many below, of a vector: at least one where any are kept."""
    return 0 if fraction == 0 else max(1, round(fraction / 2 * values))


class NonUniformCodec(Codec):
    """Common part of the two codecs.

    Args:
        nbits (`int`): Bits per code.
        codebook (`torch.Tensor` of shape `(2 ** nbits,)`): Levels by which tokens are encoded.
        levels (`torch.Tensor`, *optional*): Levels by which codes are decoded, if they differ (Q-Norm).
        per_side (`int`): Half of the outliers of a token, over all heads; of keys, on average over a block.
    """

    def __init__(self, nbits: int, codebook: Tensor, levels: Tensor | None, per_side: int) -> None:
        # Levels that bf16 holds exactly cost nothing in quality, and kernels read them without rounding.
        self.nbits, self.codebook = nbits, codebook.bfloat16().float()
        self.levels = self.codebook if levels is None else levels.bfloat16().float()
        self.per_side = per_side
        self.outlier_capacity = 2 * per_side * BLOCK_TOKENS
        self._boundaries: tuple[Tensor, Tensor] | None = None

    @property
    def unit_tokens(self) -> int:
        return BLOCK_TOKENS

    @property
    def is_gatherable(self) -> bool:
        return True  # codes and ranges are of one token, and lists can be written anew

    def static_state(self) -> dict[str, Tensor]:
        return {"levels": self.levels}

    def codebooks_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The two codebooks, those to encode and those to decode by, on a device."""
        if self.codebook.device != device:
            self.codebook, self.levels = self.codebook.to(device), self.levels.to(device)
        return self.codebook, self.levels

    def boundaries_on(self, device: torch.device) -> Tensor:
        """What lies between the levels to encode by, on a device; made once."""
        codebook, _ = self.codebooks_on(device)
        if self._boundaries is None or self._boundaries[0] is not codebook:
            self._boundaries = codebook, boundaries_of(codebook)
        return self._boundaries[1]

    def place(self, device: torch.device) -> None:
        self.boundaries_on(device)

    def _encode(
        self, states: Tensor, scale: Tensor, offset: Tensor, qualifies: Tensor, metadata: dict[str, Tensor]
    ) -> Encoded:
        codebook, levels = self.codebooks_on(states.device)
        codes = quantize_nonuniform((states - offset) / scale, codebook)
        if self.outlier_capacity == 0:
            return Encoded(codes, metadata)
        residuals = states - dequantize_nonuniform(codes, levels, scale, offset)
        return Encoded(codes, metadata, choose_outliers(residuals, qualifies, self.outlier_capacity))

    def _decode(self, encoded: Encoded, scale: Tensor, offset: Tensor) -> Tensor:
        _, levels = self.codebooks_on(encoded.codes.device)
        states = dequantize_nonuniform(encoded.codes, levels, scale, offset)
        return states if encoded.outliers is None else add_outliers(states, encoded.outliers)


class ChannelNonUniformCodec(NonUniformCodec):
    """Keys: one static range per channel, calibrated before any token is seen (KVQuant).

    Outliers are the numbers of a block whose codes lack most, wherever in their range they lie: what is far
    beyond its end, and then what falls between distant levels. The paper keeps every number outside of its
    range, of which some lack little, and has none left for the others. Without calibrated ranges, each row's
    are taken from its own first tokens behind its sinks.

    Args:
        nbits (`int`), codebook (`torch.Tensor`), levels (`torch.Tensor`, *optional*): As above.
        per_side (`int`): As above.
        lower (`torch.Tensor` of shape `(H, D)`, *optional*), upper (`torch.Tensor`): The ranges.
        fraction (`float`): Share of numbers outside of the ranges, where these are those of the first tokens.
        warmup_tokens (`int`): How many first tokens then.
    """

    granularity = Granularity(tokens=BLOCK_TOKENS, channels=1)
    _of_channels: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def __init__(
        self,
        nbits: int,
        codebook: Tensor,
        levels: Tensor | None,
        per_side: int,
        lower: Tensor | None = None,
        upper: Tensor | None = None,
        fraction: float = 0.0,
        warmup_tokens: int = 0,
    ) -> None:
        super().__init__(nbits, codebook, levels, per_side)
        self.fraction, self.warmup_tokens = fraction, warmup_tokens
        self.scale: Tensor | None = None
        self.offset: Tensor | None = None
        self.is_learnt = lower is None or upper is None
        if lower is not None and upper is not None:
            self._set_range(lower[None, :, None], upper[None, :, None])

    def calibrate(self, states: Tensor, valid: Tensor) -> None:
        usable = valid[:, None, :, None] & torch.isfinite(states)
        seen = torch.where(usable, states, torch.nan)
        tails = seen.new_full((2,), self.fraction / 2)
        tails[1:].fill_(1 - self.fraction / 2)
        lower, upper = seen.nanquantile(tails, dim=2, keepdim=True).nan_to_num(0.0)
        self._set_range(lower, upper)

    def place(self, device: torch.device) -> None:
        super().place(device)
        if self.scale is not None:
            self.range_on(device)

    def encode(self, states: Tensor, position: int, valid: Tensor | None = None) -> Encoded:
        scale, offset = self.range_on(states.device)
        usable = torch.isfinite(states)
        if valid is not None:
            usable = usable & valid[:, None, :, None]
        return self._encode(states, scale, offset, usable, {})

    def decode(self, encoded: Encoded, position: int) -> Tensor:
        return self._decode(encoded, *self.range_on(encoded.codes.device))

    def batch_state(self) -> dict[str, Tensor]:
        if not self.is_learnt or self.scale is None or self.offset is None:
            return {}
        return {"scale": self.scale, "offset": self.offset}

    def load_batch_state(self, state: dict[str, Tensor]) -> None:
        if self.is_learnt:
            self.scale, self.offset, self._of_channels = state.get("scale"), state.get("offset"), None

    def static_state(self) -> dict[str, Tensor]:
        if self.is_learnt or self.scale is None or self.offset is None:
            return super().static_state()
        return {**super().static_state(), "scale": self.scale, "offset": self.offset}

    def _set_range(self, lower: Tensor, upper: Tensor) -> None:
        # A channel that never moves has no range; its number is the offset, whatever the code.
        # Halved first, as a range may be wider than the largest number.
        self.scale = (upper / 2 - lower / 2).float().clamp_min(torch.finfo(torch.float16).tiny)
        self.offset = (upper / 2 + lower / 2).float()

    def range_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Half of every channel's range and its middle, fp32 `(1 or B, H, 1, D)`, on a device."""
        assert self.scale is not None and self.offset is not None
        if self.scale.device != device:
            self.scale, self.offset = self.scale.to(device), self.offset.to(device)
        return self.scale, self.offset

    def ranges_of_channels(self) -> tuple[Tensor, Tensor]:
        """The same where they are now, fp32 `(1 or B, H, D)`: views, made once, for steps that ask."""
        assert self.scale is not None and self.offset is not None
        known = self._of_channels
        if known is None or known[0] is not self.scale or known[1] is not self.offset:
            known = self.scale, self.offset, self.scale[:, :, 0], self.offset[:, :, 0]
            self._of_channels = known
        return known[2:]


class TokenNonUniformCodec(NonUniformCodec):
    """Values: one range per token, over all of its heads, from the token itself (KVQuant).

    The `per_side` largest and the `per_side` smallest numbers of a token are outliers, of equal ones the
    first; the range is that of the others.
    """

    metadata_names = ("scale", "offset")
    granularity = per_token()

    @property
    def stored_granularity(self) -> Granularity:
        return Granularity()

    @property
    def rows_per_block(self) -> int:
        return BLOCK_TOKENS

    def encode(self, states: Tensor, position: int, valid: Tensor | None = None) -> Encoded:
        batch, heads, tokens, channels = states.shape
        vectors = states.transpose(1, 2).reshape(batch, tokens, heads * channels)
        usable = torch.isfinite(vectors)
        least, most = vectors.masked_fill(~usable, torch.inf), vectors.masked_fill(~usable, -torch.inf)
        is_high, is_low = are_largest(most, self.per_side), are_largest(-least, self.per_side)
        high = most.masked_fill(is_high, -torch.inf).amax(dim=-1, keepdim=True)
        low = least.masked_fill(is_low, torch.inf).amin(dim=-1, keepdim=True)
        is_range = torch.isfinite(high) & torch.isfinite(low) & (high >= low)
        high, low = (torch.where(is_range, bound, 0.0) for bound in (high, low))
        scale = round_to_half((high - low) / 2).clamp_min(torch.finfo(torch.float16).tiny)
        offset = round_to_half((high + low) / 2 + 0.0)  # zero has no sign, see affine.py
        outlying = (is_high | is_low) & usable
        if valid is not None:
            outlying &= valid[..., None]
        qualifies = outlying.view(batch, tokens, heads, channels).transpose(1, 2)
        scale, offset = (part[:, None] for part in (scale, offset))  # (B, 1, T, 1)
        return self._encode(states, scale, offset, qualifies, {"scale": scale, "offset": offset})

    def decode(self, encoded: Encoded, position: int) -> Tensor:
        return self._decode(encoded, encoded.metadata["scale"], encoded.metadata["offset"])


class UnrotatedCodec(WrappedCodec):
    """Keys as they were before the rotary embedding: each is turned back by its own position (KVQuant).

    The position of a slot is its distance from the row's first real token. The map is exactly orthogonal and
    used both ways, so nothing is lost to a model's own rounding of angles.
    """

    def __init__(self, inner: Codec, rotary: Rotary, padding: Padding) -> None:
        super().__init__(inner)
        self.rotary = self.turned_by = rotary
        self.padding = padding

    @property
    def is_gatherable(self) -> bool:
        return self.inner.is_gatherable

    @property
    def follows_slots(self) -> bool:
        return True

    def with_padding(self, padding: Padding) -> UnrotatedCodec:
        return UnrotatedCodec(self.inner, self.rotary, padding)

    def tables(self, states: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of `states` `(B, H, T, D)` from slot `position` on: `(1 or B, T, pairs)`."""
        padding = self.padding
        first = position if padding.longest else position + padding.dropped
        positions = torch.arange(first, first + states.shape[2], device=states.device)[None]
        if padding.longest:  # rows differ
            positions = positions - padding.starts(states)[:, None]
        cos, sin = (table.view(*positions.shape, -1) for table in self.rotary.tables(positions.flatten()))
        return cos, sin

    def place(self, device: torch.device) -> None:
        super().place(device)
        if device.type == "cuda":
            self.rotary.frequencies(device)  # which keeps them there

    def _turn(self, states: Tensor, position: int, *, undo: bool) -> Tensor:
        cos, sin = (table[:, None] for table in self.tables(states, position))
        return self.rotary.turn(states, cos, -sin if undo else sin)

    def calibrate(self, states: Tensor, valid: Tensor) -> None:
        self.inner.calibrate(self._turn(states, 0, undo=True), valid)

    def encode(self, states: Tensor, position: int, valid: Tensor | None = None) -> Encoded:
        return self.inner.encode(self._turn(states, position, undo=True), position, valid)

    def decode(self, encoded: Encoded, position: int) -> Tensor:
        return self._turn(self.inner.decode(encoded, position), position, undo=False)

    def batch_state(self) -> dict[str, Tensor]:
        return self.inner.batch_state()

    def load_batch_state(self, state: dict[str, Tensor]) -> None:
        self.inner.load_batch_state(state)
