// p.v of 64 packed tokens on the tensor core, by one warp.
//
// Codes are subnormal fp16 numbers, as in scaled_keys.cuh; scales, one per token and group of channels, are multiplied
// into the weights, whose fragments are few; minima are a matrix of their own, of one row per group, and their products
// are added to the channels of the group every few blocks. So are the 128 that symmetric codes are too large by: their
// matrix is of ones. Weights are powers of two smaller or larger than they should be, so that they times the largest
// scale fit fp16 (`exponent`); the accumulators follow when that changes, which is rare. About 1.1 instructions per
// code of 2, 4 or 8 bits with one scale per token, 1.5 with four; of 3 bits 0.8 more. By count in the machine code for
// sm_90; not measured.
#pragma once

#include "fast_lanes.cuh"

namespace kvcache {

struct ValueUnit {
  const uint8_t *codes, *scale, *minimum;  // minima of affine codes alone
  const uint2* weights;                    // [columns][tile][lane], as `b`
  int chunks;                              // of 16 channels
  int width, chunks_per_group, swizzle;
  int groups;                              // `width` if that and `chunks` are known to some code, or 0
  int group_shift;                         // 2^group_shift tokens share a row of metadata
  uint32_t shrink;                         // 2^-exponent, twice
  bool has_scales;                         // or one for all, which is applied at the end
  bool is_aligned;                         // codes are unpacked with AlignedCodes
};

// The numbers of a field for tokens 4 quad .. 4 quad + 3 and one group: two pairs. `kGroups`: numbers of every token, 0
// if that is not known.
template <int kGroups>
KVCACHE_DEVICE uint2 load_tokens(const ValueUnit& unit, const uint8_t* field, int quad, int group) {
  const int width = kGroups > 0 ? kGroups : unit.width, shift = kGroups > 0 ? 0 : unit.group_shift;
  if (width == 1 && shift == 0) return *reinterpret_cast<const uint2*>(field + 8 * quad);
  const int row = 2 * width;  // bytes
  const uint8_t* first = field + (4 * quad >> shift) * row + 2 * group;
  return {load_2(first) | load_2(first + (1 >> shift) * row) << 16,
          load_2(first + (2 >> shift) * row) | load_2(first + (3 >> shift) * row) << 16};
}

// The same for all groups at once, of rows of two, four or eight numbers, one per token; or for none.
KVCACHE_DEVICE void load_groups(const uint8_t*, int, uint2 (&)[1]) {}
KVCACHE_DEVICE void load_groups(const uint8_t* field, int quad, uint2 (&groups)[2]) {
  const uint4 rows = *reinterpret_cast<const uint4*>(field + 16 * quad);
  groups[0] = {permute_bytes(rows.x, rows.y, 0x5410), permute_bytes(rows.z, rows.w, 0x5410)};
  groups[1] = {permute_bytes(rows.x, rows.y, 0x7632), permute_bytes(rows.z, rows.w, 0x7632)};
}
KVCACHE_DEVICE void load_groups(const uint8_t* field, int quad, uint2 (&groups)[4]) {
  const uint2* rows = reinterpret_cast<const uint2*>(field + 32 * quad);
  const uint2 a = rows[0], b = rows[1], c = rows[2], d = rows[3];
  groups[0] = {permute_bytes(a.x, b.x, 0x5410), permute_bytes(c.x, d.x, 0x5410)};
  groups[1] = {permute_bytes(a.x, b.x, 0x7632), permute_bytes(c.x, d.x, 0x7632)};
  groups[2] = {permute_bytes(a.y, b.y, 0x5410), permute_bytes(c.y, d.y, 0x5410)};
  groups[3] = {permute_bytes(a.y, b.y, 0x7632), permute_bytes(c.y, d.y, 0x7632)};
}
KVCACHE_DEVICE void load_groups(const uint8_t* field, int quad, uint2 (&groups)[8]) {
  const uint4* rows = reinterpret_cast<const uint4*>(field + 64 * quad);
  const uint4 a = rows[0], b = rows[1], c = rows[2], d = rows[3];
  const uint32_t words[4][4] = {{a.x, b.x, c.x, d.x}, {a.y, b.y, c.y, d.y}, {a.z, b.z, c.z, d.z}, {a.w, b.w, c.w, d.w}};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t which = i % 2 == 0 ? 0x5410u : 0x7632u;
    groups[i] = {permute_bytes(words[i / 2][0], words[i / 2][1], which),
                 permute_bytes(words[i / 2][2], words[i / 2][3], which)};
  }
}

// The larger half of a word.
KVCACHE_DEVICE uint32_t larger_half(uint32_t pair) {
  const uint32_t low = pair & 0xFFFFu, high = pair >> 16;
  return low > high ? low : high;
}

// Exponents of accumulators, so that weights of up to 256, shrunk, and then times scales, fit fp16.
constexpr int kLeastExponent = -7, kMostExponent = 14;

// The smallest of them for scales whose bits are up to `largest`.
KVCACHE_DEVICE int exponent_of_scale(uint32_t largest) {
  const int exponent = static_cast<int>(largest >> 10) - 15;
  return exponent < kLeastExponent ? kLeastExponent : exponent > kMostExponent ? kMostExponent : exponent;
}

// Bits of the largest scales for which an exponent is enough, twice.
KVCACHE_DEVICE uint32_t largest_fitting(int exponent) {
  return static_cast<uint32_t>(exponent + 16) * 0x04000400u - 0x00010001u;
}

// Bits of the largest of a block's scales that this lane sees: one of both halves.
template <bool kIsKnown>
KVCACHE_DEVICE uint32_t largest_scales(const ValueUnit& unit) {
  const int count = (kBlockTokens >> unit.group_shift) * unit.width;
  return fold_field<kIsKnown, kIsKnown>(unit.scale, count, larger_halves);
}

// Codes of tile `chunk` for the tokens of a quad: rows are channels 2g and 2g + 1 of it, pairs are (4 quad, + 1) in
// a[0], a[1] and the next two in a[2], a[3]; not yet as numbers. 2, 3 and 4 bits: a word holds a pair of tokens of
// several chunks.
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
    a[2 * pair] = first;
    a[2 * pair + 1] = second;
  }
}

// Where a lane finds words of codes, 64 bytes times `index` from the first of its quad in tile 0, if it is known how
// many chunks there are, and so how words are spread over the banks.
template <int kBits, int kChunks>
struct LaneValues {
  static constexpr int kQuadBytes = kChunks * 8 * (kBits == 3 ? 2 : kBits);
  static constexpr int kSwizzle = (kBits == 8 ? 2 : kBits == 4 ? 1 : 0) + (kChunks == 16 ? 4 : kChunks == 8 ? 3 : 2);
  const uint8_t *even, *odd;

  KVCACHE_DEVICE LaneValues(const ValueUnit& unit, int g, int t)
      : even(unit.codes + swizzled(t * kQuadBytes + 8 * g, kSwizzle)),
        odd(unit.codes + swizzled(t * kQuadBytes + 64 + 8 * g, kSwizzle)) {}
  KVCACHE_DEVICE uint2 load(int k, int index) const {
    return *reinterpret_cast<const uint2*>((index % 2 == 0 ? even : odd) + 4 * k * kQuadBytes + index / 2 * 128);
  }
};

// Words of the codes of two pairs of tokens, 16 / kBits chunks each (8 of 3 bits), where they begin with the first
// chunk of as many, so that places are known; or one word of four chunks of either pair.
template <int kBits>
struct AlignedCodes {
  static constexpr int kPerWord = kBits == 4 ? 4 : 8;
  uint2 words[2];      // 2 and 4 bits
  Nibbles nibbles[4];  // 3 bits: of a[0] .. a[3]

  KVCACHE_DEVICE void load(const ValueUnit& unit, int chunks, int quad, int chunk, int g) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int word = (2 * quad * chunks + chunk + pair * chunks) / kPerWord;
      words[pair] = load_8(unit.codes, word * 64 + 8 * g, unit.swizzle);
      if (kBits == 3) complete(unit, chunks, word, g, pair);
    }
  }
  template <int kChunks>
  KVCACHE_DEVICE void load(const ValueUnit& unit, const LaneValues<kBits, kChunks>& lane, int k, int chunk, int g,
                           int t) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int index = (pair * kChunks + chunk) / kPerWord;
      words[pair] = lane.load(k, index);
      if (kBits == 3) complete(unit, kChunks, (4 * k + t) * 2 * kChunks / kPerWord + index, g, pair);
    }
  }
  // Codes of a chunk, `further` places further of the second pair.
  KVCACHE_DEVICE void unpack(int chunk, int further, uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = i % 2 == 0 ? words[i / 2].x : words[i / 2].y;
      const int place = (chunk + i / 2 * further) % kPerWord;
      if (kBits == 4) {
        a[i] = subnormal_codes<4>(word, place);
      } else if (kBits == 3) {
        a[i] = subnormal_three(nibbles[i], place / 4, place % 4);
      } else {
        a[i] = subnormal_codes<2>(word >> place / 4 * 8, place % 4);
      }
    }
  }

 private:
  // Joins a word of 2 bits with its third bits.
  KVCACHE_DEVICE void complete(const ValueUnit& unit, int chunks, int word, int g, int pair) {
    const uint2 high = load_8(unit.codes, chunks * 16 * kBlockTokens / 4 + word / 2 * 64 + 8 * g, unit.swizzle);
    nibbles[2 * pair] = spread<3>(words[pair].x, high_bits(high.x, word % 2));
    nibbles[2 * pair + 1] = spread<3>(words[pair].y, high_bits(high.y, word % 2));
  }
};

// Every lane's rows of a matrix of groups, 16 at most, that is `numbers` in the row of its group and 0 elsewhere.
template <int kColumns>
KVCACHE_DEVICE void add_groups(float (&minima)[kColumns][4], uint2 low, uint2 high, const uint2 (&weights)[kColumns]) {
#pragma unroll
  for (int n = 0; n < kColumns; ++n)
    multiply_accumulate(minima[n], low.x, high.x, low.y, high.y, weights[n].x, weights[n].y);
}

// What of `pairs` in shared memory, 32 for every tile, is this lane's.
template <typename Pair>
struct LanePairs {
  Pair* first;

  KVCACHE_DEVICE explicit LanePairs(Pair* pairs) : first(pairs + opaque_lane()) {}
  KVCACHE_DEVICE Pair& operator[](int tile) const { return first[32 * tile]; }
};

// o[column][chunk] += codes * weights, minima[column] += minima * weights; `kAligned`: see AlignedCodes; `kChunks` and
// `kGroups`: if there are as many chunks, and every token has as many scales (and minima): 1, 2, 4 or 8; both 0 if that
// is not known. `kUnroll`: quads in a row.
template <int kBits, int kFormat, bool kAligned, int kChunks, int kGroups, int kUnroll, typename Weights, int kColumns,
          int kTiles>
KVCACHE_DEVICE void value_products(const ValueUnit& unit, const Weights& all_weights, float (&o)[kColumns][kTiles][4],
                                   float (&minima)[kColumns][4]) {
  constexpr uint32_t kOnes = 0x3C003C00u;
  const int lane = opaque_lane(), g = lane / 4, t = lane % 4;
  constexpr bool kIsKnown = kChunks > 0, kHasMany = kGroups > 1;
  constexpr int kGroupChunks = kIsKnown ? kChunks / kGroups : 1;
  const LaneValues<kBits, kIsKnown ? kChunks : kTiles> places(unit, g, t);
#pragma unroll(kUnroll)
  for (int k = 0; k < 4; ++k) {
    const int quad = 4 * k + t;
    uint2 plain[kColumns], scaled[kColumns];
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const uint2 weights = all_weights[n * 4 + k];
      scaled[n] = plain[n] = {half2_multiply(weights.x, unit.shrink), half2_multiply(weights.y, unit.shrink)};
    }
    if (kFormat == kAffine) {  // one row per group of channels; rows beyond are never looked at
      const int width = kIsKnown ? kGroups : unit.width;
      const uint2 low = load_tokens<kGroups>(unit, unit.minimum, quad, g < width ? g : 0);
      uint2 high = low;
      if (width > 8) high = load_tokens<kGroups>(unit, unit.minimum, quad, g + 8 < width ? g + 8 : 0);
      add_groups(minima, low, high, plain);
    }
    int next = 0, group = 0;
    AlignedCodes<kBits> codes{};
    uint2 groups[kHasMany ? kGroups : 1];
    load_groups(unit.scale, quad, groups);
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {
      if (kIsKnown ? u < kChunks : u < unit.chunks) {
        if (kIsKnown ? u % kGroupChunks == 0 : u == next) {
          if (kHasMany || unit.has_scales) {
            const uint2 numbers =
                kHasMany ? groups[u / kGroupChunks] : load_tokens<kGroups>(unit, unit.scale, quad, group);
#pragma unroll
            for (int n = 0; n < kColumns; ++n)
              scaled[n] = {half2_multiply(plain[n].x, numbers.x), half2_multiply(plain[n].y, numbers.y)};
          }
          if (kFormat == kSymmetric) {
            const uint32_t low = g == group ? kOnes : 0, high = g + 8 == group ? kOnes : 0;
            add_groups(minima, {low, low}, {high, high}, scaled);
          }
          next += unit.chunks_per_group;
          ++group;
        }
        uint32_t a[4];
        if (kBits == 8) {
          const uint2 words = kIsKnown ? places.load(k, u)
                                       : load_8(unit.codes, (quad * unit.chunks + u) * 64 + 8 * g, unit.swizzle);
          a[0] = subnormal_bytes<kFormat>(words.x, false);
          a[1] = subnormal_bytes<kFormat>(words.y, false);
          a[2] = subnormal_bytes<kFormat>(words.x, true);
          a[3] = subnormal_bytes<kFormat>(words.y, true);
        } else if (kAligned) {
          if (u % AlignedCodes<kBits>::kPerWord == 0) {
            if (kIsKnown) {
              codes.load(unit, places, k, u, g, t);
            } else {
              codes.load(unit, unit.chunks, quad, u, g);
            }
          }
          codes.unpack(u, kChunks, a);
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

// The same by the weights in shared memory.
template <int kBits, int kFormat, bool kAligned, int kChunks, int kGroups, int kUnroll, int kColumns, int kTiles>
KVCACHE_DEVICE void value_products(const ValueUnit& unit, float (&o)[kColumns][kTiles][4],
                                   float (&minima)[kColumns][4]) {
  value_products<kBits, kFormat, kAligned, kChunks, kGroups, kUnroll>(unit, LanePairs(unit.weights), o, minima);
}

// As many chunks as `unit` has, and as many numbers of every token.
template <int kBits, int kFormat, int kChunks, int kColumns, int kTiles>
KVCACHE_DEVICE void multiply_known_values(const ValueUnit& unit, float (&o)[kColumns][kTiles][4],
                                          float (&minima)[kColumns][4]) {
  if constexpr (kBits < 8) {
    if (unit.groups == 2) return value_products<kBits, kFormat, true, kChunks, 2, 1>(unit, o, minima);
    if (unit.groups == 4) return value_products<kBits, kFormat, true, kChunks, 4, 1>(unit, o, minima);
    if constexpr (kChunks >= 8) {
      if (unit.groups == 8) return value_products<kBits, kFormat, true, kChunks, 8, 1>(unit, o, minima);
    }
  }
  value_products<kBits, kFormat, true, kChunks, 1, 1>(unit, o, minima);
}

template <int kBits, int kFormat, int kColumns, int kTiles>
KVCACHE_DEVICE void multiply_aligned_values(const ValueUnit& unit, float (&o)[kColumns][kTiles][4],
                                            float (&minima)[kColumns][4]) {
  if (unit.groups == 0) return value_products<kBits, kFormat, true, 0, 0, 1>(unit, o, minima);
  if constexpr (kTiles == 8) {
    if (unit.chunks == 4) return multiply_known_values<kBits, kFormat, 4>(unit, o, minima);
  }
  multiply_known_values<kBits, kFormat, kTiles>(unit, o, minima);
}

template <int kColumns, int kTiles>
KVCACHE_DEVICE void multiply_values(const Side& side, const ValueUnit& unit, float (&o)[kColumns][kTiles][4],
                                    float (&minima)[kColumns][4]) {
  if (side.nbits == 8) {
    if (side.format == kSymmetric) return multiply_aligned_values<8, kSymmetric>(unit, o, minima);
    if (side.format == kE4M3) return multiply_aligned_values<8, kE4M3>(unit, o, minima);
    if (side.format == kE5M2) return multiply_aligned_values<8, kE5M2>(unit, o, minima);
    return multiply_aligned_values<8, kAffine>(unit, o, minima);
  }
  if (unit.is_aligned) {
    if (side.nbits == 4) return multiply_aligned_values<4, kAffine>(unit, o, minima);
    if (side.nbits == 3) return multiply_aligned_values<3, kAffine>(unit, o, minima);
    return multiply_aligned_values<2, kAffine>(unit, o, minima);
  }
  if (side.nbits == 4) return value_products<4, kAffine, false, 0, 0, 1>(unit, o, minima);
  if (side.nbits == 3) return value_products<3, kAffine, false, 0, 0, 1>(unit, o, minima);
  value_products<2, kAffine, false, 0, 0, 1>(unit, o, minima);
}

// What the accumulators of a chunk must be multiplied by, powers of two of the weights aside.
KVCACHE_DEVICE float chunk_place(const Side& values, bool is_aligned, int chunk) {
  if (values.format == kE4M3) return 256.0f;
  if (values.format == kE5M2) return 1.0f;
  if (values.nbits == 4 && is_aligned) return place_of<4, kAffine>(chunk);
  if (values.nbits == 3 && is_aligned) return place_of<3, kAffine>(chunk);
  if (values.nbits == 2 && is_aligned) return place_of<2, kAffine>(chunk);
  return place_of<8, kAffine>(0);
}

}  // namespace kvcache
