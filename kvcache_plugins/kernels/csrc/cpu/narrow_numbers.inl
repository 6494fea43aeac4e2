// From fp32 to narrower numbers, rounded to nearest even (decode_tokens.inl, encode_unit.inl).
#pragma once

#include "portable_numbers.inl"

namespace kvcache {
namespace {  // see portable_numbers.inl

inline __attribute__((always_inline)) Words bits_of(Floats v) {
  Words bits;
  __builtin_memcpy(&bits, &v, sizeof(bits));
  return bits;
}

inline __attribute__((always_inline)) Floats number_of(Words bits) {
  Floats v;
  __builtin_memcpy(&v, &bits, sizeof(v));
  return v;
}

// bf16, right-aligned; NaN becomes the quiet one.
inline __attribute__((always_inline)) Words narrow_to_bfloat16(Floats v) {
  const Words bits = bits_of(v);
  const Words rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const Words is_nan = (Words)(v != v);
  return (rounded & ~is_nan) | (is_nan & 0x7fc0u);
}

// fp16, right-aligned. Adding a power of two that depends on the magnitude rounds the mantissa at the right place,
// for subnormal results too (the method of the FP16 library, M. Dukhan).
inline __attribute__((always_inline)) Words narrow_to_half(Floats v) {
  const Words bits = bits_of(v);
  const Words doubled = bits + bits;
  const Floats magnitude = number_of(bits & 0x7fffffffu);
  const Words exponent = doubled & 0xff000000u;
  const Words is_small = (Words)(exponent < 0x71000000u);
  const Words bias = (exponent & ~is_small) | (is_small & 0x71000000u);
  const Floats base = number_of((bias >> 1) + 0x07800000u) + magnitude * 0x1.0p+112f * 0x1.0p-110f;
  const Words sum = bits_of(base);
  const Words number = (sum >> 13 & 0x7c00u) + (sum & 0xfffu);
  const Words is_nan = (Words)(doubled > 0xff000000u);
  return (bits >> 31 << 15) | (number & ~is_nan) | (is_nan & 0x7e00u);
}

// The same, but a finite number beyond the largest fp16 one becomes that.
inline __attribute__((always_inline)) Words narrow_finite_to_half(Floats v) {
  const Words half = narrow_to_half(v);
  const Words is_infinite = (Words)((half & 0x7fffu) == 0x7c00u);
  const Words was_finite = (Words)((bits_of(v) & 0x7fffffffu) < 0x7f800000u);
  return half - (is_infinite & was_finite & 1u);
}

}  // namespace
}  // namespace kvcache
