// The online softmax of R query rows (one or four): their maxima, sums of exponentials and outputs so far.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "avx512_math.h"
#include "avx512_values.h"
#include "decode_attention.h"

namespace kvcache {
namespace avx512 {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// There is room for the widest heads, of which no more is written or read than the heads at hold take.
template <int R>
class OnlineSoftmax {
 public:
  // For the rows of a task from `first` on.
  OnlineSoftmax(const Task& task, int first)
      : task_(task), value_(task.value), first_(first), rows_(std::min(R, task.queries - first)) {
    std::fill(best_, best_ + 4, kNothing);
    for (int r = 0; r < R; ++r) {
      std::memset(total_[r], 0, sizeof(total_[r]));
      std::memset(output[r], 0, sizeof(float) * value_.padded_dim);
      std::memset(minimum_sum[r], 0, sizeof(minimum_sum[r][0]) * value_.width);
    }
  }

  // Brings the scores of the block at slot `start` to what the softmax takes; minus infinity where nothing is seen.
  void mask(int64_t start, float (*scores)[kBlockTokens]) {
    const int64_t stop = std::min(start + kBlockTokens, task_.end);
    const bool is_plain = task_.softcap <= 0 && task_.alibi == nullptr && task_.bias == nullptr;
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int r = 0; r < rows_; ++r) {
      const int row = first_ + r;
      const int64_t query_slot = task_.length - task_.query_length + row % task_.query_length;
      int64_t low = start, high = stop;  // visible slots
      if (task_.is_causal) high = std::min(high, query_slot + 1);
      if (task_.window > 0) low = std::max(low, query_slot - task_.window + 1);
      if (is_plain && low == start && high == start + kBlockTokens) continue;
      for (int t = 0; t < kBlockTokens; t += kLanes) {
        __m512 score = _mm512_loadu_ps(scores[r] + t);
        __mmask16 live = _cvtmask16_u32(first_lanes(int(std::max<int64_t>(0, high - start - t))) &
                                        ~first_lanes(int(std::max<int64_t>(0, low - start - t))));
        if (task_.softcap > 0) {
          alignas(64) float capped[kLanes];
          _mm512_store_ps(capped, score);
          for (int i = 0; i < kLanes; ++i)
            if (live >> i & 1) capped[i] = task_.softcap * std::tanh(capped[i] / task_.softcap);
          score = _mm512_load_ps(capped);
        }
        if (task_.alibi != nullptr) {
          const float slope = task_.alibi[row / task_.query_length];
          const __m512 distance = _mm512_cvtepi32_ps(
              _mm512_add_epi32(lane, _mm512_set1_epi32(int(start + t - query_slot))));
          score = _mm512_fmadd_ps(distance, _mm512_set1_ps(slope), score);
        }
        if (task_.bias != nullptr) {
          const float* bias_row = task_.bias + row * task_.bias_row_stride + start + t;
          const __m512 bias = _mm512_maskz_loadu_ps(live, bias_row);
          // a hidden token counts for nothing, whatever its score: minus infinity and NaN would make NaN
          live = _mm512_mask_cmp_ps_mask(live, bias, _mm512_set1_ps(kNothing), _CMP_GT_OQ);
          score = _mm512_add_ps(score, bias);
        }
        _mm512_storeu_ps(scores[r] + t, _mm512_mask_blend_ps(live, _mm512_set1_ps(kNothing), score));
      }
    }
  }

  // In place of `mask` and `soften`: takes the weights that a call gives for the block at slot `start`.
  void take(int64_t start, float (*weights)[kBlockTokens]) {
    for (int r = 0; r < R; ++r) {
      best_[r] = 0.0f;  // what is merged is not scaled
      if (r < rows_) {
        take_weights(task_, first_ + r, start, weights[r]);
      } else {
        std::memset(weights[r], 0, sizeof(weights[r]));
      }
    }
  }

  // Turns scores into weights relative to the rows' maxima so far; false if no row sees anything of the block.
  bool soften(float (*scores)[kBlockTokens]) {
    __m512 largest[4] = {};
    for (int r = 0; r < R; ++r) {
      if (r >= rows_) continue;
      largest[r] = _mm512_loadu_ps(scores[r]);
      __mmask16 undefined = _mm512_cmp_ps_mask(largest[r], largest[r], _CMP_UNORD_Q);
      for (int t = kLanes; t < kBlockTokens; t += kLanes) {
        const __m512 score = _mm512_loadu_ps(scores[r] + t);
        undefined |= _mm512_cmp_ps_mask(score, score, _CMP_UNORD_Q);
        largest[r] = _mm512_max_ps(largest[r], score);
      }
      if (undefined) spoil(r);
    }
    float block_best[4];
    reduce_max(largest, block_best);
    bool any = false;
    for (int r = 0; r < R; ++r) {
      if (r >= rows_ || block_best[r] == kNothing) {
        std::memset(scores[r], 0, sizeof(scores[r]));
        continue;
      }
      any = true;
      if (block_best[r] > best_[r]) rescale(r, block_best[r]);
      const __m512 shift = _mm512_set1_ps(best_[r]);
      __m512 sum = _mm512_load_ps(total_[r]);
      for (int t = 0; t < kBlockTokens; t += kLanes) {
        const __m512 score = _mm512_loadu_ps(scores[r] + t);
        const __mmask16 live = _mm512_cmp_ps_mask(score, _mm512_set1_ps(kNothing), _CMP_GT_OQ);
        const __m512 weight = _mm512_maskz_mov_ps(live, exp_ps(_mm512_sub_ps(score, shift)));
        sum = _mm512_add_ps(sum, weight);
        _mm512_storeu_ps(scores[r] + t, weight);
      }
      _mm512_store_ps(total_[r], sum);
    }
    return any;
  }

  // Writes the task's results.
  void store() const {
    const int channels = value_.head_dim / value_.width;
    for (int r = 0; r < rows_; ++r) {
      const int row = first_ + r;
      task_.maximum[row] = best_[r];
      task_.sum[row] = _mm512_reduce_add_ps(_mm512_load_ps(total_[r]));
      for (int g = 0; g < value_.width; ++g) {
        const float minimum = _mm512_reduce_add_ps(_mm512_load_ps(minimum_sum[r][g]));
        for (int c = g * channels; c < (g + 1) * channels; ++c)
          task_.output[int64_t(row) * value_.head_dim + c] = output[r][c] + minimum;
      }
    }
  }

  alignas(64) float output[R][kMaxHeadDim];
  alignas(64) float minimum_sum[R][kMaxWidth][kLanes];  // sums of p * minimum, not yet added to the channels

 private:
  // A visible score that is not a number makes the row's result so, as it would in dense attention.
  void spoil(int r) {
    if (best_[r] == kNothing) best_[r] = 0.0f;
    _mm512_store_ps(total_[r], _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN()));
  }

  // Makes `best` the maximum of a row.
  void rescale(int r, float best) {
    const __m512 factor = _mm512_set1_ps(best_[r] == kNothing ? 0.0f : std::exp(best_[r] - best));
    best_[r] = best;
    _mm512_store_ps(total_[r], _mm512_mul_ps(_mm512_load_ps(total_[r]), factor));
    for (int c = 0; c < value_.padded_dim; c += kLanes)
      _mm512_store_ps(output[r] + c, _mm512_mul_ps(_mm512_load_ps(output[r] + c), factor));
    for (int g = 0; g < value_.width; ++g)
      _mm512_store_ps(minimum_sum[r][g], _mm512_mul_ps(_mm512_load_ps(minimum_sum[r][g]), factor));
  }

  const Task& task_;
  const Side& value_;
  const int first_, rows_;
  float best_[4];
  alignas(64) float total_[R][kLanes];  // sums of exponentials, lane by lane
};

}  // namespace avx512
}  // namespace kvcache
