// Scores of R query rows (one or four) against one 64-token block of packed keys, lanes = tokens.
//
// No lane ever needs another: a 32-bit lane holds one token's two (16-bit codes) or four (8-bit codes) channels, so a
// dot-product instruction advances 16 tokens at once and nothing is summed across lanes. Scales are folded into the
// query where they belong to a channel, and into the score where they belong to a token.
//
//   words    2, 3, 4 bits: shift, `vpermw` (table of codes in bf16), `vdpbf16ps`
//   turned   the same with keys stored relative to their block: the table holds the dequantized numbers of the two
//            channels of a rotary pair, and the query is a vector, rotated for every token of the period
//   bytes    8 bits: `vpdpbusd` with the query in two or three signed bytes
//   floats   8-bit floating point: table of bf16 magnitudes, `vdpbf16ps`
#pragma once

#include <algorithm>

#include "avx512_math.h"
#include "decode_attention.h"
#include "record_fetcher.h"

namespace kvcache {
namespace avx512 {

constexpr int kMaxPairs = kMaxHeadDim / 2;
constexpr int kMaxGroups = 4;  // token groups of a block: 16 tokens or more each
constexpr int kMaxPeriod = 64;

// What of the query does not depend on the block. R query rows share one pass over the codes; those beyond `rows` are
// zero. There is room for the widest heads; `prepare_query` writes what is read of it, which is as long as the head.
template <int R>
struct Query {
  int rows;
  alignas(64) float values[R][kMaxHeadDim + kLanes];  // times the smoothing factors; after head_dim a vector of zeros
  alignas(64) uint32_t pairs[2][R][kMaxPairs]; // bf16 pairs and what rounding left over
  alignas(64) int32_t bytes[3][R][kMaxHeadDim / 4];
  float byte_scale[R];
  int32_t byte_sum[3][R];
  float sum[R];
};

// Bf16 pairs of every row, rotated back by every offset of the period: [part][row][pair][period].
template <int R>
struct TurnedQuery {
  alignas(64) uint32_t pairs[2][R][kMaxPairs][kMaxPeriod];
};

inline void channel_pair(const Side& key, int pair, int* low, int* high) {
  *low = key.interleaved ? 2 * pair : pair;
  *high = key.interleaved ? 2 * pair + 1 : pair + key.padded_dim / 2;
}

// Two vectors of 16 channels whose pairs are lanes 0..15 of pairs [pair, pair + 16).
inline void load_pair_channels(const Side& key, const float* channels, int pair, __m512* low, __m512* high) {
  if (key.interleaved) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const __m512 a = _mm512_loadu_ps(channels + 2 * pair), b = _mm512_loadu_ps(channels + 2 * pair + 16);
    *low = _mm512_permutex2var_ps(a, even, b);
    *high = _mm512_permutex2var_ps(a, odd, b);
  } else {
    *low = _mm512_loadu_ps(channels + pair);
    *high = _mm512_loadu_ps(channels + pair + key.padded_dim / 2);
  }
}

// q = byte_scale * (16384 a + 128 b + c) with signed bytes a, b, c: 22 bits; the first two of them are 15 bits.
template <int R>
inline void split_into_bytes(const Side& key, int r, float largest, Query<R>* query) {
  const float scale = largest > 0 ? largest / (127.0f * 128.0f * 128.0f) : 1.0f;
  const float place[3] = {16384.0f, 128.0f, 1.0f};
  query->byte_scale[r] = scale;
  __m512i sum[3] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
  for (int c = 0; c < key.padded_dim; c += kLanes) {
    __m512 rest = _mm512_roundscale_ps(
        _mm512_div_ps(_mm512_load_ps(query->values[r] + c), _mm512_set1_ps(scale)), 0);
    for (int p = 0; p < 3; ++p) {
      const __m512 digit = _mm512_roundscale_ps(_mm512_mul_ps(rest, _mm512_set1_ps(1.0f / place[p])), 0);
      rest = _mm512_fnmadd_ps(digit, _mm512_set1_ps(place[p]), rest);
      const __m512i whole = _mm512_cvtps_epi32(digit);
      sum[p] = _mm512_add_epi32(sum[p], whole);
      _mm_store_si128((__m128i*)((int8_t*)query->bytes[p][r] + c), _mm512_cvtsepi32_epi8(whole));
    }
  }
  for (int p = 0; p < 3; ++p) query->byte_sum[p][r] = _mm512_reduce_add_epi32(sum[p]);
}

template <int R>
inline void prepare_query(const Side& key, const float* const* rows, int count, Query<R>* query) {
  query->rows = count;
  for (int r = 0; r < R; ++r) {
    float* values = query->values[r];
    __m512 largest = _mm512_setzero_ps(), sum = _mm512_setzero_ps();
    for (int c = 0; c < key.padded_dim; c += kLanes) {
      const __mmask16 live = r < count ? first_lanes(key.head_dim - c) : __mmask16(0);
      __m512 value = _mm512_maskz_loadu_ps(live, rows[r < count ? r : 0] + c);
      if (key.factors != nullptr) value = _mm512_mul_ps(value, _mm512_maskz_loadu_ps(live, key.factors + c));
      largest = _mm512_max_ps(largest, _mm512_abs_ps(value));
      sum = _mm512_add_ps(sum, value);
      _mm512_store_ps(values + c, value);
    }
    _mm512_store_ps(values + key.padded_dim, _mm512_setzero_ps());
    query->sum[r] = _mm512_reduce_add_ps(sum);
    if (key.nbits != 8) {
      for (int pair = 0; pair < key.padded_dim / 2; pair += kLanes) {
        __m512 low, high;
        load_pair_channels(key, values, pair, &low, &high);
        __m512i rest;
        const __m512i rounded = bf16_pairs(low, high, &rest);
        _mm512_store_si512(query->pairs[0][r] + pair, rounded);
        _mm512_store_si512(query->pairs[1][r] + pair, rest);
      }
    } else if (key.format == kE4M3 || key.format == kE5M2) {
      // Pairs of neighbouring channels, whatever the rotary layout: see Float8Table::decode.
      for (int pair = 0; pair < key.padded_dim / 2; pair += kLanes) {
        const __m512 a = _mm512_load_ps(values + 2 * pair), b = _mm512_load_ps(values + 2 * pair + kLanes);
        _mm512_store_si512(query->pairs[0][r] + pair, neighbour_pairs(a, b));
        _mm512_store_si512(query->pairs[1][r] + pair, neighbour_pairs(bf16_rest(a), bf16_rest(b)));
      }
    } else {
      split_into_bytes(key, r, _mm512_reduce_max_ps(largest), query);
    }
  }
}

template <int R>
inline void prepare_turned_query(const Side& key, const Query<R>& query, TurnedQuery<R>* turned) {
  const int half = key.rotary_dim / 2;
  alignas(64) float first[kMaxPeriod], second[kMaxPeriod];
  for (int r = 0; r < R; ++r) {  // rows beyond the query's are zero, and turned all the same
    for (int pair = 0; pair < key.padded_dim / 2; ++pair) {
      int low, high;
      channel_pair(key, pair, &low, &high);
      const float a = query.values[r][low], b = query.values[r][high];
      for (int t = 0; t < key.period; ++t) {
        const float c = pair < half ? key.cos[t * half + pair] : 1.0f;
        const float s = pair < half ? key.sin[t * half + pair] : 0.0f;
        first[t] = a * c + b * s;  // R(-t) q
        second[t] = b * c - a * s;
      }
      for (int t = 0; t < key.period; t += kLanes) {
        __m512i rest;
        const __m512i rounded = bf16_pairs(_mm512_load_ps(first + t), _mm512_load_ps(second + t), &rest);
        _mm512_store_si512(turned->pairs[0][r][pair] + t, rounded);
        _mm512_store_si512(turned->pairs[1][r][pair] + t, rest);
      }
    }
  }
}

// The codes of 16 tokens, two channels each: nibble group k of pair `pair`, in the low bits of 16-bit lanes.
template <int B>
[[gnu::always_inline]] inline __m512i word_codes(const uint8_t* codes, int pair, int k, int padded_dim) {
  if (B == 4) return shift_right(_mm512_loadu_si512(codes + 64 * pair), 4 * k);
  const __m512i low = _mm512_loadu_si512(codes + 64 * (pair / 2));
  const __m512i two = shift_right(low, 2 * k + 8 * (pair % 2));
  if (B == 2) return two;
  const __m512i high = _mm512_loadu_si512(codes + kBlockTokens * padded_dim / 4 + 64 * (pair / 4));
  // the bit goes to place 2
  const int place = 4 * (pair % 4) + k;
  const __m512i bit = place >= 2 ? shift_right(high, place - 2) : shift_left(high, 2 - place);
  return _mm512_ternarylogic_epi32(_mm512_set1_epi16(3), two, bit, 0xca);
}

struct BlockMetadata {
  alignas(64) float scale[kMaxGroups][kMaxHeadDim];
  alignas(64) float minimum[kMaxGroups][kMaxHeadDim];
};

// Metadata of per-channel keys, zero beyond head_dim.
inline void load_channel_metadata(const Side& key, const uint8_t* record, BlockMetadata* out) {
  const int groups = kBlockTokens / key.group_tokens;
  for (int g = 0; g < groups; ++g) {
    const int64_t row = int64_t(g) * key.head_dim * key.metadata_bytes;
    for (int c = 0; c < key.padded_dim; c += kLanes) {
      const int64_t at = row + c * key.metadata_bytes;
      const int count = key.head_dim - c;
      _mm512_store_ps(out->scale[g] + c, load_metadata(record + key.scale_offset + at, key.metadata_bytes, count));
      _mm512_store_ps(out->minimum[g] + c, load_metadata(record + key.minimum_offset + at, key.metadata_bytes, count));
    }
  }
}

// Folds the scales of per-channel keys into the query, and its product with the minima (of the middle codes) into one
// constant a row, for every group of tokens.
template <int B, int PARTS, int R>
inline void fold_channels(const Side& key, const uint8_t* record, const Query<R>& query,
                          uint32_t (*pairs)[kMaxGroups][R][kMaxPairs], float (*constant)[4]) {
  // the bf16 of channels `first` and `second` to pairs: side by side already, or alternately from both
  alignas(64) uint16_t places[32];
  for (int i = 0; i < 32; ++i) places[i] = uint16_t(key.interleaved ? i : i / 2 + i % 2 * 16);
  const __m512i order = _mm512_load_si512(places);
  const __m512 center = _mm512_set1_ps(code_center(B));
  const int half = key.padded_dim / 2, bytes = key.metadata_bytes;
  for (int g = 0; g < kBlockTokens / key.group_tokens; ++g) {
    const int64_t row = int64_t(g) * key.head_dim * bytes;
    __m512 sum[4] = {};
    for (int pair = 0; pair < half; pair += kLanes) {
      const int first = key.interleaved ? 2 * pair : pair, second = key.interleaved ? first + kLanes : first + half;
      const int first_live = std::min(key.head_dim, key.interleaved ? key.head_dim : half) - first;
      const int second_live = key.head_dim - second;
      const uint8_t* scales = record + key.scale_offset + row;
      const uint8_t* minima = record + key.minimum_offset + row;
      const __m512 scale_a = load_metadata(scales + first * bytes, bytes, first_live);
      const __m512 scale_b = load_metadata(scales + second * bytes, bytes, second_live);
      const __m512 minimum_a =
          _mm512_fmadd_ps(scale_a, center, load_metadata(minima + first * bytes, bytes, first_live));
      const __m512 minimum_b =
          _mm512_fmadd_ps(scale_b, center, load_metadata(minima + second * bytes, bytes, second_live));
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m512 q_a = _mm512_loadu_ps(query.values[r] + first), q_b = _mm512_loadu_ps(query.values[r] + second);
        sum[r] = _mm512_fmadd_ps(q_a, minimum_a, _mm512_fmadd_ps(q_b, minimum_b, sum[r]));
        const __m512 a = _mm512_mul_ps(q_a, scale_a), b = _mm512_mul_ps(q_b, scale_b);
        _mm512_store_si512(pairs[0][g][r] + pair, _mm512_permutexvar_epi16(order, neighbour_pairs(a, b)));
        if (PARTS == 2) {
          const __m512i rest = neighbour_pairs(bf16_rest(a), bf16_rest(b));
          _mm512_store_si512(pairs[1][g][r] + pair, _mm512_permutexvar_epi16(order, rest));
        }
      }
    }
    reduce_add(sum, constant[g]);
  }
}

// Words of 2, 3, 4 bits. `pairs[part][group][row]` are the folded queries and `constant` what their products are added
// to; one group if scales belong to tokens.
template <int B, int PARTS, int R>
inline void score_words(const Side& key, const uint8_t* codes,
                        const uint32_t (*pairs)[kMaxGroups][R][kMaxPairs], int groups, const float (*constant)[4],
                        RecordFetcher& fetcher, float (*out)[kBlockTokens]) {
  const __m512i table = code_table(B);
  __m512 sum[R][4];
  for (int r = 0; r < R; ++r)
    for (int k = 0; k < 4; ++k) sum[r][k] = _mm512_set1_ps(constant[k * groups / 4][r]);
  const int count = key.padded_dim / 2;
  const RecordFetcher::Lines ahead = fetcher.take(count);
  for (int pair = 0; pair < count; ++pair) {
    ahead.fetch(pair);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const __m512i values = _mm512_permutexvar_epi16(word_codes<B>(codes, pair, k, key.padded_dim), table);
      const int g = k * groups / 4;
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        for (int part = 0; part < PARTS; ++part)
          sum[r][k] = dot_bf16(sum[r][k], values, broadcast_pair(&pairs[part][g][r][pair]));
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int k = 0; k < 4; ++k) _mm512_storeu_ps(out[r] + 16 * k, sum[r][k]);
}

// Words stored relative to their block: the table holds scale * code + minimum of both channels of the pair.
template <int B, int PARTS, int R>
inline void score_turned(const Side& key, const uint8_t* codes, const BlockMetadata& metadata,
                         const TurnedQuery<R>& query, RecordFetcher& fetcher, float (*out)[kBlockTokens]) {
  const __m512 codes_ps = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i partner = _mm512_set1_epi32(0x00100000), mask = _mm512_set1_epi16((1 << B) - 1);
  const int groups = kBlockTokens / key.group_tokens, steps = key.period / kLanes;
  __m512 sum[R][4];
  for (int r = 0; r < R; ++r)
    for (int k = 0; k < 4; ++k) sum[r][k] = _mm512_setzero_ps();
  const int count = key.padded_dim / 2;
  const RecordFetcher::Lines ahead = fetcher.take(count);
  for (int pair = 0; pair < count; ++pair) {
    ahead.fetch(pair);
    int low, high;
    channel_pair(key, pair, &low, &high);
    __m512i table[kMaxGroups], rest[kMaxGroups];
    for (int g = 0; g < groups; ++g) {
      const __m512 a = _mm512_fmadd_ps(codes_ps, _mm512_set1_ps(metadata.scale[g][low]),
                                       _mm512_set1_ps(metadata.minimum[g][low]));
      const __m512 b = _mm512_fmadd_ps(codes_ps, _mm512_set1_ps(metadata.scale[g][high]),
                                       _mm512_set1_ps(metadata.minimum[g][high]));
      table[g] = neighbour_pairs(a, b);
      if (PARTS == 2) {
        rest[g] = neighbour_pairs(bf16_rest(a), bf16_rest(b));
      }
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const __m512i index =
          _mm512_ternarylogic_epi32(word_codes<B>(codes, pair, k, key.padded_dim), mask, partner, 0xea);
      const int g = k * groups / 4, offset = (k % steps) * kLanes;
      const __m512i values = _mm512_permutexvar_epi16(index, table[g]);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m512i turned = _mm512_load_si512(query.pairs[0][r][pair] + offset);
        sum[r][k] = dot_bf16(sum[r][k], values, turned);
        if (PARTS == 2) {
          const __m512i small = _mm512_permutexvar_epi16(index, rest[g]);
          sum[r][k] = dot_bf16(sum[r][k], small, turned);
          sum[r][k] = dot_bf16(sum[r][k], values, _mm512_load_si512(query.pairs[1][r][pair] + offset));
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int k = 0; k < 4; ++k) _mm512_storeu_ps(out[r] + 16 * k, sum[r][k]);
}

// Bytes: integer dot products, exact for the query's PARTS signed bytes.
template <int PARTS, int R>
inline void score_bytes(const Side& key, const uint8_t* codes, const Query<R>& query, RecordFetcher& fetcher,
                        float (*out)[kBlockTokens]) {
  const int count = key.padded_dim / 4;
  for (int k = 0; k < 4; ++k) {
    __m512i sum[R][PARTS];
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < PARTS; ++p) sum[r][p] = _mm512_set1_epi32(-128 * query.byte_sum[p][r]);
    const RecordFetcher::Lines ahead = fetcher.take(count);
    for (int d = 0; d < count; ++d) {
      ahead.fetch(d);
      const __m512i block = _mm512_loadu_si512(codes + 64 * (4 * d + k));
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
        for (int p = 0; p < PARTS; ++p)
          sum[r][p] = _mm512_dpbusd_epi32(sum[r][p], block, _mm512_set1_epi32(query.bytes[p][r][d]));
    }
    for (int r = 0; r < R; ++r) {
      __m512 total = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[r][0]), _mm512_set1_ps(16384.0f));
      total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][1]), _mm512_set1_ps(128.0f), total);
      if (PARTS == 3) total = _mm512_add_ps(_mm512_cvtepi32_ps(sum[r][PARTS - 1]), total);
      _mm512_storeu_ps(out[r] + 16 * k, _mm512_mul_ps(total, _mm512_set1_ps(query.byte_scale[r])));
    }
  }
}

template <int PARTS, int R>
inline void score_floats(const Side& key, const uint8_t* codes, const Query<R>& query, const Float8Table& table,
                         RecordFetcher& fetcher, float (*out)[kBlockTokens]) {
  const int count = key.padded_dim / 4;
  for (int k = 0; k < 4; ++k) {
    __m512 sum[R][2];
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    const RecordFetcher::Lines ahead = fetcher.take(count);
    for (int d = 0; d < count; ++d) {
      ahead.fetch(d);
      __m512i even, odd;
      table.decode(_mm512_loadu_si512(codes + 64 * (4 * d + k)), &even, &odd);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        for (int p = 0; p < PARTS; ++p) {
          const __m512i pairs = broadcast_two_pairs(&query.pairs[p][r][2 * d]);
          sum[r][0] = dot_bf16(sum[r][0], even, pairs);
          sum[r][1] = dot_bf16(sum[r][1], odd, pairs);
        }
      }
    }
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(out[r] + 16 * k, Float8Table::join(sum[r][0], sum[r][1]));
  }
}

}  // namespace avx512
}  // namespace kvcache
