// q.k of 64 packed tokens on the tensor core, by one warp.
//
// Codes become fp16 numbers in registers. Metadata per channel is applied there too, one multiply-add per pair, and
// the rotation inside a block after it, three more; metadata per token is applied to the products. About 1.6
// instructions per code without rotation and 3.2 with it, by count; not measured.
#pragma once

#include "fast_lanes.cuh"

namespace kvcache {

// A unit of keys in shared memory: codes, then metadata.
struct KeyUnit {
  const uint8_t *codes, *scale, *minimum;  // `scale` or `minimum` null where there are none
  const uint2* fragments;                  // the queries as `b`, [columns][steps][lane]
  const uint4* rotations;                  // cos, cos, -sin, sin of two pairs: [period][pairs / 2], padded rows
  int rotation_row;                        // uint4 per row of `rotations`
  int phase, period;                       // of the first token of the block
  int steps, half, dim, swizzle;
  int row_shift;  // a row of metadata per channel serves 2^row_shift tiles
  bool interleaved;
};

// Metadata of the channels of a lane in one step, for the tokens of tile `k`: two pairs.
KVCACHE_DEVICE uint2 load_channels(const KeyUnit& unit, const uint8_t* field, int row, int pair) {
  const uint8_t* at = field + row * unit.dim * 2;
  if (unit.interleaved) return {load_4(at + 4 * pair), load_4(at + 4 * pair + 4)};
  const uint32_t low = load_4(at + 2 * pair), high = load_4(at + 2 * (pair + unit.half));
  return {permute_bytes(low, high, 0x5410), permute_bytes(low, high, 0x7632)};
}

// x = (a, b) -> (a cos - b sin, b cos + a sin)
KVCACHE_DEVICE uint32_t rotated(uint32_t x, uint32_t cosines, uint32_t sines) {
  return half2_fma(permute_bytes(x, x, 0x1032), sines, half2_multiply(x, cosines));
}

// Codes of 2, 3 or 4 bits: a word holds a pair of channels (i, i + D / 2), or (2i, 2i + 1), of four tiles.
template <int kBits, bool kPerChannel, bool kRotated, int kColumns>
KVCACHE_DEVICE void key_products(const KeyUnit& unit, float (&c)[kColumns][4][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
#pragma unroll 2
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
    uint2 scale{0, 0}, minimum{0, 0};
#pragma unroll
    for (int order = 0; order < 4; ++order) {
      // tiles two apart share their rotations if the period is 32
      const int k = kRotated ? order % 2 * 2 + order / 2 : order;
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
        const int shift = 8 * (t % 2) + k;  // of the pair in the plane of 1 bit
        a[0] = small_codes((first.x >> 2 * k & 0x00030003u) | (high.x >> shift & 0x00010001u) << 2);
        a[1] = small_codes((first.y >> 2 * k & 0x00030003u) | (high.y >> shift & 0x00010001u) << 2);
        a[2] = small_codes((first.x >> (8 + 2 * k) & 0x00030003u) | (high.x >> (shift + 4) & 0x00010001u) << 2);
        a[3] = small_codes((first.y >> (8 + 2 * k) & 0x00030003u) | (high.y >> (shift + 4) & 0x00010001u) << 2);
      }
      if (kPerChannel) {
        if (order == 0 || (kRotated ? unit.row_shift < 2 : (k & ((1 << unit.row_shift) - 1)) == 0)) {
          scale = load_channels(unit, unit.scale, k >> unit.row_shift, pair);
          minimum = load_channels(unit, unit.minimum, k >> unit.row_shift, pair);
        }
        a[0] = half2_fma(a[0], scale.x, minimum.x);
        a[1] = half2_fma(a[1], scale.x, minimum.x);
        a[2] = half2_fma(a[2], scale.y, minimum.y);
        a[3] = half2_fma(a[3], scale.y, minimum.y);
      }
      if (kRotated) {
        // Whether the compiler keeps these between the tiles that share them was not measured.
        const int delta = (unit.phase + 16 * k) % unit.period + 2 * g;
        const uint4 even = unit.rotations[delta * unit.rotation_row + pair / 2];
        const uint4 odd = unit.rotations[(delta + 1) * unit.rotation_row + pair / 2];
        a[0] = rotated(a[0], even.x, even.y);
        a[1] = rotated(a[1], odd.x, odd.y);
        a[2] = rotated(a[2], even.z, even.w);
        a[3] = rotated(a[3], odd.z, odd.w);
      }
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
        multiply_accumulate(c[n][k], a[0], a[1], a[2], a[3], queries[n].x, queries[n].y);
    }
  }
}

// Codes of 8 bits: a word holds channels 4i .. 4i + 3 of a token.
template <int kFormat, bool kPerChannel, int kColumns>
KVCACHE_DEVICE void wide_key_products(const KeyUnit& unit, float (&c)[kColumns][4][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
#pragma unroll 2
  for (int step = 0; step < unit.steps; ++step) {
    const int channel = 16 * step + 4 * t;
    uint2 queries[kColumns];
    for (int n = 0; n < kColumns; ++n) queries[n] = unit.fragments[(n * unit.steps + step) * 32 + lane];
    uint2 scale{0, 0}, minimum{0, 0};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint2 words = load_8(unit.codes, channel * kBlockTokens + 64 * k + 8 * g, unit.swizzle);
      uint32_t a[4] = {eight_bits<kFormat>(words.x, false), eight_bits<kFormat>(words.y, false),
                       eight_bits<kFormat>(words.x, true), eight_bits<kFormat>(words.y, true)};
      if (kPerChannel) {
        if ((k & ((1 << unit.row_shift) - 1)) == 0) {
          const int at = ((k >> unit.row_shift) * unit.dim + channel) * 2;
          scale = *reinterpret_cast<const uint2*>(unit.scale + at);
          minimum = *reinterpret_cast<const uint2*>(unit.minimum + at);
        }
        a[0] = half2_fma(a[0], scale.x, minimum.x);
        a[1] = half2_fma(a[1], scale.x, minimum.x);
        a[2] = half2_fma(a[2], scale.y, minimum.y);
        a[3] = half2_fma(a[3], scale.y, minimum.y);
      }
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
        multiply_accumulate(c[n][k], a[0], a[1], a[2], a[3], queries[n].x, queries[n].y);
    }
  }
}

// All formats; `c` is [column][tile], products with what codes and metadata per channel stand for.
template <int kColumns>
KVCACHE_DEVICE void multiply_keys(const Side& side, const KeyUnit& unit, float (&c)[kColumns][4][4]) {
  const bool per_channel = side.width > 1;
  if (side.cos != nullptr) {
    if (side.nbits == 2) return key_products<2, true, true>(unit, c);
    if (side.nbits == 3) return key_products<3, true, true>(unit, c);
    return key_products<4, true, true>(unit, c);
  }
  if (per_channel) {
    if (side.nbits == 2) return key_products<2, true, false>(unit, c);
    if (side.nbits == 3) return key_products<3, true, false>(unit, c);
    if (side.nbits == 4) return key_products<4, true, false>(unit, c);
    return wide_key_products<kAffine, true>(unit, c);
  }
  if (side.format == kSymmetric) return wide_key_products<kSymmetric, false>(unit, c);
  if (side.format == kE4M3) return wide_key_products<kE4M3, false>(unit, c);
  if (side.format == kE5M2) return wide_key_products<kE5M2, false>(unit, c);
  if (side.nbits == 2) return key_products<2, false, false>(unit, c);
  if (side.nbits == 3) return key_products<3, false, false>(unit, c);
  if (side.nbits == 4) return key_products<4, false, false>(unit, c);
  return wide_key_products<kAffine, false>(unit, c);
}

}  // namespace kvcache
