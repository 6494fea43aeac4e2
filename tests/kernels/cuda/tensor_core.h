// How a tensor core multiplies a tile of fp16 or bf16 numbers: as an A100's does, which cuts off the most of those that
// the kernels are built for.
//
// Eight products at a time are shifted, with the sum so far, to the exponent of the largest of the nine, cut off after
// 24 bits of fraction, and added up exactly; the sum is cut off to fp32. A product's exponent is the sum of those of
// its factors, and that of a subnormal one is the least (-14 of fp16, -126 of bf16). H100s do so with sixteen products
// and 25 bits (Fasi et al., PeerJ Comput. Sci. 7:e330, 2021; Khattak and Mikaitis, arXiv:2512.07004).
//
// `add_products` says so for one sum. `multiply` does the same for the eight sums of a row at once: of the time that
// emulated attention took, singly made sums were a third.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace tensor_core {

constexpr int kRows = 16, kColumns = 8, kDepth = 16;
constexpr int kProducts = 8, kFractionBits = 24, kSumBits = 24;
constexpr int kNoExponent = -400;  // of zero: below that of any product, and one that a double has

// c += a . b
struct Tile {
  float a[kRows][kDepth], b[kDepth][kColumns], c[kRows][kColumns];
};

inline int least_exponent(bool are_bfloats) { return are_bfloats ? -126 : -14; }

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
  int largest = sum == 0.0f ? kNoExponent : exponent_of(sum, -126);
  double exact = sum;
  for (int k = 0; k < kProducts; ++k) {
    if (a[k] == 0.0f || b[k] == 0.0f) continue;
    largest = std::max(largest, exponent_of(a[k], least) + exponent_of(b[k], least));
    exact += static_cast<double>(a[k]) * b[k];
  }
  if (!std::isfinite(exact)) return static_cast<float>(exact);
  if (largest == kNoExponent) return 0.0f;
  const double unit = power_of_two(kFractionBits - largest);
  auto total = static_cast<int64_t>(sum * unit);  // towards zero, as every one below
  for (int k = 0; k < kProducts; ++k) total += static_cast<int64_t>(static_cast<double>(a[k]) * b[k] * unit);
  const int bits = total == 0 ? 0 : 64 - __builtin_clzll(static_cast<uint64_t>(std::llabs(total)));
  if (bits > kSumBits) total = total / (int64_t{1} << (bits - kSumBits)) * (int64_t{1} << (bits - kSumBits));
  return static_cast<float>(static_cast<double>(total) / unit);
}

// sum + a . b, of sixteen pairs.
inline float add_products(float sum, const float (&a)[kDepth], const float (&b)[kDepth], bool are_bfloats) {
  for (int k = 0; k < kDepth; k += kProducts) sum = add_some(sum, a + k, b + k, least_exponent(are_bfloats));
  return sum;
}

// Every sum by itself.
inline void multiply_singly(Tile& tile, bool are_bfloats) {
  for (int column = 0; column < kColumns; ++column) {
    float b[kDepth];
    for (int k = 0; k < kDepth; ++k) b[k] = tile.b[k][column];
    for (int row = 0; row < kRows; ++row)
      tile.c[row][column] = add_products(tile.c[row][column], tile.a[row], b, are_bfloats);
  }
}

// One of each for every column.
using Floats = float __attribute__((vector_size(4 * kColumns)));
using Words = int32_t __attribute__((vector_size(4 * kColumns)));
using Doubles = double __attribute__((vector_size(8 * kColumns)));
using Integers = int64_t __attribute__((vector_size(8 * kColumns)));

// Returns whether all numbers were finite, and with them the sums; if not, `sums` are worth nothing.
__attribute__((always_inline)) inline bool multiply_together(const Tile& tile, int least,
                                                             float (&sums)[kRows][kColumns]) {
  constexpr int32_t kInfinite = 255;
  Doubles b[kDepth];
  Integers b_exponents[kDepth];
  Words beyond{};
  for (int k = 0; k < kDepth; ++k) {
    Floats numbers;
    Words bits;
    std::memcpy(&numbers, tile.b[k], sizeof(numbers));
    std::memcpy(&bits, tile.b[k], sizeof(bits));
    Words exponents = bits >> 23 & 255;
    beyond |= exponents == kInfinite;
    exponents -= 127;
    exponents = exponents > least ? exponents : Words{} + least;
    exponents = numbers == 0.0f ? Words{} + 2 * kNoExponent : exponents;
    b[k] = __builtin_convertvector(numbers, Doubles);
    b_exponents[k] = __builtin_convertvector(exponents, Integers);
  }
  for (int row = 0; row < kRows; ++row) {
    Floats sum;
    std::memcpy(&sum, tile.c[row], sizeof(sum));
    for (int first = 0; first < kDepth; first += kProducts) {
      Words bits;
      std::memcpy(&bits, &sum, sizeof(bits));
      Words exponents = bits >> 23 & 255;
      beyond |= exponents == kInfinite;
      exponents -= 127;
      exponents = exponents > -126 ? exponents : Words{} - 126;
      exponents = sum == 0.0f ? Words{} + kNoExponent : exponents;
      Integers largest = __builtin_convertvector(exponents, Integers);
      for (int k = first; k < first + kProducts; ++k) {
        const float a = tile.a[row][k];
        if (a == 0.0f) continue;
        if (!std::isfinite(a)) return false;
        const Integers product = b_exponents[k] + exponent_of(a, least);
        largest = product > largest ? product : largest;
      }
      const Integers unit_bits = (1023 + kFractionBits - largest) << 52;
      const Integers inverse_bits = (1023 - kFractionBits + largest) << 52;
      Doubles unit, inverse;
      std::memcpy(&unit, &unit_bits, sizeof(unit));
      std::memcpy(&inverse, &inverse_bits, sizeof(inverse));
      Integers total = __builtin_convertvector(__builtin_convertvector(sum, Doubles) * unit, Integers);
      for (int k = first; k < first + kProducts; ++k)
        total += __builtin_convertvector(b[k] * static_cast<double>(tile.a[row][k]) * unit, Integers);
      Doubles cut = __builtin_convertvector(total, Doubles);  // has less than 53 bits
      Integers cut_bits;
      std::memcpy(&cut_bits, &cut, sizeof(cut_bits));
      cut_bits &= -(int64_t{1} << (53 - kSumBits));
      std::memcpy(&cut, &cut_bits, sizeof(cut));
      sum = __builtin_convertvector(cut * inverse, Floats);
    }
    std::memcpy(sums[row], &sum, sizeof(sum));
  }
  for (int column = 0; column < kColumns; ++column)
    if (beyond[column] != 0) return false;
  return true;
}

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512dq,avx512vl"))) inline bool multiply_avx512(const Tile& tile, int least,
                                                                                 float (&sums)[kRows][kColumns]) {
  return multiply_together(tile, least, sums);
}
#endif

inline bool multiply_anywhere(const Tile& tile, int least, float (&sums)[kRows][kColumns]) {
#if defined(__x86_64__)
  static const bool is_wide = __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (is_wide) return multiply_avx512(tile, least, sums);
#endif
  return multiply_together(tile, least, sums);
}

inline void multiply(Tile& tile, bool are_bfloats) {
  float sums[kRows][kColumns];
  if (multiply_anywhere(tile, least_exponent(are_bfloats), sums)) std::memcpy(tile.c, sums, sizeof(sums));
  else multiply_singly(tile, are_bfloats);
}

}  // namespace tensor_core
