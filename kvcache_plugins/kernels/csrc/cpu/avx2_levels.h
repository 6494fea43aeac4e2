// Products with non-uniform codes of whole blocks for AVX2 (KVQuant): levels are looked up and used, and never stored.
//
// A shift and a mask leave a code in every byte. Two look-ups find the lower and the upper bytes of the levels, which
// bf16 holds exactly, and these are put together: a word has the levels of two codes then, which a shift or a mask
// makes fp32. All products are in fp32, for any query.
//
// Lanes are tokens for the scores and channels for the weighted sums, as in avx2_products.h. Bound, for 32 codes that
// four rows share: 38 instructions for the scores and 31 for the weighted sums, not counting loads. Many rows are
// better served by tiles, which are decoded once.
#pragma once

#include "avx2_blocks.h"
#include "avx2_positions.h"

namespace kvcache {
namespace {  // see portable_numbers.inl

constexpr int kMostLevelRows = 7;  // query rows up to which looking levels up anew for every four is faster than tiles

// The 32 codes of a step, one in every byte: of 3 bits, joined with the third bits from another plane, where those of a
// half's two codes lie four apart.
template <int kBits>
inline __m256i byte_codes(const uint8_t* words, int shift, const uint8_t* plane, int plane_shift) {
  const __m256i shifted = _mm256_srl_epi16(load_codes(words), _mm_cvtsi32_si128(shift));
  const __m256i low = _mm256_and_si256(shifted, _mm256_set1_epi8(kBits == 4 ? 15 : 3));
  if (kBits != 3) return low;
  const __m256i high = _mm256_srl_epi16(load_codes(plane), _mm_cvtsi32_si128(plane_shift));
  const __m256i first = _mm256_slli_epi16(_mm256_and_si256(high, _mm256_set1_epi16(1)), 2);
  const __m256i second = _mm256_slli_epi16(_mm256_and_si256(high, _mm256_set1_epi16(16)), 6);
  return _mm256_or_si256(low, _mm256_or_si256(first, second));
}

// The numbers that bf16 in the lower and in the upper halves of words are.
inline __m256 lower_numbers(__m256i halves) { return _mm256_castsi256_ps(_mm256_slli_epi32(halves, 16)); }

inline __m256 upper_numbers(__m256i halves) {
  return _mm256_castsi256_ps(_mm256_and_si256(halves, _mm256_set1_epi32(static_cast<int32_t>(0xFFFF0000))));
}

// What the codes of a side stand for.
class LevelTable {
 public:
  explicit LevelTable(const Side& side) {
    alignas(16) uint8_t low[16], high[16];
    for (int code = 0; code < 16; ++code) {
      uint32_t bits;
      std::memcpy(&bits, side.levels + (code & ((1 << side.nbits) - 1)), sizeof(bits));
      low[code] = static_cast<uint8_t>(bits >> 16);
      high[code] = static_cast<uint8_t>(bits >> 24);
    }
    low_ = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(low)));
    high_ = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(high)));
  }

  // Levels as bf16: of the codes in the lower bytes of halves, and of those in the upper bytes.
  void find(__m256i codes, __m256i (&levels)[2]) const {
    const __m256i low = _mm256_shuffle_epi8(low_, codes), high = _mm256_shuffle_epi8(high_, codes);
    const __m256i lower = _mm256_set1_epi16(255);
    levels[0] = _mm256_or_si256(_mm256_and_si256(low, lower), _mm256_slli_epi16(high, 8));
    levels[1] = _mm256_or_si256(_mm256_srli_epi16(low, 8), _mm256_andnot_si256(lower, high));
  }

 private:
  __m256i low_, high_;
};

inline float residual_of(int32_t outlier) { return _cvtsh_ss(static_cast<uint16_t>(outlier)); }

// Scores of a task's query rows.
class LevelKeys {
 public:
  explicit LevelKeys(const Task& task) : task_(task), key_(task.key) {
    const bool is_whole = key_.inv_freq == nullptr || key_.interleaved || key_.rotary_dim == key_.padded_dim;
    serves_ = key_.format == kNonUniform && key_.channel_scale != nullptr && key_.factors == nullptr &&
              key_.cos == nullptr && is_whole && task.queries <= kMostLevelRows;
    if (!serves_) return;
    queries_.reset(new TurnedQueries(task));
    pairs_ = key_.padded_dim / 2;
    ranges_.resize(2 * pairs_);
    for (int pair = 0; pair < pairs_; ++pair) set_ranges(pair);
  }

  // Writes the scores of the whole block at slot `start`; false if that takes decoding.
  bool score(int64_t start, const uint8_t* record, float* scores, RecordFetcher& fetcher) {
    if (!serves_) return false;
    queries_->move_to(start);
    const LevelTable table(key_);
    for (int first = 0; first < task_.queries; first += kTogether) {
      const int rows = static_cast<int>(smaller(kTogether, task_.queries - first));
      queries_->turn_rows(first / kTogether);
      float* const out = scores + first * kBlockTokens;
      dispatch_words(key_.nbits, rows, [&]<int kBits, int kRows>() {
        score_codes<kBits, kRows>(record + key_.codes_offset, table, fetcher, out);
      });
      add_outliers(outliers_of(key_, start), rows, out);
    }
    return true;
  }

 private:
  // Scales and offsets of a pair of channels, turned by the distances of 8 tokens: what the levels of the first and of
  // the second channel are multiplied by for either channel of the turned keys, and what is added to that.
  struct alignas(32) Ranges {
    float of_first[2][kLanes], of_second[2][kLanes], offset[2][kLanes];
  };

  void set_ranges(int pair) {
    float scale[2], offset[2];
    for (int half = 0; half < 2; ++half) {
      const int channel = pair_channel(key_, pair, half);
      const bool is_real = channel < key_.head_dim;  // others decode to nothing
      scale[half] = is_real ? key_.channel_scale[channel] : 0.0f;
      offset[half] = is_real ? key_.channel_offset[channel] : 0.0f;
    }
    for (int distance = 0; distance < 16; ++distance) {
      Ranges& ranges = ranges_[distance / kLanes * pairs_ + pair];
      const int t = distance % kLanes;
      const float c = queries_->distances(pair).cos[distance], s = queries_->distances(pair).sin[distance];
      ranges.of_first[0][t] = scale[0] * c;
      ranges.of_first[1][t] = scale[0] * s;
      ranges.of_second[0][t] = -scale[1] * s;
      ranges.of_second[1][t] = scale[1] * c;
      ranges.offset[0][t] = offset[0] * c - offset[1] * s;
      ranges.offset[1][t] = offset[1] * c + offset[0] * s;
    }
  }

  // sums[i][r] += products of 8 tokens' keys, of which `levels` are a pair of channels and whose ranges these are, with
  // the query as turned for the sixteen tokens they are of.
  template <int kCount, int kRows>
  inline __attribute__((always_inline)) void multiply_add(const __m256i (&levels)[kCount], const Ranges& ranges,
                                                          const TurnedPair* const (&queries)[kCount],
                                                          __m256 (&sums)[kCount][kRows]) const {
#pragma GCC unroll 2
    for (int side = 0; side < 2; ++side) {
      const __m256 of_first = _mm256_load_ps(ranges.of_first[side]), of_second = _mm256_load_ps(ranges.of_second[side]);
      const __m256 offset = _mm256_load_ps(ranges.offset[side]);
      __m256 turned[kCount];
#pragma GCC unroll 2
      for (int i = 0; i < kCount; ++i) {
        turned[i] = _mm256_fmadd_ps(lower_numbers(levels[i]), of_first,
                                    _mm256_fmadd_ps(upper_numbers(levels[i]), of_second, offset));
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int i = 0; i < kCount; ++i)
          sums[i][r] = _mm256_fmadd_ps(turned[i], _mm256_set1_ps(queries[i]->numbers[side][r]), sums[i][r]);
      }
    }
  }

  template <int kBits, int kRows>
  void score_codes(const uint8_t* codes, const LevelTable& table, RecordFetcher& fetcher, float* out) const {
    const uint8_t* const plane = codes + kBlockTokens * key_.padded_dim / 4;
    const auto keep = [&](int token, const __m256 (&sum)[kRows]) {
      for (int r = 0; r < kRows; ++r) _mm256_storeu_ps(out + r * kBlockTokens + token, sum[r]);
    };
    if (kBits == 4) {  // in every byte of a half a code of the same channel: of token t and of token t + 32
#pragma GCC unroll 4
      for (int part = 0; part < 4; ++part) {
        const int k = part / 2, at = part % 2 * 8;
        const RecordFetcher::Lines ahead = fetcher.take(pairs_ / 2);
        __m256 sum[2][kRows] = {};
        for (int pair = 0; pair < pairs_; ++pair) {
          if (pair % 2 == 0) ahead.fetch(pair / 2);
          const __m256i found = byte_codes<kBits>(codes + 64 * pair + 4 * at, 4 * k, nullptr, 0);
          __m256i levels[2];
          table.find(found, levels);
          const TurnedPair* const queries[2] = {queries_->of(k) + pair, queries_->of(k + 2) + pair};
          multiply_add(levels, ranges_[at / kLanes * pairs_ + pair], queries, sum);
        }
        for (int which = 0; which < 2; ++which) keep(16 * (k + 2 * which) + at, sum[which]);
      }
      return;
    }
    // of the same token, and of two pairs of channels
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const TurnedPair* const query = queries_->of(k);
      const RecordFetcher::Lines ahead = fetcher.take(pairs_ / 2);
      __m256 sum[2][1][kRows] = {};
      for (int step = 0; step < pairs_ / 2; ++step) {
        ahead.fetch(step);
        for (int i = 0; i < 2; ++i) {
          const __m256i found = byte_codes<kBits>(codes + 64 * step + 32 * i, 2 * k, plane + 64 * (step / 2) + 32 * i,
                                                  8 * (step % 2) + k);
          __m256i levels[2];
          table.find(found, levels);
#pragma GCC unroll 2
          for (int pair = 2 * step; pair < 2 * step + 2; ++pair)
            multiply_add({levels[pair - 2 * step]}, ranges_[i * pairs_ + pair], {query + pair}, sum[i]);
        }
      }
      for (int i = 0; i < 2; ++i) keep(16 * k + 8 * i, sum[i][0]);
    }
  }

  // Adds what outliers contribute, up to four rows at once.
  void add_outliers(const OutlierList& list, int rows, float* out) const {
    static constexpr float kSigns[2] = {1.0f, -1.0f};
    alignas(32) float found[kBlockTokens][kTogether] = {};
    for (const int32_t* entry = list.begin; entry < list.end; ++entry) {
      const int token = outlier_token(*entry), channel = outlier_channel(*entry);
      const int pair = (key_.interleaved ? channel / 2 : channel) % pairs_;
      const int half = key_.interleaved ? channel % 2 : channel >= pairs_;  // as good as random
      const float residual = residual_of(*entry);
      const float along = residual * queries_->distances(pair).cos[token % 16];
      const float across = residual * queries_->distances(pair).sin[token % 16] * kSigns[half];
      const float(&query)[2][kTogether] = queries_->of(token / 16)[pair].numbers;
      __m128 sum = _mm_fmadd_ps(_mm_set1_ps(along), _mm_load_ps(query[half]), _mm_load_ps(found[token]));
      sum = _mm_fmadd_ps(_mm_set1_ps(across), _mm_load_ps(query[1 - half]), sum);
      _mm_store_ps(found[token], sum);
    }
    for (int t = 0; t < kBlockTokens && list.begin < list.end; t += 4) {
      __m128 part[4];
      for (int i = 0; i < 4; ++i) part[i] = _mm_load_ps(found[t + i]);
      _MM_TRANSPOSE4_PS(part[0], part[1], part[2], part[3]);
      for (int r = 0; r < rows; ++r) {
        float* const at = out + r * kBlockTokens + t;
        _mm_storeu_ps(at, _mm_add_ps(_mm_loadu_ps(at), part[r]));
      }
    }
  }

  const Task& task_;
  const Side& key_;
  bool serves_;
  int pairs_ = 0;
  std::vector<Ranges> ranges_;  // [8 tokens][pair]
  std::unique_ptr<TurnedQueries> queries_;
};

// Weighted sums of values for a task's query rows.
class LevelValues {
 public:
  explicit LevelValues(const Task& task)
      : task_(task), value_(task.value), scale_(value_, value_.scale_offset, value_.static_scale),
        minimum_(value_, value_.minimum_offset, 0.0f) {
    const int per_word = value_.nbits == 4 ? 4 : 8;  // chunks of 16 channels, which then lie alike for all tokens
    serves_ = value_.format == kNonUniform && value_.width == 1 && is_by_token(value_) && value_.factors == nullptr &&
              value_.padded_dim / 16 % per_word == 0 && task.queries <= kMostLevelRows;
  }

  // Adds the whole block's at slot `start` to rows of the output, `stride` apart; false, and nothing is added, if that
  // takes decoding.
  bool add(int64_t start, const uint8_t* record, const float* weights, RecordFetcher& fetcher, Workspace& ws,
           float* output, int64_t stride) {
    if (!serves_) return false;
    load_metadata(value_, record, ws);
    scale_.take(ws.scale);
    minimum_.take(ws.minimum);
    if (!are_finite(scale_.of(0), kBlockTokens) || !are_finite(minimum_.of(0), kBlockTokens)) return false;
    const LevelTable table(value_);
    add_outliers(outliers_of(value_, start), weights, output, stride);
    for (int first = 0; first < task_.queries; first += kTogether) {
      const int rows = static_cast<int>(smaller(kTogether, task_.queries - first));
      fold(weights + first * kBlockTokens, rows);
      dispatch_words(value_.nbits, rows, [&]<int kBits, int kRows>() {
        add_codes<kBits, kRows>(record + value_.codes_offset, table, fetcher, output + first * stride, stride);
      });
    }
    return true;
  }

 private:
  // Brings up to four rows of weights times the scales to [token][row], and sums them times the minima.
  void fold(const float* weights, int rows) {
    const __m128 nothing = _mm_setzero_ps();
    __m128 added = nothing;
    for (int t = 0; t < kBlockTokens; t += 4) {
      __m128 part[4];
      for (int r = 0; r < 4; ++r) part[r] = r < rows ? _mm_loadu_ps(weights + r * kBlockTokens + t) : nothing;
      _MM_TRANSPOSE4_PS(part[0], part[1], part[2], part[3]);
      for (int i = 0; i < 4; ++i) {
        _mm_store_ps(scaled_[t + i], _mm_mul_ps(part[i], _mm_set1_ps(scale_.of(0)[t + i])));
        added = _mm_fmadd_ps(part[i], _mm_set1_ps(minimum_.of(0)[t + i]), added);
      }
    }
    _mm_store_ps(added_, added);
  }

  template <int kBits, int kRows>
  void add_codes(const uint8_t* codes, const LevelTable& table, RecordFetcher& fetcher, float* output,
                 int64_t stride) const {
    constexpr int kLow = kBits == 3 ? 2 : kBits, kPerWord = 16 / kLow;
    const int chunks = value_.padded_dim / 16;
    const uint8_t* const plane = codes + kBlockTokens * value_.padded_dim / 4;
    for (int part = 0; part < chunks; ++part) {  // 8 channels of a chunk, and of the one that is half a word further on
      const int u = part / kPerWord * kPerWord + part % kPerWord / 2, at = part % 2 * 8;
      const RecordFetcher::Lines ahead = fetcher.take(kBlockTokens / 4);
      __m256 sum[2][kRows] = {};
      for (int j = 0; j < kBlockTokens / 2; ++j) {
        if (j % 2 == 0) ahead.fetch(j / 2);
        const unsigned chunk = j * chunks + u;
        const __m256i found = byte_codes<kBits>(codes + 64 * (chunk / kPerWord) + 4 * at, kLow * (u % kPerWord),
                                                plane + 64 * (chunk / 16) + 4 * at, chunk % 16);
        __m256i levels[2];
        table.find(found, levels);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const __m256 first = _mm256_set1_ps(scaled_[2 * j][r]), second = _mm256_set1_ps(scaled_[2 * j + 1][r]);
          for (int which = 0; which < 2; ++which) {
            sum[which][r] = _mm256_fmadd_ps(lower_numbers(levels[which]), first, sum[which][r]);
            sum[which][r] = _mm256_fmadd_ps(upper_numbers(levels[which]), second, sum[which][r]);
          }
        }
      }
      for (int which = 0; which < 2; ++which) {
        for (int r = 0; r < kRows; ++r) {
          float* const to = output + r * stride + 16 * (u + which * kPerWord / 2) + at;
          const __m256 found = _mm256_add_ps(sum[which][r], _mm256_set1_ps(added_[r]));
          _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(to), found));
        }
      }
    }
  }

  void add_outliers(const OutlierList& list, const float* weights, float* output, int64_t stride) const {
    for (const int32_t* entry = list.begin; entry < list.end; ++entry) {
      const float residual = residual_of(*entry);  // finite (quantizers/outliers.py)
      for (int r = 0; r < task_.queries; ++r)
        output[r * stride + outlier_channel(*entry)] += weights[r * kBlockTokens + outlier_token(*entry)] * residual;
    }
  }

  const Task& task_;
  const Side& value_;
  bool serves_;
  TokenMetadata scale_, minimum_;
  // of four rows
  alignas(16) float scaled_[kBlockTokens][kTogether], added_[kTogether];
};

}  // namespace
}  // namespace kvcache
