// q.k of 64 packed tokens on the tensor core, by one warp, where a token has several scales, each of as many
// neighbouring channels: signed codes of 8 bits, times their scale in fp16.
//
// About 3.6 instructions per code, by count; not measured.
#pragma once

#include "key_units.cuh"

namespace kvcache {

// Bytes 0, 1 (`upper` false) or 2, 3 of a word, less 128, as exact numbers: 1024 and a byte are one number.
KVCACHE_DEVICE uint32_t signed_bytes(uint32_t word, bool upper) {
  return half2_add(permute_bytes(word, kHalf1024, upper ? 0x5352u : 0x5150u), kMinus1152);
}

// `groups` of whole steps; `c` is [column][tile].
template <int kColumns>
KVCACHE_DEVICE void grouped_key_products(const KeyUnit& unit, int groups, float (&c)[kColumns][4][4]) {
  const int lane = opaque_lane(), g = lane / 4, t = lane % 4, row = 2 * groups;
  const uint8_t* scales = unit.scale + 2 * g * row;
#pragma unroll 1
  for (int step = 0, left = unit.steps / groups; step < unit.steps; ++step) {
    uint2 queries[kColumns];
#pragma unroll
    for (int n = 0; n < kColumns; ++n) queries[n] = unit.fragments[(n * unit.steps + step) * 32 + lane];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint2 words = load_8(unit.codes, (16 * step + 4 * t) * kBlockTokens + 64 * k + 8 * g, unit.swizzle);
      const uint32_t even = load_2(scales + 16 * k * row) * 0x10001u;  // of two neighbouring tokens, twice
      const uint32_t odd = load_2(scales + (16 * k + 1) * row) * 0x10001u;
      const uint32_t a[4] = {
          half2_multiply(signed_bytes(words.x, false), even), half2_multiply(signed_bytes(words.y, false), odd),
          half2_multiply(signed_bytes(words.x, true), even), half2_multiply(signed_bytes(words.y, true), odd)};
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
        multiply_accumulate(c[n][k], a[0], a[1], a[2], a[3], queries[n].x, queries[n].y);
    }
    if (--left == 0) {  // the next group
      left = unit.steps / groups;
      scales += 2;
    }
  }
  scale_rows(unit.row_scale, c);
}

}  // namespace kvcache
