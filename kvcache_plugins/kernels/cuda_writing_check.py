"""A check of the CUDA kernels that write into a cache, on their GPU, against the quantizers on the CPU.

Each function tells what is wrong on a device, or `None`; `cuda_check` calls them undisturbed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..models.rotary import Rotary
from ..quantizers import affine, float8
from ..quantizers.granularity import Granularity, per_channel_group, per_token_group, per_token_head
from ..quantizers.nonuniform import (
    boundaries_of,
    dequantize_nonuniform,
    normal_float_codebook,
    quantize_nonuniform,
)
from ..quantizers.outliers import Outliers, are_largest, choose_outliers
from ..quantizers.packing import BLOCK_TOKENS, pack_keys, pack_values, packed_bytes
from .layout import FORMATS
from .writing_ops import append_tokens, encode_levels, encode_tokens

__all__ = ["encoding_deviation", "levels_deviation", "step_deviation"]

_ROWS, _HEADS = 2, 2
_MOST_TURNED = 1e-2
"""Share of bytes that may differ after a rotation, which a GPU may round otherwise: a code in thousands."""


def encoding_deviation(device: torch.device) -> str | None:
    """Encode two blocks and one more token, and compare with the quantizers on the CPU, byte by byte."""
    head_dim, pairs = 64, 32
    rotary = Rotary(tuple(0.9**i for i in range(pairs)))
    tables = rotary.tables(torch.arange(32))
    for name, nbits, granularity, is_key in (
        ("affine", 4, per_channel_group(32), True),
        ("affine", 2, per_token_group(32), False),
        ("symmetric", 8, per_token_head(), True),
        ("e4m3", 8, per_token_head(), False),
    ):
        tokens = 2 * BLOCK_TOKENS + (granularity.tokens == 1)
        states = torch.randn(_ROWS, _HEADS, tokens, head_dim)
        for is_rotated in (False, True)[: 1 + is_key]:
            layout, record_bytes = _encode_layout(name, nbits, granularity, head_dim)
            layout[6] = interleaved = int(is_key and not is_rotated)
            records = torch.zeros(_ROWS, _HEADS, 3, record_bytes, dtype=torch.uint8, device=device)
            turning = tuple(table.to(device) for table in tables) if is_rotated else ()
            moved = states.to(device)
            done = [encode_tokens(records, moved[:, :, :128], is_key, layout, 0, *turning)]
            if tokens > 128:
                done.append(encode_tokens(records, moved[:, :, 128:], is_key, layout, 128, *turning))
            if not all(done):
                return f"encoding {name} was refused"
            if is_rotated:
                deltas = torch.arange(tokens) % 32
                states_there = rotary.turn(states, tables[0][deltas], -tables[1][deltas])
            else:
                states_there = states
            expected = _expected_codes(name, nbits, granularity, states_there, is_key, bool(interleaved))
            found = records[:, :, : expected.shape[2], : expected.shape[3]].cpu()
            if float((found != expected).float().mean()) > (_MOST_TURNED if is_rotated else 0.0):
                return f"encoded {name} {'keys' if is_key else 'values'} differ"
    return None


def levels_deviation(device: torch.device) -> str | None:
    """Encode two blocks by non-uniform levels, and compare codes, ranges and lists, number by number."""
    head_dim, per_side, start = 64, 1, BLOCK_TOKENS
    rotary = Rotary(tuple(0.9**i for i in range(head_dim // 2)))
    tables = [table[None] for table in rotary.tables(torch.arange(2 * BLOCK_TOKENS))]
    for nbits in (2, 3, 4):
        book = normal_float_codebook(nbits).bfloat16().float()
        size = packed_bytes(head_dim, nbits)
        for is_key, is_rotated in ((True, False), (True, True), (False, False)):
            states = torch.randn(_ROWS, _HEADS, 2 * BLOCK_TOKENS, head_dim)
            scale, offset = (torch.rand(2, _ROWS, _HEADS, 1, head_dim) + 0.5) if is_key else (None, None)
            options = {"scale": scale, "offset": offset}
            if is_rotated:
                options |= {"cos": tables[0], "sin": tables[1]}
            records = torch.zeros(_ROWS, _HEADS, 3, size + 256, dtype=torch.uint8, device=device)
            lists = Outliers(
                torch.zeros(_ROWS, 3, 2 * per_side * BLOCK_TOKENS, dtype=torch.int32, device=device),
                torch.zeros(_ROWS, 3, _HEADS + 1, dtype=torch.int16, device=device),
            )
            places = (-1, -1) if is_key else (size, size + 128)
            done = encode_levels(
                records, lists, states.to(device), is_key, [nbits, 0, head_dim, 1, 1, 2, 0, 0, *places],
                boundaries_of(book).to(device), book.to(device), per_side, start,
                **{name: None if given is None else given.to(device) for name, given in options.items()},
            )  # fmt: skip
            if not done:
                return f"encoding {nbits} bit levels was refused"
            turned = rotary.turn(states, tables[0][:, None], -tables[1][:, None]) if is_rotated else states
            expected = _expected_levels(turned, scale, offset, book, nbits, per_side)
            found = [records.cpu()[:, :, 1:], *(tensor.cpu()[:, 1:] for tensor in lists)]
            if not is_rotated and not all(map(torch.equal, found, expected)):
                return f"{nbits} bit levels of {'keys' if is_key else 'values'} differ"
            if is_rotated and float((found[0] != expected[0]).float().mean()) > _MOST_TURNED:
                return f"{nbits} bit levels of rotated keys differ"
    return None


def _expected_levels(
    states: Tensor, scale: Tensor | None, offset: Tensor | None, book: Tensor, nbits: int, per_side: int
) -> list[Tensor]:
    """Records and lists of whole blocks; without ranges, tokens have their own."""
    is_key, outlying = scale is not None, torch.ones_like(states, dtype=torch.bool)
    if scale is None or offset is None:
        vectors = states.transpose(1, 2).flatten(2)  # [B, T, H * D]
        is_high, is_low = are_largest(vectors, per_side), are_largest(-vectors, per_side)
        high = vectors.masked_fill(is_high, -torch.inf).amax(-1, keepdim=True)
        low = vectors.masked_fill(is_low, torch.inf).amin(-1, keepdim=True)
        outlying = (is_high | is_low).unflatten(2, states.shape[1::2]).transpose(1, 2)
        scale, offset = (part[:, None].half().float() for part in ((high - low) / 2, (high + low) / 2))
    codes = quantize_nonuniform((states - offset) / scale, book)
    residuals = states - dequantize_nonuniform(codes, book, scale, offset)
    blocks = codes.unflatten(2, (-1, BLOCK_TOKENS))
    packed = pack_keys(blocks, nbits) if is_key else pack_values(blocks, nbits)
    ranges = torch.zeros(*packed.shape[:3], 256, dtype=torch.uint8)
    if not is_key:
        halves = (
            torch.stack([scale, offset]).half().expand(-1, -1, states.shape[1], -1, -1)
        )  # [2, B, H, T, 1]
        fields = halves.unflatten(3, (-1, BLOCK_TOKENS)).contiguous().view(torch.uint8).flatten(4)
        ranges = torch.cat([*fields], dim=-1)
    lists = choose_outliers(residuals, outlying, 2 * per_side * BLOCK_TOKENS)
    return [torch.cat([packed, ranges], dim=-1), *lists]


def step_deviation(device: torch.device) -> str | None:
    """Append a few tokens, and compare with copies and with `encode_tokens`, which has passed its check."""
    head_dim, new = 64, 3
    rotary = Rotary(tuple(0.9**i for i in range(head_dim // 2)))
    rotation = tuple(table.to(device) for table in rotary.tables(torch.arange(32)))
    for name, nbits, granularity, turning in (
        ("affine", 4, per_channel_group(32), rotation),
        ("affine", 4, per_channel_group(32), ()),
        ("affine", 4, per_token_head(), ()),
        ("affine", 3, per_token_group(32), rotation),
        ("symmetric", 8, per_token_head(), rotation),
        ("e5m2", 8, per_token_head(), rotation),
    ):
        keys, offset = _encode_layout(name, nbits, granularity, head_dim)
        keys[6] = int(not turning)
        values, record_bytes = _encode_layout(name, nbits, granularity, head_dim, offset)
        tails = [torch.randn(_ROWS, _HEADS, 80, head_dim).to(device) for _ in range(4)]
        states = [torch.randn(_ROWS, _HEADS, new, head_dim).to(device) for _ in range(2)]
        records = torch.zeros(2, _ROWS, _HEADS, 3, record_bytes, dtype=torch.uint8, device=device)
        tails[2:] = [tail.clone() for tail in tails[:2]]
        # a block of which the last tokens are new, and, where tokens are packed singly, two over an edge
        for write, first, count, slot in ((62, 1, 64, 64), (65, 66, 2, 127))[: 1 + (granularity.tokens == 1)]:
            key_plan, value_plan = ([write, first, count, slot, *layout] for layout in (keys, values))
            done = append_tokens(
                records[0], states[0], states[1], tails[0], tails[1], key_plan, value_plan, *turning
            )
            for tail, given, layout in zip(tails[2:], states, (keys, values), strict=True):
                tail[:, :, write : write + new] = given
                due, turned = tail[:, :, first : first + count], turning if layout is keys else ()
                done &= encode_tokens(records[1], due, layout is keys, layout, slot, *turned)
            if not done:
                return f"a step of {name} was refused"
            if not all(map(torch.equal, [records[0], *tails[:2]], [records[1], *tails[2:]])):
                return f"what a step of {name} writes differs"
    return None


def _encode_layout(
    name: str, nbits: int, granularity: Granularity, head_dim: int, offset: int = 0
) -> tuple[list[int], int]:
    """Integers of a layout whose fields begin at `offset`, as `encode_tokens` takes them, and their end."""
    size, width = packed_bytes(head_dim, nbits), granularity.width(head_dim)
    row_bytes = BLOCK_TOKENS // granularity.tokens * width * 2
    layout = [nbits, FORMATS[name], head_dim, granularity.tokens, width, 2, 0, offset, offset + size]
    layout.append(offset + size + row_bytes if name == "affine" else -1)
    return layout, offset + size + 2 * row_bytes


def _expected_codes(
    name: str, nbits: int, granularity: Granularity, states: Tensor, is_key: bool, interleaved: bool
) -> Tensor:
    """Packed codes of whole blocks, `(B, H, N, nbytes)`."""
    if name == "affine":
        scale, minimum = affine.choose_qparams_asymmetric(states, granularity, nbits)
        codes = affine.quantize_asymmetric(states, scale, minimum, granularity, nbits)
    elif name == "symmetric":
        scale = affine.choose_qparams_symmetric(states, granularity)
        codes = affine.quantize_symmetric(states, scale, granularity)
    else:
        scale = affine.choose_qparams_symmetric(states, granularity, None, float8.FLOAT8_MAX[name])
        codes = float8.quantize_float8(states, scale, granularity, name)
    blocks = codes[:, :, : 2 * BLOCK_TOKENS].unflatten(2, (2, BLOCK_TOKENS))
    return pack_keys(blocks, nbits, interleaved) if is_key else pack_values(blocks, nbits)
