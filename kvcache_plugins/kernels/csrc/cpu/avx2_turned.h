// Scores with integer codes of keys stored relative to their block (KIVI with `rope_mode="block"`) for AVX2, where
// nothing is decoded to memory.
//
// Keys are widened, scaled, and turned by the angles of their places in registers, a token and the one 32 slots further
// on at once, and multiplied with up to four query rows. All is in fp32, for any query. Lanes are tokens. Bound: 14
// multiply-adds of 8 lanes for 16 codes that four rows share, of which scaling and turning are six, in seven cycles
// (Zen 3). Many rows are better served by tiles, which are turned once.
#pragma once

#include <vector>

#include "avx2_products.h"

namespace kvcache {
namespace {  // see portable_numbers.inl

constexpr int kMostTurnedRows = 16;  // query rows up to which turning keys anew for every four is faster than tiles

class TurnedKeys {
 public:
  explicit TurnedKeys(const Task& task) : task_(task), key_(task.key) {
    serves_ = key_.format == kAffine && key_.nbits < 8 && key_.cos != nullptr && key_.factors == nullptr &&
              key_.width == key_.head_dim && key_.group_tokens >= 16 && key_.minimum_offset >= 0 &&
              key_.head_dim == key_.padded_dim && (key_.interleaved != 0 || key_.rotary_dim == key_.head_dim) &&
              key_.period % kLanes == 0 && task.queries <= kMostTurnedRows;
    if (!serves_) return;
    pairs_ = key_.padded_dim / 2;
    queries_.resize((task.queries + kTogether - 1) / kTogether * pairs_);
    const int turned = key_.rotary_dim / 2;  // pairs
    angles_.resize(key_.period / kLanes * pairs_);
    for (int t = 0; t < key_.period; ++t) {
      for (int pair = 0; pair < pairs_; ++pair) {
        Angles& angles = angles_[t / kLanes * pairs_ + pair];
        angles.cos[t % kLanes] = pair < turned ? key_.cos[t * turned + pair] : 1.0f;
        angles.sin[t % kLanes] = pair < turned ? key_.sin[t * turned + pair] : 0.0f;
      }
    }
    for (int r = 0; r < task.queries; ++r) {
      const float* const row = task.query + static_cast<int64_t>(r) * key_.head_dim;
      for (int pair = 0; pair < pairs_; ++pair) {
        for (int half = 0; half < 2; ++half)
          queries_[r / kTogether * pairs_ + pair].numbers[half][r % kTogether] = row[channel(pair, half)];
      }
    }
  }

  // Writes the scores of the whole block at slot `start`; false if that takes decoding.
  bool score(int64_t start, const uint8_t* record, float* scores, RecordFetcher& fetcher, Workspace& ws) {
    if (!serves_) return false;
    load_metadata(key_, record, ws);
    for (int first = 0; first < task_.queries; first += kTogether) {
      const int rows = static_cast<int>(smaller(kTogether, task_.queries - first));
      const Queries* const queries = queries_.data() + first / kTogether * pairs_;
      dispatch_words(key_.nbits, rows, [&]<int kBits, int kRows>() {
        score_turned<kBits, kRows>(record + key_.codes_offset, queries, ws, start, fetcher,
                                   scores + first * kBlockTokens);
      });
    }
    return true;
  }

 private:
  // What rows have for the two channels of a pair.
  struct Queries {
    float numbers[2][kTogether];
  };
  // Of a pair, for 8 tokens.
  struct Angles {
    float cos[kLanes], sin[kLanes];
  };

  const Angles* angles_of(int64_t slot) const { return angles_.data() + slot % key_.period / kLanes * pairs_; }

  int channel(int pair, int half) const { return key_.interleaved ? 2 * pair + half : pair + half * pairs_; }

  template <int kBits, int kRows>
  __attribute__((noinline)) void score_turned(const uint8_t* codes, const Queries* queries, const Workspace& ws,
                                              int64_t start, RecordFetcher& fetcher, float* out) const {
    constexpr int kPerWord = kBits == 4 ? 1 : 2;        // pairs of channels
    constexpr int kInStep = kBits == 3 ? 4 : kPerWord;  // after which codes lie in their words as before
    const uint8_t* const plane = codes + kBlockTokens * key_.padded_dim / 4;
    const int step = channel(1, 0), between = channel(0, 1);  // from pair to pair, and within one
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {  // 8 tokens, and those 32 slots further on
      const int k = part / 2, i = part % 2, at = 16 * k + 8 * i;
      const int64_t near = at / key_.group_tokens * key_.head_dim, far = (at + 32) / key_.group_tokens * key_.head_dim;
      const Angles* const angles[2] = {angles_of(start + at), angles_of(start + at + 32)};
      const RecordFetcher::Lines ahead = fetcher.take(pairs_ / kInStep);
      __m256 sums[2][kRows] = {};
      for (int first = 0; first < pairs_; first += kInStep) {
        ahead.fetch(first / kInStep);
#pragma GCC unroll 4
        for (int n = 0; n < kInStep; ++n) {
          const int pair = first + n;
          __m256 a[2], b[2];
#pragma GCC unroll 2
          for (int which = 0; which < 2; ++which) {
            const int place = k + 2 * which;
            const Place low = kBits == 4 ? Place(0, 4 * place) : Place(0, 8 * (n % 2) + 2 * place, 0, 4 * n + place);
            const __m256i found = low.take<kBits>(codes + 64 * (pair / kPerWord), plane + 64 * (pair / 4), i);
            const int64_t one = (which == 0 ? near : far) + pair * step, other = one + between;
            const __m256 x = _mm256_fmadd_ps(lower_codes(found), _mm256_set1_ps(ws.scale[one]),
                                             _mm256_set1_ps(ws.minimum[one]));
            const __m256 y = _mm256_fmadd_ps(upper_codes(found), _mm256_set1_ps(ws.scale[other]),
                                             _mm256_set1_ps(ws.minimum[other]));
            const __m256 c = _mm256_loadu_ps(angles[which][pair].cos), s = _mm256_loadu_ps(angles[which][pair].sin);
            a[which] = _mm256_fmsub_ps(x, c, _mm256_mul_ps(y, s));
            b[which] = _mm256_fmadd_ps(y, c, _mm256_mul_ps(x, s));
          }
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const __m256 first_number = _mm256_set1_ps(queries[pair].numbers[0][r]);
            const __m256 second_number = _mm256_set1_ps(queries[pair].numbers[1][r]);
#pragma GCC unroll 2
            for (int which = 0; which < 2; ++which) {
              sums[which][r] = _mm256_fmadd_ps(a[which], first_number, sums[which][r]);
              sums[which][r] = _mm256_fmadd_ps(b[which], second_number, sums[which][r]);
            }
          }
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        for (int which = 0; which < 2; ++which)
          _mm256_storeu_ps(out + r * kBlockTokens + at + 32 * which, sums[which][r]);
      }
    }
  }

  const Task& task_;
  const Side& key_;
  bool serves_;
  int pairs_ = 0;
  std::vector<Queries> queries_;  // [four rows][pair]
  std::vector<Angles> angles_;    // [8 tokens of the period][pair]
};

}  // namespace
}  // namespace kvcache
