// What a lane of the fast path knows: its place in the fragments of the tensor core, the parts of shared memory, and
// how codes become fp16 numbers in registers.
//
// Tokens, keys, values and weights meet in this order (g = lane / 4, t = lane % 4, k = 0 .. 3 the 16-token tile):
//
//     q.k   tokens are the rows of `a`: row g is token 16k + 2g, row g + 8 the next; so a lane's 8 neighbouring bytes
//           of the key codes (two tokens) are its a[0], a[1] of all four tiles.
//     p.v   channels are the rows: row g of tile u is channel 16u + 2g, row g + 8 the next; tokens are the columns:
//           2t, 2t + 1 are tokens 16k + 4t, + 1, the columns 8 further tokens 16k + 4t + 2, + 3.
//
// The order of the reduced index is free as long as both factors agree, which is what makes the layout of the codes,
// made for vectors of tokens and of channels, fit: a 32-bit lane of it is a pair of neighbours of the reduced index.
#pragma once

#include "query_rows.cuh"

namespace kvcache {

constexpr uint32_t kHalf1024 = 0x64006400u, kMinus1024 = 0xE400E400u;
constexpr uint32_t kMinus1152 = 0xE480E480u;  // 1024 + 128

// Byte `offset` of the codes in shared memory. Lanes of different t would meet in the same banks; the XOR spreads
// them. Copies write 16 bytes at a time, loads read 8, and both stay together.
KVCACHE_BOTH int swizzled(int offset, int swizzle) { return offset ^ ((offset >> (4 + swizzle) & 3) << 5); }

KVCACHE_DEVICE uint2 load_8(const uint8_t* codes, int offset, int swizzle) {
  return *reinterpret_cast<const uint2*>(codes + swizzled(offset, swizzle));
}
KVCACHE_DEVICE uint32_t load_4(const uint8_t* from) { return *reinterpret_cast<const uint32_t*>(from); }
KVCACHE_DEVICE uint32_t load_2(const uint8_t* from) { return *reinterpret_cast<const uint16_t*>(from); }

// Codes k = 0 .. 3 of 4 bits in each half of a word, as exact numbers. A code in the low bits of 1024's mantissa is
// added to it; one four bits higher is added to 64.
KVCACHE_DEVICE uint32_t four_bits(uint32_t word, int k) {
  const uint32_t bits = word >> (k / 2 * 8);
  return k % 2 == 0 ? half2_add((bits & 0x000F000Fu) | kHalf1024, kMinus1024)
                    : half2_add((bits & 0x00F000F0u) | 0x54005400u, 0xD400D400u);
}

// Codes k = 0 .. 3 of 2 bits in the low byte of each half.
KVCACHE_DEVICE uint32_t two_bits(uint32_t bits, int k) {
  switch (k) {
    case 0:
      return half2_add((bits & 0x00030003u) | kHalf1024, kMinus1024);
    case 1:
      return half2_add((bits & 0x000C000Cu) | 0x5C005C00u, 0xDC00DC00u);  // 256
    case 2:
      return half2_add((bits & 0x00300030u) | 0x54005400u, 0xD400D400u);  // 64
    default:
      return half2_add((bits & 0x00C000C0u) | 0x4C004C00u, 0xCC00CC00u);  // 16
  }
}

KVCACHE_DEVICE uint32_t small_codes(uint32_t codes) { return half2_add(codes | kHalf1024, kMinus1024); }

// Bytes 0, 1 (`upper` false) or 2, 3 of a word as numbers; e4m3 comes 2^8 too small.
template <int kFormat>
KVCACHE_DEVICE uint32_t eight_bits(uint32_t word, bool upper) {
  if (kFormat == kE4M3 || kFormat == kE5M2) {
    const uint32_t bits = permute_bytes(word, 0, upper ? 0x3424 : 0x1404);
    if (kFormat == kE5M2) return bits;
    return (bits & 0x80008000u) | ((bits & 0x7F007F00u) >> 1);
  }
  const uint32_t bits = permute_bytes(word, kHalf1024, upper ? 0x5352 : 0x5150);
  return half2_add(bits, kFormat == kSymmetric ? kMinus1152 : kMinus1024);
}

// Dynamic shared memory of the fast path, in bytes from its start.
struct FastMemory {
  int fragments, row_scale, row_sum, rotations, weights, ring, bytes;
  int rotation_stride;  // entries of 8 bytes

  KVCACHE_BOTH static int aligned(int bytes) { return (bytes + 127) / 128 * 128; }
  KVCACHE_BOTH static constexpr int slots() { return 3; }  // units of a warp in shared memory

  KVCACHE_BOTH FastMemory(const AttentionArguments& a, int columns) {
    fragments = 0;
    row_scale = fragments + columns * a.key.head_dim / 16 * 256;
    row_sum = row_scale + 4 * kMostRows;
    rotations = row_sum + 4 * kMostRows;
    rotation_stride = a.key.head_dim / 2 + 4;
    weights = rotations + (a.key.cos != nullptr ? aligned(a.key.period * rotation_stride * 8) : 0);
    ring = weights + kWarps * columns * 1024;
    const int units = kWarps * slots() * a.unit_bytes, results = 4 * 8 * columns * (a.value.head_dim + 2);
    bytes = ring + (units > results ? units : results);
  }
};

}  // namespace kvcache
