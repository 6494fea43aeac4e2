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

KVCACHE_DEVICE uint2 load_8(const uint8_t* codes, int offset, int swizzle) {
  return *reinterpret_cast<const uint2*>(codes + swizzled(offset, swizzle));
}
KVCACHE_DEVICE uint32_t load_4(const uint8_t* from) { return *reinterpret_cast<const uint32_t*>(from); }
KVCACHE_DEVICE uint32_t load_2(const uint8_t* from) { return *reinterpret_cast<const uint16_t*>(from); }

// Folds `count` numbers of a field that begins at a multiple of 16 bytes, those of this lane, two at a time; 0 where it
// has none. `kAreEights`: `count` is a multiple of eight. `kIsKnown`: the compiler knows `count`.
template <bool kAreEights, bool kIsKnown, typename Fold>
KVCACHE_DEVICE uint32_t fold_field(const uint8_t* field, int count, Fold fold) {
  const int lane = opaque_lane();
  if (!kIsKnown) count = opaque(count);
  uint32_t found = 0;
#pragma unroll(kIsKnown ? 4 : 1)
  for (int offset = 16 * lane; offset + 16 <= 2 * count; offset += 512) {
    const uint4 words = *reinterpret_cast<const uint4*>(field + offset);
    found = fold(fold(found, fold(words.x, words.y)), fold(words.z, words.w));
  }
  if (!kAreEights && lane < count % 8) found = fold(found, load_2(field + (count / 8 * 8 + lane) * 2));
  return found;
}

// Codes k = 0 .. 3 of 4 bits in each half of a word, as exact numbers. A code in the low bits of 1024's mantissa is
// added to it; one four bits higher is added to 64.
KVCACHE_DEVICE uint32_t four_bits(uint32_t word, int k) {
  const uint32_t bits = word >> (k / 2 * 8);
  return k % 2 == 0 ? half2_add(and_or(bits, 0x000F000Fu, kHalf1024), kMinus1024)
                    : half2_add(and_or(bits, 0x00F000F0u, 0x54005400u), 0xD400D400u);
}

// Codes k = 0 .. 3 of 2 bits in the low byte of each half.
KVCACHE_DEVICE uint32_t two_bits(uint32_t bits, int k) {
  switch (k) {
    case 0:
      return half2_add(and_or(bits, 0x00030003u, kHalf1024), kMinus1024);
    case 1:
      return half2_add(and_or(bits, 0x000C000Cu, 0x5C005C00u), 0xDC00DC00u);  // 256
    case 2:
      return half2_add(and_or(bits, 0x00300030u, 0x54005400u), 0xD400D400u);  // 64
    default:
      return half2_add(and_or(bits, 0x00C000C0u, 0x4C004C00u), 0xCC00CC00u);  // 16
  }
}

// Codes of 2 or 3 bits, four to a byte, as nibbles: those of places 0 and 2 of every byte, and of places 1 and 3.
struct Nibbles {
  uint32_t even, odd;
};

// `high`: of every byte the third bits of its codes, in the low nibble; whatever else it holds is ignored.
template <int kBits>
KVCACHE_DEVICE Nibbles spread(uint32_t word, uint32_t high) {
  uint32_t even = word & 0x33333333u, odd = word >> 2 & 0x33333333u;
  if (kBits == 3) {
    // both bits of a byte move by one product: to bits 2 and 6, and to bits 4 and 5, which are dropped
    even = and_or((high & 0x05050505u) * 0x14u, 0x44444444u, even);
    odd = and_or((high & 0x0A0A0A0Au) * 0x0Au, 0x44444444u, odd);
  }
  return {even, odd};
}

// Codes k = 0 .. 3 of 3 bits of the lower bytes of both halves (`upper` 0), or of the upper ones, as exact numbers.
KVCACHE_DEVICE uint32_t three_bits(const Nibbles& codes, int upper, int k) {
  return four_bits(k % 2 == 0 ? codes.even : codes.odd, 2 * upper + k / 2);
}

// The third bits of four bytes of codes: nibbles `2 parity` and the next of both halves of a word of the plane of 1
// bit, as low nibbles of bytes in the order of the plane of 2 bits.
KVCACHE_DEVICE uint32_t high_bits(uint32_t plane, int parity) {
  return permute_bytes(plane, plane >> 4, parity == 0 ? 0x6240u : 0x7351u);
}

// The same codes as subnormal fp16 numbers, which is what their bits are once masked out of a word: k = 0 .. 3 of 2 or
// 4 bits in each half (of 2 bits: in its low byte).
template <int kBits>
KVCACHE_DEVICE uint32_t subnormal_codes(uint32_t word, int k) {
  if (kBits == 4) return word >> (k / 2 * 8) & (k % 2 == 0 ? 0x000F000Fu : 0x00F000F0u);
  return word & 0x00030003u << 2 * k;
}
KVCACHE_DEVICE uint32_t subnormal_three(const Nibbles& codes, int upper, int k) {
  return subnormal_codes<4>(k % 2 == 0 ? codes.even : codes.odd, 2 * upper + k / 2);
}

// Bytes 0, 1 (`upper` false) or 2, 3 of a word: subnormal numbers, or 8-bit floats, of which e4m3 comes 2^8 too small.
template <int kFormat>
KVCACHE_DEVICE uint32_t subnormal_bytes(uint32_t word, bool upper) {
  if (kFormat == kE4M3 || kFormat == kE5M2) {
    const uint32_t bits = permute_bytes(word, 0, upper ? 0x3424 : 0x1404);
    if (kFormat == kE5M2) return bits;
    return and_or(bits >> 1, 0x3F803F80u, bits & 0x80008000u);
  }
  return permute_bytes(word, 0, upper ? 0x4342 : 0x4140);
}

// What a code must be multiplied by after `subnormal_codes`, `_three` or `_bytes` at place k.
template <int kBits, int kFormat>
KVCACHE_DEVICE constexpr float place_of(int k) {
  if (kFormat == kE4M3 || kFormat == kE5M2) return 1.0f;
  const int shift = kBits == 4 ? k % 2 * 4 : kBits == 3 ? k % 4 / 2 * 4 : kBits == 2 ? k % 4 * 2 : 0;
  return static_cast<float>(1 << (24 - shift));
}

// Scales per channel meet the queries (scaled_keys.cuh), which no scale may take out of the range of fp16: the largest
// number of a query row becomes 2^size to 2^(size + 1), less than 1 then. Where codes of 8 bits have such scales, keys
// of a thousandth would be lost in fp16's subnormal numbers: there are large queries and small ones.
constexpr int kQueryShift = 14;  // between these
KVCACHE_BOTH bool has_channel_scales(const Side& keys) {
  return keys.width > 1 && keys.format == kAffine && keys.cos == nullptr;
}
KVCACHE_BOTH bool has_two_sizes(const Side& keys) { return has_channel_scales(keys) && keys.nbits == 8; }
KVCACHE_BOTH int query_size(const Side& keys) {
  return has_channel_scales(keys) && keys.nbits < 8 ? -1 : kQueryShift - 1;
}

// Dynamic shared memory of the fast path, in bytes from its start. The ring is first, so that its places, which are
// needed most, are worked out quickest.
struct FastMemory {
  int fragments, small_fragments, row_scale, row_sum, rotations, weights, sinks_end, bytes;
  int rotation_stride;  // entries of 8 bytes

  KVCACHE_BOTH static int aligned(int bytes) { return (bytes + 127) / 128 * 128; }

  KVCACHE_BOTH FastMemory(const AttentionArguments& a, int columns) {
    fragments = a.ring_bytes;
    small_fragments = fragments + columns * a.key.head_dim / 16 * 256;
    row_scale = small_fragments + (has_two_sizes(a.key) ? small_fragments - fragments : 0);
    row_sum = row_scale + 4 * kMostRows;
    rotations = row_sum + 4 * kMostRows;
    rotation_stride = a.key.head_dim / 2 + 4;
    weights = rotations + (a.key.cos != nullptr ? aligned(a.key.period * rotation_stride * 8) : 0);
    sinks_end = weights + kWarps * columns * 1024;
    bytes = sinks_end + (a.key.sink_length > 0 ? 16 : 0);
  }
};

}  // namespace kvcache
