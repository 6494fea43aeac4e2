// Codes of a record to fp32 numbers in shared memory: every format and every layout. A lane takes 32 bits of codes at a
// time and a warp 128 bytes in a row, so that no code is loaded twice, but for the third bits of 3; what the codes of a
// word have in common is worked out once.
#pragma once

#include "packed_codes.cuh"

namespace kvcache {

// Whether codes are integers with scales, and perhaps minima, in fp16, and nothing else.
KVCACHE_DEVICE bool is_usual(const Side& side) {
  return (side.format == kAffine || side.format == kSymmetric) && side.scale_offset >= 0 && side.metadata_bytes == 2 &&
         side.factors == nullptr;
}

// Brings the tokens [first, last) of a record into tile[token][channel]. `kIsUsual`: see above.
template <bool kIsUsual>
struct RecordDecoder {
  const Side& side;
  const uint8_t* record;
  const float *channel_scale, *channel_offset, *factors;  // of the head, or null
  float scale;                                            // where there is one for all
  int group_shift;                                        // of metadata: 2^group_shift tokens share a row
  int first, last, stride;
  float* tile;

  KVCACHE_DEVICE RecordDecoder(const Side& side, const uint8_t* record, int batch, int head, int heads, int first,
                               int last, float* tile, int stride)
      : side(side),
        record(record),
        channel_scale(nullptr),
        channel_offset(nullptr),
        factors(nullptr),
        scale(side.scale_offset < 0 && side.channel_scale == nullptr ? side.static_scale[head] : 1.0f),
        group_shift(power_of(side.group_tokens)),
        first(first),
        last(last),
        stride(stride),
        tile(tile) {
    const int64_t channel = static_cast<int64_t>(head) * side.head_dim;
    if (side.channel_scale != nullptr) {
      channel_scale = side.channel_scale + batch * side.channel_batch_stride + channel;
      channel_offset = side.channel_offset + batch * side.channel_batch_stride + channel;
    }
    if (side.factors != nullptr) factors = side.factors + static_cast<int64_t>(batch) * heads * side.head_dim + channel;
  }

  KVCACHE_DEVICE void decode(bool is_key) const {
    if (side.nbits == 8) {
      is_key ? decode_byte_keys() : decode_byte_values();
    } else {
      is_key ? decode_keys() : decode_values();
    }
  }

 private:
  KVCACHE_DEVICE int low_bits() const { return side.nbits == 3 ? 2 : side.nbits; }  // 3 bits are planes of 2 and of 1

  // 32 bits of the codes, `offset` bytes from the first.
  KVCACHE_DEVICE uint32_t word(int offset) const {
    return *reinterpret_cast<const uint32_t*>(record + side.codes_offset + offset);
  }
  KVCACHE_DEVICE int column_of(int channel) const {
    if (side.width == side.head_dim) return channel;
    return side.width == 1 ? 0 : channel / (side.head_dim / side.width);
  }
  // What a code stands for, before outliers and rotations.
  KVCACHE_DEVICE float number(int token, int channel, int column, uint32_t code) const {
    if (kIsUsual) {
      const int entry = (token >> group_shift) * side.width + column;
      const uint16_t* scales = reinterpret_cast<const uint16_t*>(record + side.scale_offset);
      const uint16_t* minima = reinterpret_cast<const uint16_t*>(record + side.minimum_offset);
      const float value = static_cast<float>(static_cast<int>(code) - (side.format == kSymmetric ? 128 : 0));
      return add_rounded(multiply_rounded(value, half_float(scales[entry])),
                         side.minimum_offset >= 0 ? half_float(minima[entry]) : 0.0f);
    }
    const float value = side.format == kNonUniform ? side.levels[code] : code_value(code, side.format);
    float by = scale, plus = 0.0f;
    if (channel_scale != nullptr) {
      by = channel_scale[channel];
      plus = channel_offset[channel];
    } else {
      const int entry = (token >> group_shift) * side.width + column;
      if (side.scale_offset >= 0) by = read_metadata(record + side.scale_offset, side.metadata_bytes, entry);
      if (side.minimum_offset >= 0) plus = read_metadata(record + side.minimum_offset, side.metadata_bytes, entry);
    }
    const float scaled = add_rounded(multiply_rounded(value, by), plus);
    return factors != nullptr ? multiply_rounded(scaled, factors[channel]) : scaled;
  }
  KVCACHE_DEVICE void put(int token, int channel, float number) const {
    if (token >= first && token < last) tile[token * stride + channel] = number;
  }

  KVCACHE_DEVICE void decode_keys() const {
    const int low = low_bits(), parts = 4 / low, half = side.padded_dim / 2;
    const uint32_t mask = (1u << low) - 1;
    for (int w = static_cast<int>(threadIdx.x); w < half / parts * 16; w += static_cast<int>(blockDim.x)) {
      const int token = w % 16;  // and every 16th from there on
      const uint32_t words = word(4 * w);
#pragma unroll 1
      for (int part = 0; part < parts; ++part) {
        const int pair = w / 16 * parts + part;
        const uint32_t codes = words >> 4 * low * part;
        uint32_t third = 0;
        if (side.nbits == 3)
          third = word(plane_bytes(2, side.padded_dim) + (pair / 4 * 16 + token) * 4) >> pair % 4 * 4;
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
          const int channel = side.interleaved != 0 ? 2 * pair + upper : pair + upper * half;
          if (channel >= side.head_dim) continue;
          const int column = column_of(channel);
          float numbers[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const uint32_t code = (codes >> (16 * upper + low * k) & mask) | (third >> (16 * upper + k) & 1u) << 2;
            numbers[k] = number(token + 16 * k, channel, column, code);
          }
#pragma unroll
          for (int k = 0; k < 4; ++k) put(token + 16 * k, channel, numbers[k]);
        }
      }
    }
  }
  KVCACHE_DEVICE void decode_byte_keys() const {
    for (int w = static_cast<int>(threadIdx.x); w < side.padded_dim / 4 * kBlockTokens;
         w += static_cast<int>(blockDim.x)) {
      const int token = w % kBlockTokens, channel = w / kBlockTokens * 4;
      const uint32_t codes = word(4 * w);
      float numbers[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (channel + i < side.head_dim)
          numbers[i] = number(token, channel + i, column_of(channel + i), codes >> 8 * i & 255u);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (channel + i < side.head_dim) put(token, channel + i, numbers[i]);
    }
  }
  KVCACHE_DEVICE void decode_values() const {
    const int low = low_bits(), per_word = 16 / low, chunks = side.padded_dim / 16;
    const uint32_t mask = (1u << low) - 1;
    for (int w = static_cast<int>(threadIdx.x); w < kBlockTokens / 2 * chunks / per_word * 16;
         w += static_cast<int>(blockDim.x)) {
      const uint32_t words = word(4 * w);
#pragma unroll 1
      for (int i = 0; i < per_word; ++i) {
        const int chunk = w / 16 * per_word + i, token = chunk / chunks * 2, channel = chunk % chunks * 16 + w % 16;
        if (channel >= side.head_dim) continue;
        const uint32_t codes = words >> low * i;
        uint32_t third = 0;
        if (side.nbits == 3)
          third = word(plane_bytes(2, side.padded_dim) + (chunk / 16 * 16 + w % 16) * 4) >> chunk % 16;
        const int column = column_of(channel);
        float numbers[2];
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const uint32_t code = (codes >> 16 * odd & mask) | (third >> 16 * odd & 1u) << 2;
          numbers[odd] = number(token + odd, channel, column, code);
        }
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) put(token + odd, channel, numbers[odd]);
      }
    }
  }
  KVCACHE_DEVICE void decode_byte_values() const {
    for (int w = static_cast<int>(threadIdx.x); w < kBlockTokens / 4 * side.padded_dim;
         w += static_cast<int>(blockDim.x)) {
      const int token = w / side.padded_dim * 4, channel = w % side.padded_dim;
      if (channel >= side.head_dim) continue;
      const uint32_t codes = word(4 * w);
      const int column = column_of(channel);
      float numbers[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) numbers[i] = number(token + i, channel, column, codes >> 8 * i & 255u);
#pragma unroll
      for (int i = 0; i < 4; ++i) put(token + i, channel, numbers[i]);
    }
  }
};

}  // namespace kvcache
