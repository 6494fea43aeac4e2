// Products of numbers with integer codes of whole blocks for AVX2, where nothing is decoded to memory.
//
// A shift and a mask make 16 codes, two to a lane, which belong to a pair of numbers of a query row, or of a row of
// weights. Two kinds of arithmetic go on from there:
//
// * `Rounded`, for bf16 queries: one instruction multiplies the codes by the pair, rounded to 16 bits, and adds both.
//   Two instructions for 16 codes and a row. Bound: these, which take 2.5 cycles for 16 codes of four rows (Zen 3).
// * `Exact`, for fp32 and fp16 queries: codes are split and widened to fp32. Six instructions for 16 codes, and two for
//   every row; bound: eight multiply-adds of 8 lanes for 16 codes of four rows, in four cycles.
//
// Lanes are tokens for the scores and channels for the weighted sums, as in the AVX-512 kernel.
#pragma once

#include "avx2_blocks.h"

namespace kvcache {
namespace {  // see portable_numbers.inl

// Which numbers are a pair: neighbours; one of the first half and one of the second; of four neighbours the first and
// the third, then the others.
enum Pairing { kNeighbours, kHalves, kQuads };

// The codes in the lower and in the upper halves of words.
inline __m256 lower_codes(__m256i words) {
  return _mm256_cvtepi32_ps(_mm256_and_si256(words, _mm256_set1_epi32(0xFFFF)));
}

inline __m256 upper_codes(__m256i words) { return _mm256_cvtepi32_ps(_mm256_srli_epi32(words, 16)); }

// Numbers in units of 1/32767 of the largest, as integers of 16 bits. Results are exact to about 1e-5: better than
// products in bf16. Sums of 256 channels fit: 255 * 32767 * 256 < 2^31.
struct Rounded {
  using Pair = int32_t;  // two numbers
  static constexpr bool kIsPrecise = false;
  // Query rows up to which this is faster than tiles, which are decoded once: where numbers are the same for all
  // blocks, and where scales are folded into them in every block.
  static constexpr int kMostRows = kMaxQueries, kMostFoldedRows = kMaxQueries;

  // Products of up to four rows with codes of 16 lanes.
  template <int kRows>
  struct Sums {
    __m256i sums[kRows][2] = {};

    // Adds those of 8 and another 8 lanes' codes with a pair of every row, `stride` apart.
    inline __attribute__((always_inline)) void add(__m256i first, __m256i second, const Pair* pairs, int64_t stride) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m256i pair = _mm256_set1_epi32(pairs[r * stride]);
        sums[r][0] = _mm256_add_epi32(sums[r][0], _mm256_madd_epi16(first, pair));
        sums[r][1] = _mm256_add_epi32(sums[r][1], _mm256_madd_epi16(second, pair));
        // Nothing: or compilers add the products of two steps up before, for which there are not registers enough.
        asm("" : "+x"(sums[r][0]));
        asm("" : "+x"(sums[r][1]));
      }
    }

    __m256 of(int r, int half) const { return _mm256_cvtepi32_ps(sums[r][half]); }
  };

  // Makes pairs of `count` numbers, a multiple of 16, of which `largest` is the largest magnitude, and returns their
  // unit.
  static float make_pairs(const float* x, int count, float largest, Pairing pairing, Pair* pairs) {
    const float unit = (largest > 1e-30f ? largest : 1e-30f) / 32767.0f;  // whose inverse is finite
    const __m256 inverse = _mm256_set1_ps(1.0f / unit);
    const __m256i quads = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4, 5, 2, 3, 6, 7,
                                           8, 9, 12, 13, 10, 11, 14, 15);
    const auto rounded = [&](int i) { return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), inverse)); };
    __m256i* out = reinterpret_cast<__m256i*>(pairs);
    for (int i = 0; i < count / 2 && pairing == kHalves; i += 8) {
      const __m256i second = _mm256_slli_epi32(rounded(i + count / 2), 16);
      _mm256_storeu_si256(out++, _mm256_blend_epi16(rounded(i), second, 0xAA));
    }
    for (int i = 0; i < count && pairing != kHalves; i += 16) {
      const __m256i all = _mm256_permute4x64_epi64(_mm256_packs_epi32(rounded(i), rounded(i + 8)), 0xD8);
      _mm256_storeu_si256(out++, pairing == kQuads ? _mm256_shuffle_epi8(all, quads) : all);
    }
    return unit;
  }
};

// Numbers as they are.
struct Exact {
  struct Pair {
    float first, second;
  };
  static constexpr bool kIsPrecise = true;
  static constexpr int kMostRows = 16, kMostFoldedRows = 8;

  template <int kRows>
  struct Sums {
    static constexpr int kChains = kRows > 2 ? 1 : 2;  // sums of a lane: with few, each would wait for the one before
    __m256 sums[kRows][2][kChains] = {};

    inline __attribute__((always_inline)) void add(__m256i first, __m256i second, const Pair* pairs, int64_t stride) {
      const __m256 codes[2][2] = {{lower_codes(first), upper_codes(first)}, {lower_codes(second), upper_codes(second)}};
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m256 pair[2] = {_mm256_set1_ps(pairs[r * stride].first), _mm256_set1_ps(pairs[r * stride].second)};
#pragma GCC unroll 2
        for (int part = 0; part < 2; ++part) {
#pragma GCC unroll 2
          for (int half = 0; half < 2; ++half) {
            __m256& sum = sums[r][half][part % kChains];
            sum = _mm256_fmadd_ps(codes[half][part], pair[part], sum);
          }
        }
      }
    }

    __m256 of(int r, int half) const {
      return kChains == 1 ? sums[r][half][0] : _mm256_add_ps(sums[r][half][0], sums[r][half][kChains - 1]);
    }
  };

  static float make_pairs(const float* x, int count, float, Pairing pairing, Pair* pairs) {
    float* const out = &pairs->first;
    for (int i = 0; i < count / 2 && pairing == kHalves; i += 8) {
      const __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + count / 2);
      const __m256 low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
      _mm256_storeu_ps(out + 2 * i, _mm256_permute2f128_ps(low, high, 0x20));
      _mm256_storeu_ps(out + 2 * i + 8, _mm256_permute2f128_ps(low, high, 0x31));
    }
    for (int i = 0; i < count && pairing != kHalves; i += 8) {
      const __m256 all = _mm256_loadu_ps(x + i);
      _mm256_storeu_ps(out + i, pairing == kQuads ? _mm256_permute_ps(all, 0xD8) : all);
    }
    return 1.0f;
  }
};

// Words shifted right, and what is left of their halves; of 3 bits, joined with the third bits from another plane.
template <int kBits>
inline __m256i unpacked(const uint8_t* words, __m128i shift, const uint8_t* plane, __m128i plane_shift) {
  const __m256i shifted = _mm256_srl_epi16(load_codes(words), shift);
  const __m256i low = _mm256_and_si256(shifted, _mm256_set1_epi16(kBits == 4 ? 15 : 3));
  if (kBits != 3) return low;
  const __m256i high = _mm256_srl_epi16(load_codes(plane), plane_shift);
  return _mm256_or_si256(low, _mm256_slli_epi16(_mm256_and_si256(high, _mm256_set1_epi16(1)), 2));
}

// Where codes of 16 lanes lie, two to a lane: how far their words are from the first, and how far up in these.
struct Place {
  int64_t offset, plane_offset;
  __m128i shift, plane_shift;

  Place(int64_t offset, int shift, int64_t plane_offset = 0, int plane_shift = 0)
      : offset(offset), plane_offset(plane_offset), shift(_mm_cvtsi32_si128(shift)),
        plane_shift(_mm_cvtsi32_si128(plane_shift)) {}

  template <int kBits>
  __m256i take(const uint8_t* codes, const uint8_t* plane, int half) const {
    return unpacked<kBits>(codes + offset + 32 * half, shift, plane + plane_offset + 32 * half, plane_shift);
  }
};

// Adds products with bytes, four to a lane, and two pairs: for the first and the third of four, and for the others.
template <typename Sums, typename Pair>
inline __attribute__((always_inline)) void add_bytes(const uint8_t* words, const Pair* pairs, int64_t stride,
                                                     Sums& sums) {
  const __m256i a = load_codes(words), b = load_codes(words + 32), low = _mm256_set1_epi16(255);
  sums.add(_mm256_and_si256(a, low), _mm256_and_si256(b, low), pairs, stride);
  sums.add(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8), pairs + 1, stride);
}

// out[r][t]: products of the keys of 64 tokens with row r of `pairs`, rows `stride` apart. Every `group` tokens have
// kTogether rows of their own.
template <typename Arithmetic, int kBits, int kRows>
__attribute__((noinline)) void score_codes(const uint8_t* codes, int channels, int group,
                                           const typename Arithmetic::Pair* pairs, int stride, RecordFetcher& fetcher,
                                           float (*out)[kBlockTokens]) {
  constexpr int kPairs = kBits == 2 || kBits == 3 ? 4 : 2;  // in a step
  const uint8_t* const plane = codes + kBlockTokens * channels / 4;
  const int steps = channels / 2 / kPairs;
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    const auto* row = pairs + 16 * k / group * kTogether * stride;
    const RecordFetcher::Lines ahead = fetcher.take(steps);
    typename Arithmetic::template Sums<kRows> sums;
    for (int step = 0; step < steps; ++step, row += kPairs) {
      ahead.fetch(step);
      if (kBits == 8) {
        add_bytes(codes + 64 * (4 * step + k), row, stride, sums);
        continue;
      }
#pragma GCC unroll 4
      for (int i = 0; i < kPairs; ++i) {
        const Place place = kBits == 4 ? Place(64 * i, 4 * k) : Place(64 * (i / 2), 8 * (i % 2) + 2 * k, 0, 4 * i + k);
        const uint8_t *const at = codes + 128 * step, *const above = plane + 64 * step;
        sums.add(place.take<kBits>(at, above, 0), place.take<kBits>(at, above, 1), row + i, stride);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
      for (int half = 0; half < 2; ++half) _mm256_storeu_ps(out[r] + 16 * k + 8 * half, sums.of(r, half));
  }
}

// The weights of one row and group of channels: pairs, their unit, and what is added to every channel.
template <typename Arithmetic>
struct Weights {
  alignas(32) typename Arithmetic::Pair pairs[kBlockTokens / 2];
  float unit, added;
};

// output[r][c] += products of the values of 64 tokens with the weights of row r; every `group` chunks of 16 channels
// have weights of their own, those of a row one after the other, `width` of them. After `kPeriod` pairs of tokens, the
// codes of a channel lie in their words as before.
template <typename Arithmetic, int kBits, int kRows, int kPeriod>
__attribute__((noinline)) void add_codes(const uint8_t* codes, int chunks, int group,
                                         const Weights<Arithmetic>* weights, int width, RecordFetcher& fetcher,
                                         float* output, int64_t stride) {
  constexpr int kPerWord = kBits == 4 ? 4 : 8, kSteps = kBlockTokens / 2 / kPeriod;
  const uint8_t* const plane = codes + kBlockTokens * chunks * 4;
  const int64_t apart = kBits == 8 ? 64 * chunks : 64 * kPeriod * chunks / kPerWord;  // of two steps' codes
  for (int u = 0; u < chunks; ++u) {
    const Weights<Arithmetic>* const first = weights + u / group;
    const int64_t rows_apart = width * sizeof(*weights) / sizeof(first->pairs[0]);
    const RecordFetcher::Lines ahead = fetcher.take(kSteps);
    const auto find = [&](int chunk) {
      return Place(64 * (chunk / kPerWord), 16 / kPerWord * (chunk % kPerWord), 64 * (chunk / 16), chunk % 16);
    };
    const Place places[2] = {find(u), find(u + chunks)};
    const auto* row = first->pairs;
    const uint8_t *at = kBits == 8 ? codes + 64 * u : codes, *above = plane;
    typename Arithmetic::template Sums<kRows> sums;
    for (int step = 0; step < kSteps; ++step, row += kPeriod, at += apart, above += 4 * kPeriod * chunks) {
      ahead.fetch(step);
      if (kBits == 8) {
        add_bytes(at, row, rows_apart, sums);
        continue;
      }
#pragma GCC unroll 2
      for (int i = 0; i < kPeriod; ++i) {
        const Place place = kPeriod == 2 ? places[i] : find(i * chunks + u);
        const __m256i low = place.take<kBits>(at, above, 0), high = place.take<kBits>(at, above, 1);
        sums.add(low, high, row + i, rows_apart);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m256 unit = _mm256_set1_ps(first[r * width].unit), added = _mm256_set1_ps(first[r * width].added);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        float* const at = output + r * stride + 16 * u + 8 * i;
        const __m256 found = _mm256_fmadd_ps(sums.of(r, i), unit, added);
        _mm256_storeu_ps(at, _mm256_add_ps(_mm256_loadu_ps(at), found));
      }
    }
  }
}

// Calls `add_codes` for where codes lie.
template <typename Arithmetic, int kBits, int kRows, typename... Arguments>
void add_codes(const uint8_t* codes, int chunks, Arguments&&... arguments) {
  constexpr int kAlike = kBits == 8 ? 1 : kBits == 4 ? 2 : kBits == 2 ? 4 : 8;  // chunks that two pairs' words end with
  if (chunks % kAlike == 0) return add_codes<Arithmetic, kBits, kRows, 2>(codes, chunks, arguments...);
  if constexpr (kBits != 8) add_codes<Arithmetic, kBits, kRows, 16>(codes, chunks, arguments...);
}

}  // namespace
}  // namespace kvcache
