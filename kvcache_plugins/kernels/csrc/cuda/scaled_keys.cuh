// q.k of 64 packed tokens on the tensor core, by one warp, where keys need no rotation: with a scale and a minimum per
// channel and group of tokens,
//
//     q.k = sum over channels (q s) code + sum over channels q m,
//
// so that scales meet the queries, of which there are fewer than of codes, and minima are a product of their own with
// one row per group. What is left to do for a code is to be masked out of its word: as an fp16 number that is
// subnormal, code 2^-24 (or a little larger: `place_of`), which tensor cores multiply exactly (found of V100, T4 and
// A100 in PeerJ Comput. Sci. 7:e330; promised nowhere, so the check on a device would tell of another). Scales per
// token, and all powers of two, are applied to the products.
//
// 0.9 to 1 instruction per code of 2, 4 or 8 bits without metadata per channel; of 3 bits 0.8 more. By count in the
// machine code for sm_90, not measured; of whole blocks with such metadata, too, see known_attention.cuh.
#pragma once

#include "key_units.cuh"

namespace kvcache {

// Rows of scales of up to 2 leave queries of up to 2^14 in the range of fp16; beyond, the small ones are taken. Scales
// of 2 to 4 bits are not as small, and meet small queries alone.
KVCACHE_DEVICE bool has_large_scales(const KeyUnit& unit, int rows) {
  const uint32_t seen =
      fold_field<true, false>(unit.scale, rows * unit.dim, [](uint32_t x, uint32_t y) { return x | y; });
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

// The codes of a lane, two steps at a time, as `a` of tile k; see `place_of`. Two steps repeat the pattern in which
// codes are spread over the banks, so that a lane's places are known but for a multiple of that.
template <int kBits, int kFormat>
struct LaneKeys {
  static constexpr int kSwizzle = kBits == 8 ? 4 : 3, kStepBytes = 16 * kBlockTokens * (kBits == 3 ? 2 : kBits) / 8;
  const uint8_t *low[2], *high[2];  // of an even and an odd step: both words, of 8 bits tiles 0 and 1
  int plane;                        // of 3 bits: the highest bits of an even step, in bytes from the first code
  uint2 first, second;
  Nibbles even, odd;  // 3 bits: of the even and the odd token
  uint2 words[4];     // 8 bits

  KVCACHE_DEVICE LaneKeys(const KeyUnit& unit, int g, int t) {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const int at = which * kStepBytes + t * (kStepBytes / 4) + 8 * g;
      low[which] = unit.codes + swizzled(at, kSwizzle);
      high[which] = unit.codes + swizzled(at + 64, kSwizzle);
    }
    plane = unit.dim * kBlockTokens / 4 + t / 2 * 64 + 8 * g;
  }
  KVCACHE_DEVICE void load(const KeyUnit& unit, int which) {
    first = *reinterpret_cast<const uint2*>(low[which]);
    if (kBits == 8) {
      words[0] = first;
      words[1] = *reinterpret_cast<const uint2*>(high[which]);
      words[2] = *reinterpret_cast<const uint2*>(low[which] + 128);  // beyond the bits that are exchanged
      words[3] = *reinterpret_cast<const uint2*>(high[which] + 128);
    } else if (kBits == 4) {
      second = *reinterpret_cast<const uint2*>(high[which]);
    } else if (kBits == 3) {
      const int parity = static_cast<int>(threadIdx.x) % 2;  // of t
      const uint2 third = load_8(unit.codes, plane + 128 * which, kSwizzle);
      even = spread<3>(first.x, high_bits(third.x, parity));
      odd = spread<3>(first.y, high_bits(third.y, parity));
    } else {
      second = {first.x >> 8, first.y >> 8};
    }
  }
  KVCACHE_DEVICE void advance() {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      low[which] += 2 * kStepBytes;
      high[which] += 2 * kStepBytes;
    }
    plane += 256;
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

// The metadata of a lane's channels, step by step: four neighbours, since channels are not those of rotary pairs.
struct LaneChannels {
  const uint8_t* first;

  KVCACHE_DEVICE LaneChannels(const uint8_t* row, int t) : first(row + 8 * t) {}
  // Of a row that lies `further` bytes behind, `step` steps from here.
  KVCACHE_DEVICE uint2 load(int further, int step) const {
    return *reinterpret_cast<const uint2*>(first + further + 32 * step);
  }
  KVCACHE_DEVICE void advance(int steps) { first += 32 * steps; }
};

// `kRows`: of metadata per channel in a block, 0 for none; `kUnroll`: pairs of steps in a row. `c` is [column][tile].
template <int kBits, int kFormat, int kRows, int kUnroll, int kColumns>
KVCACHE_DEVICE void scaled_key_products(const KeyUnit& unit, float (&c)[kColumns][4][4]) {
  const int lane = opaque_lane(), g = lane / 4, t = lane % 4, row_bytes = 2 * unit.dim;
  const bool is_large = kRows > 0 && kBits == 8 && has_large_scales(unit, kRows);
  const uint2* fragments = (is_large ? unit.small_fragments : unit.fragments) + lane;
  float minima[kColumns][4] = {};
  LaneKeys<kBits, kFormat> codes(unit, g, t);
  LaneChannels scales(unit.scale, t);
  LaneChannels least(unit.minimum + (kRows > 1 ? g % kRows * row_bytes : 0), t);
  // The next step or, of two, the one after it, whose places are known from the first's.
  const auto multiply_step = [&](int which) {
    codes.load(unit, which);
    uint2 queries[kColumns];
    ScaledQueries<kRows, kColumns> scaled;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) queries[n] = fragments[(n * unit.steps + which) * 32];
    if (kRows > 0) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) scaled.scale(row, scales.load(row * row_bytes, which), queries);
      const uint2 numbers = least.load(0, which);  // row g of the product: group g; others are not looked at
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
        multiply_accumulate(minima[n], numbers.x, 0, numbers.y, 0, queries[n].x, queries[n].y);
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
#pragma unroll(kUnroll)
  for (int left = unit.steps / 2; left > 0; --left) {
    multiply_step(0);
    multiply_step(1);
    fragments += 64;
    codes.advance();
    if (kRows > 0) {
      scales.advance(2);
      least.advance(2);
    }
  }
  if (unit.steps % 2 != 0) multiply_step(0);
  const float grow = is_large ? static_cast<float>(1 << kQueryShift) : 1.0f;
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const int row = 8 * n + 2 * t + column;
      const float scale = unit.row_scale[row] * grow;
      const float least = minima[n][column] * scale;  // of group g
      float added = kFormat == kSymmetric ? -128.0f * unit.row_sum[row] : 0.0f;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (kRows > 0 && k * kRows % 4 == 0) added = shuffle(least, k * kRows / 4 * 4 + t);
        const float place = place_of<kBits, kFormat>(k) * scale;
        c[n][k][column] = fmaf(c[n][k][column], place, added);
        c[n][k][column + 2] = fmaf(c[n][k][column + 2], place, added);
      }
    }
  }
}

}  // namespace kvcache
