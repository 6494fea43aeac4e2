// Products with integer codes of whole blocks for AVX2: in integers of 16 bits, nothing is decoded.
//
// A shift and a mask make 16 codes, which one instruction multiplies by a pair of numbers, over and over, and adds in
// twos to 8 sums of 32 bits. These numbers are a query row, or a row of weights, times the scales that differ within a
// sum, rounded to units of 1/32767 of the largest. Results are then exact to about 1e-5: better than products in bf16,
// worse than fp32 and fp16 queries ask for, which are left to the tiles of decode_attention_portable.inl, as is all
// that is not an integer. Sums of 256 channels fit: 255 * 32767 * 256 < 2^31.
//
// Lanes are tokens for the scores and channels for the weighted sums, as in the AVX-512 kernel. Bound: two instructions
// for 16 codes and a row, and about six for 16 codes that four rows share.
#pragma once

#include <vector>

#include "avx2_blocks.h"

namespace kvcache {
namespace {  // see portable_numbers.inl

constexpr int kSlack = 16;  // numbers after a row that may be read

// Rounds 16 numbers, which are units of `1 / inverse`.
inline __m256i rounded(const float* x, __m256 inverse) {
  const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), inverse));
  const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), inverse));
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
}

// Which numbers are a pair: neighbours; one of the first half and one of the second; of four neighbours the first and
// the third, then the others.
enum Pairing { kNeighbours, kHalves, kQuads };

// Rounds `count` numbers, a multiple of 16, to pairs; returns their unit, or infinity if one is not finite.
float round_to_pairs(const float* x, int count, Pairing pairing, int32_t* pairs) {
  const float largest = largest_of(x, count);
  if (largest == kInfinity) return kInfinity;
  const float unit = (largest > 1e-30f ? largest : 1e-30f) / 32767.0f;  // whose inverse is finite
  const __m256 inverse = _mm256_set1_ps(1.0f / unit);
  const __m256i quads = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4, 5, 2, 3, 6, 7,
                                         8, 9, 12, 13, 10, 11, 14, 15);
  __m256i* out = reinterpret_cast<__m256i*>(pairs);
  if (pairing == kHalves) {
    for (int i = 0; i < count / 2; i += 16) {
      const __m256i a = _mm256_permute4x64_epi64(rounded(x + i, inverse), 0xD8);  // for `unpack`, by halves of 128
      const __m256i b = _mm256_permute4x64_epi64(rounded(x + i + count / 2, inverse), 0xD8);
      _mm256_storeu_si256(out++, _mm256_unpacklo_epi16(a, b));
      _mm256_storeu_si256(out++, _mm256_unpackhi_epi16(a, b));
    }
    return unit;
  }
  for (int i = 0; i < count; i += 16) {
    const __m256i all = rounded(x + i, inverse);
    _mm256_storeu_si256(out++, pairing == kQuads ? _mm256_shuffle_epi8(all, quads) : all);
  }
  return unit;
}

// Words shifted right, and what is left of their halves; of 3 bits, joined with the third bits from another plane.
template <int kBits>
inline __m256i unpacked(const uint8_t* words, int shift, const uint8_t* plane, int plane_shift) {
  const __m256i shifted = _mm256_srl_epi16(load_codes(words), _mm_cvtsi32_si128(shift));
  const __m256i low = _mm256_and_si256(shifted, _mm256_set1_epi16(kBits == 4 ? 15 : 3));
  if (kBits != 3) return low;
  const __m256i high = _mm256_srl_epi16(load_codes(plane), _mm_cvtsi32_si128(plane_shift));
  return _mm256_or_si256(low, _mm256_slli_epi16(_mm256_and_si256(high, _mm256_set1_epi16(1)), 2));
}

// Codes for 8 lanes: two to a lane, or four of 8 bits, the first and the third and then the others.
struct Codes {
  __m256i first, second;

  static Codes of_bytes(const uint8_t* words) {
    const __m256i all = load_codes(words);
    return {_mm256_and_si256(all, _mm256_set1_epi16(255)), _mm256_srli_epi16(all, 8)};
  }
};

// sum[r][i] += codes of 8 lanes times the pair of row r, or the two pairs of 8-bit codes.
template <int kBits, int kRows>
inline void multiply_add(const Codes (&codes)[2], const int32_t* pairs, int stride, __m256i (&sum)[kRows][2]) {
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    const __m256i pair = _mm256_set1_epi32(pairs[r * stride]);
    for (int i = 0; i < 2; ++i) sum[r][i] = _mm256_add_epi32(sum[r][i], _mm256_madd_epi16(codes[i].first, pair));
    if (kBits != 8) continue;
    const __m256i other = _mm256_set1_epi32(pairs[r * stride + 1]);
    for (int i = 0; i < 2; ++i) sum[r][i] = _mm256_add_epi32(sum[r][i], _mm256_madd_epi16(codes[i].second, other));
  }
}

// sums[r][t]: products of the keys of 64 tokens with row r of `pairs`, rows `stride` apart. Every `group` tokens have
// kTogether rows of their own.
template <int kBits, int kRows>
void score_codes(const uint8_t* codes, int channels, int group, const int32_t* pairs, int stride,
                 RecordFetcher& fetcher, int32_t (*sums)[kBlockTokens]) {
  constexpr int kPairs = kBits == 8 ? 2 : 1;  // of a lane in a step
  const uint8_t* const plane = codes + kBlockTokens * channels / 4;
  const int steps = channels / 2 / kPairs;
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    const int32_t* const rows = pairs + 16 * k / group * kTogether * stride;
    const RecordFetcher::Lines ahead = fetcher.take(steps);
    __m256i sum[kRows][2] = {};
    for (int step = 0; step < steps; ++step) {
      ahead.fetch(step);
      Codes found[2];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        if (kBits == 8) {
          found[i] = Codes::of_bytes(codes + 64 * (4 * step + k) + 32 * i);
        } else if (kBits == 4) {
          found[i].first = unpacked<4>(codes + 64 * step + 32 * i, 4 * k, nullptr, 0);
        } else {
          found[i].first = unpacked<kBits>(codes + 64 * (step / 2) + 32 * i, 8 * (step % 2) + 2 * k,
                                           plane + 64 * (step / 4) + 32 * i, 4 * (step % 4) + k);
        }
      }
      multiply_add<kBits>(found, rows + kPairs * step, stride, sum);
    }
    for (int r = 0; r < kRows; ++r)
      for (int i = 0; i < 2; ++i)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums[r] + 16 * k + 8 * i), sum[r][i]);
  }
}

// The weights of one row and group of channels: pairs, their unit, and what is added to every channel.
struct Weights {
  alignas(32) int32_t pairs[kBlockTokens / 2];
  float unit, added;
};

// output[r][c] += products of the values of 64 tokens with the weights of row r; every `group` chunks of 16 channels
// have weights of their own, those of a row one after the other, `width` of them.
template <int kBits, int kRows>
void add_codes(const uint8_t* codes, int chunks, int group, const Weights* weights, int width, RecordFetcher& fetcher,
               float* output, int64_t stride) {
  constexpr int kLow = kBits == 3 ? 2 : kBits, kPerWord = 16 / kLow, kPairs = kBits == 8 ? 2 : 1;
  constexpr int kSteps = kBlockTokens / 2 / kPairs;
  const uint8_t* const plane = codes + kBlockTokens * chunks * 4;
  for (int u = 0; u < chunks; ++u) {
    const Weights* const first = weights + u / group;
    const int rows_apart = static_cast<int>(width * sizeof(Weights) / sizeof(int32_t));
    const RecordFetcher::Lines ahead = fetcher.take(kSteps);
    __m256i sum[kRows][2] = {};
    for (int step = 0; step < kSteps; ++step) {
      ahead.fetch(step);
      const unsigned chunk = step * chunks + u;
      Codes found[2];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        if (kBits == 8) {
          found[i] = Codes::of_bytes(codes + 64 * chunk + 32 * i);
        } else {
          found[i].first = unpacked<kBits>(codes + 64 * (chunk / kPerWord) + 32 * i, kLow * (chunk % kPerWord),
                                           plane + 64 * (chunk / 16) + 32 * i, chunk % 16);
        }
      }
      multiply_add<kBits>(found, first->pairs + kPairs * step, rows_apart, sum);
    }
    for (int r = 0; r < kRows; ++r) {
      const __m256 unit = _mm256_set1_ps(first[r * width].unit), added = _mm256_set1_ps(first[r * width].added);
      for (int i = 0; i < 2; ++i) {
        float* const at = output + r * stride + 16 * u + 8 * i;
        const __m256 found = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][i]), unit, added);
        _mm256_storeu_ps(at, _mm256_add_ps(_mm256_loadu_ps(at), found));
      }
    }
  }
}

// Calls `run.template operator()<kBits, kRows>()` for codes of 2, 3, 4 or 8 bits.
template <typename Run>
void dispatch_bits(int nbits, int rows, const Run& run) {
  dispatch_rows(rows, [&]<int kRows>() {
    if (nbits == 2) return run.template operator()<2, kRows>();
    if (nbits == 3) return run.template operator()<3, kRows>();
    if (nbits == 4) return run.template operator()<4, kRows>();
    run.template operator()<8, kRows>();
  });
}

bool has_integer_codes(const Side& side) {
  return (side.format == kAffine || side.format == kSymmetric) && (side.nbits < 8 || side.head_dim <= 256);
}

// Scores of a task's query rows.
class IntegerKeys {
 public:
  explicit IntegerKeys(const Task& task)
      : task_(task), key_(task.key), is_per_channel_(key_.width > 1),
        scale_(key_, key_.scale_offset, key_.static_scale), minimum_(key_, key_.minimum_offset, 0.0f) {
    serves_ = task.precise == 0 && has_integer_codes(key_) && key_.cos == nullptr && key_.inv_freq == nullptr &&
              (is_per_channel_ ? key_.width == key_.head_dim && key_.group_tokens >= 16 && key_.minimum_offset >= 0
                               : is_by_token(key_));
    if (!serves_) return;
    stride_ = key_.padded_dim / 2 + kSlack;
    row_length_ = key_.padded_dim + kSlack;
    query_.resize(task.queries * row_length_);
    for (int r = 0; r < task.queries; ++r) {
      for (int d = 0; d < key_.head_dim; ++d) {
        query_[r * row_length_ + d] = task.query[static_cast<int64_t>(r) * key_.head_dim + d] *
                                      (key_.factors != nullptr ? key_.factors[d] : 1.0f);
      }
    }
    const int sets = is_per_channel_ ? kBlockTokens / key_.group_tokens * kTogether : task.queries;
    pairs_.resize(sets * stride_);
    units_.resize(sets);
    constants_.resize(sets);
    for (int r = 0; r < task.queries && !is_per_channel_; ++r) {
      const float* const row = query_.data() + r * row_length_;
      serves_ &= round_row(row, r);
      for (int d = 0; d < key_.head_dim; ++d) constants_[r] += row[d];
    }
  }

  // Writes the scores of a whole block; false if that takes decoding.
  bool score(const uint8_t* record, float* scores, RecordFetcher& fetcher, Workspace& ws) {
    if (!serves_) return false;
    load_metadata(key_, record, ws);
    if (!is_per_channel_) {
      scale_.take(ws.scale);
      minimum_.take(ws.minimum);
    }
    for (int first = 0; first < task_.queries; first += kTogether) {
      const int rows = static_cast<int>(smaller(kTogether, task_.queries - first));
      if (is_per_channel_ && !fold_channels(first, rows, ws)) return false;
      const int32_t* const pairs = pairs_.data() + (is_per_channel_ ? 0 : first * stride_);
      const int group = is_per_channel_ ? key_.group_tokens : kBlockTokens;
      dispatch_bits(key_.nbits, rows, [&]<int kBits, int kRows>() {
        score_codes<kBits, kRows>(record + key_.codes_offset, key_.padded_dim, group, pairs, stride_, fetcher, sums_);
      });
      for (int r = 0; r < rows; ++r) finish(r, first + r, scores + (first + r) * kBlockTokens);
    }
    return true;
  }

 private:
  // Rounds a query row with all that is folded in; false if it is not finite.
  bool round_row(const float* row, int set) {
    const Pairing pairing = key_.nbits == 8 ? kQuads : key_.interleaved != 0 ? kNeighbours : kHalves;
    units_[set] = round_to_pairs(row, key_.padded_dim, pairing, pairs_.data() + set * stride_);
    return units_[set] != kInfinity;
  }

  bool fold_channels(int first, int rows, const Workspace& ws) {
    alignas(32) float folded[kMaxHeadDim + kSlack] = {};
    for (int g = 0; g < kBlockTokens / key_.group_tokens; ++g) {
      const float* const scale = ws.scale + g * key_.head_dim;
      const float* const minimum = ws.minimum + g * key_.head_dim;
      for (int r = 0; r < rows; ++r) {
        const float* const row = query_.data() + (first + r) * row_length_;
        Floats constant = Floats{};
        int d = 0;
        for (; d + kLanes <= key_.head_dim; d += kLanes) {
          const Floats query = load<Floats>(row + d);
          store(folded + d, query * load<Floats>(scale + d));
          constant += query * load<Floats>(minimum + d);
        }
        float sum = 0.0f;
        for (; d < key_.head_dim; ++d) {
          folded[d] = row[d] * scale[d];
          sum += row[d] * minimum[d];
        }
        for (int l = 0; l < kLanes; ++l) sum += constant[l];
        constants_[g * kTogether + r] = sum;
        if (!round_row(folded, g * kTogether + r)) return false;
      }
    }
    return true;
  }

  // Turns sums into scores.
  void finish(int r, int row, float* out) const {
    for (int t = 0; t < kBlockTokens; t += kLanes) {
      const int set = is_per_channel_ ? t / key_.group_tokens * kTogether + r : row;
      Floats score = __builtin_convertvector(load<Integers>(sums_[r] + t), Floats) * units_[set];
      if (is_per_channel_) {
        score += constants_[set];
      } else {
        if (key_.format == kSymmetric) score -= 128.0f * constants_[set];
        score = score * load<Floats>(scale_.of(0) + t) + constants_[set] * load<Floats>(minimum_.of(0) + t);
      }
      store(out + t, score);
    }
  }

  const Task& task_;
  const Side& key_;
  const bool is_per_channel_;
  bool serves_;
  int stride_ = 0, row_length_ = 0;  // of pairs, and of numbers
  TokenMetadata scale_, minimum_;  // where these belong to tokens
  std::vector<float> query_;
  // a row of pairs for every query row, or for every group of tokens and kTogether rows; its unit, and the sum of its
  // numbers or of its products with the minima
  std::vector<int32_t> pairs_;
  std::vector<float> units_, constants_;
  int32_t sums_[kTogether][kBlockTokens];
};

// Weighted sums of values for a task's query rows.
class IntegerValues {
 public:
  explicit IntegerValues(const Task& task)
      : task_(task), value_(task.value), scale_(value_, value_.scale_offset, value_.static_scale),
        minimum_(value_, value_.minimum_offset, 0.0f) {
    const int group = value_.head_dim / value_.width;
    serves_ = task.precise == 0 && has_integer_codes(value_) && is_by_token(value_) &&
              value_.factors == nullptr && (value_.width == 1 || group % 16 == 0);
    if (serves_) weights_.resize(task.queries * value_.width);
  }

  // Adds a whole block's to rows of the output, `stride` apart; false, and nothing is added, if that takes decoding.
  bool add(const uint8_t* record, const float* weights, RecordFetcher& fetcher, Workspace& ws, float* output,
           int64_t stride) {
    if (!serves_) return false;
    load_metadata(value_, record, ws);
    scale_.take(ws.scale);
    minimum_.take(ws.minimum);
    for (int r = 0; r < task_.queries; ++r)
      for (int g = 0; g < value_.width; ++g)
        if (!fold(weights + r * kBlockTokens, g, weights_[r * value_.width + g])) return false;
    const int chunks = value_.padded_dim / 16, group = value_.width == 1 ? chunks : value_.head_dim / value_.width / 16;
    for (int first = 0; first < task_.queries; first += kTogether) {
      const int rows = static_cast<int>(smaller(kTogether, task_.queries - first));
      dispatch_bits(value_.nbits, rows, [&]<int kBits, int kRows>() {
        add_codes<kBits, kRows>(record + value_.codes_offset, chunks, group, weights_.data() + first * value_.width,
                                value_.width, fetcher, output + first * stride, stride);
      });
    }
    return true;
  }

 private:
  // Multiplies weights by the scales of a group; false if what is seen is not finite.
  bool fold(const float* weights, int g, Weights& out) const {
    alignas(32) float folded[kBlockTokens];
    Floats added = Floats{}, total = Floats{};
    for (int t = 0; t < kBlockTokens; t += kLanes) {
      const Floats weight = load<Floats>(weights + t);
      const Floats product = weight * load<Floats>(scale_.of(g) + t);
      added += weight * load<Floats>(minimum_.of(g) + t);
      total += product;
      store(folded + t, product);
    }
    out.added = 0.0f;
    float bias = 0.0f;
    for (int l = 0; l < kLanes; ++l) {
      out.added += added[l];
      bias += total[l];
    }
    if (value_.format == kSymmetric) out.added -= 128.0f * bias;
    out.unit = round_to_pairs(folded, kBlockTokens, value_.nbits == 8 ? kQuads : kNeighbours, out.pairs);
    return out.unit != kInfinity && out.added * 0.0f == 0.0f;
  }

  const Task& task_;
  const Side& value_;
  bool serves_;
  TokenMetadata scale_, minimum_;
  std::vector<Weights> weights_;        // [row][group]
};

}  // namespace
}  // namespace kvcache
