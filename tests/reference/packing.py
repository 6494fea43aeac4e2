"""The bit order of packed codes, one code at a time.

A block holds the codes of 64 consecutive slots (tokens) of one row and one kv head, `codes[slot][channel]` of
shape `(64, D)` with `D` a multiple of 16. Packed, it is a flat run of little-endian 16-bit words (1, 2 and 4
bits) or of bytes (8 bits). Three bits are a 2-bit plane of the two low bits followed by a 1-bit plane of the
high bit.

The `*_map` functions below *are* the layout: they say in which word, and at which bit of it, each code lies.
Packing and unpacking only follow them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

__all__ = ["BLOCK_SLOTS", "key_map", "pack_keys", "pack_values", "unpack_keys", "unpack_values", "value_map"]

BLOCK_SLOTS = 64

Codes = Sequence[Sequence[int]]
Location = tuple[int, int, int, int]
"""(word index, bit shift inside the word, slot, channel)."""


def key_map(head_dim: int, nbits: int) -> Iterator[Location]:
    """Where the codes of a key block lie.

    Tokens run along the words; two neighbouring words hold the two halves of the head. For `nbits` 1, 2 and
    4, with `per_word = 4 / nbits` channels in a word and `half = D / 2`::

        word[j][tau][hw] = sum over p < per_word, k < 4 of
                           code[slot 16 k + tau][channel per_word j + p + hw half] << nbits (4 p + k)

    For 8 bits, `byte[channel / 4][slot / 16][slot % 16][channel % 4]`.

    Args:
        head_dim: Number of channels, a multiple of 16.
        nbits: 1, 2, 4 (16-bit words) or 8 (bytes).

    Yields:
        `(word, shift, slot, channel)`, once for every code.
    """
    if nbits == 8:
        for slot in range(BLOCK_SLOTS):
            for channel in range(head_dim):
                yield ((channel // 4) * 4 + slot // 16) * 64 + (slot % 16) * 4 + channel % 4, 0, slot, channel
        return
    half = head_dim // 2
    per_word = 4 // nbits
    for j in range(half // per_word):
        for tau in range(16):
            for hw in range(2):
                word = (j * 16 + tau) * 2 + hw
                for p in range(per_word):
                    for k in range(4):
                        yield word, nbits * (4 * p + k), 16 * k + tau, per_word * j + p + hw * half


def value_map(head_dim: int, nbits: int) -> Iterator[Location]:
    """Where the codes of a value block lie.

    Channels run along the words; two neighbouring words hold two consecutive slots. For `nbits` 1, 2 and 4,
    slot pair `j` (slots `2 j` and `2 j + 1`) and 16-channel chunk `u` have the running number `m = j (D / 16)
    + u`, and a word takes `per_word = 16 / nbits` of them::

        word[m / per_word][c][hw] |= code[slot 2 j + hw][channel 16 u + c] << nbits (m % per_word)

    For 8 bits, `byte[slot / 4][channel / 16][channel % 16][slot % 4]`.

    Args:
        head_dim: Number of channels, a multiple of 16.
        nbits: 1, 2, 4 (16-bit words) or 8 (bytes).

    Yields:
        `(word, shift, slot, channel)`, once for every code.
    """
    chunks = head_dim // 16
    if nbits == 8:
        for slot in range(BLOCK_SLOTS):
            for channel in range(head_dim):
                chunk = (slot // 4) * chunks + channel // 16
                yield chunk * 64 + (channel % 16) * 4 + slot % 4, 0, slot, channel
        return
    per_word = 16 // nbits
    for j in range(BLOCK_SLOTS // 2):
        for u in range(chunks):
            m = j * chunks + u
            for c in range(16):
                for hw in range(2):
                    word = ((m // per_word) * 16 + c) * 2 + hw
                    yield word, nbits * (m % per_word), 2 * j + hw, 16 * u + c


def pack_keys(codes: Codes, nbits: int) -> bytes:
    """Packs a block of key codes.

    Args:
        codes: `(64, D)` integers in `0 .. 2**nbits - 1` (nested sequences, an array or a tensor).
        nbits: 1, 2, 3, 4 or 8.

    Returns:
        `8 * nbits * D` bytes.
    """
    return _pack(codes, nbits, key_map)


def pack_values(codes: Codes, nbits: int) -> bytes:
    """Packs a block of value codes; arguments and result as in `pack_keys`."""
    return _pack(codes, nbits, value_map)


def unpack_keys(data: bytes, head_dim: int, nbits: int) -> list[list[int]]:
    """Inverse of `pack_keys`: the `(64, head_dim)` codes as nested lists."""
    return _unpack(data, head_dim, nbits, key_map)


def unpack_values(data: bytes, head_dim: int, nbits: int) -> list[list[int]]:
    """Inverse of `pack_values`: the `(64, head_dim)` codes as nested lists."""
    return _unpack(data, head_dim, nbits, value_map)


def _pack(codes: Codes, nbits: int, layout: Callable[[int, int], Iterator[Location]]) -> bytes:
    rows = [[int(code) for code in row] for row in codes]
    head_dim = len(rows[0])
    if nbits == 3:
        low = [[code & 0b011 for code in row] for row in rows]
        high = [[code >> 2 for code in row] for row in rows]
        return _pack(low, 2, layout) + _pack(high, 1, layout)
    word_bytes = 1 if nbits == 8 else 2
    words = [0] * (BLOCK_SLOTS * head_dim * nbits // (8 * word_bytes))
    for word, shift, slot, channel in layout(head_dim, nbits):
        words[word] |= rows[slot][channel] << shift
    return b"".join(word.to_bytes(word_bytes, "little") for word in words)


def _unpack(
    data: bytes, head_dim: int, nbits: int, layout: Callable[[int, int], Iterator[Location]]
) -> list[list[int]]:
    if nbits == 3:
        split = BLOCK_SLOTS * head_dim * 2 // 8
        low = _unpack(data[:split], head_dim, 2, layout)
        high = _unpack(data[split:], head_dim, 1, layout)
        return [[a | b << 2 for a, b in zip(*rows, strict=True)] for rows in zip(low, high, strict=True)]
    word_bytes = 1 if nbits == 8 else 2
    codes = [[0] * head_dim for _ in range(BLOCK_SLOTS)]
    for word, shift, slot, channel in layout(head_dim, nbits):
        value = int.from_bytes(data[word * word_bytes : (word + 1) * word_bytes], "little")
        codes[slot][channel] = value >> shift & (1 << nbits) - 1
    return codes
