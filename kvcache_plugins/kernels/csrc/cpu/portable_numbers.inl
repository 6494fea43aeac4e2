// Vectors of the compiler, number formats and functions of the portable kernel
// (decode_attention_portable.inl).
//
// Everything lies in an unnamed namespace, because several translation units compile this for different
// machines. `KVCACHE_LANES` is the fp32 lanes of a vector, `KVCACHE_F16C` says that fp16 converts in
// hardware.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(KVCACHE_F16C)
#include <immintrin.h>
#endif

#include "decode_attention.h"

namespace kvcache {
namespace {  // everything: two translation units compile this for different machines

#if defined(KVCACHE_LANES)
constexpr int kLanes = KVCACHE_LANES;
#else
constexpr int kLanes = 4;
#endif
constexpr float kInfinity = std::numeric_limits<float>::infinity();

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

template <typename Vector>
inline __attribute__((always_inline)) Vector load(const void* from) {
  Vector v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}

inline __attribute__((always_inline)) void store(float* to, Floats v) { __builtin_memcpy(to, &v, sizeof(v)); }
inline __attribute__((always_inline)) Floats splat(float x) { return x - Floats{}; }
inline __attribute__((always_inline)) Floats to_floats(Words v) {
  return __builtin_convertvector((Integers)v, Floats);
}

// The lanes of a vector combined in twos, fours and so on, which takes fewer steps after each other than one by one.
template <typename Combine>
inline __attribute__((always_inline)) float reduce_lanes(Floats v, const Combine& combine) {
  float lanes[kLanes];
  store(lanes, v);
#pragma GCC unroll 4
  for (int count = kLanes / 2; count > 0; count /= 2) {
#pragma GCC unroll 8
    for (int l = 0; l < count; ++l) lanes[l] = combine(lanes[l], lanes[l + count]);
  }
  return lanes[0];
}

inline __attribute__((always_inline)) float sum_of_lanes(Floats v) {
  return reduce_lanes(v, [](float a, float b) { return a + b; });
}

// The largest lane; one that is not a number counts or does not.
inline __attribute__((always_inline)) float largest_lane(Floats v) {
  return reduce_lanes(v, [](float a, float b) { return a > b ? a : b; });
}

// Widens floats of `kExponent` exponent bits, given right-aligned in a word of which bit `kSign` is the sign.
// Finite ones only, unless `kSpecial`. Subnormals are rebuilt by a subtraction: they survive a CPU that
// flushes denormals.
template <int kExponentBits, int kSign, bool kSpecial>
inline __attribute__((always_inline)) Floats widen(Words bits) {
  constexpr int kMantissaBits = kSign - kExponentBits;
  constexpr uint32_t kRebias = 127 - ((1 << (kExponentBits - 1)) - 1);
  constexpr uint32_t kExponentMask = ((1u << kExponentBits) - 1) << 23;
  const Words magnitude = (bits & ((1u << kSign) - 1)) << (23 - kMantissaBits);
  const Words exponent = magnitude & kExponentMask;
  const Words is_small = (Words)(exponent == 0);
  Words rebiased = magnitude + (kRebias << 23) + (is_small & (1u << 23));
  if (kSpecial) rebiased += (Words)(exponent == kExponentMask) & (kRebias << 23);
  const Words correction = is_small & ((kRebias + 1) << 23);
  Floats value;
  Floats subtracted;
  __builtin_memcpy(&value, &rebiased, sizeof(value));
  __builtin_memcpy(&subtracted, &correction, sizeof(value));
  value -= subtracted;
  Words result;
  __builtin_memcpy(&result, &value, sizeof(value));
  result |= (bits >> kSign) << 31;
  __builtin_memcpy(&value, &result, sizeof(value));
  return value;
}

template <int kFormat>
inline __attribute__((always_inline)) Floats code_values(Words codes) {
  if (kFormat == kSymmetric) return to_floats(codes) - 128.0f;
  if (kFormat == kE4M3) return widen<4, 7, false>(codes);
  if (kFormat == kE5M2) return widen<5, 7, false>(codes);
  return to_floats(codes);
}

inline void widen_halves(const uint16_t* from, int64_t count, float* to) {
  int64_t i = 0;
#if defined(KVCACHE_F16C)
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
#else
  for (; i + kLanes <= count; i += kLanes) {
    Words bits;
    for (int l = 0; l < kLanes; ++l) bits[l] = from[i + l];
    store(to + i, widen<5, 15, true>(bits));
  }
#endif
  for (; i < count; ++i) {
    Words bits = {from[i]};
    to[i] = widen<5, 15, true>(bits)[0];
  }
}

void widen_row(const void* data, int32_t dtype, int64_t offset, int64_t count, float* to) {
  if (dtype == kFloat32) {
    std::memcpy(to, static_cast<const float*>(data) + offset, count * sizeof(float));
  } else if (dtype == kFloat16) {
    widen_halves(static_cast<const uint16_t*>(data) + offset, count, to);
  } else {
    const uint16_t* from = static_cast<const uint16_t*>(data) + offset;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
      std::memcpy(to + i, &bits, sizeof(bits));
    }
  }
}

// exp(x) for x <= 0, to 2 units in the last place (the polynomial of Cephes); 0 below -87.3, NaN stays.
inline __attribute__((always_inline)) Floats exponential(Floats x) {
  constexpr float kLowest = -87.3f;
  const Integers is_zero = x < kLowest;
  x = is_zero ? splat(kLowest) : x;
  const Floats n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // rounds to the nearest integer
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const Integers power = (__builtin_convertvector(n, Integers) + 127) << 23;
  Floats scale;
  __builtin_memcpy(&scale, &power, sizeof(scale));
  return is_zero ? Floats{} : y * scale;
}

inline __attribute__((always_inline)) Floats hyperbolic_tangent(Floats x) {
  const Floats magnitude = x < 0.0f ? -x : x;
  const Floats e = exponential(-2.0f * magnitude);
  const Floats far = (1.0f - e) / (1.0f + e);
  const Floats z = x * x;
  Floats near = z * -5.70498872745e-3f + 2.06390887954e-2f;
  near = near * z - 5.37397155531e-2f;
  near = near * z + 1.33314422036e-1f;
  near = near * z - 3.33332819422e-1f;
  near = near * z * x + x;
  return magnitude < 0.625f ? near : (x < 0.0f ? -far : far);
}

}  // namespace
}  // namespace kvcache
