"""Bit packing: the only place that knows in which order codes lie inside a block.

A block is 64 consecutive tokens of one (row, kv head). Codes come and go as uint8 tensors `(..., 64, D)`, `D`
a multiple of 16; packed they are `64 * D * nbits / 8` bytes, `(..., nbytes)`. The orders suit vector units,
whose lanes are tokens for `q @ K^T` and channels for `p @ V`, so that neither product needs a horizontal sum.
With `h = D / 2`, 16-bit words:

    keys, b in {1, 2, 4}     word[j][tau][hw] = sum over k < 4, p < P of
                                 code[token 16k + tau][channel P*j + p + hw*h] << b * (4p + k)      P = 4 / b
    keys, b = 8              byte[d / 4][token / 16][token % 16][d % 4]
    values, b in {1, 2, 4}   word[w][c][hw]   = sum over i < N of
                                 code[token 2j + hw][channel 16u + c] << b * i                      N = 16 / b
                                 where chunk j * (D / 16) + u = w * N + i
    values, b = 8            byte[token / 4][d / 16][d % 16][token % 4]
    3 bits                   the 2-bit packing of the low bits, then the 1-bit packing of the high bit

`hw` picks the half of a 32-bit lane, so a lane of the keys holds the two channels of a rotary pair: `(i, i +
h)`, or `(2i, 2i + 1)` with `interleaved=True`. The latter is also the order of keys that need not be turned,
whose scales and minima a lane then finds together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = [
    "BLOCK_TOKENS",
    "pack_keys",
    "pack_values",
    "packed_bytes",
    "padded_head_dim",
    "unpack_keys",
    "unpack_values",
]

BLOCK_TOKENS = 64
"""Tokens in a block."""


def padded_head_dim(head_dim: int) -> int:
    """Smallest multiple of 16 that holds `head_dim` channels; the extra channels have code 0."""
    return -(-head_dim // 16) * 16


def packed_bytes(head_dim: int, nbits: int) -> int:
    """Bytes of the codes of one block."""
    return BLOCK_TOKENS * padded_head_dim(head_dim) * nbits // 8


def pack_keys(codes: Tensor, nbits: int, interleaved: bool = False) -> Tensor:
    """Pack uint8 codes `(..., 64, D)` in key order; returns uint8 `(..., nbytes)`."""
    if nbits == 3:
        return _pack_planes(pack_keys, codes, interleaved=interleaved)
    head_dim = codes.shape[-1]
    if nbits == 8:
        order = codes.unflatten(-2, (4, 16)).unflatten(-1, (head_dim // 4, 4))
        return _permute_last(order, (2, 0, 1, 3)).flatten(-4)
    parts = 4 // nbits
    tiles = _split_channels(codes.unflatten(-2, (4, 16)), parts, interleaved)  # [..., k, tau, hw, j, p]
    words = torch.zeros(*tiles.shape[:-5], *tiles.shape[-4:-1], dtype=torch.int16, device=codes.device)
    for k in range(4):
        for p in range(parts):
            words |= tiles[..., k, :, :, :, p].to(torch.int16) << (nbits * (4 * p + k))
    return _permute_last(words, (2, 0, 1)).contiguous().view(torch.uint8).flatten(-3)


def unpack_keys(data: Tensor, nbits: int, head_dim: int, interleaved: bool = False) -> Tensor:
    """Inverse of [`pack_keys`]: uint8 `(..., nbytes)` to codes `(..., 64, head_dim)`."""
    if nbits == 3:
        return _unpack_planes(unpack_keys, data, head_dim, interleaved=interleaved)
    if nbits == 8:
        order = data.unflatten(-1, (head_dim // 4, 4, 16, 4))
        return _permute_last(order, (1, 2, 0, 3)).flatten(-2).flatten(-3, -2)
    parts = 4 // nbits
    words = data.view(torch.int16).unflatten(-1, (-1, 16, 2))
    words = _permute_last(words, (1, 2, 0)).contiguous()  # [..., tau, hw, j]
    half = words.shape[-1]
    if interleaved:  # channel = 2 * (parts * j + p) + hw
        codes = torch.empty(*words.shape[:-3], 4, 16, half, parts, 2, dtype=torch.uint8, device=data.device)
        order = codes.movedim(-1, -3)
    else:
        codes = torch.empty(*words.shape[:-3], 4, 16, 2, half, parts, dtype=torch.uint8, device=data.device)
        order = codes
    mask = 2**nbits - 1
    for k in range(4):
        for p in range(parts):
            order[..., k, :, :, :, p] = (words >> (nbits * (4 * p + k))) & mask
    return codes.flatten(-3).flatten(-3, -2)


def pack_values(codes: Tensor, nbits: int) -> Tensor:
    """Pack uint8 codes `(..., 64, D)` in value order; returns uint8 `(..., nbytes)`."""
    if nbits == 3:
        return _pack_planes(pack_values, codes)
    head_dim = codes.shape[-1]
    if nbits == 8:
        order = codes.unflatten(-2, (16, 4)).unflatten(-1, (head_dim // 16, 16))
        return _permute_last(order, (0, 2, 3, 1)).flatten(-4)
    per_word = 16 // nbits
    chunks = _permute_last(
        codes.unflatten(-2, (32, 2)).unflatten(-1, (-1, 16)), (0, 2, 3, 1)
    )  # [..., j, u, c, hw]
    chunks = chunks.flatten(-4, -3).unflatten(-3, (-1, per_word))
    words = torch.zeros(*chunks.shape[:-3], 16, 2, dtype=torch.int16, device=codes.device)
    for i in range(per_word):
        words |= chunks[..., i, :, :].to(torch.int16) << (nbits * i)
    return words.view(torch.uint8).flatten(-3)


def unpack_values(data: Tensor, nbits: int, head_dim: int) -> Tensor:
    """Inverse of [`pack_values`]: uint8 `(..., nbytes)` to codes `(..., 64, head_dim)`."""
    if nbits == 3:
        return _unpack_planes(unpack_values, data, head_dim)
    if nbits == 8:
        order = data.unflatten(-1, (16, head_dim // 16, 16, 4))
        return _permute_last(order, (0, 3, 1, 2)).flatten(-2).flatten(-3, -2)
    per_word, mask = 16 // nbits, 2**nbits - 1
    words = data.view(torch.int16).unflatten(-1, (-1, 16, 2))
    chunks = torch.empty(*words.shape[:-2], per_word, 16, 2, dtype=torch.uint8, device=data.device)
    for i in range(per_word):
        chunks[..., i, :, :] = (words >> (nbits * i)) & mask
    order = chunks.flatten(-4, -3).unflatten(-3, (32, head_dim // 16))  # [..., j, u, c, hw]
    return _permute_last(order, (0, 3, 1, 2)).flatten(-2).flatten(-3, -2)


def _split_channels(codes: Tensor, parts: int, interleaved: bool) -> Tensor:
    if interleaved:
        codes = codes.unflatten(-1, (-1, parts, 2)).movedim(-1, -3)
    else:
        codes = codes.unflatten(-1, (2, -1, parts))
    return codes


def _permute_last(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """Permute the last `len(order)` dimensions."""
    lead = tensor.dim() - len(order)
    return tensor.permute(*range(lead), *(lead + i for i in order))


def _pack_planes(pack: Callable[..., Tensor], codes: Tensor, **options: bool) -> Tensor:
    return torch.cat([pack(codes & 3, 2, **options), pack(codes >> 2, 1, **options)], dim=-1)


def _unpack_planes(unpack: Callable[..., Tensor], data: Tensor, head_dim: int, **options: bool) -> Tensor:
    low_bytes = packed_bytes(head_dim, 2)
    low = unpack(data[..., :low_bytes], 2, head_dim, **options)
    return low | (unpack(data[..., low_bytes:], 1, head_dim, **options) << 2)
