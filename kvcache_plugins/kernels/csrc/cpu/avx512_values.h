// R rows (one or four) of probabilities times one 64-token block of packed values, lanes = channels.
//
// A 32-bit lane holds two (16-bit codes) or four (8-bit codes) tokens of one channel, so nothing is summed across
// lanes. Scales belong to tokens and groups of channels: they are folded into the probabilities. Minima are summed
// apart, as one number per row and group of channels.
#pragma once

#include "avx512_math.h"
#include "decode_attention.h"
#include "record_fetcher.h"

namespace kvcache {
namespace avx512 {

constexpr int kMaxWidth = kMaxHeadDim / 16;

// Metadata of a block with the token as the last dimension; zero for tokens that are not packed.
struct ValueMetadata {
  alignas(64) float scale[kMaxWidth][kBlockTokens];
  alignas(64) float minimum[kMaxWidth][kBlockTokens];
};

inline void transpose_metadata(const uint8_t* data, int bytes, int width, int group_tokens, int tokens,
                               float (*out)[kBlockTokens]) {
  if (width == 1 && group_tokens == 1) {
    for (int t = 0; t < kBlockTokens; t += kLanes)
      _mm512_store_ps(out[0] + t, load_metadata(data + t * bytes, bytes, tokens - t));
    return;
  }
  if (bytes == 2 && group_tokens == 1 && (width == 2 || width == 4)) {
    alignas(64) uint16_t order[2][32];
    for (int i = 0; i < 32; ++i)
      for (int half = 0; half < 2; ++half) order[half][i] = uint16_t((i % 16) * width + i / 16 + 2 * half);
    for (int t = 0; t < kBlockTokens; t += kLanes) {
      const __m512i a = _mm512_loadu_si512(data + 2 * t * width);
      const __m512i b = width == 4 ? _mm512_loadu_si512(data + 2 * t * width + 64) : a;
      const __mmask16 live = first_lanes(tokens - t);
      for (int g = 0; g < width; g += 2) {
        const __m512i picked = _mm512_permutex2var_epi16(a, _mm512_load_si512(order[g / 2]), b);
        _mm512_store_ps(out[g] + t, _mm512_maskz_cvtph_ps(live, _mm512_castsi512_si256(picked)));
        _mm512_store_ps(out[g + 1] + t, _mm512_maskz_cvtph_ps(live, _mm512_extracti64x4_epi64(picked, 1)));
      }
    }
    return;
  }
  if (bytes == 2 && group_tokens == 1 && width % 2 == 0) {  // 32 bits are the entries of two groups
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i places = _mm512_mullo_epi32(lane, _mm512_set1_epi32(2 * width));
    for (int t = 0; t < kBlockTokens; t += kLanes) {
      const __mmask16 live = first_lanes(tokens - t);
      for (int g = 0; g < width; g += 2) {
        const uint8_t* from = data + 2 * (t * width + g);
        const __m512i both = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), live, places, from, 1);
        _mm512_store_ps(out[g] + t, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(both)));
        _mm512_store_ps(out[g + 1] + t, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16))));
      }
    }
    return;
  }
  for (int t = 0; t < kBlockTokens; ++t) {
    const uint8_t* row = data + int64_t(t / group_tokens) * width * bytes;
    for (int g = 0; g < width; ++g) {
      float value = 0.0f;
      if (t < tokens) {
        if (bytes == 4) {
          std::memcpy(&value, row + 4 * g, 4);
        } else {
          uint16_t half;
          std::memcpy(&half, row + 2 * g, 2);
          value = _cvtsh_ss(half);
        }
      }
      out[g][t] = value;
    }
  }
}

// Probabilities times scale as bf16 pairs of neighbouring tokens: [part][group][row][token / 2].
template <int R>
struct WeightPairs {
  alignas(64) uint32_t pairs[2][kMaxWidth][R][kBlockTokens / 2];
};

template <int PARTS, int R>
inline void fold_weights(const float (*weights)[kBlockTokens], const float* scale, int group, WeightPairs<R>* out) {
  for (int r = 0; r < R; ++r) {
    for (int t = 0; t < kBlockTokens; t += 32) {
      const __m512 a = _mm512_mul_ps(_mm512_loadu_ps(weights[r] + t), _mm512_load_ps(scale + t));
      const __m512 b = _mm512_mul_ps(_mm512_loadu_ps(weights[r] + t + 16), _mm512_load_ps(scale + t + 16));
      _mm512_store_si512(out->pairs[0][group][r] + t / 2, neighbour_pairs(a, b));
      if (PARTS == 2)
        _mm512_store_si512(out->pairs[1][group][r] + t / 2, neighbour_pairs(bf16_rest(a), bf16_rest(b)));
    }
  }
}

// U chunks of channels, of which [U0, U0 + N) in this pass; `group_of` is channels per group / 16.
template <int B, int U, int U0, int N, int PARTS, int R>
inline void add_words_pass(const uint8_t* codes, __m512i table, const WeightPairs<R>& weights, int group_of,
                           RecordFetcher& fetcher, float* const* out) {
  // The place of a chunk in its word repeats every `period` pairs of tokens, so that shifts are constants.
  constexpr int per_word = B == 3 ? 16 : 16 / B;
  constexpr int period = per_word / (U % 16 == 0 ? per_word < 16 ? per_word : 16
                                     : U % 8 == 0 ? per_word < 8 ? per_word : 8
                                     : U % 4 == 0 ? per_word < 4 ? per_word : 4
                                     : U % 2 == 0 ? 2
                                                  : 1);
  __m512 sum[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) sum[r][n] = _mm512_setzero_ps();
  const RecordFetcher::Lines ahead = fetcher.take(kBlockTokens / 2);
  for (int first = 0; first < kBlockTokens / 2; first += period) {
    const uint8_t* base = codes;  // chunk `first * U` starts a word in every plane
#pragma GCC unroll 16
    for (int step = 0; step < period; ++step) {
      const int j = first + step;
      ahead.fetch(j);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const int local = step * U + U0 + n;
        __m512i value;
        if constexpr (B == 3) {
          const uint8_t* low = base + 64 * (first * U / 8);
          const uint8_t* high = base + kBlockTokens * U * 4 + 64 * (first * U / 16);
          const __m512i two = shift_right(_mm512_loadu_si512(low + 64 * (local / 8)), 2 * (local % 8));
          const __m512i plane = _mm512_loadu_si512(high + 64 * (local / 16));
          const int place = local % 16;
          const __m512i bit = place >= 2 ? shift_right(plane, place - 2) : shift_left(plane, 2 - place);
          value = _mm512_ternarylogic_epi32(_mm512_set1_epi16(3), two, bit, 0xca);
        } else {
          const uint8_t* low = base + 64 * (first * U / per_word);
          value = shift_right(_mm512_loadu_si512(low + 64 * (local / per_word)), B * (local % per_word));
        }
        value = _mm512_permutexvar_epi16(value, table);
        const int g = (U0 + n) / group_of;
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
          for (int part = 0; part < PARTS; ++part)
            sum[r][n] = dot_bf16(sum[r][n], value, broadcast_pair(&weights.pairs[part][g][r][j]));
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) {
      float* at = out[r] + 16 * (U0 + n);
      _mm512_storeu_ps(at, _mm512_add_ps(_mm512_loadu_ps(at), sum[r][n]));
    }
  }
}

template <int B, int U, int PARTS, int R, int U0 = 0>
inline void add_words(const uint8_t* codes, __m512i table, const WeightPairs<R>& weights, int group_of,
                      RecordFetcher& fetcher, float* const* out) {
  if constexpr (U0 < U) {
    constexpr int n = U - U0 < 4 ? U - U0 : 4;
    add_words_pass<B, U, U0, n, PARTS, R>(codes, table, weights, group_of, fetcher, out);
    add_words<B, U, PARTS, R, U0 + n>(codes, table, weights, group_of, fetcher, out);
  }
}

// Probabilities times scale, which are not negative, as two or three unsigned bytes (16 or 24 bits), with one unit per
// row and block.
template <int R>
struct WeightBytes {
  alignas(64) uint8_t bytes[3][R][kBlockTokens];
  float unit[R];
};

template <int PARTS, int R>
inline void fold_weight_bytes(const float (*weights)[kBlockTokens], const float* scale, WeightBytes<R>* out) {
  const float most = PARTS == 3 ? 16776960.0f : 65535.0f;  // never rounds up to one byte more
  __m512 folded[4][4], largest[4] = {};
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < 4; ++i) {
      folded[r][i] = _mm512_mul_ps(_mm512_loadu_ps(weights[r] + 16 * i), _mm512_load_ps(scale + 16 * i));
      largest[r] = _mm512_max_ps(largest[r], folded[r][i]);
    }
  }
  float top[4];
  reduce_max(largest, top);
  for (int r = 0; r < R; ++r) {
    out->unit[r] = top[r] > 0 ? top[r] / most : 1.0f;
    const __m512 inverse = _mm512_set1_ps(1.0f / out->unit[r]);
    for (int i = 0; i < 4; ++i) {
      const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(folded[r][i], inverse));
#pragma GCC unroll 3
      for (int p = 0; p < PARTS; ++p) {  // the most significant byte first
        const __m128i byte = _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, unsigned(8 * (PARTS - 1 - p))));
        _mm_store_si128((__m128i*)(out->bytes[p][r] + 16 * i), byte);
      }
    }
  }
}

template <int PARTS, int R>
inline void add_bytes(const uint8_t* codes, int chunks, const WeightBytes<R>& weights, RecordFetcher& fetcher,
                      float* const* out) {
  const __m512i sign = _mm512_set1_epi8(char(0x80));  // turns a code biased by 128 into a signed byte
  for (int u = 0; u < chunks; ++u) {
    __m512i sum[R][PARTS];
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < PARTS; ++p) sum[r][p] = _mm512_setzero_si512();
    const RecordFetcher::Lines ahead = fetcher.take(kBlockTokens / 4);
    for (int t = 0; t < kBlockTokens / 4; ++t) {
      ahead.fetch(t);
      const __m512i block = _mm512_xor_si512(_mm512_loadu_si512(codes + 64 * (t * chunks + u)), sign);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        for (int p = 0; p < PARTS; ++p) {
          int32_t four;
          std::memcpy(&four, weights.bytes[p][r] + 4 * t, 4);
          sum[r][p] = _mm512_dpbusd_epi32(sum[r][p], _mm512_set1_epi32(four), block);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      __m512 total = _mm512_cvtepi32_ps(sum[r][0]);
      for (int p = 1; p < PARTS; ++p)
        total = _mm512_fmadd_ps(total, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(sum[r][p]));
      float* at = out[r] + 16 * u;
      _mm512_storeu_ps(at, _mm512_fmadd_ps(total, _mm512_set1_ps(weights.unit[r]), _mm512_loadu_ps(at)));
    }
  }
}

template <int PARTS, int R>
inline void add_floats(const uint8_t* codes, int chunks, const WeightPairs<R>& weights, const Float8Table& table,
                       RecordFetcher& fetcher, float* const* out) {
  for (int u = 0; u < chunks; ++u) {
    __m512 sum[R][2];
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    const RecordFetcher::Lines ahead = fetcher.take(kBlockTokens / 4);
    for (int t = 0; t < kBlockTokens / 4; ++t) {
      ahead.fetch(t);
      __m512i even, odd;
      table.decode(_mm512_loadu_si512(codes + 64 * (t * chunks + u)), &even, &odd);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        for (int p = 0; p < PARTS; ++p) {
          const __m512i pairs = broadcast_two_pairs(&weights.pairs[p][0][r][2 * t]);
          sum[r][0] = dot_bf16(sum[r][0], even, pairs);
          sum[r][1] = dot_bf16(sum[r][1], odd, pairs);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      float* at = out[r] + 16 * u;
      _mm512_storeu_ps(at, _mm512_add_ps(_mm512_loadu_ps(at), Float8Table::join(sum[r][0], sum[r][1])));
    }
  }
}

}  // namespace avx512
}  // namespace kvcache
