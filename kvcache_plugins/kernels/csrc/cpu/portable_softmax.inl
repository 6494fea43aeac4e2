// One step of the online softmax over a block of 64 slots, with all that may change a logit
// (decode_attention_portable.inl, attend_latents.inl).
#pragma once

#include "portable_decoding.inl"

namespace kvcache {
namespace {  // see portable_numbers.inl

// Whether any query may see any of the slots [start, start + count).
bool is_visible(const Task& task, int64_t start, int64_t count) {
  const int64_t oldest_query = task.length - task.query_length;
  if (task.window > 0 && start + count - 1 <= oldest_query - task.window) return false;
  if (task.bias == nullptr) return true;
  const int rows = task.bias_row_stride == 0 ? 1 : task.queries;
  for (int r = 0; r < rows; ++r) {
    const float* bias = task.bias + r * task.bias_row_stride + start;
    for (int64_t t = 0; t < count; ++t) {
      if (bias[t] != -kInfinity) return true;
    }
  }
  return false;
}

// Turns the products of one row into logits; returns whether any slot of the block is hidden from it.
bool adjust(const Task& task, int row, int64_t start, int64_t count, float* scores) {
  const int64_t query_slot = task.length - task.query_length + row % task.query_length;
  if (task.softcap > 0.0f) {
    for (int t = 0; t < kBlockTokens; t += kLanes) {
      store(scores + t, hyperbolic_tangent(load<Floats>(scores + t) / task.softcap) * task.softcap);
    }
  }
  if (task.alibi != nullptr) {
    const float slope = task.alibi[row / task.query_length];
    const float first = static_cast<float>(start - query_slot);
    for (int t = 0; t < kBlockTokens; ++t) scores[t] += slope * (first + static_cast<float>(t));
  }
  bool is_hidden = false;
  if (task.bias != nullptr) {
    const float* bias = task.bias + row * task.bias_row_stride + start;
    for (int64_t t = 0; t < count; ++t) {
      is_hidden |= bias[t] == -kInfinity;
      scores[t] = bias[t] == -kInfinity ? -kInfinity : scores[t] + bias[t];
    }
  }
  const int64_t low = task.window > 0 ? smaller(larger(query_slot - task.window + 1 - start, 0), count) : 0;
  const int64_t high = larger(task.is_causal != 0 ? smaller(count, query_slot + 1 - start) : count, 0);
  for (int64_t t = 0; t < low; ++t) scores[t] = -kInfinity;
  for (int64_t t = high; t < kBlockTokens; ++t) scores[t] = -kInfinity;
  return is_hidden || low > 0 || high < count;
}

// Replaces the logits of one row by weights, and brings its sum and output to the new maximum. A visible score that is
// not a number makes the row's sum so, and with it the result, as in dense attention.
void soften(const Task& task, int row, int width, float* scores, float* output) {
  Floats best = load<Floats>(scores);
  for (int t = kLanes; t < kBlockTokens; t += kLanes) {
    const Floats v = load<Floats>(scores + t);
    best = v > best ? v : best;
  }
  const float before = task.maximum[row];
  const float largest = largest_lane(best), now = largest > before ? largest : before;
  if (now == -kInfinity) {
    bool is_defined = true;
    for (int t = 0; t < kBlockTokens; ++t) is_defined &= scores[t] == scores[t];
    if (!is_defined) {
      task.maximum[row] = 0.0f;
      task.sum[row] = std::numeric_limits<float>::quiet_NaN();
    }
    std::memset(scores, 0, kBlockTokens * sizeof(float));
    return;
  }
  Floats total = Floats{};
  for (int t = 0; t < kBlockTokens; t += kLanes) {
    const Floats weight = exponential(load<Floats>(scores + t) - now);
    store(scores + t, weight);
    total += weight;
  }
  const float sum = sum_of_lanes(total);
  if (now != before) {
    const float decay = exponential(splat(before - now))[0];
    task.sum[row] *= decay;
    for (int d = 0; d < width; d += kLanes) store(output + d, load<Floats>(output + d) * decay);
    task.maximum[row] = now;
  }
  task.sum[row] += sum;
  if (sum != sum) std::memset(scores, 0, kBlockTokens * sizeof(float));  // for products that want numbers
}

}  // namespace
}  // namespace kvcache
