// Squares of numbers turned over in registers (decode_tokens.inl, attend_latents.inl).
#pragma once

#include "portable_numbers.inl"

namespace kvcache {
namespace {  // see portable_numbers.inl

// Turns over kLanes vectors of 32-bit lanes, whatever they hold: in step s, the parts of s rows and s columns of each
// square of 2s change places across its diagonal.
inline __attribute__((always_inline)) void transpose(Floats* rows) {
#pragma GCC unroll 4
  for (int s = 1; s < kLanes; s *= 2) {
    Integers upper{}, lower{};  // of two rows one after the other, the lanes that make up the new ones
#pragma GCC unroll 16
    for (int l = 0; l < kLanes; ++l) {
      upper[l] = (l & s) != 0 ? kLanes + l - s : l;
      lower[l] = (l & s) != 0 ? kLanes + l : l + s;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if ((i & s) != 0) continue;
      const Floats a = rows[i], b = rows[i + s];
      rows[i] = __builtin_shuffle(a, b, upper);
      rows[i + s] = __builtin_shuffle(a, b, lower);
    }
  }
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
