// p.v of 64 packed tokens on the tensor core, by one warp.
//
// Codes become exact fp16 numbers in registers; scales, one per token and group of channels, are multiplied into the
// weights, whose fragments are few; minima are a matrix of their own, of one row per group, and their products are
// added to the channels of the group at the end. Weights are powers of two smaller or larger than they should be, so
// that they times the largest scale fit fp16 (`exponent`); the accumulators follow when that changes, which is rare.
// About 1.2 instructions per code, by count; not measured.
#pragma once

#include "fast_lanes.cuh"

namespace kvcache {

struct ValueUnit {
  const uint8_t *codes, *scale, *minimum;  // `scale` or `minimum` null where there are none
  const uint2* weights;                    // [columns][tile][lane], as `b`
  int chunks;                              // of 16 channels
  int width, chunks_per_group, group_tokens, swizzle;
  uint32_t shrink;                         // 2^-exponent, twice

  KVCACHE_DEVICE int entry(int token, int group) const { return (token / group_tokens * width + group) * 2; }
};

// The numbers of a field for tokens 4 quad .. 4 quad + 3 and one group: two pairs.
KVCACHE_DEVICE uint2 load_tokens(const ValueUnit& unit, const uint8_t* field, int quad, int group) {
  if (unit.width == 1 && unit.group_tokens == 1) return *reinterpret_cast<const uint2*>(field + 8 * quad);
  const int token = 4 * quad;
  return {load_2(field + unit.entry(token, group)) | load_2(field + unit.entry(token + 1, group)) << 16,
          load_2(field + unit.entry(token + 2, group)) | load_2(field + unit.entry(token + 3, group)) << 16};
}

// Smallest exponent that lets weights of up to 256 times the scales, and the minima, fit fp16. -14 to 14.
KVCACHE_DEVICE int needed_exponent(const ValueUnit& unit) {
  if (unit.scale == nullptr) return 0;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int count = kBlockTokens / unit.group_tokens * unit.width;
  uint32_t scale = 0, minimum = 0;
  for (int i = lane; i < count; i += 32) {
    const uint32_t s = load_2(unit.scale + 2 * i) & 0x7FFFu;
    scale = s > scale ? s : scale;
    if (unit.minimum == nullptr) continue;
    const uint32_t m = load_2(unit.minimum + 2 * i) & 0x7FFFu;
    minimum = m > minimum ? m : minimum;
  }
  const int of_scale = static_cast<int>(warp_max(scale) >> 10) - 15;
  const int of_minimum = static_cast<int>(warp_max(minimum) >> 10) - 15 - 12;
  const int exponent = of_scale > of_minimum ? of_scale : of_minimum;
  return exponent < -14 ? -14 : exponent > 14 ? 14 : exponent;
}

// Codes of tile `chunk` for the tokens of a quad: rows are channels 2g and 2g + 1 of it, pairs are (4 quad, + 1) in
// a[0], a[1] and the next two in a[2], a[3]. 2, 3 and 4 bits: a word holds a pair of tokens of several chunks.
template <int kBits>
KVCACHE_DEVICE void load_narrow(const ValueUnit& unit, int quad, int chunk, int g, uint32_t (&a)[4]) {
  constexpr int kLow = kBits == 3 ? 2 : kBits, kPerWord = 16 / kLow;
  constexpr uint32_t kMask = ((1u << kLow) - 1) * 0x00010001u;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const int place = (2 * quad + pair) * unit.chunks + chunk;
    const uint2 words = load_8(unit.codes, place / kPerWord * 64 + 8 * g, unit.swizzle);
    const int shift = kLow * (place % kPerWord);
    uint32_t first = words.x >> shift & kMask, second = words.y >> shift & kMask;
    if (kBits == 3) {
      const uint2 high =
          load_8(unit.codes, unit.chunks * 16 * kBlockTokens / 4 + place / 16 * 64 + 8 * g, unit.swizzle);
      first |= (high.x >> place % 16 & 0x00010001u) << 2;
      second |= (high.y >> place % 16 & 0x00010001u) << 2;
    }
    a[2 * pair] = small_codes(first);
    a[2 * pair + 1] = small_codes(second);
  }
}

// The same where every word begins with the first chunk of a group of `kPerWord`, so that places are known.
template <int kBits>
KVCACHE_DEVICE void unpack_narrow(uint2 first, uint2 second, int place, uint32_t (&a)[4]) {
  if (kBits == 4) {
    a[0] = four_bits(first.x, place);
    a[1] = four_bits(first.y, place);
    a[2] = four_bits(second.x, place);
    a[3] = four_bits(second.y, place);
  } else {
    const int shift = place / 4 * 8;
    a[0] = two_bits(first.x >> shift, place % 4);
    a[1] = two_bits(first.y >> shift, place % 4);
    a[2] = two_bits(second.x >> shift, place % 4);
    a[3] = two_bits(second.y >> shift, place % 4);
  }
}

// o[column][chunk] += codes * weights, minima[column] += minima * weights; `kAligned`: see unpack_narrow.
template <int kBits, int kFormat, bool kAligned, int kColumns, int kTiles>
KVCACHE_DEVICE void value_products(const ValueUnit& unit, float (&o)[kColumns][kTiles][4],
                                   float (&minima)[kColumns][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1
  for (int k = 0; k < 4; ++k) {
    const int quad = 4 * k + t;
    uint2 plain[kColumns], scaled[kColumns];
#pragma unroll
    for (int n = 0; n < kColumns; ++n) scaled[n] = plain[n] = unit.weights[(n * 4 + k) * 32 + lane];
    if (unit.minimum != nullptr) {  // one row per group of channels
      uint32_t a[4] = {0, 0, 0, 0};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = g + 8 * half;
        const bool is_group = row < unit.width;  // no branch: the product below wants the lanes together
        const uint2 numbers = load_tokens(unit, unit.minimum, quad, is_group ? row : 0);
        a[half] = is_group ? half2_multiply(numbers.x, unit.shrink) : 0;
        a[half + 2] = is_group ? half2_multiply(numbers.y, unit.shrink) : 0;
      }
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
        multiply_accumulate(minima[n], a[0], a[1], a[2], a[3], plain[n].x, plain[n].y);
    }
    int next = 0, group = 0;
    uint2 first{0, 0}, second{0, 0};
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {
      if (u < unit.chunks) {
        if (unit.scale != nullptr && u == next) {
          const uint2 numbers = load_tokens(unit, unit.scale, quad, group);
          const uint32_t low = half2_multiply(numbers.x, unit.shrink), high = half2_multiply(numbers.y, unit.shrink);
#pragma unroll
          for (int n = 0; n < kColumns; ++n)
            scaled[n] = {half2_multiply(plain[n].x, low), half2_multiply(plain[n].y, high)};
          next += unit.chunks_per_group;
          ++group;
        }
        uint32_t a[4];
        if (kBits == 8) {
          const uint2 words = load_8(unit.codes, (quad * unit.chunks + u) * 64 + 8 * g, unit.swizzle);
          a[0] = eight_bits<kFormat>(words.x, false);
          a[1] = eight_bits<kFormat>(words.y, false);
          a[2] = eight_bits<kFormat>(words.x, true);
          a[3] = eight_bits<kFormat>(words.y, true);
        } else if (kAligned) {
          constexpr int kPerWord = 16 / kBits;
          if (u % kPerWord == 0) {
            const int word = 2 * quad * unit.chunks / kPerWord + u / kPerWord;
            first = load_8(unit.codes, word * 64 + 8 * g, unit.swizzle);
            second = load_8(unit.codes, (word + unit.chunks / kPerWord) * 64 + 8 * g, unit.swizzle);
          }
          unpack_narrow<kBits>(first, second, u % kPerWord, a);
        } else {
          load_narrow<kBits>(unit, quad, u, g, a);
        }
#pragma unroll
        for (int n = 0; n < kColumns; ++n)
          multiply_accumulate(o[n][u], a[0], a[1], a[2], a[3], scaled[n].x, scaled[n].y);
      }
    }
  }
}

template <int kColumns, int kTiles>
KVCACHE_DEVICE void multiply_values(const Side& side, const ValueUnit& unit, float (&o)[kColumns][kTiles][4],
                                    float (&minima)[kColumns][4]) {
  if (side.format == kSymmetric) return value_products<8, kSymmetric, true>(unit, o, minima);
  if (side.format == kE4M3) return value_products<8, kE4M3, true>(unit, o, minima);
  if (side.format == kE5M2) return value_products<8, kE5M2, true>(unit, o, minima);
  if (side.nbits == 8) return value_products<8, kAffine, true>(unit, o, minima);
  if (side.nbits == 3) return value_products<3, kAffine, false>(unit, o, minima);
  if (side.nbits == 4) {
    if (unit.chunks % 4 == 0) return value_products<4, kAffine, true>(unit, o, minima);
    return value_products<4, kAffine, false>(unit, o, minima);
  }
  if (unit.chunks % 8 == 0) return value_products<2, kAffine, true>(unit, o, minima);
  return value_products<2, kAffine, false>(unit, o, minima);
}

}  // namespace kvcache
