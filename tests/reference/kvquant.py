"""A fake-quantized KVQuant cache, from the formulas of the paper (arXiv 2401.18079, section 3).

What a calibration finds is given as plain tensors; everything that is done with them is done here::

    keys     turned back by their positions, `u = (k - z) / r` with `r`, `z` of each channel's static range;
             code = nearest level; any number may be an outlier
    values   `u = (v - z) / r` with `r`, `z` of each token's own range over all kv heads, its `n` largest and
             `n` smallest numbers left out; code = nearest level; these `2 n` are its outliers
    outlier  dense + fp16(x - dense), that is exact to fp16
    cap      of 64 tokens `128 n` key outliers, those of all heads whose dense value is furthest off; none of
             them a pad or a sink
    exact    the first tokens of a row (sinks), and all that is not among the first
             `64 * floor(max(0, T - residual_length) / 64)`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import Cache, PreTrainedConfig

from .caches import FakeQuantizer, OracleLayer, rotate_half_split

__all__ = ["KVQuantOracle", "kvquant_oracle_cache", "outliers_per_side"]

BLOCK = 64


@dataclass(frozen=True)
class KVQuantOracle(FakeQuantizer):
    """KVQuant for one layer.

    Attributes:
        key_lower, key_upper: `torch.Tensor` of shape `(H, D)`: the range of each channel before the rotation.
        key_codebook, value_codebook: `torch.Tensor` of shape `(2 ** nbits,)`: levels in `[-1, 1]`.
        inv_freq: `torch.Tensor` of shape `(rotary_dim / 2,)`, angles per position.
        key_levels, value_levels: Levels to read codes with, where they are not those of the codebook.
        outlier_fraction: Share of a vector that is kept beside the codes.
        sink_length: First real tokens of a row, kept exact.
        residual_length: Newest tokens kept exact, at least.
    """

    key_lower: torch.Tensor
    key_upper: torch.Tensor
    key_codebook: torch.Tensor
    value_codebook: torch.Tensor
    inv_freq: torch.Tensor
    key_levels: torch.Tensor | None = None
    value_levels: torch.Tensor | None = None
    outlier_fraction: float = 0.01
    sink_length: int = 1
    residual_length: int = 128

    def quantized_lengths(self, length: int) -> tuple[int, int]:
        """Keys and values leave in whole blocks."""
        count = BLOCK * (max(0, length - self.residual_length) // BLOCK)
        return count, count

    def read_keys(
        self, keys: torch.Tensor, count: int, valid: torch.Tensor, first_encoding_length: int
    ) -> torch.Tensor:
        valid = valid[:, :count]
        order = valid.cumsum(dim=-1)  # [B, count], 1 for the first real token
        positions = (order - 1)[:, None]
        keys = rotate_half_split(keys[:, :, :count].to(torch.float32), -positions, self.inv_freq)

        scale = ((self.key_upper - self.key_lower) / 2)[:, None].clamp(min=1e-7)  # [H, 1, D]
        offset = _half((self.key_upper + self.key_lower) / 2)[:, None]
        dense = _read(keys, scale, offset, self.key_codebook, self.key_levels)
        plain = valid & (order > self.sink_length)
        is_outlier = plain[:, None, :, None].expand_as(keys)
        limit = 2 * BLOCK * outliers_per_side(self.outlier_fraction, keys.shape[1] * keys.shape[3])
        is_outlier = _worst_of_each_block((keys - dense).abs(), is_outlier, limit)
        keys = torch.where(is_outlier, dense + _half(keys - dense), dense)
        return rotate_half_split(keys, positions, self.inv_freq)

    def read_values(self, values: torch.Tensor, count: int) -> torch.Tensor:
        # [B, H, T, D] -> [B, T, H, D] -> [B, T, H * D]: a token is one vector over all heads.
        vectors = values[:, :, :count].to(torch.float32).transpose(1, 2)
        heads = vectors.shape[2:]
        vectors = vectors.flatten(2)
        side = outliers_per_side(self.outlier_fraction, vectors.shape[-1])
        ranked = vectors.sort(dim=-1).values
        low, high = ranked[..., side, None], ranked[..., -1 - side, None]
        scale, offset = _half((high - low) / 2).clamp(min=1e-7), _half((high + low) / 2)
        dense = _read(vectors, scale, offset, self.value_codebook, self.value_levels)
        is_outlier = (vectors < low) | (vectors > high)
        read = torch.where(is_outlier, dense + _half(vectors - dense), dense)
        return read.view(*read.shape[:2], *heads).transpose(1, 2)


def kvquant_oracle_cache(
    config: PreTrainedConfig,
    tensors: Mapping[str, torch.Tensor],
    inv_freq: torch.Tensor,
    *,
    nbits: int = 3,
    outlier_fraction: float = 0.01,
    sink_length: int = 1,
    residual_length: int = 128,
    padding: Sequence[int] | None = None,
) -> Cache:
    """A cache of `KVQuantOracle` layers.

    Args:
        config: The model's configuration.
        tensors: Of every layer `i`: `layers.{i}.key_lower`, `.key_upper`, `.key_codebook_{nbits}`,
            `.value_codebook_{nbits}` and perhaps `.key_levels_{nbits}`, `.value_levels_{nbits}`.
        inv_freq: `torch.Tensor` of shape `(rotary_dim / 2,)`.
        nbits: Bits of a code.
        outlier_fraction: Share of a vector that is kept beside the codes.
        sink_length: First real tokens of a row, kept exact.
        residual_length: Newest tokens kept exact, at least.
        padding: Left-pad slots of each row; None for none.

    Returns:
        `transformers.Cache`, empty.
    """
    layers = []
    for index in range(config.num_hidden_layers):
        prefix = f"layers.{index}"
        quantizer = KVQuantOracle(
            key_lower=tensors[f"{prefix}.key_lower"],
            key_upper=tensors[f"{prefix}.key_upper"],
            key_codebook=tensors[f"{prefix}.key_codebook_{nbits}"],
            value_codebook=tensors[f"{prefix}.value_codebook_{nbits}"],
            inv_freq=inv_freq,
            key_levels=tensors.get(f"{prefix}.key_levels_{nbits}"),
            value_levels=tensors.get(f"{prefix}.value_levels_{nbits}"),
            outlier_fraction=outlier_fraction,
            sink_length=sink_length,
            residual_length=residual_length,
        )
        layers.append(OracleLayer(quantizer, padding))
    return Cache(layers=list(layers))


def outliers_per_side(fraction: float, size: int) -> int:
    """Outliers above, and as many below, of a vector of `size` numbers; none only if the fraction is 0."""
    return 0 if fraction == 0 else max(1, round(fraction / 2 * size))


def _half(x: torch.Tensor) -> torch.Tensor:
    """The nearest fp16 number, as fp32."""
    return x.to(torch.float16).to(torch.float32)


def _read(
    x: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor,
    codebook: torch.Tensor,
    levels: torch.Tensor | None,
) -> torch.Tensor:
    """`levels[code] * scale + offset`, `code` that of the level of `codebook` nearest to `x` normalized."""
    midpoints = (codebook[1:] + codebook[:-1]) / 2
    codes = torch.bucketize((x - offset) / scale, midpoints)
    return (codebook if levels is None else levels)[codes] * scale + offset


def _worst_of_each_block(error: torch.Tensor, chosen: torch.Tensor, limit: int) -> torch.Tensor:
    """Of the numbers `chosen` in every 64 tokens of a row, over all heads, the `limit` with the largest
    error."""
    kept = chosen.clone()
    for row in range(chosen.shape[0]):
        for start in range(0, chosen.shape[2], BLOCK):
            block = (row, slice(None), slice(start, start + BLOCK))
            places = chosen[block].nonzero(as_tuple=True)
            dropped = error[block][places].sort(descending=True, stable=True).indices[limit:]
            kept[block][tuple(place[dropped] for place in places)] = False
    return kept
