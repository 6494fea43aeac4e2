// Products of a task's query rows with integer codes of whole blocks for AVX2: what the products of avx2_products.h are
// made with, and what is made of them. Scales that differ within a sum are folded into the query, or the weights; the
// others, and the minima, into the sums.
#pragma once

#include <vector>

#include "avx2_products.h"

namespace kvcache {
namespace {  // see portable_numbers.inl

constexpr int kSlack = 16;  // numbers after a row that may be read

bool has_integer_codes(const Side& side) {
  return (side.format == kAffine || side.format == kSymmetric) && (side.nbits < 8 || side.head_dim <= 256);
}

// Scores of a task's query rows.
template <typename Arithmetic>
class IntegerKeys {
 public:
  explicit IntegerKeys(const Task& task)
      : task_(task), key_(task.key), is_per_channel_(key_.width > 1),
        scale_(key_, key_.scale_offset, key_.static_scale), minimum_(key_, key_.minimum_offset, 0.0f) {
    serves_ = (task.precise != 0) == Arithmetic::kIsPrecise && has_integer_codes(key_) && key_.cos == nullptr &&
              key_.inv_freq == nullptr &&
              task.queries <= (is_per_channel_ ? Arithmetic::kMostFoldedRows : Arithmetic::kMostRows) &&
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
      Magnitude magnitude;
      for (int d = 0; d < key_.padded_dim; d += kLanes) magnitude.take(load<Floats>(row + d));
      serves_ &= take_row(row, magnitude, r);
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
      const auto* const pairs = pairs_.data() + (is_per_channel_ ? 0 : first * stride_);
      const int group = is_per_channel_ ? key_.group_tokens : kBlockTokens;
      dispatch_bits(key_.nbits, rows, [&]<int kBits, int kRows>() {
        score_codes<Arithmetic, kBits, kRows>(record + key_.codes_offset, key_.padded_dim, group, pairs, stride_,
                                              fetcher, sums_);
      });
      for (int r = 0; r < rows; ++r) finish(r, first + r, scores + (first + r) * kBlockTokens);
    }
    return true;
  }

 private:
  // Takes a query row with all that is folded in; false if what is not finite keeps it from being rounded.
  bool take_row(const float* row, const Magnitude& magnitude, int set) {
    const Pairing pairing = key_.nbits == 8 ? kQuads : key_.interleaved != 0 ? kNeighbours : kHalves;
    const float largest = magnitude.largest();
    if (largest == kInfinity && !Arithmetic::kIsPrecise) return false;
    units_[set] = Arithmetic::make_pairs(row, key_.padded_dim, largest, pairing, pairs_.data() + set * stride_);
    return true;
  }

  bool fold_channels(int first, int rows, const Workspace& ws) {
    alignas(32) float folded[kMaxHeadDim + kSlack] = {};
    for (int g = 0; g < kBlockTokens / key_.group_tokens; ++g) {
      const float* const scale = ws.scale + g * key_.head_dim;
      const float* const minimum = ws.minimum + g * key_.head_dim;
      for (int r = 0; r < rows; ++r) {
        const float* const row = query_.data() + (first + r) * row_length_;
        Floats constant = Floats{};
        Magnitude magnitude;
        int d = 0;
        for (; d + kLanes <= key_.head_dim; d += kLanes) {
          const Floats query = load<Floats>(row + d), product = query * load<Floats>(scale + d);
          store(folded + d, product);
          magnitude.take(product);
          constant += query * load<Floats>(minimum + d);
        }
        float sum = sum_of_lanes(constant);
        for (int i = d; i < key_.head_dim; ++i) {
          folded[i] = row[i] * scale[i];
          sum += row[i] * minimum[i];
        }
        if (d < key_.head_dim) magnitude.take(load<Floats>(folded + d));
        constants_[g * kTogether + r] = sum;
        if (!take_row(folded, magnitude, g * kTogether + r)) return false;
      }
    }
    return true;
  }

  // Turns sums into scores.
  void finish(int r, int row, float* out) const {
    for (int t = 0; t < kBlockTokens; t += kLanes) {
      const int set = is_per_channel_ ? t / key_.group_tokens * kTogether + r : row;
      Floats score = load<Floats>(sums_[r] + t) * units_[set];
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
  std::vector<typename Arithmetic::Pair> pairs_;
  std::vector<float> units_, constants_;
  float sums_[kTogether][kBlockTokens];
};

// Weighted sums of values for a task's query rows.
template <typename Arithmetic>
class IntegerValues {
 public:
  explicit IntegerValues(const Task& task)
      : task_(task), value_(task.value), scale_(value_, value_.scale_offset, value_.static_scale),
        minimum_(value_, value_.minimum_offset, 0.0f) {
    const int group = value_.head_dim / value_.width;
    serves_ = (task.precise != 0) == Arithmetic::kIsPrecise && has_integer_codes(value_) && is_by_token(value_) &&
              task.queries <= (value_.width > 1 ? Arithmetic::kMostFoldedRows : Arithmetic::kMostRows) &&
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
        add_codes<Arithmetic, kBits, kRows>(record + value_.codes_offset, chunks, group,
                                            weights_.data() + first * value_.width, value_.width, fetcher,
                                            output + first * stride, stride);
      });
    }
    return true;
  }

 private:
  // Multiplies weights by the scales of a group; false if what is seen is not finite.
  bool fold(const float* weights, int g, Weights<Arithmetic>& out) const {
    alignas(32) float folded[kBlockTokens];
    Floats added = Floats{}, total = Floats{};
    Magnitude magnitude;
    for (int t = 0; t < kBlockTokens; t += kLanes) {
      const Floats weight = load<Floats>(weights + t), product = weight * load<Floats>(scale_.of(g) + t);
      store(folded + t, product);
      magnitude.take(product);
      added += weight * load<Floats>(minimum_.of(g) + t);
      total += product;
    }
    out.added = sum_of_lanes(added);
    if (value_.format == kSymmetric) out.added -= 128.0f * sum_of_lanes(total);
    const Pairing pairing = value_.nbits == 8 ? kQuads : kNeighbours;
    const float largest = magnitude.largest();
    out.unit = Arithmetic::make_pairs(folded, kBlockTokens, largest, pairing, out.pairs);
    return largest != kInfinity && out.added * 0.0f == 0.0f;
  }

  const Task& task_;
  const Side& value_;
  bool serves_;
  TokenMetadata scale_, minimum_;
  std::vector<Weights<Arithmetic>> weights_;  // [row][group]
};

}  // namespace
}  // namespace kvcache
