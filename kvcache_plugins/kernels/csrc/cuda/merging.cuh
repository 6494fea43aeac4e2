// How the results of the splits of a query row become its output.
//
// A thread block merges a row. Few loads are needed, so they are to be on the way together: those of a thread's first
// numbers are asked for before the weights of these are known. Not timed.
#pragma once

#include "query_rows.cuh"

namespace kvcache {

constexpr int kMergeThreads = 256;
static_assert(4 * kMergeThreads >= kMaxHeadDim, "four channels have a thread");

// Bytes of dynamic shared memory of the merge.
inline int merge_bytes(const AttentionArguments& a) { return 16 * kMergeThreads + 4 * a.splits(); }

// The largest logit of a row, and the sum of its weights: of every warp alike.
struct RowSum {
  float best, total;

  // `sums`: the same of every split; `sink`: a logit without a value.
  KVCACHE_DEVICE RowSum(const float2* sums, int splits, float sink) : best(sink), total(0.0f) {
    constexpr int kAtOnce = 4;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float found = -infinity();  // by this lane
#pragma unroll 1
    for (int first = lane; first < splits; first += 32 * kAtOnce) {
      float2 pairs[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int split = first + 32 * i;
        pairs[i] = split < splits ? sums[split] : float2{-infinity(), 0.0f};
      }
      const float before = found;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) found = fmaxf(found, pairs[i].x);
      total *= power_of_two(before - finite(found));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) total = fmaf(pairs[i].y, power_of_two(pairs[i].x - finite(found)), total);
    }
    best = fmaxf(best, found);
    for (int mask = 16; mask > 0; mask /= 2) best = fmaxf(best, shuffle_xor(best, mask));
    total *= power_of_two(found - finite(best));
    for (int mask = 16; mask > 0; mask /= 2) total += shuffle_xor(total, mask);
    total += power_of_two(sink - finite(best));
  }
  KVCACHE_DEVICE float weight_of(float logit) const { return power_of_two(logit - finite(best)); }

 private:
  // Nothing that is hidden has a weight, also where all is.
  KVCACHE_DEVICE static float finite(float largest) { return largest == -infinity() ? 0.0f : largest; }
};

// Merges the splits of one query row, a thread block each, which may begin before they have ended; sink logits are
// weights without a value. The splits are shared out among the threads of four channels.
KVCACHE_DEVICE void merge_splits(const AttentionArguments& a, uint8_t* shared) {
  constexpr int kAtOnce = 8;  // splits of a thread
  const int value_dim = a.value.head_dim, splits = a.splits(), thread = static_cast<int>(threadIdx.x);
  const int fours = a.partial_channels() / 4, count = kMergeThreads / fours, part = thread / fours;
  const int64_t row = blockIdx.x;  // batch, kv head, head of the group, query token
  const float2* const sums = reinterpret_cast<const float2*>(a.partial_sums) + row * splits;
  const float4* const outputs =
      reinterpret_cast<const float4*>(a.partial_outputs) + row * splits * fours + (thread - part * fours);
  float4* const parts = reinterpret_cast<float4*>(shared);
  float* const weights = reinterpret_cast<float*>(parts + kMergeThreads);
  const int end = part < count ? splits : 0;
  float4 numbers[kAtOnce];
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int split = first + i * count;
      numbers[i] = split < end ? outputs[split * fours] : float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
  };
  wait_for_previous();
  let_next_begin();
  load(part);
  float sink = -infinity();
  if (a.sink_logits != nullptr) {
    const int query_head = static_cast<int>(blockIdx.x) / a.query_length % (a.records.heads * a.group);
    sink = a.sink_logits[a.are_sinks_of_queries != 0 ? row : query_head] * kLog2E;
  }
  const RowSum sum(sums, splits, sink);
#pragma unroll 1
  for (int split = thread; split < splits; split += kMergeThreads) weights[split] = sum.weight_of(sums[split].x);
  block_barrier();
  float4 merged = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
  for (int first = part; first < end; first += kAtOnce * count) {
    if (first != part) load(first);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int split = first + i * count;
      const float weight = split < end ? weights[split] : 0.0f;
      if (weight == 0.0f) continue;  // and the numbers may be anything
      merged.x = fmaf(weight, numbers[i].x, merged.x);
      merged.y = fmaf(weight, numbers[i].y, merged.y);
      merged.z = fmaf(weight, numbers[i].z, merged.z);
      merged.w = fmaf(weight, numbers[i].w, merged.w);
    }
  }
  parts[thread] = merged;
  block_barrier();
  const float inverse = sum.total == 0.0f ? 1.0f : 1.0f / sum.total;
  const float* const channels = reinterpret_cast<const float*>(parts);
  for (int channel = thread; channel < value_dim; channel += kMergeThreads) {
    float number = 0.0f;
    for (int i = 0; i < count; ++i) number += channels[4 * fours * i + channel];
    write_number(a.output, a.query_dtype, row * value_dim + channel, number * inverse);
  }
}

}  // namespace kvcache
