// Tokens that are read as they are, widened in registers: sinks, and those that follow the packed ones.
//
// The numbers of a token lie side by side, so lanes are channels. What 16 products' lanes add up to, of four tokens and
// four rows or of 16 tokens and one, is found at once. All is in fp32. Bound: two multiply-adds of 16 lanes a cycle for
// four rows, loads for one. 128 tokens of 8 heads of 128 channels in bf16, four rows each, take 7 us where one after the
// other took 50; 8192 of them in fp32 3.4 ms, and 7.0 if the next block is not asked for (one core of a Zen 5).
#pragma once

#include <algorithm>

#include "avx512_math.h"
#include "decode_attention.h"

namespace kvcache {
namespace avx512 {

// Exact tokens of a block, `first` and those that follow it: from element `at` on, `stride` apart.
struct ExactRun {
  const void* data;
  int64_t at, stride;
  int first, count;
};

// Calls `visit(run)` for what is exact of the slots of a block, and before `end`: sinks, and all from `packed` on.
template <typename Visit>
void for_exact(const Side& side, int64_t start, int packed, int64_t end, Visit visit) {
  const int64_t stop = std::min(start + kBlockTokens, end);
  const auto take = [&](const void* data, int64_t begin, int64_t length, int64_t stride, int64_t low, int64_t high) {
    low = std::max(low, begin);
    high = std::min(high, begin + length);
    if (low < high) visit(ExactRun{data, (low - begin) * stride, stride, int(low - start), int(high - low)});
  };
  if (side.sinks != nullptr)
    take(side.sinks, side.sink_start, side.sink_length, side.head_dim, start, std::min(stop, side.packed_length));
  for (int i = 0; i < side.num_segments; ++i) {
    const Segment& segment = side.segments[i];
    take(segment.data, segment.start, segment.length, segment.stride, start + packed, stop);
  }
}

// Channels of a token from element `at` on, in fp32; the lanes that are not live are zero.
template <int kDtype>
inline __m512 widened(const void* data, int64_t at, __mmask16 live) {
  if (kDtype == kFloat32) return _mm512_maskz_loadu_ps(live, static_cast<const float*>(data) + at);
  const __m256i half = _mm256_maskz_loadu_epi16(live, static_cast<const uint16_t*>(data) + at);
  if (kDtype == kFloat16) return _mm512_cvtph_ps(half);
  return from_bf16_low(_mm512_cvtepu16_epi32(half));
}

// Asks for the same channels of the token that is a block further on.
template <int kDtype>
inline void fetch_next(const ExactRun& run, int64_t at) {
  const int64_t bytes = kDtype == kFloat32 ? 4 : 2;
  _mm_prefetch(static_cast<const char*>(run.data) + bytes * (at + kBlockTokens * run.stride), _MM_HINT_T0);
}

// scores[r][token] of a run and R query rows.
template <int kDtype, int R>
__attribute__((noinline)) void score_run(const ExactRun& run, const float* const* queries, int dim,
                                         float (*scores)[kBlockTokens]) {
  constexpr int kTokens = kLanes / R;
  for (int t = 0; t < run.count; t += kTokens) {
    int64_t at[kTokens];  // after the last one, of that once more
    for (int i = 0; i < kTokens; ++i) at[i] = run.at + std::min(t + i, run.count - 1) * run.stride;
    __m512 sums[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) sums[i] = _mm512_setzero_ps();
    for (int c = 0; c < dim; c += kLanes) {
      const __mmask16 live = first_lanes(dim - c);
      __m512 query[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) query[r] = _mm512_maskz_loadu_ps(live, queries[r] + c);
#pragma GCC unroll 16
      for (int i = 0; i < kTokens; ++i) {
        fetch_next<kDtype>(run, at[i] + c);
        const __m512 token = widened<kDtype>(run.data, at[i] + c, live);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[r * kTokens + i] = _mm512_fmadd_ps(token, query[r], sums[r * kTokens + i]);
      }
    }
    alignas(64) float found[R][kTokens];
    _mm512_store_ps(found, sums_of_lanes(sums));
    for (int r = 0; r < R; ++r) {
      float* const out = scores[r] + run.first + t;
      _mm512_mask_storeu_ps(out, first_lanes(std::min(kTokens, run.count - t)),
                            _mm512_maskz_loadu_ps(first_lanes(kTokens), found[r]));
    }
  }
}

// output[r][c...] += weighted sums of a run, of kChunks times 16 channels. `seen` has a bit for every row with a weight;
// the numbers of a token are not multiplied with weights of zero, as they may be anything there.
template <int kDtype, int R, int kChunks>
inline __attribute__((always_inline)) void add_chunks_of_run(const ExactRun& run, const float (*weights)[kBlockTokens],
                                                             const uint8_t* seen, int all, int dim, int c,
                                                             float* const* output) {
  __m512 sums[R][kChunks];
  __mmask16 live[kChunks];
#pragma GCC unroll 8
  for (int i = 0; i < kChunks; ++i) {
    live[i] = first_lanes(dim - c - kLanes * i);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[r][i] = _mm512_load_ps(output[r] + c + kLanes * i);
  }
  int64_t at = run.at + c;
  for (int t = 0; t < run.count; ++t, at += run.stride) {
    if (seen[t] == 0) continue;
    __mmask16 rows[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) rows[r] = seen[t] >> r & 1 ? 0xffff : 0;
    const bool is_seen_by_all = seen[t] == all;
#pragma GCC unroll 8
    for (int i = 0; i < kChunks; ++i) {
      fetch_next<kDtype>(run, at + kLanes * i);
      const __m512 token = widened<kDtype>(run.data, at + kLanes * i, live[i]);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m512 weight = _mm512_set1_ps(weights[r][run.first + t]);
        sums[r][i] = is_seen_by_all ? _mm512_fmadd_ps(token, weight, sums[r][i])
                                    : _mm512_mask3_fmadd_ps(token, weight, sums[r][i], rows[r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kChunks; ++i) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) _mm512_store_ps(output[r] + c + kLanes * i, sums[r][i]);
  }
}

// output[r] += weighted sums of a run, for the first `rows` of R query rows.
template <int kDtype, int R>
__attribute__((noinline)) void add_run(const ExactRun& run, const float (*weights)[kBlockTokens], int rows, int dim,
                                       float* const* output) {
  uint8_t seen[kBlockTokens] = {};
  for (int r = 0; r < rows; ++r)
    for (int t = 0; t < run.count; ++t) seen[t] |= (weights[r][run.first + t] != 0.0f) << r;
  const int all = (1 << rows) - 1;
  const auto add = [&]<int kChunks>(int c) {
    add_chunks_of_run<kDtype, R, kChunks>(run, weights, seen, all, dim, c, output);
    return c + kLanes * kChunks;
  };
  for (int c = 0; c < dim;) {
    const int chunks = (dim - c + kLanes - 1) / kLanes;
    if (R == 1 && chunks >= 8) {
      c = add.template operator()<8>(c);
    } else if (chunks >= 4) {
      c = add.template operator()<4>(c);
    } else {
      c = chunks >= 2 ? add.template operator()<2>(c) : add.template operator()<1>(c);
    }
  }
}

// Calls `run.template operator()<kDtype>()` for a dtype.
template <typename Run>
inline void dispatch_dtypes(int dtype, const Run& run) {
  if (dtype == kFloat32) return run.template operator()<kFloat32>();
  if (dtype == kFloat16) return run.template operator()<kFloat16>();
  run.template operator()<kBFloat16>();
}

}  // namespace avx512
}  // namespace kvcache
