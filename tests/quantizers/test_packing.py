"""Bit packing against the naive loops of `tests/reference`, for every width and number of bits.

The oracle knows rotary pairs `(i, i + D/2)`. For interleaved pairs `(2i, 2i + 1)` it is told to look up the
other channel: the layout differs in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcache_plugins.quantizers.packing import (
    BLOCK_TOKENS,
    pack_keys,
    pack_values,
    packed_bytes,
    padded_head_dim,
    unpack_keys,
    unpack_values,
)
from tests.reference import packing as oracle

WIDTHS = (16, 48, 64, 80, 96, 128, 192)
BITS = (1, 2, 3, 4, 8)
ORDERS = ("keys", "interleaved-keys", "values")


def _interleave(codes: Tensor) -> Tensor:
    """Channels in an order in which the pair `(2i, 2i + 1)` lies where the oracle expects `(i, i + D/2)`."""
    return torch.cat([codes[..., 0::2], codes[..., 1::2]], dim=-1)


def _pack(order: str, codes: Tensor, nbits: int) -> Tensor:
    if order == "values":
        return pack_values(codes, nbits)
    return pack_keys(codes, nbits, interleaved=order == "interleaved-keys")


def _unpack(order: str, data: Tensor, nbits: int, head_dim: int) -> Tensor:
    if order == "values":
        return unpack_values(data, nbits, head_dim)
    return unpack_keys(data, nbits, head_dim, interleaved=order == "interleaved-keys")


def _naive(order: str, codes: Tensor, nbits: int) -> bytes:
    if order == "values":
        return oracle.pack_values(codes.tolist(), nbits)
    # Bytes hold four neighbouring channels whatever the rotation.
    paired = _interleave(codes) if order == "interleaved-keys" and nbits != 8 else codes
    return oracle.pack_keys(paired.tolist(), nbits)


def _bytes(data: Tensor) -> bytes:
    return bytes(data.tolist())


@pytest.mark.parametrize("nbits", BITS, ids=lambda b: f"{b}bit")
@pytest.mark.parametrize("head_dim", WIDTHS, ids=lambda d: f"D{d}")
@pytest.mark.parametrize("order", ORDERS)
def test_equals_the_naive_loops(order: str, head_dim: int, nbits: int) -> None:
    codes = torch.randint(2**nbits, (BLOCK_TOKENS, head_dim), dtype=torch.uint8)
    data = _pack(order, codes, nbits)
    assert data.dtype == torch.uint8
    assert _bytes(data) == _naive(order, codes, nbits)
    assert data.shape == (packed_bytes(head_dim, nbits),)
    assert torch.equal(_unpack(order, data, nbits, head_dim), codes)


@pytest.mark.parametrize("nbits", BITS, ids=lambda b: f"{b}bit")
@pytest.mark.parametrize(
    ("pack", "unpack", "naive"),
    [(pack_keys, unpack_keys, oracle.unpack_keys), (pack_values, unpack_values, oracle.unpack_values)],
    ids=["keys", "values"],
)
def test_any_bytes_unpack_as_the_naive_loops_do(
    pack: Callable[..., Tensor],
    unpack: Callable[..., Tensor],
    naive: Callable[..., list[list[int]]],
    nbits: int,
) -> None:
    data = torch.randint(256, (packed_bytes(80, nbits),), dtype=torch.uint8)
    codes = unpack(data, nbits, 80)
    assert codes.tolist() == naive(_bytes(data), 80, nbits)
    assert torch.equal(pack(codes, nbits), data)


@pytest.mark.parametrize("nbits", [1, 2, 4], ids=lambda b: f"{b}bit")
def test_a_lane_of_the_keys_holds_the_channels_of_a_rotary_pair(nbits: int) -> None:
    head_dim = 48
    for interleaved, partner in ((False, 24), (True, 1)):
        for channel in (0, 6, 22):
            codes = torch.zeros(BLOCK_TOKENS, head_dim, dtype=torch.uint8)
            codes[17, channel] = codes[17, channel + partner] = 1
            lanes = pack_keys(codes, nbits, interleaved).view(torch.int32)
            assert torch.count_nonzero(lanes) == 1
            (lane,) = lanes[lanes != 0].tolist()
            assert lane & 0xFFFF == lane >> 16 & 0xFFFF


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("nbits", BITS, ids=lambda b: f"{b}bit")
def test_blocks_are_independent(order: str, nbits: int) -> None:
    # Leading dimensions, and strides as slices of a record have them.
    wide = torch.randint(2**nbits, (2, 3, 4, BLOCK_TOKENS, 2 * 80), dtype=torch.uint8)
    codes = wide[:, :, 1:, :, ::2]
    assert not codes.is_contiguous()
    data = _pack(order, codes, nbits)
    assert data.shape == (2, 3, 3, packed_bytes(80, nbits))
    alone = torch.stack([_pack(order, block, nbits) for block in codes.reshape(-1, BLOCK_TOKENS, 80)])
    assert torch.equal(data.flatten(0, 2), alone)
    record = torch.full((2, 3, 3, 128 + data.shape[-1] + 64), 0xFF, dtype=torch.uint8)
    record[..., 128:-64] = data
    assert torch.equal(_unpack(order, record[..., 128:-64], nbits, 80), codes)


@pytest.mark.parametrize("head_dim", [1, 15, 16, 17, 24, 80, 100], ids=lambda d: f"D{d}")
def test_padded_widths(head_dim: int) -> None:
    padded = padded_head_dim(head_dim)
    assert padded % 16 == 0 and 0 <= padded - head_dim < 16
    for nbits in BITS:
        assert packed_bytes(head_dim, nbits) == 64 * padded * nbits // 8


@st.composite
def _blocks(draw: st.DrawFn) -> tuple[Tensor, int]:
    nbits, chunks = draw(st.sampled_from(BITS)), draw(st.integers(1, 16))
    lead = draw(st.sampled_from([(), (1,), (3,), (2, 1, 2)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    return torch.randint(2**nbits, (*lead, 64, 16 * chunks), dtype=torch.uint8, generator=generator), nbits


@given(block=_blocks(), order=st.sampled_from(ORDERS))
@settings(max_examples=100, deadline=None)
def test_round_trip(block: tuple[Tensor, int], order: str) -> None:
    codes, nbits = block
    data = _pack(order, codes, nbits)
    assert data.numel() == codes.numel() * nbits // 8
    assert torch.equal(_unpack(order, data, nbits, codes.shape[-1]), codes)


@given(block=_blocks(), order=st.sampled_from(ORDERS), split=st.integers(1, 63))
@settings(max_examples=50, deadline=None)
def test_a_partial_block_is_completed_by_a_bitwise_or(
    block: tuple[Tensor, int], order: str, split: int
) -> None:
    codes, nbits = block
    first, second = codes.clone(), codes.clone()
    first[..., split:, :], second[..., :split, :] = 0, 0
    assert torch.equal(_pack(order, first, nbits) | _pack(order, second, nbits), _pack(order, codes, nbits))


def _locations(
    order: Callable[[int, int], Iterator[oracle.Location]], head_dim: int, nbits: int
) -> list[tuple[int, int]]:
    return [(word, shift) for word, shift, _, _ in order(head_dim, nbits)]


@pytest.mark.parametrize("order", [oracle.key_map, oracle.value_map], ids=["keys", "values"])
def test_the_oracle_itself_gives_every_code_its_own_bits(
    order: Callable[..., Iterator[oracle.Location]],
) -> None:
    # A layout in which two codes shared bits would make the comparisons above meaningless.
    for nbits in (1, 2, 4, 8):
        places = _locations(order, 48, nbits)
        assert len(set(places)) == len(places) == 64 * 48
