// Small vector helpers of the AVX-512 kernels: 16 fp32 lanes, bf16 pairs, fp16 metadata, and the exponential.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "decode_attention.h"

namespace kvcache {
namespace avx512 {

constexpr int kLanes = 16;

inline __mmask16 first_lanes(int count) {
  return count >= kLanes ? __mmask16(0xffff) : count <= 0 ? __mmask16(0) : __mmask16((1u << count) - 1);
}

// `count` (at most 16) metadata entries from `data`, in fp16 or fp32; the other lanes are zero.
inline __m512 load_metadata(const uint8_t* data, int bytes, int count) {
  const __mmask16 mask = first_lanes(count);
  if (bytes == 4) return _mm512_maskz_loadu_ps(mask, data);
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, data));
}

// Sixteen fp32 numbers as bf16, widened to the low half of a 32-bit lane.
inline __m512i bf16_low(__m512 x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)); }

// The fp32 value of the bf16 in the low half of every lane.
inline __m512 from_bf16_low(__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }

// What rounding to bf16 leaves over.
inline __m512 bf16_rest(__m512 x) { return _mm512_sub_ps(x, from_bf16_low(bf16_low(x))); }

// 32 numbers as 16 pairs of neighbours.
inline __m512i neighbour_pairs(__m512 first, __m512 second) {
  return (__m512i)_mm512_cvtne2ps_pbh(second, first);
}

// Pairs (low, high) of bf16 in 32-bit lanes; with `rest`, also the pairs of what rounding left over.
inline __m512i bf16_pairs(__m512 low, __m512 high, __m512i* rest) {
  const __m512i a = bf16_low(low), b = bf16_low(high);
  if (rest != nullptr) {
    const __m512i c = bf16_low(bf16_rest(low)), d = bf16_low(bf16_rest(high));
    *rest = _mm512_or_si512(c, _mm512_slli_epi32(d, 16));
  }
  return _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
}

// Sums of four vectors.
inline void reduce_add(const __m512* x, float* sums) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
  const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

// Lane i: the sum of vector i of 16.
inline __m512 sums_of_lanes(const __m512* x) {
  __m512 quarters[4];
  for (int i = 0; i < 4; ++i) {
    const __m512* const four = x + 4 * i;
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(four[0], four[1]), _mm512_unpackhi_ps(four[0], four[1]));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(four[2], four[3]), _mm512_unpackhi_ps(four[2], four[3]));
    quarters[i] = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  }
  const auto halves = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  };
  const __m512 first = halves(quarters[0], quarters[1]), second = halves(quarters[2], quarters[3]);
  return _mm512_add_ps(_mm512_shuffle_f32x4(first, second, 0x88), _mm512_shuffle_f32x4(first, second, 0xdd));
}

// Maxima of four vectors.
inline void reduce_max(const __m512* x, float* maxima) {
  const __m512 ab = _mm512_max_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  const __m512 cd = _mm512_max_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
  const __m512 all = _mm512_max_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(maxima, _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

inline __m512 dot_bf16(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// Shifts of every 16-bit lane by a count that need not be an immediate.
inline __m512i shift_right(__m512i x, int count) { return _mm512_srlv_epi16(x, _mm512_set1_epi16(short(count))); }
inline __m512i shift_left(__m512i x, int count) { return _mm512_sllv_epi16(x, _mm512_set1_epi16(short(count))); }

inline __m512i broadcast_pair(const uint32_t* pair) { return _mm512_set1_epi32(int(*pair)); }

// e^x for x <= 0 (and -inf), relative error about 1e-7: Cody-Waite reduction and a polynomial of degree 6.
inline __m512 exp_ps(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-104.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.0f / 720.0f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

// Codes are read relative to the middle of their range, and the minimum is moved there: the two parts of
// `code * scale + minimum` then no longer cancel, which halves the rounding error for nothing.
inline float code_center(int nbits) { return nbits == 8 ? 128.0f : float((1 << nbits) - 1) / 2; }

// Look-up table of 32 bf16 entries: entry e is the centered code e modulo 2^nbits. `vpermw` reads the low five bits of
// an index, so repeating the table makes masking the other codes of a word unnecessary.
inline __m512i code_table(int nbits) {
  alignas(64) uint16_t table[32];
  for (int e = 0; e < 32; ++e) {
    const float value = float(e & ((1 << nbits) - 1)) - code_center(nbits);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    table[e] = uint16_t(bits >> 16);  // exact: halves up to 7.5
  }
  return _mm512_load_si512(table);
}

// bf16 numbers of 8-bit float codes, exact: `vpermi2b` looks up 64 codes at once in a table of 128 magnitudes, one for
// each byte of a bf16.
struct Float8Table {
  __m512i low[2], high[2];

  Float8Table(int exponent_bits, int bias) {
    alignas(64) uint8_t bytes[2][128];
    const int mantissa_bits = 7 - exponent_bits;
    for (int code = 0; code < 128; ++code) {
      const int exponent = code >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
      float value = exponent ? float((1 << mantissa_bits) + mantissa) : float(2 * mantissa);
      for (int e = exponent - bias - mantissa_bits; e > 0; --e) value *= 2.0f;
      for (int e = exponent - bias - mantissa_bits; e < 0; ++e) value *= 0.5f;
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      bytes[0][code] = uint8_t(bits >> 16);
      bytes[1][code] = uint8_t(bits >> 24);
    }
    for (int i = 0; i < 2; ++i) {
      low[i] = _mm512_load_si512(bytes[0] + 64 * i);
      high[i] = _mm512_load_si512(bytes[1] + 64 * i);
    }
  }

  // The table of a format; that of E4M3 for those that need none.
  static const Float8Table& of(int format) {
    static const Float8Table e4m3(4, 7), e5m2(5, 15);
    return format == kE5M2 ? e5m2 : e4m3;
  }

  // 64 codes as bf16, four of every 32-bit lane side by side: `even` holds the first two lanes of every 128 bits,
  // `odd` the other two, so that a lane of the codes becomes two lanes of pairs.
  void decode(__m512i codes, __m512i* even, __m512i* odd) const {
    const __m512i lower = _mm512_permutex2var_epi8(low[0], codes, low[1]);
    const __m512i upper = _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(high[0], codes, high[1]), codes,
                                                    _mm512_set1_epi8(char(0x80)), 0xf8);  // or the sign bit
    *even = _mm512_unpacklo_epi8(lower, upper);
    *odd = _mm512_unpackhi_epi8(lower, upper);
  }

  // Sums of neighbouring lanes, in the order of the lanes of the codes.
  static __m512 join(__m512 even, __m512 odd) {
    return _mm512_add_ps(_mm512_shuffle_ps(even, odd, 0x88), _mm512_shuffle_ps(even, odd, 0xdd));
  }
};

// Two neighbouring pairs, in every two lanes.
inline __m512i broadcast_two_pairs(const uint32_t* pairs) {
  long long both;
  std::memcpy(&both, pairs, 8);
  return _mm512_set1_epi64(both);
}

}  // namespace avx512
}  // namespace kvcache
