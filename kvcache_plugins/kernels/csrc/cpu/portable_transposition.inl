// Squares of numbers turned over in registers (decode_tokens.inl, attend_latents.inl).
#pragma once

#include <utility>

#include "portable_numbers.inl"

namespace kvcache {
namespace {  // see portable_numbers.inl

// Lanes of two vectors, of which the second's follow the first's.
template <int... kChosen>
inline __attribute__((always_inline)) Floats choose_lanes(Floats a, Floats b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kChosen...);
#else
  return __builtin_shuffle(a, b, Integers{kChosen...});
#endif
}

// Turns over kLanes vectors of 32-bit lanes, whatever they hold: in step s, the parts of s rows and s columns of each
// square of 2s change places across its diagonal.
template <int s, int... l>
inline __attribute__((always_inline)) void transpose_from(Floats* rows, std::integer_sequence<int, l...> lanes) {
  if constexpr (s < kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if ((i & s) != 0) continue;
      const Floats a = rows[i], b = rows[i + s];
      rows[i] = choose_lanes<((l & s) != 0 ? kLanes + l - s : l)...>(a, b);
      rows[i + s] = choose_lanes<((l & s) != 0 ? kLanes + l : l + s)...>(a, b);
    }
    transpose_from<2 * s>(rows, lanes);
  }
}

inline __attribute__((always_inline)) void transpose(Floats* rows) {
  transpose_from<1>(rows, std::make_integer_sequence<int, kLanes>());
}

// Turns over a square of kLanes rows of `from` into rows of `to`.
inline __attribute__((always_inline)) void transpose_square(const float* from, int64_t from_stride, float* to,
                                                            int64_t to_stride) {
  Floats rows[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) rows[i] = load<Floats>(from + i * from_stride);
  transpose(rows);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) store(to + i * to_stride, rows[i]);
}

}  // namespace
}  // namespace kvcache
