// Encoding of whole blocks by non-uniform levels, with outliers: the interface between the binding, which knows torch,
// and the kernels, which do not.
#pragma once

#include "encode_unit.h"

namespace kvcache {

constexpr int64_t kMaxSide = 255;  // twice 64 times as many, the most a list of outliers holds

// One block of one row: its 64 tokens in all heads, and where codes, metadata and outliers go.
struct LevelBlock {
  const float* numbers;  // [heads][64][padded_dim], `head_stride` from head to head; zeros beyond head_dim
  int64_t heads, head_stride;
  uint8_t* record;  // of the first head
  int64_t head_bytes;  // from head to head
  const float *boundaries, *levels;  // [2^nbits - 1], [2^nbits]
  // of keys, for every channel [heads][padded_dim]: half of its range and its middle, and beyond them what every code
  // means [2^nbits][heads][padded_dim]
  const float *scale, *offset, *meanings;
  int64_t side;  // half of the outliers of a token; of keys, on average
  int64_t first_plain;  // tokens before it have no outliers; 0 to 64
  uint32_t* entries;  // [width], null without outliers
  int64_t width;
  int16_t* starts;  // [heads + 1]
  uint32_t* scratch;  // [2][heads][64][padded_dim]
};

struct LevelKernels {
  void (*encode_keys)(const LevelBlock& block, const Layout& layout);
  void (*encode_values)(const LevelBlock& block, const Layout& layout);
};

LevelKernels level_kernels_portable();
LevelKernels level_kernels_avx2();
LevelKernels level_kernels_avx512();

}  // namespace kvcache
