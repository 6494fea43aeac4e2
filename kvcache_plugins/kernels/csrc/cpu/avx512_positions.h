// Scores of R query rows against one 64-token block of keys stored as they were before the rotary embedding, with one
// static range per channel and outliers beside the codes (KVQuant); lanes = tokens.
//
// A position is split into a base, the same for 16 tokens, and a distance from it. The query is turned back by the
// base, four times a block; decoded keys are turned by the distance, whose cosines and sines are one small table. Bases
// advance by complex multiplication in double precision, so no angle is computed in the loop. Dot products are in fp32:
// the numbers are there anyway, and rounding them to bf16 would cost as much as it saves.
#pragma once

#include <cmath>

#include "avx512_keys.h"

namespace kvcache {
namespace avx512 {

// Codes of a number of bits as bf16 levels, which they are exactly: `vpermw` reads the low five bits of an index.
inline __m512i level_table(const float* levels, int nbits) {
  alignas(64) uint16_t table[32];
  for (int e = 0; e < 32; ++e) {
    uint32_t bits;
    std::memcpy(&bits, levels + (e & ((1 << nbits) - 1)), 4);
    table[e] = uint16_t(bits >> 16);
  }
  return _mm512_load_si512(table);
}

// What an entry of a list of outliers says (kvcache_plugins/layers/outliers.py).
struct Outlier {
  int token, channel;
  float residual;

  explicit Outlier(int32_t entry)
      : token(outlier_token(entry)), channel(outlier_channel(entry)), residual(_cvtsh_ss(uint16_t(entry))) {}
};

template <int R>
class PositionedKeys {
 public:
  PositionedKeys(const Side& key, const Query<R>& query) : key_(key), is_turned_(key.inv_freq != nullptr) {
    const int pairs = key.padded_dim / 2;
    for (int pair = 0; pair < whole_vectors(pairs); ++pair) {
      int low = 0, high = 0;
      if (pair < pairs) channel_pair(key, pair, &low, &high);
      for (int r = 0; r < R; ++r) {
        query_[r][0][pair] = pair < pairs ? query.values[r][low] : 0.0f;
        query_[r][1][pair] = pair < pairs ? query.values[r][high] : 0.0f;
      }
      // channels beyond the head decode to nothing
      scale_[0][pair] = pair < pairs && low < key.head_dim ? key.channel_scale[low] : 0.0f;
      scale_[1][pair] = pair < pairs && high < key.head_dim ? key.channel_scale[high] : 0.0f;
      offset_[0][pair] = pair < pairs && low < key.head_dim ? key.channel_offset[low] : 0.0f;
      offset_[1][pair] = pair < pairs && high < key.head_dim ? key.channel_offset[high] : 0.0f;
      const bool turns = is_turned_ && 2 * pair < key.rotary_dim;
      const double cos_one = turns ? std::cos(key.inv_freq[pair]) : 1.0;
      const double sin_one = turns ? std::sin(key.inv_freq[pair]) : 0.0;
      double c = 1.0, s = 0.0;
      for (int t = 0; t < 16; ++t) {
        delta_[0][pair][t] = float(c);
        delta_[1][pair][t] = float(s);
        const double next = c * cos_one - s * sin_one;
        s = c * sin_one + s * cos_one;
        c = next;
      }
      step_[0][pair] = c;
      step_[1][pair] = s;
    }
  }

  // Turns the query to the block at slot `start`.
  void turn_query(int64_t start) {
    if (!is_turned_) {
      const size_t bytes = sizeof(float) * key_.padded_dim / 2;
      for (int k = 0; k < 4; ++k)
        for (int r = 0; r < R; ++r)
          for (int side = 0; side < 2; ++side) std::memcpy(turned_[k][r][side], query_[r][side], bytes);
      return;
    }
    if (start != next_) set_base(start);
    next_ = start + kBlockTokens;
    const int pairs = key_.padded_dim / 2;
    for (int k = 0; k < 4; ++k) {
      for (int pair = 0; pair < pairs; pair += kLanes) {
        const __m512 c = narrow(base_[0] + pair), s = narrow(base_[1] + pair);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const __m512 a = _mm512_load_ps(query_[r][0] + pair), b = _mm512_load_ps(query_[r][1] + pair);
          _mm512_store_ps(turned_[k][r][0] + pair, _mm512_fmadd_ps(a, c, _mm512_mul_ps(b, s)));
          _mm512_store_ps(turned_[k][r][1] + pair, _mm512_fmsub_ps(b, c, _mm512_mul_ps(a, s)));
        }
        advance(pair);
        advance(pair + 8);
      }
    }
  }

  // Scores of the block whose codes these are; `turn_query` comes first.
  template <int B>
  void score(const uint8_t* codes, RecordFetcher& fetcher, float (*out)[kBlockTokens]) const {
    if (is_turned_) {
      score_words<B, true>(codes, fetcher, out);
    } else {
      score_words<B, false>(codes, fetcher, out);
    }
  }

  // Adds what the outliers of the block contribute.
  void add_outliers(const OutlierList& list, float (*out)[kBlockTokens]) const {
    const int half = key_.padded_dim / 2;
    for (const int32_t* entry = list.begin; entry < list.end; ++entry) {
      const Outlier outlier(*entry);
      const int pair = key_.interleaved ? outlier.channel / 2 : outlier.channel % half;
      const bool is_second = key_.interleaved ? outlier.channel % 2 != 0 : outlier.channel >= half;
      const int k = outlier.token / 16;
      const float c = delta_[0][pair][outlier.token % 16], s = delta_[1][pair][outlier.token % 16];
      for (int r = 0; r < R; ++r) {
        const float a = turned_[k][r][0][pair], b = turned_[k][r][1][pair];
        out[r][outlier.token] += outlier.residual * (is_second ? c * b - s * a : c * a + s * b);
      }
    }
  }

 private:
  static int whole_vectors(int pairs) { return (pairs + kLanes - 1) / kLanes * kLanes; }

  static __m512 narrow(const double* x) {
    const __m256 low = _mm512_cvtpd_ps(_mm512_load_pd(x)), high = _mm512_cvtpd_ps(_mm512_load_pd(x + 8));
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
  }

  void set_base(int64_t start) {
    const double position = double(start + key_.position);
    for (int pair = 0; pair < whole_vectors(key_.padded_dim / 2); ++pair) {
      const double angle = 2 * pair < key_.rotary_dim ? position * key_.inv_freq[pair] : 0.0;
      base_[0][pair] = std::cos(angle);
      base_[1][pair] = std::sin(angle);
    }
  }

  void advance(int pair) {
    const __m512d c = _mm512_load_pd(base_[0] + pair), s = _mm512_load_pd(base_[1] + pair);
    const __m512d dc = _mm512_load_pd(step_[0] + pair), ds = _mm512_load_pd(step_[1] + pair);
    _mm512_store_pd(base_[0] + pair, _mm512_fmsub_pd(c, dc, _mm512_mul_pd(s, ds)));
    _mm512_store_pd(base_[1] + pair, _mm512_fmadd_pd(c, ds, _mm512_mul_pd(s, dc)));
  }

  template <int B, bool TURNED>
  void score_words(const uint8_t* codes, RecordFetcher& fetcher, float (*out)[kBlockTokens]) const {
    const __m512i table = level_table(key_.levels, B);
    const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
    const int pairs = key_.padded_dim / 2;
    const RecordFetcher::Lines ahead = fetcher.take(pairs);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      __m512 sum[R][2];
      for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
#pragma GCC unroll 2
      for (int pair = 0; pair < pairs; ++pair) {
        if (k == 0) ahead.fetch(pair);
        const __m512i both = _mm512_permutexvar_epi16(word_codes<B>(codes, pair, k, key_.padded_dim), table);
        const __m512 a = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)),
                                         _mm512_set1_ps(scale_[0][pair]), _mm512_set1_ps(offset_[0][pair]));
        const __m512 b = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(both, upper)),
                                         _mm512_set1_ps(scale_[1][pair]), _mm512_set1_ps(offset_[1][pair]));
        __m512 x = a, y = b;
        if (TURNED) {
          const __m512 c = _mm512_load_ps(delta_[0][pair]), s = _mm512_load_ps(delta_[1][pair]);
          x = _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s));
          y = _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s));
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          sum[r][0] = _mm512_fmadd_ps(x, _mm512_set1_ps(turned_[k][r][0][pair]), sum[r][0]);
          sum[r][1] = _mm512_fmadd_ps(y, _mm512_set1_ps(turned_[k][r][1][pair]), sum[r][1]);
        }
      }
      for (int r = 0; r < R; ++r) _mm512_storeu_ps(out[r] + 16 * k, _mm512_add_ps(sum[r][0], sum[r][1]));
    }
  }

  const Side& key_;
  const bool is_turned_;
  int64_t next_ = -1;  // slot the bases are set for
  // cosines in the first, sines in the second row
  alignas(64) double base_[2][kMaxPairs], step_[2][kMaxPairs];
  alignas(64) float delta_[2][kMaxPairs][16];
  // of the first and the second channel of every pair
  alignas(64) float query_[R][2][kMaxPairs], turned_[4][R][2][kMaxPairs];
  alignas(64) float scale_[2][kMaxPairs], offset_[2][kMaxPairs];
};

}  // namespace avx512
}  // namespace kvcache
