// q.k of 64 packed tokens on the tensor core, by one warp, where keys still need the rotation inside their block: codes
// become fp16 numbers in registers, metadata per channel are one multiply-add per pair, and the rotation three more.
// 5.4 to 6.4 instructions per code, of 3 bits 0.8 more, by count in the machine code for sm_90; not measured.
#pragma once

#include "key_units.cuh"

namespace kvcache {

// x = (a, b) -> (a cos - b sin, b cos + a sin)
KVCACHE_DEVICE uint32_t rotated(uint32_t x, uint32_t cosines, uint32_t sines) {
  return half2_fma(permute_bytes(x, x, 0x1032), sines, half2_multiply(x, cosines));
}

// Codes of 2, 3 or 4 bits: a word holds a pair of channels (i, i + D / 2), or (2i, 2i + 1), of four tiles. `kRows`: of
// metadata per channel in a block; 2 for one or two, of which one is loaded twice, and 4.
template <int kBits, int kRows, int kColumns>
KVCACHE_DEVICE void rotated_key_products(const KeyUnit& unit, float (&c)[kColumns][4][4]) {
  const int lane = opaque_lane(), g = lane / 4, t = lane % 4;
  const uint4* turns[4];  // of the even token of this lane in every tile
#pragma unroll
  for (int k = 0; k < 4; ++k)
    turns[k] = unit.rotations + ((unit.phase + 16 * k) % unit.period + 2 * g) * unit.rotation_row + t;
#pragma unroll 1
  for (int step = 0; step < unit.steps; ++step) {
    const int pair = 8 * step + 2 * t;  // this lane's pairs are `pair` and the next
    uint2 first, second{0, 0}, high{0, 0};
    if (kBits == 4) {
      first = load_8(unit.codes, pair * 64 + 8 * g, unit.swizzle);
      second = load_8(unit.codes, pair * 64 + 64 + 8 * g, unit.swizzle);
    } else {
      first = load_8(unit.codes, pair * 32 + 8 * g, unit.swizzle);
      if (kBits == 3)
        high = load_8(unit.codes, unit.dim * kBlockTokens / 4 + pair / 4 * 64 + 8 * g, unit.swizzle);
    }
    uint2 queries[kColumns];
    for (int n = 0; n < kColumns; ++n) queries[n] = unit.fragments[(n * unit.steps + step) * 32 + lane];
    Nibbles even{0, 0}, odd{0, 0};  // of the even and the odd token
    if (kBits == 3) {
      even = spread<3>(first.x, high_bits(high.x, t % 2));
      odd = spread<3>(first.y, high_bits(high.y, t % 2));
    }
    uint2 scale{0, 0}, minimum{0, 0};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint32_t a[4];
      if (kBits == 4) {
        a[0] = four_bits(first.x, k);
        a[1] = four_bits(first.y, k);
        a[2] = four_bits(second.x, k);
        a[3] = four_bits(second.y, k);
      } else if (kBits == 2) {
        a[0] = two_bits(first.x, k);
        a[1] = two_bits(first.y, k);
        a[2] = two_bits(first.x >> 8, k);
        a[3] = two_bits(first.y >> 8, k);
      } else {
        a[0] = three_bits(even, 0, k);
        a[1] = three_bits(odd, 0, k);
        a[2] = three_bits(even, 1, k);
        a[3] = three_bits(odd, 1, k);
      }
      if (k % (4 / kRows) == 0) {
        scale = load_channels(unit, unit.scale, k >> unit.tile_shift, pair);
        minimum = load_channels(unit, unit.minimum, k >> unit.tile_shift, pair);
      }
      a[0] = half2_fma(a[0], scale.x, minimum.x);
      a[1] = half2_fma(a[1], scale.x, minimum.x);
      a[2] = half2_fma(a[2], scale.y, minimum.y);
      a[3] = half2_fma(a[3], scale.y, minimum.y);
      const uint4 even_turn = turns[k][4 * step], odd_turn = turns[k][4 * step + unit.rotation_row];
      a[0] = rotated(a[0], even_turn.x, even_turn.y);
      a[1] = rotated(a[1], odd_turn.x, odd_turn.y);
      a[2] = rotated(a[2], even_turn.z, even_turn.w);
      a[3] = rotated(a[3], odd_turn.z, odd_turn.w);
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
        multiply_accumulate(c[n][k], a[0], a[1], a[2], a[3], queries[n].x, queries[n].y);
    }
  }
  scale_rows(unit.row_scale, c);
}

}  // namespace kvcache
