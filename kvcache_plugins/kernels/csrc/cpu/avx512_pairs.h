// Products of bf16 pairs: two neighbours along what a product sums over, in one 32-bit lane, so that an instruction
// does twice as many multiply-adds as of fp32 numbers (decode_attention_tiles_avx512.cpp, attend_latents_avx512.cpp).
#pragma once

#include "avx512_math.h"

namespace kvcache {
namespace avx512 {

// c[r][n] (+)= sum over k of the products of both halves of a[r][k] and b[k][n], for kRows rows and kVectors vectors of
// columns.
template <int kRows, int kVectors>
inline void multiply_pairs(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int64_t depth,
                           float* c, int64_t c_stride, bool accumulate) {
  __m512 sums[kRows][kVectors];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = accumulate ? _mm512_loadu_ps(c + r * c_stride + v * kLanes) : _mm512_setzero_ps();
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    __m512i columns[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) columns[v] = _mm512_load_si512(b + k * b_stride + v * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const __m512i factor = broadcast_pair(a + r * a_stride + k);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] = dot_bf16(sums[r][v], factor, columns[v]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(c + r * c_stride + v * kLanes, sums[r][v]);
  }
}

// Pairs of up to 32 neighbours; zeros after `count` of them.
inline __m512i neighbours(const float* from, int count) {
  const __m512 first = _mm512_maskz_loadu_ps(first_lanes(count), from);
  const __m512 second = _mm512_maskz_loadu_ps(first_lanes(count - kLanes), from + kLanes);
  return neighbour_pairs(first, second);
}

// Writes `count` numbers as pairs of neighbours.
inline void narrow(const float* from, int count, uint32_t* to) {
  for (int i = 0; i < count; i += 2 * kLanes) {
    const __mmask16 live = first_lanes((count - i + 1) / 2);
    _mm512_mask_storeu_epi32(to + i / 2, live, neighbours(from + i, count - i));
  }
}

// Writes rows 2 k and 2 k + 1, of `width` numbers, a multiple of 16, as row k of pairs, for `pairs` of them.
inline void pair_rows(const float* from, int pairs, int width, uint32_t* to) {
  // the places of a number and of its partner, which follows 16 numbers later
  const __m512i both = _mm512_add_epi32(_mm512_set1_epi32(16 << 16), _mm512_mullo_epi32(_mm512_set1_epi32(0x10001),
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)));
  for (int k = 0; k < pairs; ++k, from += 2 * width, to += width) {
    for (int n = 0; n < width; n += kLanes) {
      const __m512i rows = neighbour_pairs(_mm512_load_ps(from + n), _mm512_load_ps(from + width + n));
      _mm512_store_si512(to + n, _mm512_permutexvar_epi16(both, rows));
    }
  }
}

// Writes rows 2 k and 2 k + 1 of `count` rows of `dim` bf16 numbers, `stride` apart, as row k of pairs; `width`, a
// multiple of 16, is that of the tile, where zeros follow. Fetches as many rows behind them.
inline void pair_exact_rows(const uint16_t* rows, int64_t stride, int64_t count, int dim, int width, uint32_t* tile) {
  for (int64_t t = 0; t < count; t += 2, rows += 2 * stride, tile += width) {
    for (int n = 0; n < width; n += kLanes) {
      const __mmask16 live = first_lanes(dim - n);
      _mm_prefetch(rows + 64 * stride + n, _MM_HINT_T0);
      _mm_prefetch(rows + 65 * stride + n, _MM_HINT_T0);
      const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(live, rows + n));
      const __m256i next = _mm256_maskz_loadu_epi16(t + 1 < count ? live : __mmask16(0), rows + stride + n);
      _mm512_store_si512(tile + n, _mm512_or_si512(low, _mm512_slli_epi32(_mm512_cvtepu16_epi32(next), 16)));
    }
  }
}

}  // namespace avx512
}  // namespace kvcache
