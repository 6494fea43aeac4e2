"""Fake-quantized caches: they keep everything exactly and only pretend to have quantized it.

Which tokens of a layer are quantized is a function of the number `T` of tokens it has seen, not of how they
arrived:

* KIVI: the first `R * (T // R)` keys and the first `max(0, T - R)` values, `R` the residual length;
* KVQuant (in `kvquant.py`): whole blocks of 64 tokens among the first `max(0, T - R)`;
* every other method: the first `max(0, T - R)` keys and values.

A call reads the tokens that were quantized *before* it as quantized, the rest and its own tokens exactly.
Hence the first call (the prompt) is exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from .quantizers import asymmetric, float8, symmetric8

__all__ = [
    "FakeQuantizer",
    "Float8Oracle",
    "Int4Oracle",
    "Int8Oracle",
    "KiviOracle",
    "OracleLayer",
    "oracle_cache",
    "rotate_half_split",
    "smoothing_factors",
    "value_group_size",
]

SMOOTHING_TOKENS = 64


class FakeQuantizer(ABC):
    """What a method makes of the keys and values of one layer."""

    residual_length: int
    sink_length: int = 0
    """First real tokens of a row that are read exactly."""

    def quantized_lengths(self, length: int) -> tuple[int, int]:
        """How many of the first keys and values are quantized once `length` tokens have been seen."""
        count = max(0, length - self.residual_length)
        return count, count

    @abstractmethod
    def read_keys(
        self, keys: torch.Tensor, count: int, valid: torch.Tensor, first_encoding_length: int
    ) -> torch.Tensor:
        """Reads the first `count` keys back from their codes.

        Args:
            keys: Exact keys, `torch.Tensor` of shape `(B, H, T, D)`, rotated if the model rotates them.
            count: Number of quantized tokens.
            valid: Boolean `torch.Tensor` of shape `(B, T)`, False for left padding.
            first_encoding_length: Tokens seen when the first key was quantized. Whatever a method estimates
                from the text comes from these, since nothing may change once a token is encoded.

        Returns:
            fp32 `torch.Tensor` of shape `(B, H, count, D)`.
        """

    @abstractmethod
    def read_values(self, values: torch.Tensor, count: int) -> torch.Tensor:
        """Reads the first `count` values, `(B, H, T, D)`, back from their codes: fp32 `(B, H, count, D)`."""


@dataclass(frozen=True)
class KiviOracle(FakeQuantizer):
    """KIVI: keys per channel over groups of tokens, values per token over groups of channels.

    Attributes:
        key_bits: Bits of a key code.
        value_bits: Bits of a value code.
        q_group_size: Tokens (keys) or channels (values) that share a scale.
        residual_length: Newest tokens kept exact; a multiple of `q_group_size`.
        rope_mode: `"post"` quantizes keys as they come. `"block"` first rotates the key in slot `t` back by
            `t % rope_period` positions, so that all keys of a period carry the same rotation and a constant
            offset of a channel stays constant; reading rotates forth again.
        rope_period: A multiple of `q_group_size`.
        inv_freq: `torch.Tensor` of shape `(rotary_dim / 2,)`, angles per position; needed by `"block"`.
            Channels from `rotary_dim` on are not rotated.
    """

    key_bits: int = 4
    value_bits: int = 4
    q_group_size: int = 32
    residual_length: int = 128
    rope_mode: str = "post"
    rope_period: int = 64
    inv_freq: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.residual_length <= 0 or self.residual_length % self.q_group_size:
            raise ValueError(
                f"residual_length must be a positive multiple of q_group_size ({self.q_group_size}), "
                f"got {self.residual_length}"
            )
        if self.rope_mode not in ("post", "block"):
            raise ValueError(f"rope_mode must be 'post' or 'block', got {self.rope_mode!r}")
        if self.rope_mode == "block" and self.inv_freq is None:
            raise ValueError("rope_mode='block' needs inv_freq")
        if self.rope_mode == "block" and self.rope_period % self.q_group_size:
            raise ValueError(
                f"rope_period must be a multiple of q_group_size ({self.q_group_size}), "
                f"got {self.rope_period}"
            )

    def quantized_lengths(self, length: int) -> tuple[int, int]:
        """Keys leave in whole blocks of `residual_length` tokens, values one token at a time."""
        return self.residual_length * (length // self.residual_length), max(0, length - self.residual_length)

    def read_keys(
        self, keys: torch.Tensor, count: int, valid: torch.Tensor, first_encoding_length: int
    ) -> torch.Tensor:
        batch_size, num_heads, _, head_dim = keys.shape
        groups = count // self.q_group_size
        keys = keys[:, :, :count].to(torch.float32)
        offsets = torch.arange(count, device=keys.device) % self.rope_period
        if self.rope_mode == "block":
            assert self.inv_freq is not None
            keys = rotate_half_split(keys, -offsets, self.inv_freq)
        # [B, H, T, D] -> [B, H, groups, G, D]: the members of a group are consecutive slots of one channel.
        grouped = keys.reshape(batch_size, num_heads, groups, self.q_group_size, head_dim)
        grouped_valid = valid[:, :count].reshape(batch_size, 1, groups, self.q_group_size, 1)
        keys = asymmetric(grouped, self.key_bits, axis=3, valid=grouped_valid).dequantized
        keys = keys.reshape(batch_size, num_heads, count, head_dim)
        if self.rope_mode == "block":
            assert self.inv_freq is not None
            keys = rotate_half_split(keys, offsets, self.inv_freq)
        return keys

    def read_values(self, values: torch.Tensor, count: int) -> torch.Tensor:
        group = value_group_size(values.shape[-1], self.q_group_size)
        # [B, H, T, D] -> [B, H, T, D/G, G]: the members of a group are consecutive channels of one token.
        grouped = values[:, :, :count].unflatten(-1, (-1, group))
        return asymmetric(grouped, self.value_bits, axis=-1).dequantized.flatten(-2)


@dataclass(frozen=True)
class Int8Oracle(FakeQuantizer):
    """Symmetric int8, one scale per token and kv head."""

    residual_length: int = 0

    def read_keys(
        self, keys: torch.Tensor, count: int, valid: torch.Tensor, first_encoding_length: int
    ) -> torch.Tensor:
        return symmetric8(keys[:, :, :count], axis=-1).dequantized

    def read_values(self, values: torch.Tensor, count: int) -> torch.Tensor:
        return symmetric8(values[:, :, :count], axis=-1).dequantized


@dataclass(frozen=True)
class Int4Oracle(FakeQuantizer):
    """Asymmetric codes of a few bits, one scale and minimum per token and kv head.

    Attributes:
        key_bits: Bits of a key code.
        value_bits: Bits of a value code.
        residual_length: Newest tokens kept exact.
        smooth: Exponent of the factors the key channels are divided by before they are quantized (0: none).
    """

    key_bits: int = 4
    value_bits: int = 4
    residual_length: int = 64
    smooth: float = 0.0

    def read_keys(
        self, keys: torch.Tensor, count: int, valid: torch.Tensor, first_encoding_length: int
    ) -> torch.Tensor:
        if self.smooth == 0.0:
            return asymmetric(keys[:, :, :count], self.key_bits, axis=-1).dequantized
        factors = smoothing_factors(keys[:, :, :first_encoding_length], valid, self.smooth, self.sink_length)
        smoothed = keys[:, :, :count].to(torch.float32) / factors
        return asymmetric(smoothed, self.key_bits, axis=-1).dequantized * factors

    def read_values(self, values: torch.Tensor, count: int) -> torch.Tensor:
        return asymmetric(values[:, :, :count], self.value_bits, axis=-1).dequantized


@dataclass(frozen=True)
class Float8Oracle(FakeQuantizer):
    """8-bit floating point (`"e4m3"` or `"e5m2"`) with a dynamic scale per token and kv head."""

    format: str = "e4m3"
    residual_length: int = 0

    def read_keys(
        self, keys: torch.Tensor, count: int, valid: torch.Tensor, first_encoding_length: int
    ) -> torch.Tensor:
        return float8(keys[:, :, :count], self.format, axis=-1).dequantized

    def read_values(self, values: torch.Tensor, count: int) -> torch.Tensor:
        return float8(values[:, :, :count], self.format, axis=-1).dequantized


class OracleLayer(DynamicLayer):
    """A dense layer that returns what a quantizing layer would have returned.

    `keys` and `values` are the exact tensors of all tokens, so the verbs inherited from the dense layer
    (crop, reorder, select) act on everything there is; the quantization is redone from them at every call.

    Args:
        quantizer: The method.
        padding: Left-pad slots of each row; None for none. Pads are kept out of every statistic.
    """

    def __init__(self, quantizer: FakeQuantizer, padding: Sequence[int] | None = None) -> None:
        super().__init__()
        self.quantizer = quantizer
        self.padding = None if padding is None else torch.tensor(padding)
        self.first_encoding_length: int | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends new tokens and returns all of them as this call may read them.

        Args:
            key_states: `torch.Tensor` of shape `(B, H, n, D)`.
            value_states: `torch.Tensor` of shape `(B, H, n, Dv)`.

        Returns:
            Keys and values of shape `(B, H, T + n, D)` and `(B, H, T + n, Dv)` in the dtype given.
        """
        seen = self.get_seq_length()
        keys, values = super().update(key_states, value_states)
        key_count, value_count = self.quantizer.quantized_lengths(seen)
        returned = self._read_keys(keys, key_count), self._read_values(values, value_count)
        if self.first_encoding_length is None and self.quantizer.quantized_lengths(keys.shape[-2])[0] > 0:
            self.first_encoding_length = keys.shape[-2]
        return returned

    def _read_keys(self, keys: torch.Tensor, count: int) -> torch.Tensor:
        if count == 0:
            return keys
        assert self.first_encoding_length is not None
        valid = torch.ones(keys.shape[0], keys.shape[-2], dtype=torch.bool, device=keys.device)
        if self.padding is not None:
            slots = torch.arange(keys.shape[-2], device=keys.device)
            valid = slots[None, :] >= self.padding.to(keys.device)[:, None]
        read = self.quantizer.read_keys(keys, count, valid, self.first_encoding_length)
        return self._with_exact(read, keys)

    def _read_values(self, values: torch.Tensor, count: int) -> torch.Tensor:
        if count == 0:
            return values
        return self._with_exact(self.quantizer.read_values(values, count), values)

    def _with_exact(self, read: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """What was read, with the tokens that are kept exactly: sinks, and all that follow."""
        count = read.shape[-2]
        slots = torch.arange(count, device=states.device)[None, :]
        start = 0 if self.padding is None else self.padding.to(states.device)[:, None]
        is_sink = (slots >= start) & (slots < start + self.quantizer.sink_length)  # [B or 1, count]
        read = torch.where(is_sink[:, None, :, None], states[:, :, :count], read.to(states.dtype))
        return torch.cat([read, states[:, :, count:]], dim=-2)

    def reset(self) -> None:
        """Forgets all tokens, and what was estimated from them."""
        super().reset()
        self.first_encoding_length = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorders the rows, and their padding."""
        super().reorder_cache(beam_idx)
        if self.padding is not None:
            self.padding = self.padding[beam_idx.cpu()]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row, and its padding."""
        super().batch_repeat_interleave(repeats)
        if self.padding is not None:
            self.padding = self.padding.repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps some rows, and their padding."""
        super().batch_select_indices(indices)
        if self.padding is not None:
            self.padding = self.padding[indices.cpu()]


METHODS: dict[str, type[FakeQuantizer]] = {
    "kivi": KiviOracle,
    "int8": Int8Oracle,
    "int4": Int4Oracle,
    "float8": Float8Oracle,
}


def oracle_cache(
    config: PreTrainedConfig, method: str, *, padding: Sequence[int] | None = None, **options: Any
) -> Cache:
    """A cache of `OracleLayer`s for a model all of whose layers use full attention.

    Args:
        config: The model's configuration.
        method: `"kivi"`, `"int8"`, `"int4"` or `"float8"`.
        padding: Left-pad slots of each row; None for none.
        **options: Attributes of `KiviOracle`, `Int8Oracle`, `Int4Oracle` or `Float8Oracle`.

    Returns:
        `transformers.Cache`, empty.

    Raises:
        ValueError: If the method is unknown, or a layer of the model does not use full attention.
        TypeError: If the method has no such option.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {sorted(METHODS)}, got {method!r}")
    config = config.get_text_config(decoder=True)
    unsupported = set(getattr(config, "layer_types", None) or []) - {"full_attention"}
    if unsupported:
        raise ValueError(f"oracle caches hold full-attention layers only, got {sorted(unsupported)}")
    quantizer = METHODS[method](**options)
    return Cache(layers=[OracleLayer(quantizer, padding) for _ in range(config.num_hidden_layers)])


def rotate_half_split(states: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Rotates every channel pair `(i, i + rotary_dim / 2)` of slot `t` by the angle `positions[t] *
    inv_freq[i]`.

    Angles are computed in fp64 and only their cosines and sines rounded to fp32, so that rotating back and
    forth loses no more than fp32 rounding.

    Args:
        states: fp32 `torch.Tensor` of shape `(B, H, T, D)`.
        positions: Integer `torch.Tensor` that broadcasts to `(B, H, T)`; negative ones rotate back.
        inv_freq: `torch.Tensor` of shape `(rotary_dim / 2,)`.

    Returns:
        fp32 `torch.Tensor` of shape `(B, H, T, D)`.
    """
    half = inv_freq.shape[0]
    # [..., T, rotary_dim / 2]
    angles = positions.double()[..., None] * inv_freq.double().to(positions.device)
    cos, sin = angles.cos().float(), angles.sin().float()
    first, second, rest = states[..., :half], states[..., half : 2 * half], states[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def smoothing_factors(
    keys: torch.Tensor, valid: torch.Tensor, exponent: float, sink_length: int = 0
) -> torch.Tensor:
    """Per-channel divisors `max|K| ** exponent` over 64 real tokens, equal within a rotary pair.

    They are the first that are divided by them: those behind the sinks. The two channels `(i, i + D / 2)` of
    a pair share the larger maximum, so that dividing commutes with the rotation.

    Args:
        keys: `torch.Tensor` of shape `(B, H, T, D)`.
        valid: Boolean `torch.Tensor` of shape `(B, >= T)`, False for padding.
        exponent: 0 gives ones.
        sink_length: First real tokens of a row, which are kept exact.

    Returns:
        fp32 `torch.Tensor` of shape `(B, H, 1, D)`.
    """
    valid = valid[:, : keys.shape[-2]]
    order = valid.cumsum(dim=-1)  # [B, T], 1 for the first real token
    chosen = valid & (order > sink_length) & (order <= sink_length + SMOOTHING_TOKENS)
    magnitude = torch.where(chosen[:, None, :, None], keys.to(torch.float32).abs(), 0.0)
    maximum = magnitude.amax(dim=-2, keepdim=True)  # [B, H, 1, D]
    first, second = maximum.chunk(2, dim=-1)
    return torch.maximum(first, second).repeat(1, 1, 1, 2).clamp(min=1e-5) ** exponent


def value_group_size(head_dim: int, q_group_size: int) -> int:
    """Channels that share a value scale: `q_group_size` if it divides the head, else the next smaller
    multiple of 16.

    Args:
        head_dim: Number of channels.
        q_group_size: The group size asked for.

    Returns:
        The largest divisor of `head_dim` that is a multiple of 16 and at most `q_group_size`; `head_dim` if
        none is.
    """
    if head_dim % q_group_size == 0:
        return q_group_size
    sizes = [size for size in range(16, q_group_size + 1, 16) if head_dim % size == 0]
    return max(sizes, default=head_dim)
