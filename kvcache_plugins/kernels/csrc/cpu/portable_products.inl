// Products of rows of numbers with a tile, with sums held in registers (decode_attention_portable.inl,
// attend_latents.inl).
#pragma once

#include "portable_numbers.inl"

namespace kvcache {
namespace {  // see portable_numbers.inl

constexpr int kPanelRows = 6;  // at most
// Columns held in registers at once: with six rows, 12 of 16 vector registers, or 24 of 32.
constexpr int kPanelVectors = kLanes == 16 ? 4 : 2;

// c[r][n] (+)= sum over k of a[r][k] * b[k][n], for kRows rows and kVectors vectors of columns.
template <int kRows, int kVectors = kPanelVectors>
void multiply_panel(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth, float* c,
                    int64_t c_stride, bool accumulate) {
  Floats sums[kRows][kVectors];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = accumulate ? load<Floats>(c + r * c_stride + v * kLanes) : Floats{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Floats columns[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) columns[v] = load<Floats>(b + k * b_stride + v * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const Floats factor = splat(a[r * a_stride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] += factor * columns[v];
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(c + r * c_stride + v * kLanes, sums[r][v]);
  }
}

// Calls `multiply<n>(first)` for all rows, up to six at a time, and as many each time as can be.
template <typename Multiply>
inline __attribute__((always_inline)) void by_rows(int64_t rows, const Multiply& multiply) {
  const int64_t parts = (rows + kPanelRows - 1) / kPanelRows;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t first = part * rows / parts;
    switch ((part + 1) * rows / parts - first) {
      case 6: multiply.template operator()<6>(first); break;
      case 5: multiply.template operator()<5>(first); break;
      case 4: multiply.template operator()<4>(first); break;
      case 3: multiply.template operator()<3>(first); break;
      case 2: multiply.template operator()<2>(first); break;
      case 1: multiply.template operator()<1>(first); break;
    }
  }
}

// Calls `multiply<rows, vectors>(first row, first column)` for all rows and a multiple of 16 columns, which come
// outside: what is read of the tile then stays in the first-level cache for all rows.
template <typename Multiply>
inline __attribute__((always_inline)) void by_panels(int64_t rows, int64_t width, const Multiply& multiply) {
  int64_t n = 0;
  for (; n + kPanelVectors * kLanes <= width; n += kPanelVectors * kLanes)
    by_rows(rows, [&]<int kRows>(int64_t r) { multiply.template operator()<kRows, kPanelVectors>(r, n); });
  for (; kLanes == 16 && n < width; n += kLanes)
    by_rows(rows, [&]<int kRows>(int64_t r) { multiply.template operator()<kRows, 1>(r, n); });
}

}  // namespace
}  // namespace kvcache
