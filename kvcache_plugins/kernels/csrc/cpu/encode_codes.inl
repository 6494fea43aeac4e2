// Codes and metadata of tokens, one by one: what kvcache_plugins/quantizers (affine.py, float8.py) computes, operation by
// operation in fp32, so that the bytes are the same to the last bit. Whole blocks go faster, see encode_unit.inl.
//
// Functions of the compiler and not of <cmath>: an inline function of a library is one for all translation units, and
// may be the one that was compiled for another machine.
#pragma once

#include <cstring>

#include "encode_unit.h"
#include "narrow_numbers.inl"

namespace kvcache {
namespace {  // see portable_numbers.inl

constexpr float kLargestHalf = 65504.0f;
constexpr float kSmallestScale = 5.9604644775390625e-8f;  // 2^-24

// Nearest integer, ties to even, for |value| < 2^22; no library call, so that loops of it are vector code.
inline float nearest(float value) { return (value + 12582912.0f) - 12582912.0f; }

uint16_t half_of(float value) { return uint16_t(narrow_to_half(splat(value))[0]); }

float half_value(uint16_t half) {
  const Words bits = {half};
  return widen<5, 15, false>(bits)[0];
}

float round_to_half(float value) { return half_value(half_of(value)); }

float round_up_to_half(float value) {
  uint16_t half = half_of(value);
  if (half_value(half) < value) ++half;
  return half_value(half);
}

void store_metadata(uint8_t* at, int64_t bytes, float value) {
  if (bytes == 4) {
    std::memcpy(at, &value, 4);
  } else {
    const uint16_t half = half_of(value);  // exact: it has been rounded
    std::memcpy(at, &half, 2);
  }
}

// Nearest 8-bit float, ties to even; |value| is at most the largest number of the format.
uint8_t to_float8(float value, int mantissa_bits, int bias) {
  const uint8_t sign = __builtin_signbit(value) ? 0x80 : 0;
  const float magnitude = __builtin_fabsf(value);
  const float smallest_normal = __builtin_ldexpf(1.0f, 1 - bias);
  if (magnitude < smallest_normal)  // subnormal; rounding up to the first normal number gives its code
    return sign | uint8_t(nearest(__builtin_ldexpf(magnitude, bias - 1 + mantissa_bits)));
  uint32_t bits;
  std::memcpy(&bits, &magnitude, 4);
  const int dropped = 23 - mantissa_bits;
  bits += (1u << (dropped - 1)) - 1 + (bits >> dropped & 1);
  return sign | uint8_t((bits >> dropped) - (uint32_t(127 - bias) << mantissa_bits));
}

// Writes the codes of one token: see packing.py for the orders.
template <int B>
void put_words(uint8_t* plane, const uint8_t* codes, int shift, const Layout& layout, bool is_key, int slot) {
  const int dim = int(layout.padded_dim()), channels = int(layout.head_dim);
  constexpr uint16_t mask = (1 << B) - 1;
  auto put = [plane](int word, int place, uint16_t code) {
    uint16_t value;
    std::memcpy(&value, plane + 2 * word, 2);
    value = uint16_t(value | code << (B * place));
    std::memcpy(plane + 2 * word, &value, 2);
  };
  if (is_key) {
    constexpr int per_word = 4 / B;
    const int half = dim / 2, lane = slot % 16, step = slot / 16;
    for (int c = 0; c < channels; ++c) {
      const int side = layout.interleaved ? c % 2 : c / half;
      const int pair = layout.interleaved ? c / 2 : c % half;
      put((pair / per_word * 16 + lane) * 2 + side, 4 * (pair % per_word) + step, codes[c] >> shift & mask);
    }
  } else {
    constexpr int per_word = 16 / B;
    const int chunks = dim / 16;
    for (int c = 0; c < channels; ++c) {
      const int chunk = slot / 2 * chunks + c / 16;
      put((chunk / per_word * 16 + c % 16) * 2 + slot % 2, chunk % per_word, codes[c] >> shift & mask);
    }
  }
}

void put_token(uint8_t* record, const uint8_t* codes, const Layout& layout, bool is_key, int slot) {
  uint8_t* at = record + layout.codes_offset;
  const int64_t dim = layout.padded_dim();
  switch (layout.nbits) {
    case 2:
      return put_words<2>(at, codes, 0, layout, is_key, slot);
    case 4:
      return put_words<4>(at, codes, 0, layout, is_key, slot);
    case 3:
      put_words<2>(at, codes, 0, layout, is_key, slot);
      return put_words<1>(at + kBlockTokens * dim / 4, codes, 2, layout, is_key, slot);
    default:
      for (int64_t c = 0; c < layout.head_dim; ++c) {
        const int64_t place = is_key ? c / 4 * 256 + slot * 4 + c % 4
                                     : slot / 4 * dim * 4 + c / 16 * 64 + c % 16 * 4 + slot % 4;
        at[place] = codes[c];
      }
  }
}

float largest_code(const Layout& layout) {
  return layout.format == kE4M3 ? 448.0f : layout.format == kE5M2 ? 57344.0f : 127.0f;
}

uint8_t encode(float value, float scale, float minimum, const Layout& layout) {
  if (layout.format == kAffine) {
    const float divisor = scale > 0 ? scale : kInfinity;
    const float code = nearest((value - minimum) / divisor), top = float((1 << layout.nbits) - 1);
    return uint8_t(code < 0.0f ? 0.0f : code > top ? top : code);
  }
  const float scaled = value / scale;
  if (layout.format == kSymmetric) {
    const float code = nearest(scaled);
    return uint8_t((code < -127.0f ? -127.0f : code > 127.0f ? 127.0f : code) + 128.0f);
  }
  const float limit = largest_code(layout);
  const float clamped = __builtin_fminf(__builtin_fmaxf(scaled, -limit), limit);
  return layout.format == kE4M3 ? to_float8(clamped, 3, 7) : to_float8(clamped, 2, 15);
}

void choose(float low, float high, const Layout& layout, float* scale, float* minimum) {
  if (layout.format == kAffine) {
    *scale = round_to_half((high - low + 0.0f) / float((1 << layout.nbits) - 1));
    *minimum = round_to_half(low + 0.0f);  // zero has no sign, see affine.py
  } else {
    *scale = __builtin_fmaxf(round_up_to_half(__builtin_fmaxf(high, -low) / largest_code(layout)), kSmallestScale);
    *minimum = 0.0f;
  }
}

void store_row(uint8_t* record, const Layout& layout, int64_t entry, float scale, float minimum) {
  store_metadata(record + layout.scale_offset + entry * layout.metadata_bytes, layout.metadata_bytes, scale);
  if (layout.minimum_offset >= 0)
    store_metadata(record + layout.minimum_offset + entry * layout.metadata_bytes, layout.metadata_bytes, minimum);
}

// See UnitKernels.
void encode_one_by_one(const float* states, int64_t start, int64_t count, uint8_t* records, int64_t record_bytes,
                 const Layout& layout, bool is_key) {
  const int64_t dim = layout.head_dim;
  uint8_t codes[kMaxHeadDim];
  if (layout.group_tokens == 1) {
    const int64_t group = dim / layout.width;
    for (int64_t t = 0; t < count; ++t) {
      const float* token = states + t * dim;
      const int64_t slot = (start + t) % kBlockTokens;
      uint8_t* record = records + (start + t) / kBlockTokens * record_bytes;
      for (int64_t g = 0; g < layout.width; ++g) {
        float low = token[g * group], high = low, scale, minimum;
        for (int64_t c = g * group + 1; c < (g + 1) * group; ++c) {
          low = token[c] < low ? token[c] : low;
          high = token[c] > high ? token[c] : high;
        }
        choose(low, high, layout, &scale, &minimum);
        for (int64_t c = g * group; c < (g + 1) * group; ++c) codes[c] = encode(token[c], scale, minimum, layout);
        store_row(record, layout, slot * layout.width + g, scale, minimum);
      }
      put_token(record, codes, layout, is_key, int(slot));
    }
    return;
  }
  // per channel: groups of tokens
  const int64_t rows = layout.group_tokens < kBlockTokens ? layout.group_tokens : kBlockTokens;
  float low[kMaxHeadDim], high[kMaxHeadDim], scale[kMaxHeadDim], minimum[kMaxHeadDim];
  for (int64_t first = 0; first < count; first += layout.group_tokens) {
    const float* group = states + first * dim;
    std::memcpy(low, group, sizeof(float) * dim);
    std::memcpy(high, group, sizeof(float) * dim);
    for (int64_t t = 1; t < layout.group_tokens; ++t) {
      for (int64_t c = 0; c < dim; ++c) {
        const float value = group[t * dim + c];
        low[c] = value < low[c] ? value : low[c];
        high[c] = value > high[c] ? value : high[c];
      }
    }
    for (int64_t c = 0; c < dim; ++c) choose(low[c], high[c], layout, scale + c, minimum + c);
    for (int64_t t = 0; t < layout.group_tokens; ++t) {
      const int64_t at = start + first + t, slot = at % kBlockTokens;
      uint8_t* record = records + at / kBlockTokens * record_bytes;
      for (int64_t c = 0; c < dim; ++c) codes[c] = encode(group[t * dim + c], scale[c], minimum[c], layout);
      put_token(record, codes, layout, is_key, int(slot));
      if (t % rows == 0)
        for (int64_t c = 0; c < dim; ++c) store_row(record, layout, slot / rows * dim + c, scale[c], minimum[c]);
    }
  }
}

}  // namespace
}  // namespace kvcache
