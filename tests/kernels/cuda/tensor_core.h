// How a tensor core adds up products of fp16 or bf16 numbers: as an A100's does, which cuts off the most of those that the
// kernels are built for.
//
// Eight products at a time are shifted, with the sum so far, to the exponent of the largest of the nine, cut off after
// 24 bits of fraction, and added up exactly; the sum is cut off to fp32. A product's exponent is the sum of those of its
// factors, and that of a subnormal one is the least (-14 of fp16, -126 of bf16). H100s do so with sixteen products and 25 bits (Fasi et al., PeerJ Comput.
// Sci. 7:e330, 2021; Khattak and Mikaitis, arXiv:2512.07004).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace tensor_core {

constexpr int kProducts = 8, kFractionBits = 24, kSumBits = 24;

inline int exponent_of(float x, int least) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return std::max(static_cast<int>(bits >> 23 & 255) - 127, least);
}

inline double power_of_two(int exponent) {
  const uint64_t bits = static_cast<uint64_t>(1023 + exponent) << 52;
  double power;
  std::memcpy(&power, &bits, 8);
  return power;
}

// sum + a . b, of kProducts pairs of numbers whose exponents are at least `least`.
inline float add_some(float sum, const float* a, const float* b, int least) {
  int largest = sum == 0.0f ? -1000 : exponent_of(sum, -126);
  double exact = sum;
  for (int k = 0; k < kProducts; ++k) {
    if (a[k] == 0.0f || b[k] == 0.0f) continue;
    largest = std::max(largest, exponent_of(a[k], least) + exponent_of(b[k], least));
    exact += static_cast<double>(a[k]) * b[k];
  }
  if (!std::isfinite(exact)) return static_cast<float>(exact);
  if (largest == -1000) return 0.0f;
  const double unit = power_of_two(kFractionBits - largest);
  auto total = static_cast<int64_t>(sum * unit);  // towards zero, as every one below
  for (int k = 0; k < kProducts; ++k) total += static_cast<int64_t>(static_cast<double>(a[k]) * b[k] * unit);
  const int bits = total == 0 ? 0 : 64 - __builtin_clzll(static_cast<uint64_t>(std::llabs(total)));
  if (bits > kSumBits) total = total / (int64_t{1} << (bits - kSumBits)) * (int64_t{1} << (bits - kSumBits));
  return static_cast<float>(static_cast<double>(total) / unit);
}

// sum + a . b, of sixteen pairs.
inline float add_products(float sum, const float (&a)[16], const float (&b)[16], bool are_bfloats = false) {
  for (int k = 0; k < 16; k += kProducts) sum = add_some(sum, a + k, b + k, are_bfloats ? -126 : -14);
  return sum;
}

}  // namespace tensor_core
