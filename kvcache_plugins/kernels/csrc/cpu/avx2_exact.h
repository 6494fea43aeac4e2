// Products with exact tokens as they lie, for AVX2: widened in registers, and neither turned over nor stored.
//
// The numbers of a token lie side by side, so lanes are channels. A score is what eight lanes add up to; that is done
// for the four rows of a token at once. All is in fp32. Bound: two multiply-adds of 8 lanes a cycle. A block of 128
// channels in bf16 takes 2.1 to 2.6 us for four rows and 1.3 to 2.0 for one, where a tile takes 5.1 and 3.9, and took
// 6.8 to 9.4 while it was turned over number by number (one core of a Zen 3). Many rows are better served by tiles,
// which are turned over once. Of 8192 tokens, the next block's are asked for ahead: of 32 heads with a row each, fp32
// then takes 11 ms, and not 15, bf16 4.2 and not 11; of 8 heads with four rows 2.2 and not 6.2, 1.7 and not 3.1 (one
// core of a Zen 5).
#pragma once

#include "avx2_blocks.h"

namespace kvcache {
namespace {  // see portable_numbers.inl

constexpr int kMostExactRows = 32;  // query rows up to which widening tokens anew for every four is faster than tiles

// 8 numbers of a dtype.
template <int kDtype>
inline __m256 widened(const void* data, int64_t at) {
  if (kDtype == kFloat32) return _mm256_loadu_ps(static_cast<const float*>(data) + at);
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(data) + at));
  if (kDtype == kFloat16) return _mm256_cvtph_ps(half);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

// Asks for the same channels of the token that is a block further on.
template <int kDtype>
inline void fetch_next(const void* data, int64_t at, int64_t stride) {
  const int64_t bytes = kDtype == kFloat32 ? 4 : 2;
  _mm_prefetch(static_cast<const char*>(data) + bytes * (at + kBlockTokens * stride), _MM_HINT_T0);
}

// Calls `run.template operator()<kDtype, kRows>()` for a dtype and up to kTogether rows.
template <typename Run>
void dispatch_dtypes(int dtype, int rows, const Run& run) {
  dispatch_rows(rows, [&]<int kRows>() {
    if (dtype == kFloat32) return run.template operator()<kFloat32, kRows>();
    if (dtype == kFloat16) return run.template operator()<kFloat16, kRows>();
    run.template operator()<kBFloat16, kRows>();
  });
}

// The products of a task, of which exact tokens need no tile.
class ExactProducts : public FloatProducts {
 public:
  explicit ExactProducts(const Task& task) : FloatProducts(task) {}

  // Writes the scores of a block of exact tokens; false if there are others, or if that takes a tile.
  bool score_exact(int64_t start, int64_t count, float* scores) const {
    if (!serves(task_.key, start)) return false;
    for_parts(task_.key, start, count, [&](const void* data, int64_t at, int64_t stride, int64_t first, int64_t n) {
      for (int row = 0; row < task_.queries; row += kTogether) {
        const int rows = static_cast<int>(smaller(kTogether, task_.queries - row));
        dispatch_dtypes(task_.key.dtype, rows, [&]<int kDtype, int kRows>() {
          score_tokens<kDtype, kRows>(data, at, stride, n, row, scores + row * kBlockTokens + first);
        });
      }
    });
    return true;
  }

  // Adds weighted sums of a block of exact tokens; false, and nothing is added, if there are others, or if that takes a
  // tile.
  bool add_exact(int64_t start, int64_t count, const float* weights, float* output) const {
    if (!serves(task_.value, start)) return false;
    for_parts(task_.value, start, count, [&](const void* data, int64_t at, int64_t stride, int64_t first, int64_t n) {
      for (int row = 0; row < task_.queries; row += kTogether) {
        const int rows = static_cast<int>(smaller(kTogether, task_.queries - row));
        dispatch_dtypes(task_.value.dtype, rows, [&]<int kDtype, int kRows>() {
          add_tokens<kDtype, kRows>(data, at, stride, n, weights + row * kBlockTokens + first,
                                    output + row * task_.value.padded_dim);
        });
      }
    });
    return true;
  }

 private:
  bool serves(const Side& side, int64_t start) const {
    return start >= side.packed_length && side.head_dim % kLanes == 0 && task_.queries <= kMostExactRows;
  }

  // Calls `visit(data, at, stride, first, count)` for tokens of a block that lie in one segment: from element `at` on,
  // `stride` apart, token `first` of the block and those that follow it.
  template <typename Visit>
  static void for_parts(const Side& side, int64_t start, int64_t count, const Visit& visit) {
    for (int i = 0; i < side.num_segments; ++i) {
      const Segment& segment = side.segments[i];
      const int64_t low = larger(segment.start, start);
      const int64_t high = smaller(segment.start + segment.length, start + count);
      if (low >= high) continue;
      visit(segment.data, (low - segment.start) * segment.stride, segment.stride, low - start, high - low);
    }
  }

  template <int kDtype, int kRows>
  __attribute__((noinline)) void score_tokens(const void* data, int64_t at, int64_t stride, int64_t count, int row,
                                              float* out) const {
    const int dim = task_.key.head_dim;
    const float* const query = task_.query + static_cast<int64_t>(row) * dim;
    for (int64_t t = 0; t < count; t += 2) {  // the query is loaded once for two tokens; of an odd one twice the same
      const int64_t first = at + t * stride, second = t + 1 < count ? first + stride : first;
      __m256 sums[2][kTogether] = {};
      for (int d = 0; d < dim; d += kLanes) {
        fetch_next<kDtype>(data, first + d, stride);
        fetch_next<kDtype>(data, second + d, stride);
        const __m256 a = widened<kDtype>(data, first + d), b = widened<kDtype>(data, second + d);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const __m256 numbers = _mm256_loadu_ps(query + r * dim + d);
          sums[0][r] = _mm256_fmadd_ps(a, numbers, sums[0][r]);
          sums[1][r] = _mm256_fmadd_ps(b, numbers, sums[1][r]);
        }
      }
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const __m256 low = _mm256_hadd_ps(sums[i][0], sums[i][1]), high = _mm256_hadd_ps(sums[i][2], sums[i][3]);
        const __m256 both = _mm256_hadd_ps(low, high);
        alignas(16) float found[kTogether];
        _mm_store_ps(found, _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1)));
        for (int r = 0; r < kRows && t + i < count; ++r) out[r * kBlockTokens + t + i] = found[r];
      }
    }
  }

  template <int kDtype, int kRows>
  __attribute__((noinline)) void add_tokens(const void* data, int64_t at, int64_t stride, int64_t count,
                                            const float* weights, float* output) const {
    const int width = task_.value.padded_dim, dim = task_.value.head_dim;
    for (int d = 0; d < dim; d += 2 * kLanes) {
      const int other = d + kLanes < dim ? kLanes : 0;  // of what is left, the same once more
      __m256 sums[kRows][2];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        sums[r][0] = _mm256_loadu_ps(output + r * width + d);
        sums[r][1] = _mm256_loadu_ps(output + r * width + d + other);
      }
      for (int64_t t = 0; t < count; ++t) {
        fetch_next<kDtype>(data, at + t * stride + d, stride);
        const __m256 a = widened<kDtype>(data, at + t * stride + d);
        const __m256 b = widened<kDtype>(data, at + t * stride + d + other);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const __m256 weight = _mm256_set1_ps(weights[r * kBlockTokens + t]);
          sums[r][0] = _mm256_fmadd_ps(a, weight, sums[r][0]);
          sums[r][1] = _mm256_fmadd_ps(b, weight, sums[r][1]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        _mm256_storeu_ps(output + r * width + d, sums[r][0]);
        _mm256_storeu_ps(output + r * width + d + other, sums[r][1]);
      }
    }
  }
};

}  // namespace
}  // namespace kvcache
