"""The packing oracles against addresses worked out on paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from .packing import key_map, pack_keys, pack_values, unpack_keys, unpack_values, value_map

Packer = Callable[[list[list[int]], int], bytes]
Unpacker = Callable[[bytes, int, int], list[list[int]]]
Layout = Callable[[int, int], Iterator[tuple[int, int, int, int]]]


class TestPacking:
    @pytest.mark.parametrize(("pack", "unpack"), [(pack_keys, unpack_keys), (pack_values, unpack_values)])
    @pytest.mark.parametrize("nbits", [1, 2, 3, 4, 8])
    @pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 128])
    def test_round_trip(self, pack: Packer, unpack: Unpacker, nbits: int, head_dim: int) -> None:
        codes = torch.randint(2**nbits, (64, head_dim)).tolist()
        data = pack(codes, nbits)
        assert len(data) == 8 * nbits * head_dim
        assert unpack(data, head_dim, nbits) == codes

    @pytest.mark.parametrize("layout", [key_map, value_map])
    @pytest.mark.parametrize("nbits", [1, 2, 4, 8])
    def test_every_bit_is_used_once(self, layout: Layout, nbits: int) -> None:
        locations = list(layout(96, nbits))
        width = 8 if nbits == 8 else 16
        bits = sorted(word * width + shift for word, shift, _, _ in locations)
        assert bits == list(range(0, 64 * 96 * nbits, nbits))
        assert len({(slot, channel) for _, _, slot, channel in locations}) == 64 * 96

    @pytest.mark.parametrize(
        ("nbits", "slot", "channel", "byte", "value"),
        [
            # 4 bits, D = 64, half = 32: word[i][tau][hw] at byte 2 ((i 16 + tau) 2 + hw), shift 4 k.
            (4, 0, 0, 0, 0x01),
            (4, 0, 32, 2, 0x01),  # the other half: hw = 1
            (4, 1, 0, 4, 0x01),  # tau = 1
            (4, 16, 0, 0, 0x10),  # k = 1
            (4, 48, 0, 1, 0x10),  # k = 3: bits 12..15, the high byte
            (4, 33, 5, 2 * ((5 * 16 + 1) * 2) + 1, 0x01),  # i = 5, tau = 1, k = 2: bit 8
            # 2 bits: word[j][tau][hw], channel 2 j + p + 32 hw, shift 8 p + 2 k.
            (2, 16, 0, 0, 0x04),
            (2, 0, 1, 1, 0x01),  # p = 1
            (2, 50, 35, 2 * ((1 * 16 + 2) * 2 + 1) + 1, 0x40),  # j = 1, p = 1, hw = 1, tau = 2, k = 3: bit 14
            # 1 bit: channel 4 j + p + 32 hw, shift 4 p + k.
            (1, 32, 3, 1, 0x40),  # p = 3, k = 2: bit 14
            (1, 0, 36, 2 * (1 * 32 + 1), 0x01),  # j = 1, hw = 1
            # 8 bits: byte[d/4][slot/16][slot%16][d%4].
            (8, 17, 6, 1 * 256 + 1 * 64 + 1 * 4 + 2, 0x01),
        ],
    )
    def test_key_addresses(self, nbits: int, slot: int, channel: int, byte: int, value: int) -> None:
        assert self.single_code(pack_keys, nbits, slot, channel, head_dim=64) == {byte: value}

    @pytest.mark.parametrize(
        ("nbits", "head_dim", "slot", "channel", "byte", "value"),
        [
            # 4 bits, D = 64: word[j][c][hw], 16-channel chunk k at shift 4 k.
            (4, 64, 1, 0, 2, 0x01),
            (4, 64, 0, 1, 4, 0x01),
            (4, 64, 0, 16, 0, 0x10),
            (4, 64, 5, 50, 2 * ((2 * 16 + 2) * 2 + 1) + 1, 0x10),  # j = 2, hw = 1, k = 3, c = 2: bit 12
            (4, 128, 0, 64, 64, 0x01),  # v = 1: the next 32 words
            # 2 bits, D = 64: a word holds the chunks of two slot pairs.
            (2, 64, 0, 48, 0, 0x40),  # chunk 3: bit 6
            (2, 64, 2, 0, 1, 0x01),  # slot pair 1: chunk 4, bit 8
            (2, 64, 4, 0, 64, 0x01),  # slot pair 2: the next 32 words
            # 2 bits, D = 128: one word for the eight chunks of a slot pair.
            (2, 128, 2, 0, 64, 0x01),
            # 4 bits, D = 80: five chunks in a pair, so words straddle slot pairs.
            (4, 80, 0, 64, 64, 0x01),  # m = 4: word 1, position 0
            (4, 80, 2, 0, 64, 0x10),  # m = 5: word 1, position 1
            # 8 bits: byte[slot/4][ch/16][ch%16][slot%4].
            (8, 64, 6, 18, 1 * 256 + 1 * 64 + 2 * 4 + 2, 0x01),
        ],
    )
    def test_value_addresses(
        self, nbits: int, head_dim: int, slot: int, channel: int, byte: int, value: int
    ) -> None:
        assert self.single_code(pack_values, nbits, slot, channel, head_dim) == {byte: value}

    def test_three_bits_are_two_planes(self) -> None:
        codes = torch.randint(8, (64, 32))
        for pack in (pack_keys, pack_values):
            planes = pack((codes % 4).tolist(), 2) + pack((codes // 4).tolist(), 1)
            assert pack(codes.tolist(), 3) == planes

    @staticmethod
    def single_code(pack: Packer, nbits: int, slot: int, channel: int, head_dim: int) -> dict[int, int]:
        """Packs a block that is zero but for a code of 1; returns the bytes that are not zero."""
        codes = [[0] * head_dim for _ in range(64)]
        codes[slot][channel] = 1
        return {index: byte for index, byte in enumerate(pack(codes, nbits)) if byte}
