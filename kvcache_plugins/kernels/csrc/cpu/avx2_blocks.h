// What products with the codes of whole blocks have in common for AVX2 (the other avx2_*.h).
#pragma once

#include <immintrin.h>

#include <vector>

#include "portable_softmax.inl"
#include "record_fetcher.h"

namespace kvcache {
namespace {  // see portable_numbers.inl

constexpr int kTogether = 4;  // query rows that share a pass over the codes

inline __m256i load_codes(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

// The largest magnitude of numbers, taken 8 at a time. Bits of floats without their signs order as integers do, and
// what is not finite comes last.
class Magnitude {
 public:
  void take(Floats x) {
    const __m256i bits = _mm256_and_si256((__m256i)x, _mm256_set1_epi32(0x7FFFFFFF));
    largest_ = _mm256_max_epi32(largest_, bits);
  }

  // Infinity if a number is not finite.
  float largest() const {
    __m128i best = _mm_max_epi32(_mm256_castsi256_si128(largest_), _mm256_extracti128_si256(largest_, 1));
    best = _mm_max_epi32(best, _mm_shuffle_epi32(best, 0x4E));
    best = _mm_max_epi32(best, _mm_shuffle_epi32(best, 0xB1));
    const float largest = _mm_cvtss_f32(_mm_castsi128_ps(best));
    return largest < kInfinity ? largest : kInfinity;
  }

 private:
  __m256i largest_{};
};

inline bool are_finite(const float* x, int count) {
  Magnitude magnitude;
  for (int i = 0; i < count; i += kLanes) magnitude.take(load<Floats>(x + i));
  return magnitude.largest() < kInfinity;
}

// Calls `run.template operator()<kRows>()` for up to kTogether rows.
template <typename Run>
void dispatch_rows(int rows, const Run& run) {
  if (rows == 1) return run.template operator()<1>();
  if (rows == 2) return run.template operator()<2>();
  if (rows == 3) return run.template operator()<3>();
  run.template operator()<kTogether>();
}

// Calls `run.template operator()<kBits, kRows>()` for codes of 2, 3 or 4 bits and up to kTogether rows.
template <typename Run>
void dispatch_words(int nbits, int rows, const Run& run) {
  dispatch_rows(rows, [&]<int kRows>() {
    if (nbits == 2) return run.template operator()<2, kRows>();
    if (nbits == 3) return run.template operator()<3, kRows>();
    run.template operator()<4, kRows>();
  });
}

// The same of 8 bits, too.
template <typename Run>
void dispatch_bits(int nbits, int rows, const Run& run) {
  if (nbits != 8) return dispatch_words(nbits, rows, run);
  dispatch_rows(rows, [&]<int kRows>() { run.template operator()<8, kRows>(); });
}

// Whether what is stored beside the codes belongs to single tokens.
bool is_by_token(const Side& side) { return side.scale_offset < 0 || side.group_tokens == 1; }

// A field of a record's metadata as [group][token]; what is not stored is the same for all tokens.
class TokenMetadata {
 public:
  TokenMetadata(const Side& side, int64_t offset, float fixed) : side_(side), offset_(offset) {
    numbers_.resize(side.width * kBlockTokens, fixed);
  }

  // Takes those of a record, as `load_metadata` leaves them: [token][group].
  void take(const float* rows) {
    if (offset_ < 0) return;
    float* const out = numbers_.data();
    const int width = side_.width;
    if (width == 1) {
      std::memcpy(out, rows, sizeof(float) * kBlockTokens);
    } else if (width % 4 == 0) {
      for (int g = 0; g < width; g += 4) {
        for (int t = 0; t < kBlockTokens; t += 4) {
          __m128 part[4];
          for (int i = 0; i < 4; ++i) part[i] = _mm_loadu_ps(rows + (t + i) * width + g);
          _MM_TRANSPOSE4_PS(part[0], part[1], part[2], part[3]);
          for (int i = 0; i < 4; ++i) _mm_storeu_ps(out + (g + i) * kBlockTokens + t, part[i]);
        }
      }
    } else {
      for (int t = 0; t < kBlockTokens; ++t)
        for (int g = 0; g < width; ++g) out[g * kBlockTokens + t] = rows[t * width + g];
    }
  }

  const float* of(int group) const { return numbers_.data() + group * kBlockTokens; }

 private:
  const Side& side_;
  const int64_t offset_;
  std::vector<float> numbers_;
};

}  // namespace
}  // namespace kvcache
