// q.k of 64 packed tokens on the tensor core, by one warp, where keys need no rotation: with a scale and a minimum per
// channel and group of tokens,
//
//     q.k = sum over channels (q s) code + sum over channels q m,
//
// so that scales meet the queries, of which there are fewer than of codes, and minima are a product of their own with
// one row per group. What is left to do for a code is to be masked out of its word: as an fp16 number that is
// subnormal, code 2^-24 (or a little larger: `place_of`), which tensor cores multiply exactly. Scales per token, and
// all powers of two, are applied to the products.
//
// About 1 instruction per code of 2, 4 or 8 bits without metadata per channel, 1.2 to 1.6 with one row of them and 1.4
// to 1.9 with two; of 3 bits one more. By count in the machine code for sm_90; not measured.
#pragma once

#include "key_units.cuh"

namespace kvcache {

// Rows of scales of up to 2 leave queries of up to 2^14 in the range of fp16; beyond, the small ones are taken.
KVCACHE_DEVICE bool has_large_scales(const KeyUnit& unit, int rows) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(unit.scale);
  uint32_t seen = 0;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < rows * unit.dim / 2; i += 32) seen |= words[i];
  return warp_any((seen & 0x40004000u) != 0);  // the highest bit of an exponent: 2 or more
}

// The queries of one step and column, and times the scales of every row.
template <int kRows, int kColumns>
struct ScaledQueries {
  uint2 of[kRows > 0 ? kRows : 1][kColumns];

  KVCACHE_DEVICE void scale(int row, uint2 scales, const uint2 (&queries)[kColumns]) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
      of[row][n] = {half2_multiply(queries[n].x, scales.x), half2_multiply(queries[n].y, scales.y)};
  }
};

// The codes of a lane, step by step, as `a` of tile k; see `place_of`. Two steps repeat the pattern in which codes are
// spread over the banks, so that a lane's places are known but for a multiple of that.
template <int kBits, int kFormat>
struct LaneKeys {
  static constexpr int kSwizzle = kBits == 8 ? 4 : 3, kStepBytes = 16 * kBlockTokens * (kBits == 3 ? 2 : kBits) / 8;
  const uint8_t *low[2], *high[2];  // of an even and an odd step: both words, of 8 bits tiles 0 and 1
  uint2 first, second;
  Nibbles even, odd;  // 3 bits: of the even and the odd token
  uint2 words[4];     // 8 bits

  KVCACHE_DEVICE LaneKeys(const KeyUnit& unit, int g, int t) {
#pragma unroll
    for (int odd_step = 0; odd_step < 2; ++odd_step) {
      const int at = odd_step * kStepBytes + t * (kStepBytes / 4) + 8 * g;
      low[odd_step] = unit.codes + swizzled(at, kSwizzle);
      high[odd_step] = unit.codes + swizzled(at + 64, kSwizzle);
    }
  }
  // `odd_step` is step % 2, known where loops are unrolled.
  KVCACHE_DEVICE void load(const KeyUnit& unit, int step, int odd_step, int g, int t) {
    const int at = (step - odd_step) * kStepBytes;
    first = *reinterpret_cast<const uint2*>(low[odd_step] + at);
    if (kBits == 8) {
      words[0] = first;
      words[1] = *reinterpret_cast<const uint2*>(high[odd_step] + at);
      words[2] = *reinterpret_cast<const uint2*>(low[odd_step] + at + 128);  // beyond the bits that are exchanged
      words[3] = *reinterpret_cast<const uint2*>(high[odd_step] + at + 128);
    } else if (kBits == 4) {
      second = *reinterpret_cast<const uint2*>(high[odd_step] + at);
    } else if (kBits == 3) {
      const int plane = unit.dim * kBlockTokens / 4 + (8 * step + 2 * t) / 4 * 64 + 8 * g;
      const uint2 third = load_8(unit.codes, plane, kSwizzle);
      even = spread<3>(first.x, high_bits(third.x, t % 2));
      odd = spread<3>(first.y, high_bits(third.y, t % 2));
    } else {
      second = {first.x >> 8, first.y >> 8};
    }
  }
  KVCACHE_DEVICE void unpack(int k, uint32_t (&a)[4]) const {
    if (kBits == 8) {
      a[0] = subnormal_bytes<kFormat>(words[k].x, false);
      a[1] = subnormal_bytes<kFormat>(words[k].y, false);
      a[2] = subnormal_bytes<kFormat>(words[k].x, true);
      a[3] = subnormal_bytes<kFormat>(words[k].y, true);
    } else if (kBits == 3) {
      a[0] = subnormal_three(even, 0, k);
      a[1] = subnormal_three(odd, 0, k);
      a[2] = subnormal_three(even, 1, k);
      a[3] = subnormal_three(odd, 1, k);
    } else {
      a[0] = subnormal_codes<kBits>(first.x, k);
      a[1] = subnormal_codes<kBits>(first.y, k);
      a[2] = subnormal_codes<kBits>(second.x, k);
      a[3] = subnormal_codes<kBits>(second.y, k);
    }
  }
};

// `kRows`: of metadata per channel in a block, 0 for none. `c` is [column][tile].
template <int kBits, int kFormat, int kRows, int kColumns>
KVCACHE_DEVICE void scaled_key_products(const KeyUnit& unit, float (&c)[kColumns][4][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const bool is_large = kRows > 0 && has_large_scales(unit, kRows);
  const uint2* const fragments = is_large ? unit.small_fragments : unit.fragments;
  float minima[kColumns][4] = {};
  LaneKeys<kBits, kFormat> codes(unit, g, t);
  const auto multiply_step = [&](int step, int odd_step) {
    codes.load(unit, step, odd_step, g, t);
    uint2 queries[kColumns];
    ScaledQueries<kRows, kColumns> scaled;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) queries[n] = fragments[(n * unit.steps + step) * 32 + lane];
    if (kRows > 0) {
      // of 8 bits a lane's channels are four neighbours
      const auto channels = [&](const uint8_t* field, int row) {
        if (kBits == 8) return *reinterpret_cast<const uint2*>(field + (row * unit.dim + 16 * step + 4 * t) * 2);
        return load_channels(unit, field, row, 8 * step + 2 * t);
      };
#pragma unroll
      for (int row = 0; row < kRows; ++row) scaled.scale(row, channels(unit.scale, row), queries);
      const uint2 least = channels(unit.minimum, g % (kRows > 0 ? kRows : 1));  // row g of the product: group g
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
        multiply_accumulate(minima[n], least.x, least.x, least.y, least.y, queries[n].x, queries[n].y);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint32_t a[4];
      codes.unpack(k, a);
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        const uint2 b = kRows > 0 ? scaled.of[k * kRows / 4][n] : queries[n];
        multiply_accumulate(c[n][k], a[0], a[1], a[2], a[3], b.x, b.y);
      }
    }
  };
#pragma unroll 1
  for (int step = 0; step + 1 < unit.steps; step += 2) {
    multiply_step(step, 0);
    multiply_step(step + 1, 1);
  }
  if (unit.steps % 2 != 0) multiply_step(unit.steps - 1, 0);
  const float grow = is_large ? static_cast<float>(1 << kQueryShift) : 1.0f;
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float place = place_of<kBits, kFormat>(k) * grow;
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        float added = 0.0f;
        if (kRows > 0) added = shuffle(minima[n][column], k * kRows / 4 * 4 + t) * grow;
        if (kFormat == kSymmetric) added = -128.0f * unit.row_sum[8 * n + 2 * t + column];
        c[n][k][column] = fmaf(c[n][k][column], place, added);
        c[n][k][column + 2] = fmaf(c[n][k][column + 2], place, added);
      }
    }
  }
}

}  // namespace kvcache
