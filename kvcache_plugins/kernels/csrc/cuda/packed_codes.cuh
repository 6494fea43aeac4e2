// What codes, metadata and exact tokens are as numbers.
#pragma once

#include "arguments.h"
#include "platform.cuh"

namespace kvcache {

// What a code stands for before it is scaled.
KVCACHE_DEVICE float code_value(uint32_t code, int format) {
  switch (format) {
    case kSymmetric:
      return static_cast<float>(static_cast<int>(code) - 128);
    case kE4M3:  // an fp16 whose exponent is 8 too small
      return half_float(static_cast<uint16_t>((code & 0x80u) << 8 | (code & 0x7fu) << 7)) * 256.0f;
    case kE5M2:
      return half_float(static_cast<uint16_t>(code << 8));
    default:
      return static_cast<float>(code);
  }
}

// A number of 16 or 32 bits, of which `dtype` tells the first kind apart.
KVCACHE_DEVICE float word_number(uint16_t bits, int dtype) {
  return dtype == kFloat16 ? half_float(bits) : bfloat_float(bits);
}
KVCACHE_DEVICE float word_number(uint32_t bits, int) { return bits_float(bits); }

KVCACHE_DEVICE float read_number(const void* data, int dtype, int64_t index) {
  if (dtype == kFloat32) return static_cast<const float*>(data)[index];
  return word_number(static_cast<const uint16_t*>(data)[index], dtype);
}

KVCACHE_DEVICE void write_number(void* data, int dtype, int64_t index, float value) {
  if (dtype == kFloat32) {
    static_cast<float*>(data)[index] = value;
  } else {
    static_cast<uint16_t*>(data)[index] = dtype == kFloat16 ? float_half(value) : float_bfloat(value);
  }
}

KVCACHE_DEVICE float read_metadata(const uint8_t* field, int bytes, int64_t index) {
  return read_number(field, bytes == 4 ? kFloat32 : kFloat16, index);
}

}  // namespace kvcache
