// What the kernels ask of the machine that concerns numbers only, in plain C++ with the roundings of the GPU: part of
// emulation.h.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulation {

[[noreturn]] void fail(const char* message);

}  // namespace emulation

namespace kvcache {

inline float infinity() { return HUGE_VALF; }
inline uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float bits_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline float half_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
  if (magnitude >= 0x7c00) return bits_float(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
  const float value = magnitude < 0x400 ? static_cast<float>(magnitude) * 0x1p-24f
                                        : bits_float((magnitude << 13) + (112u << 23));
  return sign != 0 ? -value : value;
}

// Nearest fp16, ties to even.
inline uint16_t double_half(double x) {
  if (x != x) return 0x7fff;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::fabs(x);
  if (magnitude >= 65520.0) return sign | 0x7c00;
  if (magnitude < 0x1p-14) return sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24));
  int exponent;
  const double fraction = std::frexp(magnitude, &exponent);  // in [0.5, 1)
  const int scaled = static_cast<int>(std::nearbyint(fraction * 2048.0));  // 1024 to 2048
  return sign | static_cast<uint16_t>((exponent + 14) * 1024 + (scaled - 1024));
}
inline uint16_t float_half(float x) { return double_half(x); }

template <typename Function>
inline uint32_t half2_map(Function function, uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result = 0;
  for (int i = 0; i < 32; i += 16) {
    const double x = half_float(static_cast<uint16_t>(a >> i)), y = half_float(static_cast<uint16_t>(b >> i));
    const double z = half_float(static_cast<uint16_t>(c >> i));
    result |= static_cast<uint32_t>(double_half(function(x, y, z))) << i;
  }
  return result;
}
inline uint32_t half2_add(uint32_t a, uint32_t b) {
  return half2_map([](double x, double y, double) { return x + y; }, a, b, 0);
}
inline uint32_t half2_multiply(uint32_t a, uint32_t b) {
  return half2_map([](double x, double y, double) { return x * y; }, a, b, 0);
}
inline uint32_t half2_fma(uint32_t a, uint32_t b, uint32_t c) {
  return half2_map([](double x, double y, double z) { return x * y + z; }, a, b, c);
}
inline uint32_t larger_halves(uint32_t a, uint32_t b) {
  const uint32_t low = std::max(a & 0xffffu, b & 0xffffu), high = std::max(a >> 16, b >> 16);
  return high << 16 | low;
}
inline uint32_t half2_negate(uint32_t a) { return a ^ 0x80008000u; }
inline uint32_t low_twice(uint32_t a) { return (a & 0xffffu) * 0x10001u; }
inline uint32_t high_twice(uint32_t a) { return (a >> 16) * 0x10001u; }
inline uint32_t half2_pack(float low, float high) {
  return float_half(low) | static_cast<uint32_t>(float_half(high)) << 16;
}
inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  if ((selector & 0x8888u) != 0) ::emulation::fail("a byte permutation would replicate a sign");
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
inline int count_bits(uint32_t x) { return std::popcount(x); }
inline uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) { return (x & mask) | bits; }

inline float add_rounded(float a, float b) {
  volatile float sum = a + b;
  return sum;
}
inline float multiply_rounded(float a, float b) {
  volatile float product = a * b;
  return product;
}
inline float divide_rounded(float a, float b) { return a / b; }
inline float nearest_even(float x) { return std::nearbyintf(x); }
inline void turn(double angle, float* cosine, float* sine) {
  *cosine = static_cast<float>(std::cos(angle));
  *sine = static_cast<float>(std::sin(angle));
}
inline void turn_part(uint32_t part, float* cosine, float* sine) {
  const float angle = static_cast<float>(static_cast<int32_t>(part)) * 1.4629180792671596e-9f;
  *cosine = std::cos(angle);
  *sine = std::sin(angle);
}
inline float power_of_two(float x) { return std::exp2(x); }

}  // namespace kvcache
