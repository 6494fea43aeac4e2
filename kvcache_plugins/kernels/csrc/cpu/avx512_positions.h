// Scores of R query rows against one 64-token block of keys stored as they were before the rotary embedding, with one
// static range per channel and outliers beside the codes (KVQuant); lanes = tokens.
//
// A position is split into a base, the same for 16 tokens, and a distance from it. The query is turned back by the
// base, four times a block. Decoded keys are turned by the distance, and so are their ranges, once a task: a turned key
// is two multiply-adds a channel, of the levels of both channels of a pair. Bases advance from block to block by
// complex multiplication in double precision, so no angle is computed in the loop. Everything is in fp32. Bound:
// multiply-adds, twelve for 32 codes and four rows; with products in bf16 there are fewer instructions, but the time
// was the same, and the error two thirds larger (Zen 5).
#pragma once

#include <cmath>

#include "avx512_keys.h"
#include "avx512_outliers.h"

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

template <int R>
class PositionedKeys {
 public:
  PositionedKeys(const Side& key, const Query<R>& query)
      : key_(key), pairs_(key.padded_dim / 2), is_turned_(key.inv_freq != nullptr) {
    for (int pair = 0; pair < pairs_; ++pair) {
      int channels[2];
      channel_pair(key, pair, &channels[0], &channels[1]);
      for (int r = 0; r < R; ++r) {
        const float a = query.values[r][channels[0]], b = query.values[r][channels[1]];
        query_[pair][0][r] = quarter_[pair][1][r] = a;
        query_[pair][1][r] = quarter_[pair][0][r] = b;
        quarter_[pair][1][r] = -a;
      }
      set_angles(pair, channels);
    }
  }

  // Turns the query to the block at slot `start`.
  void turn_query(int64_t start) {
    if (!is_turned_ && next_ >= 0) return;  // it is as it was
    if (start != next_) set_base(start);
    next_ = start + kBlockTokens;
    constexpr int kPairs = kLanes / (2 * R);                                   // of a vector
    const __m512i owner = _mm512_srli_epi32(lane_numbers(), R == 4 ? 3 : 1);  // the pair of every lane, from the first
    for (int first = 0; first < pairs_; first += kLanes) {
      const __m512 base_cos = narrow(base_[0] + first), base_sin = narrow(base_[1] + first);
      for (int k = 0; k < 4; ++k) {
        const __m512 step_cos = _mm512_load_ps(steps_[k][0] + first), step_sin = _mm512_load_ps(steps_[k][1] + first);
        const __m512 c = _mm512_fmsub_ps(base_cos, step_cos, _mm512_mul_ps(base_sin, step_sin));
        const __m512 s = _mm512_fmadd_ps(base_cos, step_sin, _mm512_mul_ps(base_sin, step_cos));
#pragma GCC unroll 8
        for (int i = 0; i < kLanes; i += kPairs) {
          if (first + i >= pairs_) break;
          const __m512i which = _mm512_add_epi32(owner, _mm512_set1_epi32(i));
          const __m512 along = _mm512_mul_ps(_mm512_load_ps(query_[first + i][0]), _mm512_permutexvar_ps(which, c));
          const __m512 across = _mm512_load_ps(quarter_[first + i][0]);
          _mm512_store_ps(turned_[k][first + i][0], _mm512_fmadd_ps(across, _mm512_permutexvar_ps(which, s), along));
        }
      }
      advance(first);
      advance(first + 8);
    }
  }

  // Scores of the block whose codes these are; `turn_query` comes first.
  template <int B>
  void score(const uint8_t* codes, RecordFetcher& fetcher, float (*out)[kBlockTokens]) const {
    const __m512i table = level_table(key_.levels, B), upper = _mm512_set1_epi32(int(0xffff0000));
    __m512 sum[R][4];
    for (int r = 0; r < R; ++r)
      for (int k = 0; k < 4; ++k) sum[r][k] = _mm512_setzero_ps();
    const RecordFetcher::Lines ahead = fetcher.take(pairs_);
#pragma GCC unroll 2
    for (int pair = 0; pair < pairs_; ++pair) {
      ahead.fetch(pair);
      const Ranges& ranges = ranges_[pair];
      __m512 offset[2], of_first[2], of_second[2];
      for (int side = 0; side < 2; ++side) {
        offset[side] = _mm512_load_ps(ranges.offset[side]);
        of_first[side] = _mm512_load_ps(ranges.of_first[side]);
        of_second[side] = _mm512_load_ps(ranges.of_second[side]);
      }
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        const __m512i levels = _mm512_permutexvar_epi16(word_codes<B>(codes, pair, k, key_.padded_dim), table);
        const __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(levels, 16));
        const __m512 second = _mm512_castsi512_ps(_mm512_and_si512(levels, upper));
#pragma GCC unroll 2
        for (int side = 0; side < 2; ++side) {
          const __m512 turned =
              _mm512_fmadd_ps(first, of_first[side], _mm512_fmadd_ps(second, of_second[side], offset[side]));
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r)
            sum[r][k] = _mm512_fmadd_ps(turned, _mm512_set1_ps(turned_[k][pair][side][r]), sum[r][k]);
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int k = 0; k < 4; ++k) _mm512_storeu_ps(out[r] + 16 * k, sum[r][k]);
  }

  // Adds what the outliers of the block contribute.
  void add_outliers(const OutlierList& list, float (*out)[kBlockTokens]) const {
    if (list.begin >= list.end) return;
    RowNumbers<R, kBlockTokens> sums;
    sums.clear(kBlockTokens);
    const float* const turned = turned_[0][0][0];
    for_batches(list, [&](const int32_t* entries, int count) {
      // places of what an entry needs, and its residual; of a second channel the sine counts negatively
      alignas(64) uint32_t token[kBatch], distance[kBatch], same[kBatch], other[kBatch];
      alignas(64) float along[kBatch], across[kBatch];
      for (int i = 0; i < count; i += kLanes) {
        const OutlierVector outliers(entries + i, count - i);
        __m512i pair, side;
        outliers.find_pairs(key_, &pair, &side);
        const __m512i far = _mm512_and_si512(outliers.token, _mm512_set1_epi32(kLanes - 1));
        const __m512i base = _mm512_mullo_epi32(_mm512_srli_epi32(outliers.token, 4), _mm512_set1_epi32(kMaxPairs));
        const __m512i found = _mm512_slli_epi32(_mm512_add_epi32(base, pair), 1);
        const __m512i rows = _mm512_set1_epi32(R), one = _mm512_set1_epi32(1);
        _mm512_store_si512(token + i, outliers.token);
        _mm512_store_si512(distance + i, _mm512_add_epi32(_mm512_slli_epi32(pair, 5), far));
        _mm512_store_si512(same + i, _mm512_mullo_epi32(_mm512_or_si512(found, side), rows));
        _mm512_store_si512(other + i, _mm512_mullo_epi32(_mm512_or_si512(found, _mm512_xor_si512(side, one)), rows));
        const __m512i sign = _mm512_slli_epi32(side, 31), residual = _mm512_castps_si512(outliers.residual);
        _mm512_store_ps(along + i, outliers.residual);
        _mm512_store_si512(across + i, _mm512_xor_si512(residual, sign));
      }
      for (int i = 0; i < count; ++i) {
        const float* const turn = turns_[0].cos + distance[i];
        sums.add(token[i], along[i] * turn[0], turned + same[i], across[i] * turn[kLanes], turned + other[i]);
      }
    });
    sums.add_to_rows(out, kBlockTokens);
  }

 private:
  // Cosines and sines of a pair's angles at distances of up to 15 tokens.
  struct alignas(64) Turns {
    float cos[kLanes], sin[kLanes];
  };
  static_assert(sizeof(Turns) == 32 * sizeof(float), "a shift finds those of a pair");
  // What becomes of the two channels of a pair, so turned: of their offsets, and of each one's levels.
  struct alignas(64) Ranges {
    float offset[2][kLanes], of_first[2][kLanes], of_second[2][kLanes];
  };

  static __m512i lane_numbers() {
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }

  static __m512 narrow(const double* x) {
    const __m256 low = _mm512_cvtpd_ps(_mm512_load_pd(x)), high = _mm512_cvtpd_ps(_mm512_load_pd(x + 8));
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
  }

  void set_angles(int pair, const int (&channels)[2]) {
    Turns& distances = turns_[pair];
    const bool turns = is_turned_ && 2 * pair < key_.rotary_dim;
    const double cos_one = turns ? std::cos(key_.inv_freq[pair]) : 1.0;
    const double sin_one = turns ? std::sin(key_.inv_freq[pair]) : 0.0;
    double c = 1.0, s = 0.0;
    for (int t = 0; t < kLanes; ++t) {
      distances.cos[t] = float(c);
      distances.sin[t] = float(s);
      const double next = c * cos_one - s * sin_one;
      s = c * sin_one + s * cos_one;
      c = next;
    }
    const double sixteen[2] = {c, s};
    c = 1.0;
    s = 0.0;
    for (int k = 0; k < 4; ++k) {
      steps_[k][0][pair] = float(c);
      steps_[k][1][pair] = float(s);
      const double next = c * sixteen[0] - s * sixteen[1];
      s = c * sixteen[1] + s * sixteen[0];
      c = next;
    }
    block_[0][pair] = c;
    block_[1][pair] = s;
    float scale[2], offset[2];
    for (int side = 0; side < 2; ++side) {
      const bool is_real = channels[side] < key_.head_dim;  // others decode to nothing
      scale[side] = is_real ? key_.channel_scale[channels[side]] : 0.0f;
      offset[side] = is_real ? key_.channel_offset[channels[side]] : 0.0f;
    }
    const __m512 cosines = _mm512_load_ps(distances.cos), sines = _mm512_load_ps(distances.sin);
    const auto keep = [&](int side, __m512 of_first, __m512 of_second) {
      Ranges& ranges = ranges_[pair];
      _mm512_store_ps(ranges.of_first[side], _mm512_mul_ps(of_first, _mm512_set1_ps(scale[0])));
      _mm512_store_ps(ranges.of_second[side], _mm512_mul_ps(of_second, _mm512_set1_ps(scale[1])));
      const __m512 added = _mm512_mul_ps(of_second, _mm512_set1_ps(offset[1]));
      _mm512_store_ps(ranges.offset[side], _mm512_fmadd_ps(of_first, _mm512_set1_ps(offset[0]), added));
    };
    keep(0, cosines, _mm512_sub_ps(_mm512_setzero_ps(), sines));
    keep(1, sines, cosines);
  }

  void set_base(int64_t start) {
    const double position = double(start + key_.position);
    for (int pair = 0; pair < pairs_; ++pair) {
      const double angle = is_turned_ && 2 * pair < key_.rotary_dim ? position * key_.inv_freq[pair] : 0.0;
      base_[0][pair] = std::cos(angle);
      base_[1][pair] = std::sin(angle);
    }
  }

  void advance(int pair) {
    const __m512d c = _mm512_load_pd(base_[0] + pair), s = _mm512_load_pd(base_[1] + pair);
    const __m512d dc = _mm512_load_pd(block_[0] + pair), ds = _mm512_load_pd(block_[1] + pair);
    _mm512_store_pd(base_[0] + pair, _mm512_fmsub_pd(c, dc, _mm512_mul_pd(s, ds)));
    _mm512_store_pd(base_[1] + pair, _mm512_fmadd_pd(c, ds, _mm512_mul_pd(s, dc)));
  }

  const Side& key_;
  const int pairs_;
  const bool is_turned_;
  int64_t next_ = -1;  // slot the bases are set for
  // Cosines in the first, sines in the second row: of the block's first token, of the distance to the next block, and
  // of 0, 16, 32 and 48 tokens.
  alignas(64) double base_[2][kMaxPairs] = {}, block_[2][kMaxPairs] = {};
  alignas(64) float steps_[4][2][kMaxPairs];
  Turns turns_[kMaxPairs];
  Ranges ranges_[kMaxPairs];
  // What all rows have for the two channels of a pair, what a quarter turn makes of that, and the query as turned.
  alignas(64) float query_[kMaxPairs][2][R], quarter_[kMaxPairs][2][R], turned_[4][kMaxPairs][2][R];
};

}  // namespace avx512
}  // namespace kvcache
