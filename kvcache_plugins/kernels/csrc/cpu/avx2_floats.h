// Products with 8-bit floating point codes of whole blocks for AVX2: widened through fp16, and never stored.
//
// A byte becomes a half by a shift (E5M2) or a shift and a mask (E4M3, whose exponents come out smaller by 8), and the
// processor widens halves, small ones too, by itself. Two of a word's four codes lie side by side then, for which a row
// has pairs of numbers; what they give is added once all is summed. So the results are those of fp32, for any query.
//
// Lanes are tokens for the scores and channels for the weighted sums, as in avx2_products.h. Bound: 15 instructions for
// 32 codes that four rows share, and six for every row. Many rows are better served by tiles, which are decoded once.
#pragma once

#include "avx2_blocks.h"

namespace kvcache {
namespace {  // see portable_numbers.inl

constexpr int kMostFloatRows = 16;  // query rows up to which decoding them anew for every four is faster than tiles

inline bool is_float8(const Side& side) { return side.format == kE4M3 || side.format == kE5M2; }

// What the widened codes of a format must be multiplied by.
inline float float8_unit(int format) { return format == kE4M3 ? 256.0f : 1.0f; }

// The second and the fourth codes of 8 words, as halves.
template <int kFormat>
inline __m256i odd_codes(__m256i words) {
  if (kFormat == kE5M2) return _mm256_and_si256(words, _mm256_set1_epi16(static_cast<int16_t>(0xFF00)));
  return _mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16(static_cast<int16_t>(0xBF80)));
}

// sum[r][half] += halves of 8 words times the pair of row r.
template <int kRows>
inline void multiply_add(__m256i halves, const float* pairs, int stride, __m256 (&sum)[kRows][2]) {
  const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    double both;
    std::memcpy(&both, pairs + r * stride, sizeof(both));
    const __m256 pair = _mm256_castpd_ps(_mm256_set1_pd(both));
    sum[r][0] = _mm256_fmadd_ps(low, pair, sum[r][0]);
    sum[r][1] = _mm256_fmadd_ps(high, pair, sum[r][1]);
  }
}

// Products of 8 words at each of `steps` places, `apart` bytes from one to the next, with rows of quads: out[r] has one
// for each word.
template <int kFormat, int kRows>
inline void multiply_words(const uint8_t* codes, int64_t apart, int steps, const float* quads, int stride,
                           const RecordFetcher::Lines& ahead, __m256 (&out)[kRows]) {
  __m256 sum[kRows][2] = {};
  for (int step = 0; step < steps; ++step) {
    if (step % 2 == 0) ahead.fetch(step / 2);
    const __m256i words = load_codes(codes + step * apart);
    multiply_add<kRows>(odd_codes<kFormat>(_mm256_slli_epi16(words, 8)), quads + 4 * step, stride, sum);
    multiply_add<kRows>(odd_codes<kFormat>(words), quads + 4 * step + 2, stride, sum);
  }
  for (int r = 0; r < kRows; ++r) {
    const __m256 both = _mm256_hadd_ps(sum[r][0], sum[r][1]);
    out[r] = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(both), 0xD8));
  }
}

// Calls `run.template operator()<kFormat, kRows>()` for a format and up to kTogether rows.
template <typename Run>
void dispatch_formats(int format, int rows, const Run& run) {
  dispatch_rows(rows, [&]<int kRows>() {
    if (format == kE4M3) return run.template operator()<kE4M3, kRows>();
    run.template operator()<kE5M2, kRows>();
  });
}

// Where number `i` of a row lies among its quads: the first and the third of four, then the others.
inline int place_in_quads(int i) { return i / 4 * 4 + i % 2 * 2 + i / 2 % 2; }

// Whether a side is read here: one scale for a token, or one for all.
bool has_float_codes(const Task& task, const Side& side) {
  return is_float8(side) && side.width == 1 && is_by_token(side) && task.queries <= kMostFloatRows;
}

// Scores of a task's query rows.
class FloatKeys {
 public:
  explicit FloatKeys(const Task& task)
      : task_(task), key_(task.key), scale_(key_, key_.scale_offset, key_.static_scale) {
    serves_ = has_float_codes(task, key_) && key_.cos == nullptr && key_.inv_freq == nullptr;
    if (!serves_) return;
    quads_.resize(static_cast<int64_t>(task.queries) * key_.padded_dim);
    for (int r = 0; r < task.queries; ++r) {
      for (int d = 0; d < key_.head_dim; ++d) {
        quads_[r * key_.padded_dim + place_in_quads(d)] = task.query[static_cast<int64_t>(r) * key_.head_dim + d] *
                                                          (key_.factors != nullptr ? key_.factors[d] : 1.0f);
      }
    }
  }

  // Writes the scores of a whole block; false if that takes decoding.
  bool score(const uint8_t* record, float* scores, RecordFetcher& fetcher, Workspace& ws) {
    if (!serves_) return false;
    load_metadata(key_, record, ws);
    scale_.take(ws.scale);
    for (int first = 0; first < task_.queries; first += kTogether) {
      const int rows = static_cast<int>(smaller(kTogether, task_.queries - first));
      dispatch_formats(key_.format, rows, [&]<int kFormat, int kRows>() {
        score_words<kFormat, kRows>(record + key_.codes_offset, first, scores + first * kBlockTokens, fetcher);
      });
    }
    return true;
  }

 private:
  template <int kFormat, int kRows>
  void score_words(const uint8_t* codes, int first, float* scores, RecordFetcher& fetcher) {
    const float* const quads = quads_.data() + first * key_.padded_dim;
    const __m256 unit = _mm256_set1_ps(float8_unit(kFormat));
    const int steps = key_.padded_dim / 4;
    for (int t = 0; t < kBlockTokens; t += kLanes) {
      const RecordFetcher::Lines ahead = fetcher.take(steps / 2);
      __m256 found[kRows];
      multiply_words<kFormat, kRows>(codes + 4 * t, 4 * kBlockTokens, steps, quads, key_.padded_dim, ahead, found);
      const __m256 scale = _mm256_mul_ps(_mm256_loadu_ps(scale_.of(0) + t), unit);
      for (int r = 0; r < kRows; ++r)
        _mm256_storeu_ps(scores + r * kBlockTokens + t, _mm256_mul_ps(found[r], scale));
    }
  }

  const Task& task_;
  const Side& key_;
  bool serves_;
  TokenMetadata scale_;
  std::vector<float> quads_;  // of every query row
};

// Weighted sums of values for a task's query rows.
class FloatValues {
 public:
  explicit FloatValues(const Task& task)
      : task_(task), value_(task.value), scale_(value_, value_.scale_offset, value_.static_scale) {
    serves_ = has_float_codes(task, value_) && value_.factors == nullptr;
    if (serves_) quads_.resize(task.queries * kBlockTokens);
  }

  // Adds a whole block's to rows of the output, `stride` apart; false, and nothing is added, if that takes decoding.
  bool add(const uint8_t* record, const float* weights, RecordFetcher& fetcher, Workspace& ws, float* output,
           int64_t stride) {
    if (!serves_) return false;
    load_metadata(value_, record, ws);
    scale_.take(ws.scale);
    alignas(32) float folded[kBlockTokens];
    for (int r = 0; r < task_.queries; ++r) {
      const float unit = float8_unit(value_.format);
      for (int t = 0; t < kBlockTokens; t += kLanes)
        store(folded + t, load<Floats>(weights + r * kBlockTokens + t) * load<Floats>(scale_.of(0) + t) * unit);
      if (!are_finite(folded, kBlockTokens)) return false;
      for (int t = 0; t < kBlockTokens; ++t) quads_[r * kBlockTokens + place_in_quads(t)] = folded[t];
    }
    for (int first = 0; first < task_.queries; first += kTogether) {
      const int rows = static_cast<int>(smaller(kTogether, task_.queries - first));
      dispatch_formats(value_.format, rows, [&]<int kFormat, int kRows>() {
        add_words<kFormat, kRows>(record + value_.codes_offset, first, fetcher, output + first * stride, stride);
      });
    }
    return true;
  }

 private:
  template <int kFormat, int kRows>
  void add_words(const uint8_t* codes, int first, RecordFetcher& fetcher, float* output, int64_t stride) {
    const float* const quads = quads_.data() + first * kBlockTokens;
    const int steps = kBlockTokens / 4, width = value_.padded_dim;
    for (int d = 0; d < width; d += kLanes) {
      const RecordFetcher::Lines ahead = fetcher.take(steps / 2);
      __m256 found[kRows];
      multiply_words<kFormat, kRows>(codes + 4 * d, 4 * width, steps, quads, kBlockTokens, ahead, found);
      for (int r = 0; r < kRows; ++r) {
        float* const at = output + r * stride + d;
        _mm256_storeu_ps(at, _mm256_add_ps(_mm256_loadu_ps(at), found[r]));
      }
    }
  }

  const Task& task_;
  const Side& value_;
  bool serves_;
  TokenMetadata scale_;
  std::vector<float> quads_;  // of every row of weights, times the scales
};

}  // namespace
}  // namespace kvcache
